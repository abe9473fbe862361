"""The checks of arguments that kernels and their references share: a call that contradicts itself is a UsageError."""

import torch

from quantkit.errors import UsageError


def require(condition: bool, message: str, hint: str | None = None) -> None:
    """Raise a UsageError unless `condition` holds."""
    if not condition:
        raise UsageError(message, hint=hint)


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Refuse a tensor that is not contiguous, of one of `dtypes`, and of `shape` (None: any size)."""
    require(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for have, want in zip(tensor.shape, shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, f"{name} has shape {list(tensor.shape)}, not [{wanted}]")
    require(tensor.is_contiguous(), f"{name} is not contiguous", "call .contiguous()")

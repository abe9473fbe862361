"""How every kernel is launched: on the GPU that its tensors lie on, whichever one is current."""

from typing import Any

import torch

from quantkit.kernels.checks import require

SHARED_BYTES = 227 * 1024  # that a block can have, on sm_90 and sm_100
_MOST_PROGRAMS = 65535  # along the second and the third axis of a grid
_H200_MULTIPROCESSORS = 132


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a Triton `kernel` on `grid`, in the current stream of its tensors' device. It is not waited for.

    Raises UsageError where the tensors lie on several devices, or the grid is wider than a GPU can count.
    """
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    require(len(devices) == 1, f"a call has tensors on {' and '.join(sorted(map(str, devices)))}", "move them to one")
    require(
        max(grid[1:], default=0) <= _MOST_PROGRAMS,
        f"a grid of {' x '.join(map(str, grid))} programs; beyond the first axis a GPU counts to {_MOST_PROGRAMS}",
        "take larger tiles, or split the tensor",
    )
    # Triton would launch on the current device, and in its stream.
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, enable_fp_fusion=True, **options)  # of a * b + c; Triton is to change its default


def multiprocessors(device: torch.device) -> int:
    """How many `device` has; where it is no GPU, as many as an H200."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

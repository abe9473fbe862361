"""Guard areas round the tensors that a Triton kernel is given, so that what it reads or writes outside is seen."""

import contextlib
from collections.abc import Iterator

import torch

_GUARD_BYTES = 4096


class Guards:
    """Makes copies of tensors between two guard areas; `check` finds out whether a kernel wrote into one.

    A guard area is NaN (bytes 0x7F in uint8 and E4M3, which are NaN of E4M3), or 0x5A bytes in other whole numbers, so
    that what a kernel reads there shows in its result.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, int, int]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `tensor` between guard areas."""
        placed = self.empty(tensor.shape, tensor.dtype)
        placed.copy_(tensor)
        return placed

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor between guard areas, poisoned itself, for a result."""
        guard = _GUARD_BYTES // dtype.itemsize
        count = torch.Size(shape).numel()
        buffer = _poison(count + 2 * guard, dtype)
        self._buffers.append((buffer, guard, count))
        return buffer[guard : guard + count].view(shape)

    def check(self) -> None:
        """Fail if a guard area is not as it was made."""
        for buffer, guard, count in self._buffers:
            fresh = _poison(guard, buffer.dtype).view(torch.uint8)
            assert torch.equal(buffer[:guard].view(torch.uint8), fresh), f"wrote below {count} {buffer.dtype}"
            assert torch.equal(buffer[guard + count :].view(torch.uint8), fresh), f"wrote above {count} {buffer.dtype}"


def _poison(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.uint8, torch.float8_e4m3fn):
        return torch.full((count,), 0x7F, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        return torch.full((count,), torch.nan, dtype=dtype)
    return torch.full((count * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)


@contextlib.contextmanager
def guards() -> Iterator[Guards]:
    """`with guards() as guarded: kernel(guarded(x), out=guarded.empty(...))` checks the guard areas at its end."""
    guarded = Guards()
    yield guarded
    guarded.check()

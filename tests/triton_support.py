"""Triton kernels without a GPU: run in the interpreter between guard areas, and compiled for GPUs that are not here.

Triton decides at the decoration of a kernel whether it is interpreted, so a process does one of the two. pytest
interprets (`TRITON_INTERPRET` is set in conftest.py); `compile_launches` starts a process that compiles.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from quantkit.eval.gpu_page_launches import page_branches, page_launches
from quantkit.eval.gpu_weight_launches import weight_branches, weight_launches
from quantkit.kernels.gpu import compiled
from quantkit.kernels.gpu.compiled import Compiled

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


def compile_launches(kind: str) -> list[Compiled]:
    """Compile, in another process, every kernel of the launches of a `kind` below, for each of its architectures."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Compiled(**row) for row in json.loads(done.stdout)]


KINDS = {
    "pages": (page_launches, compiled.ARCHES),
    "weights": (weight_launches, compiled.ARCHES),
    "page branches": (page_branches, (90,)),
    "weight branches": (weight_branches, (90,)),
}

if __name__ == "__main__":
    make, arches = KINDS[sys.argv[1]]
    json.dump([asdict(row) for row in compiled.compile_launches(make(torch.device("meta")), arches)], sys.stdout)

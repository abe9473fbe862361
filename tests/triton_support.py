"""Triton kernels without a GPU: run in the interpreter between guard areas, and compiled for GPUs that are not here.

Triton decides at the decoration of a kernel whether it is interpreted, so a process does one of the two. pytest
interprets (`TRITON_INTERPRET` is set in conftest.py); `compile_launches` starts a process that compiles.
"""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

ARCHES = (90, 100)
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


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes: registers of a thread, shared memory of a block and stack of a thread in bytes.

    A stack other than 0 means that registers were spilled to memory, or that an array is indexed at run time.
    """

    launch: str
    kernel: str
    arch: int
    warps: int
    registers: int
    shared: int
    stack: int


def compile_launches(module: str) -> list[Compiled]:
    """Compile, in another process, every kernel that the launches of `tests/<module>.py` launch, for each of `ARCHES`.

    The module has `LAUNCHES`, name -> function without arguments. Each calls a launcher with tensors on the device
    "meta", which have a shape and no memory: the kernels are compiled with the launcher's own choices, not run.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}  # as by default, which warns
    command = [sys.executable, __file__, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Compiled(**row) for row in json.loads(done.stdout)]


def as_table(rows: list[Compiled]) -> str:
    """A Markdown table of compiled kernels, one line each."""
    head = [field.name for field in fields(Compiled)]
    lines = [head, ["---"] * len(head), *([str(cell) for cell in astuple(row)] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


class _AbsentGpu:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(module: str) -> list[Compiled]:
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    rows: list[Compiled] = []
    original = JITFunction.run
    for arch in ARCHES:
        driver.set_active(_AbsentGpu(arch))
        for launch, call in importlib.import_module(module).LAUNCHES.items():

            def compile_only(self: Any, *args: Any, launch: str = launch, arch: int = arch, **options: Any) -> None:
                kernel = original(self, *args, **options | {"warmup": True})
                rows.append(_measure(launch, arch, kernel))

            JITFunction.run = compile_only
            call()
    return sorted(dict.fromkeys(rows), key=lambda row: (row.launch, row.arch))


def _measure(launch: str, arch: int, kernel: Any) -> Compiled:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    meta = kernel.metadata
    return Compiled(launch, meta.name, arch, meta.num_warps, registers, meta.shared, max(stack, local))


if __name__ == "__main__":
    json.dump([asdict(row) for row in _compile(sys.argv[1])], sys.stdout)

"""The Triton kernels compiled for GPUs that are not here: what each binary takes, and why it cannot be launched.

A launch is a function that calls a launcher with tensors on the device "meta", which have a shape and no memory: the
kernels are compiled with the launcher's own choices, and not run. Triton decides at its import whether it interprets
(TRITON_INTERPRET), and what is here needs a process where it does not.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quantkit.kernels.gpu.launching import SHARED_BYTES

ARCHES = (90, 100)
TENSOR_COLUMNS, THREADS, REGISTERS = 512, 1024, 65536  # of a block
STACK_BYTES = 1024  # of a thread; more is heavy spilling
Launches = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes: registers of a thread, shared memory of a block and stack of a thread in bytes.

    A stack other than 0 means that registers were spilled to memory, or that an array is indexed at run time. `fault`
    says why it cannot be launched, or should not be.
    """

    launch: str
    kernel: str
    arch: int
    warps: int = 0
    registers: int = 0
    shared: int = 0
    stack: int = 0
    fault: str = ""


class AbsentGpu:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """A number for each architecture, since kernels are cached by device."""
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def compile_launches(launches: Launches, arches: Sequence[int] = ARCHES) -> list[Compiled]:
    """Compile every kernel that `launches` launch for each of `arches`; what does not compile is a row with its fault.

    Triton's driver is that of an absent GPU afterwards: for a process that does nothing else.
    """
    rows = [row for arch in arches for name, launch in launches.items() for row in _compile(name, launch, arch)]
    return sorted(dict.fromkeys(rows), key=lambda row: (row.launch, row.arch))


def _compile(name: str, launch: Callable[[], object], arch: int) -> list[Compiled]:
    rows: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        try:
            rows.append(measure(name, arch, run(self, *args, **options | {"warmup": True})))
        except Exception as fault:  # whatever Triton or ptxas say of one kernel, the others are compiled
            rows.append(Compiled(name, self.fn.__name__, arch, fault=f"{type(fault).__name__}: {fault}"))

    driver.set_active(AbsentGpu(arch))
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return rows or [Compiled(name, "", arch, fault="launches nothing that is compiled: is TRITON_INTERPRET set?")]


def measure(launch: str, arch: int, kernel: Any) -> Compiled:
    """What the compiled `kernel` of Triton takes, and whether it can be launched."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    meta, stack = kernel.metadata, max(stack, local)
    fault = fault_of(meta, registers, stack)
    return Compiled(launch, meta.name, arch, meta.num_warps, registers, meta.shared, stack, fault)


def fault_of(metadata: Any, registers: int, stack: int) -> str:
    """Why a binary with this `metadata` of Triton, `registers` and `stack` bytes of a thread should not be launched."""
    threads = metadata.num_warps * 32
    limits = (
        ("bytes of shared memory", metadata.shared, SHARED_BYTES),
        ("columns of tensor memory", getattr(metadata, "tmem_size", None) or 0, TENSOR_COLUMNS),
        ("threads", threads, THREADS),
        ("registers of all threads", threads * -(-registers // 8) * 8, REGISTERS),  # given out in eights
        ("bytes of scratch memory, which nobody allocates", metadata.global_scratch_size, 0),
        ("bytes of stack", stack, STACK_BYTES),
    )
    return "; ".join(f"{taken} {what}, not {most}" for what, taken, most in limits if taken > most)


def as_table(rows: Sequence[Compiled]) -> str:
    """A Markdown table of compiled kernels, one line each, with faults after it."""
    head = [field.name for field in fields(Compiled)][:-1]
    lines = [head, ["---"] * len(head), *([str(cell) for cell in astuple(row)[:-1]] for row in rows)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return table + "".join(f"{row.launch}, {row.kernel}, sm_{row.arch}: {row.fault}\n" for row in rows if row.fault)

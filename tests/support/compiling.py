"""What Triton compiles ahead of time for GPUs that are not here.

Triton decides at the decoration of a kernel whether it is interpreted, so a process does one of the two. pytest
interprets (`TRITON_INTERPRET` is set in conftest.py); `compile_elsewhere` starts a process that compiles.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quantkit.eval.gpu.page_launches import page_branches, page_launches
from quantkit.eval.gpu.weight_launches import weight_branches, weight_launches
from quantkit.kernels.gpu.compiled import ARCHES, AbsentGpu, Compiled, as_table, compile_launches
from quantkit.kernels.gpu.fp8_block_dequantize import fp8_block_dequantize
from quantkit.kernels.gpu.kv_write import write_mla
from support.compiling_addresses import find_overflows
from support.paths import TESTS


def compile_elsewhere(kind: str) -> Any:
    """What one of the `KINDS` below gives in a process that compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "support.compiling", kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compiled_launches(kind: str) -> list[Compiled]:
    """Every kernel of the launches of a kind, for each of its architectures."""
    return [Compiled(**row) for row in compile_elsewhere(kind)]


def _launches(make: Callable[[torch.device], Any], arches: tuple[int, ...] = ARCHES) -> list[dict[str, Any]]:
    return [asdict(row) for row in compile_launches(make(torch.device("meta")), arches)]


def _assemble() -> list[list[str]]:
    """For each GPU, the PTX of a kernel that writes E4M3 and of one that reads it."""
    assembled: list[str] = []
    original = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        assembled.append(original(self, *args, **options | {"warmup": True}).asm["ptx"])

    JITFunction.run = compile_only
    empty = partial(torch.empty, device="meta")
    for arch in ARCHES:
        driver.set_active(AbsentGpu(arch))
        rows = empty(4, 512, dtype=torch.bfloat16), empty(4, 64, dtype=torch.bfloat16)
        slots, counts = (empty(count, dtype=torch.int64) for count in (4, 3))
        write_mla(*rows, empty(9, 64, 576, dtype=torch.uint8), slots, 1.0, counts)
        fp8_block_dequantize(empty(256, 256, dtype=torch.float8_e4m3fn), empty(2, 2))
    return [assembled[:2], assembled[2:]]


KINDS: dict[str, Callable[[], Any]] = {
    "pages": partial(_launches, page_launches),
    "weights": partial(_launches, weight_launches),
    "page branches": partial(_launches, page_branches, (90,)),
    "weight branches": partial(_launches, weight_branches, (90,)),
    "ptx": _assemble,
    "overflows": find_overflows,
}

if __name__ == "__main__":
    if sys.argv[1] == "table":
        sys.stdout.write(as_table(compiled_launches(sys.argv[2])))
    else:
        json.dump(KINDS[sys.argv[1]](), sys.stdout)

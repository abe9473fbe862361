"""`python -m quantkit.eval.kernel_speed`: the CPU kernels for packed weights against torch's own way, in one run.

Times are medians of rounds in which every way has its turn, so that what else the machine does meets all of them; the
ratios are of such medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quantkit import ops
from quantkit.formats import fp8_block, int4, nvfp4
from quantkit.kernels.cpu_linear import fp8_block_linear, int4_linear, nvfp4_linear, pack_int4
from quantkit.kernels.nvfp4_to_bf16 import nvfp4_to_bf16

EXPONENT = -8  # of NVFP4's global scale
Ways = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Comparison:
    """Ways to the same result; the last one is what the others are compared with."""

    title: str
    ways: Ways


def comparisons(rows: int, columns: int, batches: tuple[int, ...]) -> list[Comparison]:
    """Decoding, and products at each batch size, of weights [rows, columns]."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    fp8, fp8_scale = fp8_block.quantize(weight)
    codes, scale = nvfp4.quantize(weight, EXPONENT)
    packed, multiplier = nvfp4.pack(codes), 2.0**EXPONENT
    int4_codes, int4_scale = int4.quantize(weight, 128)
    reordered = pack_int4(int4.pack(int4_codes), int4_scale)
    plain = weight.bfloat16()
    out = np.empty((rows, columns), np.uint16)
    found = [
        Comparison(
            "FP8 blocks to BF16",
            {
                "kernel": lambda: ops.fp8_block_to_bf16(
                    fp8.view(torch.uint8).numpy(), fp8_scale.numpy(), (128, 128), out
                ),
                "torch, cast alone": lambda: fp8.to(torch.bfloat16),
                "torch": lambda: fp8_block.dequantize(fp8, fp8_scale),
            },
        ),
        Comparison(
            "NVFP4 to BF16",
            {
                "kernel": lambda: nvfp4_to_bf16(packed.numpy(), scale.view(torch.uint8).numpy(), multiplier, out),
                "torch": lambda: nvfp4.dequantize(codes, scale, EXPONENT),
            },
        ),
    ]
    for batch in batches:
        x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
        ways: Ways = {
            "INT4": lambda x=x: int4_linear(x, reordered),  # type: ignore[misc]
            "NVFP4": lambda x=x: nvfp4_linear(x, packed, scale, multiplier),  # type: ignore[misc]
            "FP8 blocks": lambda x=x: fp8_block_linear(x, fp8, fp8_scale),  # type: ignore[misc]
            "BF16 weights": lambda x=x: x @ plain.T,  # type: ignore[misc]
            "FP8 decoded by torch": lambda x=x: x @ fp8_block.dequantize(fp8, fp8_scale).T,  # type: ignore[misc]
        }
        found.append(Comparison(f"product, {batch} rows of x", ways))
    return found


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """The median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():  # compiles, and touches the memory
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print one line for each way: its milliseconds, and how many times faster than the last way it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=6144)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    sys.stdout.write(f"weights [{options.rows}, {options.columns}], {torch.get_num_threads()} threads\n")
    for comparison in comparisons(options.rows, options.columns, tuple(options.batch)):
        seconds = measure(comparison.ways, options.rounds)
        slowest = list(seconds.values())[-1]
        sys.stdout.write(f"\n{comparison.title}\n")
        for name, taken in seconds.items():
            sys.stdout.write(f"  {name:22} {taken * 1e3:9.2f} ms  {slowest / taken:7.1f} x\n")


if __name__ == "__main__":
    main()

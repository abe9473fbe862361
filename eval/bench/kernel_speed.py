"""`python -m quantkit.eval.bench.kernel_speed`: the CPU kernels for packed weights against torch's own way, in one run.

Times are medians of rounds in which every way has its turn, so that what else the machine does meets all of them; the
ratios are of such medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from quantkit import ops
from quantkit.formats import fp8_block, int4, nvfp4
from quantkit.ops import linear

EXPONENT = -8  # of NVFP4's global scale
BLOCK = (128, 128)


@dataclass(frozen=True)
class Way:
    """A way to compute something, and the bytes of weights that it has to read."""

    run: Callable[[], object]
    nbytes: int


Ways = dict[str, Way]


@dataclass(frozen=True)
class Comparison:
    """Ways to the same result; the last one is what the others are compared with."""

    title: str
    ways: Ways


def comparisons(rows: int, columns: int, batches: tuple[int, ...]) -> list[Comparison]:
    """Decoding, and products at each batch size, of weights [rows, columns]."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    fp8, fp8_scale = fp8_block.quantize(weight)
    out = np.empty((rows, columns), np.uint16)
    arrays = fp8.view(torch.uint8).numpy(), fp8_scale.numpy(), BLOCK, out
    decoding = {
        "kernel": Way(lambda: ops.fp8_block_to_bf16(*arrays), fp8.nbytes),
        "torch, cast alone": Way(lambda: fp8.to(torch.bfloat16), fp8.nbytes),
        "torch": Way(lambda: fp8_block.dequantize(fp8, fp8_scale), fp8.nbytes),
    }
    found = [Comparison("FP8 blocks to BF16", decoding)]
    for batch in batches:
        x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
        found.append(Comparison(f"product, {batch} rows of x", products(x, weight)))
    return found


def products(x: torch.Tensor, weight: torch.Tensor) -> Ways:
    """x [M, K] times `weight` float32 [N, K] in each storage, and by torch."""
    fp8, fp8_scale = fp8_block.quantize(weight)
    nvfp4_codes, nvfp4_scale = nvfp4.quantize(weight, EXPONENT)
    nvfp4_packed, multiplier = nvfp4.pack(nvfp4_codes), torch.tensor(2.0**EXPONENT)
    ways = {
        "FP8 blocks": Way(lambda: linear.fp8_block(x, fp8, fp8_scale, BLOCK), fp8.nbytes + fp8_scale.nbytes),
        "NVFP4": Way(
            lambda: linear.nvfp4(x, nvfp4_packed, nvfp4_scale, multiplier), nvfp4_packed.nbytes + nvfp4_scale.nbytes
        ),
    }
    for group in (128, 32):
        codes, scale = int4.quantize(weight, group)
        packed = int4.pack(codes)
        ways[f"INT4, groups of {group}"] = Way(partial(linear.int4, x, packed, scale), packed.nbytes + scale.nbytes)
    plain = weight.bfloat16()
    return ways | {
        "BF16": Way(lambda: linear.plain(x, plain), plain.nbytes),
        "BF16, torch": Way(lambda: x @ plain.T, plain.nbytes),
        "float32, torch": Way(lambda: x.float() @ weight.T, weight.nbytes),
        "FP8 decoded by torch": Way(lambda: x @ fp8_block.dequantize(fp8, fp8_scale).T, fp8.nbytes),
    }


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """The median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():  # compiles, and touches the memory
        way.run()
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way.run()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def read_speed(nbytes: int, rounds: int) -> float:
    """Bytes that the machine reads in a second, when it only looks for the largest of `nbytes` bytes' numbers."""
    numbers = np.ones(max(1, nbytes // 8), np.int64)  # zeros would share one page
    return nbytes / measure({"read": Way(numbers.max, nbytes)}, rounds)["read"]


def main(arguments: list[str] | None = None) -> None:
    """Print one line for each way: its milliseconds, how many times faster than the last way it is, the gigabytes of
    weights that it reads in a second, and what share that is of reading memory alone, on one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=6144)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    limit = read_speed(4 * options.rows * options.columns, options.rounds)
    threads = torch.get_num_threads()
    sys.stdout.write(f"weights [{options.rows}, {options.columns}], {threads} threads\n")
    sys.stdout.write(f"reading memory alone: {limit / 1e9:.1f} GB/s\n")
    for comparison in comparisons(options.rows, options.columns, tuple(options.batch)):
        seconds = measure(comparison.ways, options.rounds)
        slowest = list(seconds.values())[-1]
        sys.stdout.write(f"\n{comparison.title}\n")
        for name, taken in seconds.items():
            speed = comparison.ways[name].nbytes / taken
            figures = f"{taken * 1e3:9.2f} ms {slowest / taken:7.1f} x {speed / 1e9:7.2f} GB/s {speed / limit:6.0%}"
            sys.stdout.write(f"  {name:22} {figures}\n")


if __name__ == "__main__":
    main()

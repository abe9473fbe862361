"""`python -m quantkit.eval.bench.scale_error`: what each way of choosing 4-bit scales loses, on the same FP8 weights.

Squared errors are against the exact source, codes times scales as stored, relative to `--scale minmax` (amax / 7.5).
llm-compressor's observers stand beside, run as its `model_free_ptq` runs them: weights decoded to BF16, scales in BF16.
In the last column its search sees float32 weights and keeps float32 scales, which no INT4 checkpoint stores.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantkit import ops
from quantkit.checkpoint.source import open_source
from quantkit.choices import ScaleMethod
from quantkit.eval.bench import peers
from quantkit.formats import fp8_block
from quantkit.naming import Role
from quantkit.weights.encodings import FP8, INT4
from quantkit.weights.encodings.int4 import CODES_PER_WORD
from quantkit.weights.encodings.nvfp4 import GROUP
from quantkit.weights.grouping import read_weights
from quantkit.weights.rows import Reader

BLOCK = (128, 128)
PEER_COLUMNS = {
    "memoryless_minmax": ("memoryless_minmax", torch.bfloat16),
    "memoryless_mse": ("memoryless_mse", torch.bfloat16),
    "memoryless_mse, float32": ("memoryless_mse", torch.float32),
}
COLUMNS = (*ScaleMethod, *PEER_COLUMNS)


@dataclass(frozen=True)
class Fp8Weight:
    """FP8 bytes [N, K] and the float32 scales of their 128 x 128 blocks."""

    data: ops.Bytes
    scale: ops.Scales

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers [N, K]; exact in float64."""
        fp8 = torch.from_numpy(self.data).view(torch.float8_e4m3fn)
        return fp8_block.dequantize(fp8, torch.from_numpy(self.scale), BLOCK, dtype)


def gaussian_weight(rows: int, columns: int, seed: int = 0) -> Fp8Weight:
    """Gaussian numbers rounded to FP8 blocks as the publishers do."""
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    data, scale = fp8_block.quantize(numbers, BLOCK)
    return Fp8Weight(data.view(torch.uint8).numpy(), scale.numpy())


def routed_experts(folder: Path) -> list[Fp8Weight]:
    """The routed experts of an FP8 block checkpoint."""
    source = open_source(folder)
    experts = []
    reader = Reader(source)
    for weight in read_weights(source):
        if weight.name.role is Role.ROUTED_EXPERT and weight.encoding is FP8:
            data, scale = FP8.coded_rows(reader, weight, 0, weight.shape[0])
            experts.append(Fp8Weight(data.copy(), scale.copy()))  # the reader uses its buffers again
    return experts


def squared_errors(weights: Iterable[Fp8Weight], group_size: int) -> dict[str, float]:
    """The summed squared error of each of `COLUMNS`; the peers' are left out where llm-compressor is not installed."""
    with_peers = peers.installed("llm-compressor")
    totals: dict[str, float] = {}
    for weight in weights:
        errors = {str(method): _our_error(weight, group_size, method) for method in ScaleMethod}
        if with_peers:
            exact = weight.decode(torch.float64)
            for column, (observer, dtype) in PEER_COLUMNS.items():
                theirs = peers.decode_after_llm_compressor(weight.decode(dtype), group_size, observer)
                errors[column] = (theirs - exact).square().sum().item()
        for column, error in errors.items():
            totals[column] = totals.get(column, 0.0) + error
    return totals


def _our_error(weight: Fp8Weight, group_size: int, method: ScaleMethod) -> float:
    rows, columns = weight.data.shape
    packed: ops.Words = np.empty((rows, columns // CODES_PER_WORD), np.uint32)
    scale: ops.Bf16Bits = np.empty((rows, columns // group_size), np.uint16)
    signed = method is ScaleMethod.SIGNED
    ops.fp8_block_to_int4(weight.data, weight.scale, BLOCK, group_size, method.divisors, signed, packed, scale)
    return ops.int4_error(weight.data, weight.scale, BLOCK, packed, scale).squared_error


def nvfp4_errors(weights: Iterable[Fp8Weight]) -> dict[ScaleMethod, float]:
    """The summed squared error of NVFP4 with plain and with searched block scales."""
    totals = dict.fromkeys((ScaleMethod.MINMAX, ScaleMethod.SEARCH), 0.0)
    for weight in weights:
        rows, columns = weight.data.shape
        exponent = ops.nvfp4_exponent(448.0 * float(weight.scale.max()), "weight")
        for method in totals:
            packed: ops.Bytes = np.empty((rows, columns // 2), np.uint8)
            scale: ops.Bytes = np.empty((rows, columns // GROUP), np.uint8)
            searched = method is ScaleMethod.SEARCH
            ops.fp8_block_to_nvfp4(weight.data, weight.scale, BLOCK, exponent, searched, packed, scale)
            error = ops.nvfp4_error(weight.data, weight.scale, BLOCK, packed, scale, 2.0**exponent)
            totals[method] += error.squared_error
    return totals


def table_row(name: str, weights: Iterable[Fp8Weight], group_size: int) -> str:
    """A row of the table: each column's squared error relative to that of minmax."""
    errors = squared_errors(weights, group_size)
    base = errors[ScaleMethod.MINMAX]
    cells = (f"{errors[column] / base:.4f}" if column in errors else "not installed" for column in COLUMNS)
    return f"| {name} | {group_size} | {' | '.join(cells)} |\n"


def main() -> None:
    """Print a Markdown table for Gaussian weights and, if a checkpoint is given, its routed experts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a folder with FP8 block weights")
    parser.add_argument("--shape", type=int, nargs=2, default=(2048, 6144), help="of the Gaussian weight")
    arguments = parser.parse_args()
    rows, columns = arguments.shape
    groups = {f"Gaussian {rows} x {columns}": [gaussian_weight(rows, columns)]}
    if arguments.checkpoint is not None:
        groups[f"routed experts of {arguments.checkpoint.name}"] = routed_experts(arguments.checkpoint)
    sys.stdout.write(f"| weights | g | {' | '.join(COLUMNS)} |\n|---|{'---|' * (len(COLUMNS) + 1)}\n")
    for name, weights in groups.items():
        for group_size in INT4.group_sizes:
            sys.stdout.write(table_row(name, weights, group_size))
            sys.stdout.flush()
    sys.stdout.write("\n| NVFP4 weights | minmax | search |\n|---|---|---|\n")
    for name, weights in groups.items():
        errors = nvfp4_errors(weights)
        base = errors[ScaleMethod.MINMAX]
        sys.stdout.write(f"| {name} | 1.0000 | {errors[ScaleMethod.SEARCH] / base:.4f} |\n")


if __name__ == "__main__":
    main()

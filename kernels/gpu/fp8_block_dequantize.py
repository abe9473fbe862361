"""FP8 weights with one scale for each block of rows and columns -> BF16, FP16 or float32.

    weight  [N, K]                              float8_e4m3fn, or uint8
    scale   [ceil(N / rows), ceil(K / columns)] float32, BF16, FP16 or float8_e8m0fnu; multiplies
    out     [N, K]                              out[n, k] = weight[n, k] * scale[n // rows, k // columns]

The last block of either axis may be ragged. block = (1, K) is a scale for each channel, (N, K) one for the tensor. The
product is rounded to float32 and then to the result's type. A NaN code stays NaN.

A program decodes ROWS x (COLUMNS of SEGMENT neighbours), and reads one scale for each segment: it lies in one block.
"""

import math
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import require
from quantkit.kernels.gpu.bits import (
    FLOATS,
    bf16_as_bits,
    e4m3_to_float16,
    e8m0_to_float32,
    from_float32,
    to_float32,
)
from quantkit.kernels.gpu.launching import run


@dataclass(frozen=True)
class Config:
    """The tile of a program in weights, and its warps of 32 threads."""

    ROWS: int = 4
    COLUMNS: int = 2048
    num_warps: int = 4


def configs() -> list[Config]:
    """The tiles worth timing."""
    return [Config(rows, columns, warps) for rows in (1, 4, 8) for columns in (1024, 2048) for warps in (4, 8)]


def fp8_block_dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Decode `weight` with `scale` into `out` (a new tensor of `dtype` by default). All are contiguous.

    Raises UsageError where shapes, types or the block do not fit.
    """
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1])) if min(block) > 0 else None
    out = torch.empty_like(weight, dtype=dtype) if out is None else out
    require(weight.dtype in (torch.float8_e4m3fn, torch.uint8), f"weight is {weight.dtype}, not float8_e4m3fn or uint8")
    require(scale.dtype in (*FLOATS, torch.float8_e8m0fnu), f"scale is {scale.dtype}, which is not a type of scales")
    require(scale.shape == grid, f"scale is {[*scale.shape]}, not {grid}, for {[*weight.shape]} in blocks of {block}")
    require(out.shape == weight.shape, f"out is {[*out.shape]}, not {[*weight.shape]}")
    require(out.dtype in FLOATS, f"out is {out.dtype}, not BF16, FP16 or float32")
    require(all(t.is_contiguous() for t in (weight, scale, out)), "weight, scale and out must be contiguous")
    if out.numel() == 0:
        return out
    config = config or Config()
    segment = math.gcd(16, block[1]) if block[1] < columns else 16
    e8m0 = scale.dtype == torch.float8_e8m0fnu
    run(
        _dequantize,
        (triton.cdiv(rows, config.ROWS), triton.cdiv(columns, config.COLUMNS)),
        weight.view(torch.uint8),
        scale.view(torch.uint8) if e8m0 else bf16_as_bits(scale),
        bf16_as_bits(out),
        rows,
        columns,
        *block,
        scale.shape[1],
        SEGMENT=segment,
        E8M0=e8m0,
        HARDWARE=weight.device.type != "cpu",
        **asdict(config),
    )
    return out


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    weight_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    block_rows,
    block_columns,
    scale_columns,
    SEGMENT: tl.constexpr,
    E8M0: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // SEGMENT) * SEGMENT  # of each segment
    column = first[:, None] + tl.arange(0, SEGMENT)[None, :]
    inside = (row < rows)[:, None, None] & (column < columns)[None, :, :]
    at = row.to(tl.int64)[:, None, None] * columns + column[None, :, :]
    scale_at = (row // block_rows).to(tl.int64)[:, None] * scale_columns + (first // block_columns)[None, :]
    scale = tl.load(scale_ptr + scale_at, mask=(row < rows)[:, None] & (first < columns)[None, :], other=0)
    scale = e8m0_to_float32(scale) if E8M0 else to_float32(scale)
    weight = e4m3_to_float16(tl.load(weight_ptr + at, mask=inside, other=0), HARDWARE).to(tl.float32)
    tl.store(out_ptr + at, from_float32(weight * scale[:, :, None], out_ptr.dtype.element_ty), mask=inside)


def reference(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The same by torch alone."""
    full = scale.float().repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    values = weight.view(torch.float8_e4m3fn).float()
    return (values * full[: weight.shape[0], : weight.shape[1]]).to(dtype)

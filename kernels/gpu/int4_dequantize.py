"""Packed symmetric INT4 (compressed-tensors `pack-quantized`) -> BF16, FP16 or float32.

packed  [..., N, K / 8]  int32; word j holds codes 8j..8j+7, code + 8 in four bits, the first lowest
scale   [..., N, K / g]  BF16, FP16 or float32; multiplies; g is a multiple of 8
out     [..., N, K]      out[n, k] = (nibble(n, k) - 8) * scale[n, k // g], rounded to float32, then to out's type

codes    -8   7   0   1   -1   2   3  -3
nibbles   0   f   8   9    7   a   b   5      word = 0x5ba798f0
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import require
from quantkit.kernels.gpu.bits import FLOATS, bf16_as_bits, from_float32, int4_to_float16, to_float32
from quantkit.kernels.gpu.launching import run


@dataclass(frozen=True)
class Config:
    """The tile of a program, in rows and words of 8 weights, and its warps of 32 threads."""

    ROWS: int = 4
    WORDS: int = 256
    num_warps: int = 4


def configs() -> list[Config]:
    """The tiles worth timing."""
    return [Config(rows, words, warps) for rows in (1, 4, 8) for words in (128, 256) for warps in (4, 8)]


def int4_dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Decode `packed` with `scale` into `out` (a new tensor of `dtype` by default). All are contiguous.

    Raises UsageError where shapes or types do not fit.
    """
    *lead, words = packed.shape
    shape = (*lead, words * 8)
    groups = scale.shape[-1]
    out = torch.empty(shape, dtype=dtype, device=packed.device) if out is None else out
    require(packed.dtype == torch.int32, f"packed is {packed.dtype}, not int32")
    require(scale.dtype in FLOATS, f"scale is {scale.dtype}, not BF16, FP16 or float32")
    fits = [*scale.shape[:-1]] == lead and (groups == words or (groups > 0 and words % groups == 0))
    require(fits, f"scale is {[*scale.shape]}, which does not split {[*shape]} into groups of a multiple of 8")
    require(out.shape == shape, f"out is {[*out.shape]}, not {[*shape]}")
    require(out.dtype in FLOATS, f"out is {out.dtype}, not BF16, FP16 or float32")
    require(all(t.is_contiguous() for t in (packed, scale, out)), "packed, scale and out must be contiguous")
    if out.numel() == 0:
        return out
    config = config or Config()
    rows = packed.numel() // words
    run(
        _dequantize,
        (triton.cdiv(rows, config.ROWS), triton.cdiv(words, config.WORDS)),
        packed,
        bf16_as_bits(scale),
        bf16_as_bits(out),
        rows,
        words,
        groups,
        words // groups,
        **asdict(config),
    )
    return out


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    packed_ptr,
    scale_ptr,
    out_ptr,
    rows,
    words,
    groups,
    group_words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (word < words)[None, :]
    long_row = row.to(tl.int64)[:, None]
    at = long_row * words + word[None, :]
    packed = tl.load(packed_ptr + at, mask=inside, other=0)
    scale = to_float32(tl.load(scale_ptr + long_row * groups + (word // group_words)[None, :], mask=inside, other=0))
    position = tl.arange(0, 8)[None, None, :]
    codes = int4_to_float16((packed[:, :, None] >> (position * 4)) & 0xF).to(tl.float32)
    values = from_float32(codes * scale[:, :, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, :, None] * 8 + position, values, mask=inside[:, :, None])


def reference(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same by torch alone."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    codes = (((packed.unsqueeze(-1) >> shifts) & 0xF) - 8).flatten(-2)
    return (codes.float() * scale.float().repeat_interleave(codes.shape[-1] // scale.shape[-1], dim=-1)).to(dtype)

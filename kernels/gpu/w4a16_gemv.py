"""y = W x with 4-bit weights in the layout of the checkpoint, one row of x at a time: decoding at batch 1.

    x           [M, K]                    BF16 or FP16
    packed      [N, K / 8] int32          INT4 (compressed-tensors): word j holds codes 8j..8j+7, code + 8, first lowest
             or [N, K / 2] uint8          NVFP4: E2M1 codes, two a byte, the first in the low nibble
    scale       [N, K / g]                INT4: BF16, FP16 or float32; g a multiple of 8, and of 32 to be fast
             or [N, K / 16] float8_e4m3fn NVFP4
    multiplier  [1] float32               of NVFP4, times the result; INT4 has none
    y           [M, N]                    x's type; sums are float32, weights are not rounded

Routed experts have `packed` [E, N, ..], `scale` [E, N, ..], `multiplier` [1] or [E], and y [pairs, N].

K is split over the threads of a program, each with its own 128 bits of a row, and added at the end: no second pass, the
same order each time. A nibble of INT4 is put into the mantissa of 256 or of 16, so that the float32 is 256 + nibble or
16 + nibble (the last bit counts 1); 264 or 24 times x is subtracted once for all rows:

    word          7777 6666 5555 4444 3333 2222 1111 0000
    word << 15    3222 2111 1000 0... .... .... .... ....    nibble 0: bits 15..18, of 256; 1: 19..22, of 16
"""

import math
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import require
from quantkit.kernels.gpu.bits import (
    as_weight4,
    bf16_as_bits,
    check_product,
    e4m3_to_float16,
    from_float32,
    matrices,
    to_float32,
)
from quantkit.kernels.gpu.launching import run

MASKS = (0x00078000, 0x00780000)  # arguments: a constant mask would be copied to a register for each use of it


@dataclass(frozen=True)
class Config:
    """The tile of a program in rows of W and words of 8 weights, of which it goes along a row, and its warps."""

    ROWS: int = 8
    WORDS: int = 512
    num_warps: int = 4


def configs() -> list[Config]:
    """The tiles worth timing."""
    return [Config(rows, words, words // 128) for rows in (4, 8, 16) for words in (128, 256, 512, 1024)]


def choose(words: int) -> Config:
    """The tile for rows of `words` words: the widest that leaves nothing over, or one that takes a row at once."""
    even = [width for width in (512, 256, 128) if words % width == 0]
    width = even[0] if even else min(512, triton.next_power_of_2(words))
    return Config(WORDS=width, num_warps=max(1, width // 128))


def w4a16_gemv(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """The products of rows of `x` [M, K] with `packed`, into `out` (by default new) of x's type.

    ids  [tokens, choices] int32 or int64, for routed experts: the expert of each row of `out` [tokens * choices, N];
         x has a row for each token, or for each pair. An id outside 0..E-1 (an expert of another rank) gives zeros.

    Without ids, `out` is [M, N]. Every row of `out` reads its weights: for more than a few, see `w4a16_matmul`. Raises
    UsageError where shapes or types do not fit.
    """
    weight = as_weight4(packed, scale, multiplier)
    experts, rows, words = weight.words.shape
    pairs = x.shape[0] if ids is None else ids.numel()
    out = x.new_empty(pairs, rows) if out is None else out
    check_product(x, weight, pairs, out)
    require((packed.dim() == 3) == (ids is not None), "weights [E, N, ..] go with ids, weights [N, ..] without")
    if out.numel() == 0:
        return out
    config = config or choose(words)
    run(
        _gemv,
        (pairs, triton.cdiv(rows, config.ROWS)),
        x.view(torch.int32),
        *weight[:3],  # words, scale, multiplier
        None if ids is None else ids.contiguous(),
        bf16_as_bits(out),
        rows,
        words,
        experts,
        pairs // x.shape[0],
        0 if multiplier is None or multiplier.numel() == 1 else 1,
        *MASKS,
        BF16=x.dtype == torch.bfloat16,
        NVFP4=weight.nvfp4,
        GROUP_WORDS=weight.group_words,
        VECTOR=math.gcd(weight.group_words, 4),
        EVEN=words % config.WORDS == 0,
        HARDWARE=x.device.type != "cpu",
        **asdict(config),
    )
    return out


@triton.jit
def _gemv(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    multiplier_ptr,
    ids_ptr,
    out_ptr,
    rows,
    words,
    experts,
    pairs_per_x,
    multiplier_stride,
    low_mask,
    high_mask,
    BF16: tl.constexpr,
    NVFP4: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    one = tl.arange(0, 1)
    expert = one if ids_ptr is None else tl.load(ids_ptr + pair + one)
    known = tl.full([1], True, tl.int1) if ids_ptr is None else (expert >= 0) & (expert < experts)
    matrix_row = expert.to(tl.int64) * rows + tl.minimum(row, rows - 1)
    x_ptr += pair // pairs_per_x * words * 4
    sums = tl.zeros([ROWS, WORDS // VECTOR], tl.float32)
    for begin in range(0, words, WORDS):
        chunk = begin // VECTOR + tl.arange(0, WORDS // VECTOR)
        word = chunk[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        inside = tl.full(word.shape, True, tl.int1) if EVEN else word < words
        inside &= known[None, :]
        at = matrix_row[:, None, None] * words + word[None, :, :]
        packed = tl.load(words_ptr + at, mask=inside[None, :, :], other=0).to(tl.uint32, bitcast=True)
        scale_at = (matrix_row * (words // GROUP_WORDS))[:, None] + (chunk * VECTOR // GROUP_WORDS)[None, :]
        begun = tl.full(chunk.shape, True, tl.int1) if EVEN else chunk * VECTOR < words
        scale = tl.load(scale_ptr + scale_at, mask=(begun & known)[None, :], other=0)
        x = tl.load(x_ptr + word[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], mask=inside[:, :, None], other=0)
        low, high = _numbers(x, BF16)
        if NVFP4:
            sums += _nvfp4_dot(packed, low, high) * (e4m3_to_float16(scale, HARDWARE).to(tl.float32) * 16384.0)
        else:
            sums += _int4_dot(packed, low, high, low_mask, high_mask) * to_float32(scale)
    y = tl.sum(sums, 1)
    if multiplier_ptr is not None:
        y *= tl.load(multiplier_ptr + tl.maximum(expert, 0) * multiplier_stride, mask=known, other=0.0)
    tl.store(out_ptr + pair * rows + row, from_float32(y, out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _numbers(x, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [chunks, VECTOR, 4] int32, of two numbers each, as float32: those at even and those at odd places, in fours."""
    even, odd = tl.split(tl.reshape(x.to(tl.uint32, bitcast=True), [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    low = (_low(x0, BF16), _low(x1, BF16), _low(x2, BF16), _low(x3, BF16))
    high = (_high(x0, BF16), _high(x1, BF16), _high(x2, BF16), _high(x3, BF16))
    return low, high


@triton.jit
def _low(pair, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    if BF16:
        return (pair << 16).to(tl.float32, bitcast=True)
    return pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(pair, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    if BF16:
        return (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _int4_dot(packed, low, high, low_mask, high_mask):  # type: ignore[no-untyped-def]
    """Sums, float32 [ROWS, chunks], of INT4 codes in uint32 [ROWS, chunks, VECTOR] times x."""
    bias = 264.0 * (low[0] + low[1] + low[2] + low[3]) + 24.0 * (high[0] + high[1] + high[2] + high[3])
    sums = tl.zeros(packed.shape, tl.float32) - bias[None, :, :]
    for pair in tl.static_range(4):
        moved = packed << (15 - 8 * pair) if pair < 2 else packed >> (8 * pair - 15)
        sums += ((moved & low_mask.to(tl.uint32)) | 0x43800000).to(tl.float32, bitcast=True) * low[pair][None, :, :]
        sums += ((moved & high_mask.to(tl.uint32)) | 0x41800000).to(tl.float32, bitcast=True) * high[pair][None, :, :]
    return tl.sum(sums, 2)


@triton.jit
def _nvfp4_dot(packed, low, high):  # type: ignore[no-untyped-def]
    """Sums, float32 [ROWS, chunks], of 2^-14 times E2M1 numbers in uint32 [ROWS, chunks, VECTOR] times x.

    Nibbles i and i + 4 are moved to the upper ends of both halves, their last three bits under float16's exponent.
    """
    sums = tl.zeros(packed.shape, tl.float32)
    for nibble in tl.static_range(4):
        moved = packed << (12 - 4 * nibble)
        both = (moved & 0x80008000) | ((moved >> 3) & 0x0E000E00)
        x = low if nibble % 2 == 0 else high
        first = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        sums += first * x[nibble // 2][None, :, :]
        sums += second * x[nibble // 2 + 2][None, :, :]
    return tl.sum(sums, 2)


def reference(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch alone, in float64: [pairs, N]."""
    weight = as_weight4(packed, scale, multiplier)
    exact = matrices(weight)
    if multiplier is not None:
        exact *= multiplier.double().view(-1, 1, 1)
    if ids is None:
        return x.double() @ exact[0].T
    known = ((ids >= 0) & (ids < len(exact))).flatten()
    chosen = exact[torch.where(known, ids.flatten(), 0)]
    rows = x.double().repeat_interleave(ids.numel() // len(x), dim=0)
    return (chosen @ rows.unsqueeze(2)).squeeze(2) * known.unsqueeze(1)

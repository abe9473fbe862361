"""y = x @ W^T with 4-bit weights in the layout of the checkpoint, dense or for routed experts, on tensor cores.

    x           [M, K]                    BF16 or FP16
    packed      [N, K / 8] int32          INT4 (compressed-tensors): word j holds codes 8j..8j+7, code + 8, first lowest
             or [N, K / 2] uint8          NVFP4: E2M1 codes, two a byte, the first in the low nibble
    scale       [N, K / g]                INT4: BF16, FP16 or float32; g a multiple of 8
             or [N, K / 16] float8_e4m3fn NVFP4
    multiplier  [1] float32               of NVFP4, times the result; INT4 has none
    y           [M, N]                    x's type; sums are float32

A weight is code * scale, rounded to x's type (NVFP4 is exact there, and its multiplier comes after the sum).

A tile of words [BLOCK_N, WORDS] is unpacked nibble by nibble: the first weight of each word, then the second ones. That
permutes K, and x is permuted likewise beforehand (`_by_nibble`), so that neither side has to be interleaved:

    weights of 2 words    0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15
    order                 0 8   1 9   2 10   3 11   4 12   5 13   6 14   7 15

W is the left operand, since tensor cores want 64 rows there and a batch seldom has them: y^T = W @ x^T. K may be split
over programs; `_add` then adds the parts in their order.

Routed experts have `packed` [E, N, ..], `scale` [E, N, ..], `multiplier` [1] or [E] and y [pairs, N], a row for each
token and choice. Pairs are sorted by expert; a program finds its tile from the ends of the experts' pairs: an expert
takes ceil(its pairs / BLOCK_M) tiles, none without pairs. x and y stay in the order of the tokens.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import check_tensor, require
from quantkit.kernels.gpu.bits import (
    Weight4,
    as_weight4,
    bf16_as_bits,
    check_product,
    e2m1_to_float16,
    e4m3_to_float16,
    from_float32,
    int4_to_float16,
    matrices,
    to_float32,
)
from quantkit.kernels.gpu.launching import multiprocessors, run


@dataclass(frozen=True)
class Config:
    """A program's tile: rows of x and of W, words of 8 weights a step; the parts of K; warps, and steps in flight."""

    BLOCK_M: int = 16
    BLOCK_N: int = 64
    WORDS: int = 32
    SPLIT: int = 1
    num_warps: int = 4
    num_stages: int = 4


class Routing(NamedTuple):
    """Which expert takes which pair of a token and a choice; `route` makes it.

    order     [pairs] int64       pairs, token * choices + choice, sorted by expert
    ends      [E + 1] int64       pairs of expert e are order[ends[e]:ends[e + 1]]; pairs of no expert lie outside
    """

    order: torch.Tensor
    ends: torch.Tensor


def route(ids: torch.Tensor, experts: int) -> Routing:
    """Sort the pairs of `ids` [tokens, choices] by expert. An id outside 0..experts-1 belongs to no expert."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    return Routing(order, torch.searchsorted(sorted_ids, bounds))


def configs() -> list[Config]:
    """The tiles worth timing, for a few rows and for many."""
    few = [Config(16, rows, words, split) for rows in (64, 128) for words in (16, 32) for split in (1, 2, 4, 8)]
    many = [Config(block, 128, 16, 1, 8, stages) for block in (32, 64, 128, 256) for stages in (3, 4)]
    return few + many


def choose(rows_of_x: float, rows: int, words: int, experts: int, programs: int) -> Config:
    """The tile for `rows_of_x` rows of x per expert on a GPU that runs `programs` programs at a time."""
    block = min(128, max(16, triton.next_power_of_2(int(rows_of_x))))
    if block > 32:
        return Config(block, 128, 16, 1, 8, 3)
    tiles = triton.cdiv(rows, 64) * experts
    split = 1
    while tiles * split < programs and words // 32 >= 8 * split:
        split *= 2
    return Config(block, SPLIT=split)


def w4a16_matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor | None = None,
    routing: Routing | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """The products of `x` [M, K] with `packed`, into `out` (by default new) of x's type.

    routing  for routed experts: y has a row for each pair, zero where it has no expert; x for each token or pair

    Raises UsageError where shapes or types do not fit.
    """
    weight = as_weight4(packed, scale, multiplier)
    experts, rows, words = weight.words.shape
    pairs = x.shape[0] if routing is None else routing.order.numel()
    out = x.new_empty(pairs, rows) if out is None else out
    check_product(x, weight, pairs, out)
    require(
        (packed.dim() == 3) == (routing is not None), "weights [E, N, ..] go with a routing, weights [N, ..] without"
    )
    if routing is not None:
        check_tensor("order", routing.order, (None,), torch.int64)
        check_tensor("ends", routing.ends, (experts + 1,), torch.int64)
    if out.numel() == 0:
        return out
    config = config or choose(pairs / experts, rows, words, min(experts, pairs), 2 * multiprocessors(x.device))
    _launch(x, weight, routing, out, config)
    return out


def _launch(x: torch.Tensor, weight: Weight4, routing: Routing | None, out: torch.Tensor, config: Config) -> None:
    experts, rows, words = weight.words.shape
    pairs, split = len(out), config.SPLIT
    tiles = triton.cdiv(pairs, config.BLOCK_M)
    if routing is not None:
        tiles = min(pairs, tiles + experts)  # at most: an expert's last tile is not full
        out.zero_()
    parts = out if split == 1 else out.new_zeros((split, pairs, rows), dtype=torch.float32)
    run(
        _matmul,
        (tiles, triton.cdiv(rows, config.BLOCK_N), split),
        bf16_as_bits(_by_nibble(x, config.WORDS)),
        weight.words,
        weight.scale,
        weight.multiplier,
        None if routing is None else routing.order,
        None if routing is None else routing.ends,
        bf16_as_bits(parts),
        rows,
        words,
        experts,
        pairs,
        pairs // len(x),
        0 if weight.multiplier is None or weight.multiplier.numel() == 1 else 1,
        dtype=getattr(tl, str(x.dtype).removeprefix("torch.")),
        NVFP4=weight.nvfp4,
        GROUP_WORDS=weight.group_words,
        EXPERTS=triton.next_power_of_2(experts),
        CPU=x.device.type == "cpu",
        **asdict(config),
    )
    if split > 1:
        blocks = triton.cdiv(out.numel(), 1024)
        run(_add, (blocks,), parts, bf16_as_bits(out), out.numel(), SPLIT=split, BLOCK=1024)


def _by_nibble(x: torch.Tensor, words: int) -> torch.Tensor:
    """x [M, K] with what goes with `words` words nibble by nibble, and zeros up to a multiple: [M, K rounded up]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % (8 * words)))
    return padded.view(len(x), -1, words, 8).transpose(2, 3).contiguous().view(len(x), -1)


@triton.jit
def _matmul(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    multiplier_ptr,
    order_ptr,
    ends_ptr,
    out_ptr,
    rows,
    words,
    experts,
    pairs,
    pairs_per_x,
    multiplier_stride,
    dtype: tl.constexpr,
    NVFP4: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CPU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    if ends_ptr is None:
        expert, pair = tl.program_id(0) * 0, tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = pair < pairs
    else:
        expert, place, end = _find(ends_ptr, experts, tl.program_id(0), EXPERTS, BLOCK_M)
        if expert == experts:
            return
        there = place < end
        pair = tl.load(order_ptr + place, mask=there, other=0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix_row = (expert.to(tl.int64) * rows + tl.minimum(row, rows - 1))[:, None]
    STEP: tl.constexpr = 8 * WORDS
    steps = tl.cdiv(words, WORDS)
    x_row = (pair // pairs_per_x).to(tl.int64)[None, :] * (steps * STEP)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    part = tl.program_id(2)
    for step in range(steps * part // SPLIT, steps * (part + 1) // SPLIT):
        word = step * WORDS + tl.arange(0, WORDS)[None, :]
        packed = tl.load(words_ptr + matrix_row * words + word, mask=word < words, other=0)
        scale_at = matrix_row * (words // GROUP_WORDS) + word // GROUP_WORDS
        scale = tl.load(scale_ptr + scale_at, mask=word < words, other=0)
        x = tl.load(x_ptr + x_row + (step * STEP + tl.arange(0, STEP))[:, None], mask=there[None, :], other=0)
        unpacked = tl.reshape(_unpack(packed, scale, NVFP4, dtype, CPU), [BLOCK_N, STEP])
        sums = tl.dot(unpacked, to_float32(x) if CPU else x, sums)
    if multiplier_ptr is not None:
        sums *= tl.load(multiplier_ptr + expert * multiplier_stride)
    at = (part.to(tl.int64) * pairs + pair)[None, :] * rows + row[:, None]
    tl.store(out_ptr + at, from_float32(sums, out_ptr.dtype.element_ty), mask=there[None, :] & (row < rows)[:, None])


@triton.jit
def _find(ends_ptr, experts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile (`experts` beyond the last one), the places of its pairs [BLOCK_M] and where they end."""
    each = tl.arange(0, EXPERTS)
    begin = tl.load(ends_ptr + each, mask=each < experts, other=0)
    end = tl.load(ends_ptr + each + 1, mask=each < experts, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    passed = tl.cumsum(tiles, 0) <= tile
    expert = tl.minimum(tl.sum(passed.to(tl.int32), 0), experts)
    first = tl.sum(tl.where(passed, tiles, 0), 0)
    place = (tl.load(ends_ptr + expert) + (tile - first) * BLOCK_M) + tl.arange(0, BLOCK_M)
    return expert, place, tl.load(ends_ptr + tl.minimum(expert + 1, experts))


@triton.jit
def _unpack(packed, scale, NVFP4: tl.constexpr, dtype: tl.constexpr, CPU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of words [BLOCK_N, WORDS] nibble by nibble, [BLOCK_N, 2, 2, 2, WORDS], in `dtype`."""
    w04 = tl.join(_weight(packed, scale, 0, NVFP4, dtype, CPU), _weight(packed, scale, 4, NVFP4, dtype, CPU))
    w26 = tl.join(_weight(packed, scale, 2, NVFP4, dtype, CPU), _weight(packed, scale, 6, NVFP4, dtype, CPU))
    w15 = tl.join(_weight(packed, scale, 1, NVFP4, dtype, CPU), _weight(packed, scale, 5, NVFP4, dtype, CPU))
    w37 = tl.join(_weight(packed, scale, 3, NVFP4, dtype, CPU), _weight(packed, scale, 7, NVFP4, dtype, CPU))
    return tl.permute(tl.join(tl.join(w04, w26), tl.join(w15, w37)), (0, 2, 3, 4, 1))


@triton.jit
def _weight(packed, scale, index: tl.constexpr, NVFP4: tl.constexpr, dtype: tl.constexpr, CPU: tl.constexpr):  # type: ignore
    """Weight `index` of each word in `dtype`, which the interpreter holds as float32, rounded likewise."""
    nibble = (packed >> (4 * index)) & 0xF
    if NVFP4:
        weight = (e2m1_to_float16(nibble) * e4m3_to_float16(scale, not CPU)).to(tl.float32)
    elif scale.dtype == dtype and dtype == tl.bfloat16:
        weight = ((nibble | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True) - 136.0) * scale  # 0x4300 is 128
    else:
        weight = int4_to_float16(nibble).to(tl.float32) * to_float32(scale)
    if CPU:
        return to_float32(from_float32(weight, tl.uint16 if dtype == tl.bfloat16 else dtype))
    else:  # noqa: RET505, Triton compiles what follows a return
        return weight.to(dtype)


@triton.jit
def _add(parts_ptr, out_ptr, count, SPLIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = at
    sums = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(SPLIT):
        sums += tl.load(parts_ptr + place, mask=at < count, other=0.0)
        place += count
    tl.store(out_ptr + at, from_float32(sums, out_ptr.dtype.element_ty), mask=at < count)


def reference(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch alone, the weights rounded and multiplied in float64; `ids` [tokens, choices] for experts."""
    rounded = matrices(as_weight4(packed, scale, multiplier)).to(x.dtype).double()
    if multiplier is not None:
        rounded *= multiplier.double().view(-1, 1, 1)
    if ids is None:
        return x.double() @ rounded[0].T
    known = ((ids >= 0) & (ids < len(rounded))).flatten()
    rows = x.double().repeat_interleave(ids.numel() // len(x), dim=0)
    y = torch.zeros(len(rows), rounded.shape[1], dtype=torch.float64, device=x.device)
    for expert in range(len(rounded)):
        chosen = ids.flatten() == expert
        y[chosen] = rows[chosen] @ rounded[expert].T
    return y * known.unsqueeze(1)

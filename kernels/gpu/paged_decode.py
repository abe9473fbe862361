"""Decode attention over the pages of a KV cache: MLA with an absorbed query, with token lists for DSA, and GQA.

    scores[h, t] = softmax_scale * (q[h] . key[t])        key[t] = stored[row(t)] * scale
    out[h]       = sum over t of softmax(scores[h])[t] * value[t]          MLA: value[t] is the latent part of key[t]
    row(t)       = block_table[t // page_size] * page_size + t % page_size

Kernels: `paged_attention`. Reference: `quantkit.kernels.reference.paged_decode`. Layouts: `kernels/pages.py`.
"""

from dataclasses import dataclass

import torch
import triton

from quantkit.kernels import pages as layouts
from quantkit.kernels.checks import check_tensor, require
from quantkit.kernels.gpu import paged_attention
from quantkit.kernels.gpu.bits import bf16_as_bits
from quantkit.kernels.gpu.launching import SHARED_BYTES, multiprocessors, run
from quantkit.kernels.reference.paged_decode import check_gqa, check_mla

_LOG2E = 1.4426950408889634
_MAX_SPLITS = 64

Result = tuple[torch.Tensor, torch.Tensor]  # attended, log-sum-exp


@dataclass(frozen=True)
class Tile:
    """How a program of the split kernel works: heads (16, 32 or 64) and tokens at once, warps, pipeline stages."""

    heads: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Launch:
    """How to launch; None means: choose. `max_length`, the largest of the lengths, is checked against the block table
    and bounds the splits. Equal `splits` and `tile` give a request equal bits, whatever else is in the batch.
    """

    max_length: int | None = None
    splits: int | None = None
    tile: Tile | None = None


_CHOOSE = Launch()


@dataclass(frozen=True)
class _Pool:
    """Views of a pool's rows, [num_pages * page_size, ...]: keys and values [..., kv_heads * width], the part of the
    keys that is not a value [..., tail], and float32 scales [..., width / 128]. E4M3 is uint8."""

    keys: torch.Tensor
    values: torch.Tensor
    tails: torch.Tensor | None
    group_scales: torch.Tensor | None
    page_size: int
    kv_heads: int


@dataclass(frozen=True)
class _Requests:
    """`block_table` int32 [B, max_pages], `lengths` int32 [B], and token positions `indices` int32 [B, topk]."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    indices: torch.Tensor | None


def configs(shared: int, width: int, itemsize: int) -> list[Tile]:
    """The tiles worth a measurement for `shared` heads that share a key row of `width` numbers of `itemsize` bytes;
    `tile_for` says which one is used unmeasured. Left out are those whose queries and rows on the way do not fit.
    """
    tiles = [
        Tile(heads, tokens, warps, stages)
        for heads in (16, 32, 64)
        for tokens in (32, 64)
        for warps in (4, 8)
        for stages in (2, 3)
    ]

    def shared_memory(tile: Tile) -> int:
        again = 2 * tile.tokens if itemsize == 1 else 0  # E4M3 rows lie there a second time, in 16 bits
        ahead = tile.stages - (itemsize == 1 or tile.heads < 64)  # rows that wgmma reads are still there
        return width * (2 * tile.heads + ahead * tile.tokens * itemsize + again)

    most = max(16, triton.next_power_of_2(shared))
    return [tile for tile in tiles if tile.heads <= most and shared_memory(tile) <= SHARED_BYTES]


def tile_for(heads: int, width: int, itemsize: int, rescaled: bool = False) -> Tile:
    """The tile for `heads` that share a key row of `width` numbers of `itemsize` bytes, `rescaled` for ds_mla rows.

    Chosen for registers and shared memory on sm_90 (tests/fixtures/gpu_pages.md), where 64 heads and 64 tokens of 512
    E4M3 numbers take 216 of 227 KiB. A tile of tokens within one page needs one look into the block table.
    """
    tile_heads = min(64, max(16, triton.next_power_of_2(heads)))
    if width <= 256:
        return Tile(tile_heads, 64, 4, 3)
    if itemsize == 4:
        return Tile(16, 16, 8, 1)
    return Tile(tile_heads, 32, 8, 2 if rescaled else 3) if itemsize == 2 or rescaled else Tile(tile_heads, 64, 8, 3)


def decode_mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    scale: float = 1.0,
    indices: torch.Tensor | None = None,
    launch: Launch = _CHOOSE,
    out: Result | None = None,
) -> Result:
    """Attention of `q_latent` [B, heads, latent] and `q_rope` [B, heads, rope] over MLA or ds_mla `pages`: the attended
    latent [B, heads, latent] in the queries' dtype, and the log-sum-exp float32 [B, heads], or both in `out`.
    `block_table` int32 [B, max_pages], `lengths` int32 [B], `indices` int32 [B, topk] are as in the reference.
    """
    check_mla(q_latent, q_rope, pages, block_table, lengths, scale, indices)
    width = q_latent.shape[2]
    rows = pages.flatten(0, 1)
    if layouts.is_ds_mla(pages, width, q_rope.shape[2]):
        keys, group_scales, tails = layouts.ds_parts(rows)
    else:
        rows = rows.view(torch.uint8) if layouts.is_e4m3(rows) else rows
        keys, group_scales, tails = rows[:, :width], None, rows[:, width:]
    pool = _Pool(keys, keys, tails, group_scales, pages.shape[1], 1)
    requests = _Requests(block_table, lengths, indices)
    return _attend(q_latent, q_rope, pool, requests, (softmax_scale * scale, scale), launch, out)


def decode_gqa(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    launch: Launch = _CHOOSE,
    out: Result | None = None,
) -> Result:
    """Attention of `query` [B, heads, head_size] over `key_pages` and `value_pages` [num_pages, page_size, kv_heads,
    head_size]: [B, heads, head_size] in the query's dtype, and the log-sum-exp float32 [B, heads], or both in `out`.
    """
    check_gqa(query, key_pages, value_pages, block_table, lengths, key_scale, value_scale)
    dtype = torch.uint8 if layouts.is_e4m3(key_pages) else key_pages.dtype
    keys, values = (pages.view(dtype).flatten(0, 1).flatten(1) for pages in (key_pages, value_pages))
    pool = _Pool(keys, values, None, None, key_pages.shape[1], key_pages.shape[2])
    requests = _Requests(block_table, lengths, None)
    return _attend(query, None, pool, requests, (softmax_scale * key_scale, value_scale), launch, out)


def _attend(
    query: torch.Tensor,
    tail: torch.Tensor | None,
    pool: _Pool,
    requests: _Requests,
    scales: tuple[float, float],
    launch: Launch,
    out: Result | None,
) -> Result:
    """`query` [B, heads, width] with `tail` [B, heads, tail] over `pool`; `scales` of the scores and of the result.

    Returns [B, heads, width] in the query's dtype and the log-sum-exp float32 [B, heads], or fills `out`.
    """
    batch, heads, width = query.shape
    out = out or (torch.empty_like(query), query.new_empty((batch, heads), dtype=torch.float32))
    check_tensor("attended", out[0], tuple(query.shape), *layouts.SOURCE_TYPES, torch.float64)
    check_tensor("log-sum-exp", out[1], (batch, heads), torch.float32)
    if not query.numel():
        return out
    shared = heads // pool.kv_heads
    tile = launch.tile or tile_for(shared, width, pool.keys.element_size(), pool.group_scales is not None)
    programs = batch * pool.kv_heads * triton.cdiv(shared, tile.heads)
    splits = _splits(programs, pool.page_size, requests, launch, tile)
    partials = query.new_empty((batch * heads, splits, width), dtype=torch.float32)
    sums = query.new_empty((batch * heads, splits), dtype=torch.float32)
    hardware = query.device.type != "cpu"
    prepared, factors = _prepare(query, tail, scales[0], _numbers(pool, hardware))
    _launch_split(prepared, factors, pool, requests, tile, (programs, splits), partials, sums)
    block = min(128, triton.next_power_of_2(width))
    run(
        paged_attention.combine,
        (batch * heads, triton.cdiv(width, block)),
        partials,
        sums,
        bf16_as_bits(out[0]),
        out[1],
        scales[1],
        splits,
        width,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        BLOCK=block,
        num_warps=1,
    )
    return out


def _splits(programs: int, page_size: int, requests: _Requests, launch: Launch, tile: Tile) -> int:
    """Enough for two programs on each multiprocessor, and not more than the tiles of the longest request."""
    table = requests.block_table
    room = table.shape[1] * page_size
    longest = room if launch.max_length is None else launch.max_length
    require(
        longest <= room,
        f"a request has {longest} tokens, its block table room for {table.shape[1]} pages of {page_size}",
        "give the request more pages",
    )
    if launch.splits is not None:
        require(launch.splits > 0, f"splits is {launch.splits}", "use 1 or more, or None to choose")
        return launch.splits
    items = longest if requests.indices is None else requests.indices.shape[1]
    wanted = -(-2 * multiprocessors(table.device) // programs)
    return max(1, min(wanted, -(-items // tile.tokens), _MAX_SPLITS))


def _prepare(
    query: torch.Tensor, tail: torch.Tensor | None, score_scale: float, numbers: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, width = query.shape
    tail_width = 0 if tail is None else tail.shape[2]
    prepared = query.new_empty((batch, heads, width + tail_width), dtype=numbers)
    factors = query.new_empty((batch, heads), dtype=torch.float32)
    run(
        paged_attention.prepare,
        (batch * heads,),
        bf16_as_bits(query),
        None if tail is None else bf16_as_bits(tail),
        prepared,
        factors,
        score_scale * _LOG2E,
        width,
        tail_width,
        BLOCK=triton.next_power_of_2(width + tail_width),
        num_warps=2,
    )
    return prepared, factors


def _launch_split(
    prepared: torch.Tensor,
    factors: torch.Tensor,
    pool: _Pool,
    requests: _Requests,
    tile: Tile,
    grid: tuple[int, int],
    partials: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    width = partials.shape[2]
    tail_width = prepared.shape[2] - width
    run(
        paged_attention.split,
        grid,
        prepared,
        factors,
        bf16_as_bits(pool.keys),
        None if pool.values is pool.keys else bf16_as_bits(pool.values),
        None if pool.tails is None else bf16_as_bits(pool.tails),
        pool.group_scales,
        requests.block_table,
        requests.lengths,
        requests.indices,
        partials,
        sums,
        pool.keys.shape[0] // pool.page_size,
        requests.block_table.shape[1],
        0 if requests.indices is None else requests.indices.shape[1],
        0 if pool.tails is None else pool.tails.stride(0),
        0 if pool.group_scales is None else pool.group_scales.stride(0),
        prepared.shape[1] // pool.kv_heads,
        grid[1],
        ROW=pool.keys.stride(0),
        KV_HEADS=pool.kv_heads,
        WIDTH=width,
        TAIL=tail_width,
        PAGE_SIZE=pool.page_size,
        BLOCK_HEADS=tile.heads,
        BLOCK_TOKENS=tile.tokens,
        BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),
        BLOCK_TAIL=max(16, triton.next_power_of_2(max(tail_width, 1))),
        HARDWARE=prepared.device.type != "cpu",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _numbers(pool: _Pool, hardware: bool) -> torch.dtype:
    """What is multiplied; the interpreter cannot multiply BF16."""
    if pool.keys.dtype == torch.uint8 and pool.group_scales is None:
        return torch.float16
    return torch.bfloat16 if hardware and pool.keys.dtype != torch.float32 else torch.float32

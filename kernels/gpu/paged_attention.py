"""The kernels of paged decode attention: the queries, partial results of splits of the tokens, and their sum.

    scores[h, t] = q[h] . stored_key[row(t)] * score_scale
    out[h]       = sum over t of softmax(scores[h])[t] * stored_value[row(t)] * value_scale
    row(t)       = block_table[t // page_size] * page_size + t % page_size

A first kernel brings the queries into the type that is multiplied: float16 for E4M3, which it holds exactly, else BF16
or float32. A request's tiles of tokens are divided evenly among the splits; a program serves one split and a tile of
the heads that share the keys (rows are read once for all of them), and leaves a partial result with its log-sum-exp. A
last kernel adds the parts in their order, so equal launches give equal bits. Sums are float32.

Rows beyond a length are never read. Nothing that the host cannot see is trusted: a length beyond the block table, or a
page id outside the pool, makes the request's result NaN.
"""

import triton
import triton.language as tl

from quantkit.kernels.gpu.bits import e4m3_to_float16, from_float32, to_float32

_LN2 = tl.constexpr(0.6931471805599453)
# Four numbers at once. Not called pure: Triton would convert once for each of two products, in the layout of each, and
# then not load the rows of the next tile ahead.
_E4M3_TO_FLOAT16 = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
_GROUP = tl.constexpr(128)  # latent numbers under one scale of ds_mla


@triton.jit
def prepare(  # type: ignore[no-untyped-def]
    queries,  # [lines, WIDTH] floats
    tails,  # [lines, TAIL] floats, or None
    prepared,  # [lines, WIDTH + TAIL] in what is multiplied
    factors,  # [lines] float32: what a product is multiplied with to be a score
    score_scale,  # times log2(e), since exp2 is computed
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each request and head. A float16 query is divided by the power of two below its largest magnitude.

    Not done in `split`, where queries that do not come from memory as they are would take the registers of the sums.
    """
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    query = to_float32(tl.load(queries + line * WIDTH + column, mask=column < WIDTH, other=0))
    if TAIL:
        in_tail = (column >= WIDTH) & (column < WIDTH + TAIL)
        query += to_float32(tl.load(tails + line * TAIL + column - WIDTH, mask=in_tail, other=0))
    power = 1.0
    if prepared.dtype.element_ty == tl.float16:
        amax = tl.max(tl.abs(query), axis=0)
        power = (amax.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power > 0, power, 1.0)
        query = tl.div_rn(query, tl.zeros_like(query) + power)  # exact; `/` need not be on a GPU
    tl.store(prepared + line * (WIDTH + TAIL) + column, query.to(prepared.dtype.element_ty), mask=column < WIDTH + TAIL)
    tl.store(factors + line, power * score_scale)


@triton.jit(do_not_specialize=["heads", "splits"])
def split(  # type: ignore[no-untyped-def]
    queries,  # [B, KV_HEADS, heads, WIDTH + TAIL] in what is multiplied
    factors,  # [B, KV_HEADS, heads] float32
    keys,  # [num_slots, KV_HEADS, WIDTH], rows ROW elements apart: uint8 for E4M3, or floats
    values,  # as keys; None: the keys are the values
    key_tails,  # [num_slots, TAIL], or None
    group_scales,  # [num_slots, WIDTH / 128] float32, or None
    table,  # [B, max_pages] int32
    lengths,  # [B] int32
    indices,  # [B, topk] int32, or None
    partials,  # [B, KV_HEADS, heads, splits, WIDTH] float32
    sums,  # [B, KV_HEADS, heads, splits] float32: log2 of the sum of exp2(score)
    num_pages,
    max_pages,
    topk,
    tail_row,
    group_row,
    heads,
    splits,
    ROW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A program for each request, key head, tile of heads (the last one fastest) and split."""
    tiles = tl.cdiv(heads, BLOCK_HEADS)
    request = (tl.program_id(0) // (tiles * KV_HEADS)).to(tl.int64)
    kv_head = tl.program_id(0) // tiles % KV_HEADS
    head = tl.program_id(0) % tiles * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    line = (request * KV_HEADS + kv_head) * heads + head
    query = _load_query(queries + line * (WIDTH + TAIL), head < heads, WIDTH, BLOCK_WIDTH)
    tail = _load_query(queries + line * (WIDTH + TAIL) + WIDTH, head < heads, TAIL, BLOCK_TAIL)
    factor = tl.load(factors + line, mask=head < heads, other=0)
    length = tl.load(lengths + request)
    items = tl.minimum(length, max_pages * PAGE_SIZE) if indices is None else topk
    share = tl.cdiv(tl.cdiv(items, BLOCK_TOKENS), splits) * BLOCK_TOKENS
    first = tl.program_id(1) * share
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    attended = tl.zeros([BLOCK_HEADS, BLOCK_WIDTH], tl.float32)
    for start in range(first, tl.minimum(first + share, items), BLOCK_TOKENS):
        item = start + tl.arange(0, BLOCK_TOKENS)
        ONE_PAGE: tl.constexpr = indices is None and PAGE_SIZE % BLOCK_TOKENS == 0
        position, live = _positions(indices, request * topk + item, item, items, length)
        slot, sound = _locate(
            table + request * max_pages, start, position, live, num_pages, max_pages, PAGE_SIZE, ONE_PAGE
        )
        key = _load_rows(keys + kv_head * WIDTH, slot * ROW, sound, WIDTH, BLOCK_WIDTH, query.dtype, HARDWARE)
        key = _rescale(key, group_scales, slot * group_row, sound, BLOCK_WIDTH)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if TAIL:
            key_tail = _load_rows(key_tails, slot * tail_row, sound, TAIL, BLOCK_TAIL, query.dtype, HARDWARE)
            scores = tl.dot(tail, tl.trans(key_tail), scores, input_precision="ieee")
        scores = _mask(scores * factor[:, None], live, sound)
        value = key
        if values is not None:
            value = _load_rows(values + kv_head * WIDTH, slot * ROW, sound, WIDTH, BLOCK_WIDTH, query.dtype, HARDWARE)
        attended, largest, total = _accumulate(attended, largest, total, scores, value)
    total = tl.where((length < 0) | (length > max_pages * PAGE_SIZE), float("nan"), total)
    _store_part(partials, sums, line * splits + tl.program_id(1), head < heads, attended, largest, total, WIDTH)


@triton.jit
def _load_query(queries, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[heads, BLOCK]; 0 where there is nothing."""
    columns = tl.arange(0, BLOCK)
    return tl.load(queries[:, None] + columns[None, :], mask=real[:, None] & (columns < WIDTH)[None, :], other=0)


@triton.jit
def _positions(indices, entry, item, items, length):  # type: ignore[no-untyped-def]
    """The token positions of `item`, and which of them are to be attended to."""
    live = item < items
    position = item
    if indices is not None:
        position = tl.load(indices + entry, mask=live, other=-1)
        live = live & (position >= 0) & (position < length)
    return position, live


@triton.jit
def _locate(  # type: ignore[no-untyped-def]
    table, start, position, live, num_pages, max_pages, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr
):
    """The slots (int64) of token positions, and which of the live ones lie in the block table and in the pool."""
    if ONE_PAGE:
        page = tl.load(table + start // PAGE_SIZE) + tl.zeros_like(position)
        sound = live & (page >= 0) & (page < num_pages)
    else:
        listed = live & (position < max_pages * PAGE_SIZE)
        page = tl.load(table + position // PAGE_SIZE, mask=listed, other=-1)
        sound = (page >= 0) & (page < num_pages)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, sound


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    base,
    offset,
    sound,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The numbers [tokens, BLOCK] of the rows at `offset`; 0 where there is nothing sound."""
    columns = tl.arange(0, BLOCK)
    inside = sound[:, None]
    if WIDTH != BLOCK:
        inside = inside & (columns < WIDTH)[None, :]
    stored = tl.load(base + offset[:, None] + columns[None, :], mask=inside, other=0)
    if stored.dtype == tl.uint8 and HARDWARE:
        stored = tl.inline_asm_elementwise(_E4M3_TO_FLOAT16, "=r,=r,r", [stored], tl.float16, is_pure=False, pack=4)
    elif stored.dtype == tl.uint8:
        stored = e4m3_to_float16(stored, False)
    elif stored.dtype != NUMBERS:
        stored = to_float32(stored)
    return stored.to(NUMBERS)


@triton.jit
def _rescale(key, group_scales, offset, sound, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`key` times its groups' scales, where there are such; a power of two is exact."""
    if group_scales is not None:
        groups: tl.constexpr = BLOCK // _GROUP
        pointers = group_scales + offset[:, None] + tl.arange(0, groups)[None, :]
        scale = tl.load(pointers, mask=sound[:, None], other=0)
        wide = tl.broadcast_to(scale[:, :, None], [key.shape[0], groups, _GROUP]).reshape(key.shape)
        key = (to_float32(key) * wide).to(key.dtype)
    return key


@triton.jit
def _mask(scores, live, sound):  # type: ignore[no-untyped-def]
    """-inf for what is not attended to, NaN for what should be and cannot be found."""
    missing = tl.where(live, float("nan"), float("-inf"))
    return tl.where(sound[None, :], scores, missing[None, :])


@triton.jit
def _accumulate(attended, largest, total, scores, value):  # type: ignore[no-untyped-def]
    """One step of the running softmax; a shift of 0 avoids inf - inf where all is masked."""
    highest = tl.maximum(largest, tl.max(scores, axis=1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp2(largest - shift)
    weight = tl.exp2(scores - shift[:, None])
    attended = tl.dot(weight.to(value.dtype), value, attended * decay[:, None], input_precision="ieee")
    return attended, highest, total * decay + tl.sum(weight, axis=1)


@triton.jit
def _store_part(partials, sums, place, real, attended, largest, total, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the part and log2 of its sum of exp2(score), which is -inf for an empty part."""
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    tl.store(sums + place, tl.where(empty, float("-inf"), largest + tl.log2(divisor)), mask=real)
    columns = tl.arange(0, attended.shape[1])
    inside = real[:, None] & (columns < WIDTH)[None, :]
    tl.store(partials + place[:, None] * WIDTH + columns[None, :], attended / divisor[:, None], mask=inside)


@triton.jit(do_not_specialize=["splits"])
def combine(  # type: ignore[no-untyped-def]
    partials,  # [lines, splits, WIDTH] float32
    sums,  # [lines, splits] float32
    out,  # [lines, WIDTH] floats
    lse,  # [lines] float32
    value_scale,
    splits,
    WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each request and head, and BLOCK columns."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, BLOCK_SPLITS)
    parts = tl.load(sums + line * splits + split, mask=split < splits, other=float("-inf"))
    largest = tl.max(parts, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(parts - shift), axis=0)
    divisor = tl.where(total == 0, 1.0, total)
    attended = tl.zeros([BLOCK], tl.float32)
    for index in range(splits):
        weight = tl.exp2(tl.load(sums + line * splits + index) - shift) / divisor
        attended += weight * tl.load(
            partials + (line * splits + index) * WIDTH + columns, mask=columns < WIDTH, other=0
        )
    tl.store(
        out + line * WIDTH + columns, from_float32(attended * value_scale, out.dtype.element_ty), mask=columns < WIDTH
    )
    if tl.program_id(1) == 0:
        tl.store(lse + line, tl.where(total == 0, float("-inf"), (shift + tl.log2(divisor)) * _LN2))

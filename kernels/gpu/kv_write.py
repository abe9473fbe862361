"""Writing rows into the pages of a KV cache: BF16, float16 or float32 to E4M3 with a scale, to BF16 or to float32.

    out[slots[t], :] = e4m3(clamp(values[t, :] / scale, -448, 448))        ties to even; layouts in kernels/pages.py

MLA rows are two parts, latent and rope, in one row of the pages; GQA rows are two parts, key and value, in two pools.
Both are one launch. A ds_mla row is 512 E4M3 numbers in four groups of 128, each under a power of two of its own, and
64 BF16 numbers. Reference: `quantkit.kernels.reference.kv_write`, which also says what `counts` holds.
"""

import torch
import triton
import triton.language as tl

from quantkit.kernels import pages as layouts
from quantkit.kernels.gpu.bits import bf16_as_bits, float32_to_e4m3, from_float32, to_float32
from quantkit.kernels.gpu.launching import run
from quantkit.kernels.reference.kv_write import SMALLEST_AMAX, check_gqa, check_mla

_MAX_BLOCK = 1024
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


def write_mla(
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
) -> None:
    """Write `latent` [T, latent] and `rope` [T, rope] at `slots` int64 [T] into MLA or ds_mla `pages`; adds to `counts`
    int64 [3]. Negative slots are skipped, those beyond the pool refused and counted.
    """
    check_mla(latent, rope, pages, slots, scale, counts)
    if not slots.numel():
        return
    if layouts.is_ds_mla(pages, latent.shape[1], rope.shape[1]):
        _launch_ds(latent, rope, pages, slots, counts)
    else:
        rows = pages.flatten(0, 1)
        width = latent.shape[1]
        _launch(latent, rope, rows[:, :width], rows[:, width:], slots, scale, scale, counts)


def write_gqa(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slots: torch.Tensor,
    key_scale: float,
    value_scale: float,
    counts: torch.Tensor,
) -> None:
    """Write `key` and `value` [T, kv_heads, head_size] at `slots` int64 [T] into their pages; `counts` as above."""
    check_gqa(key, value, key_pages, value_pages, slots, key_scale, value_scale, counts)
    if slots.numel():
        key_rows, value_rows = (pages.flatten(0, 1).flatten(1) for pages in (key_pages, value_pages))
        _launch(key.flatten(1), value.flatten(1), key_rows, value_rows, slots, key_scale, value_scale, counts)


def _launch(
    left: torch.Tensor,
    right: torch.Tensor,
    left_rows: torch.Tensor,
    right_rows: torch.Tensor,
    slots: torch.Tensor,
    left_scale: float,
    right_scale: float,
    counts: torch.Tensor,
) -> None:
    widths = left.shape[1], right.shape[1]
    block = min(triton.next_power_of_2(max(widths)), _MAX_BLOCK)
    e4m3 = layouts.is_e4m3(left_rows)
    targets = [rows.view(torch.uint8) if e4m3 else bf16_as_bits(rows) for rows in (left_rows, right_rows)]
    run(
        _write,
        (slots.numel(), sum(triton.cdiv(width, block) for width in widths)),
        bf16_as_bits(left),
        bf16_as_bits(right),
        *targets,
        slots,
        counts,
        left_scale,
        right_scale,
        left_rows.shape[0],
        left.stride(0),
        right.stride(0),
        left_rows.stride(0),
        right_rows.stride(0),
        *widths,
        BLOCK=block,
        E4M3=e4m3,
        HARDWARE=slots.device.type != "cpu",
        num_warps=max(1, min(4, block // 128)),
    )


def _launch_ds(
    latent: torch.Tensor, rope: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
) -> None:
    codes, scales, tail = layouts.ds_parts(pages.flatten(0, 1))
    run(
        _write_ds,
        (slots.numel(),),
        bf16_as_bits(latent),
        bf16_as_bits(rope),
        codes,
        scales,
        bf16_as_bits(tail),
        slots,
        counts,
        codes.shape[0],
        latent.stride(0),
        rope.stride(0),
        layouts.DS_ROW,
        layouts.DS_LATENT // layouts.DS_GROUP,
        layouts.DS_GROUP,
        layouts.DS_ROPE,
        HARDWARE=slots.device.type != "cpu",
        num_warps=2,
    )


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    left,  # [T, LEFT] floats
    right,  # [T, RIGHT] floats
    left_rows,  # [num_slots, LEFT] uint8 for E4M3, or floats
    right_rows,
    slots,  # [T] int64
    counts,  # [3] int64
    left_scale,
    right_scale,
    num_slots,
    left_stride,
    right_stride,
    left_row,
    right_row,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A program for each token and BLOCK columns of the left and then of the right part."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    left_tiles = tl.cdiv(LEFT, BLOCK)
    slot = tl.load(slots + token)
    tl.atomic_add(counts + 2, 1, mask=(tile == 0) & (slot >= num_slots))
    if (slot >= 0) & (slot < num_slots):
        if tile < left_tiles:
            source = left + token * left_stride
            _write_tile(source, left_rows + slot * left_row, left_scale, counts, tile, LEFT, BLOCK, E4M3, HARDWARE)
        else:
            source = right + token * right_stride
            target = right_rows + slot * right_row
            _write_tile(source, target, right_scale, counts, tile - left_tiles, RIGHT, BLOCK, E4M3, HARDWARE)


@triton.jit
def _write_tile(  # type: ignore[no-untyped-def]
    source,
    target,
    scale,
    counts,
    tile,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = to_float32(tl.load(source + columns, mask=inside, other=0))
    if E4M3:
        values = tl.div_rn(values, tl.zeros_like(values) + scale)
        stored = float32_to_e4m3(values, HARDWARE)
        _add(counts, tl.sum((tl.abs(values) > 448.0).to(tl.int64)))
    else:
        stored = from_float32(values, target.dtype.element_ty)
    _add(counts + 1, tl.sum((values != values).to(tl.int64)))
    tl.store(target + columns, stored, mask=inside)


@triton.jit
def _add(count, number):  # type: ignore[no-untyped-def]
    """Atomics are slow and faults are rare: only numbers other than 0 are added."""
    tl.atomic_add(count, number, mask=number > 0)


@triton.jit
def _write_ds(  # type: ignore[no-untyped-def]
    latent,  # [T, GROUPS * GROUP] floats
    rope,  # [T, ROPE] floats
    codes,  # [num_slots, GROUPS * GROUP] uint8 in rows of ROW bytes
    scales,  # [num_slots, GROUPS] float32 in rows of ROW bytes
    tails,  # [num_slots, ROPE] BF16 in rows of ROW bytes
    slots,  # [T] int64
    counts,  # [3] int64
    num_slots,
    latent_stride,
    rope_stride,
    ROW: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A program for each token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    tl.atomic_add(counts + 2, 1, mask=slot >= num_slots)
    if (slot >= 0) & (slot < num_slots):
        group = tl.arange(0, GROUPS)
        columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = to_float32(tl.load(latent + token * latent_stride + columns))
        scale = _ds_scale(values)
        values = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
        tl.store(codes + slot * ROW + columns, float32_to_e4m3(values, HARDWARE))
        tl.store(scales + slot * (ROW // 4) + group, scale)
        part = tl.arange(0, ROPE)
        tail = to_float32(tl.load(rope + token * rope_stride + part))
        tl.store(tails + slot * (ROW // 2) + part, from_float32(tail, tails.dtype.element_ty))
        _add(counts, tl.sum((tl.abs(values) > 448.0).to(tl.int64)))
        _add(counts + 1, tl.sum((values != values).to(tl.int64)) + tl.sum((tail != tail).to(tl.int64)))


@triton.jit
def _ds_scale(values):  # type: ignore[no-untyped-def]
    """The power of two [groups] of float32 `values` [groups, size], as in the reference's `ds_scale`."""
    bits = values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits > 0x7F800000, 0, tl.minimum(bits, 0x7F7FFFFF))  # NaN is nothing, infinity the largest number
    amax = tl.maximum(tl.max(bits, axis=1).to(tl.float32, bitcast=True), _SMALLEST_AMAX)
    ratio = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)).to(tl.uint32, bitcast=True)
    return ((ratio + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)

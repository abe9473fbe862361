"""Writing rows into the pages of a KV cache, in torch: the truth for `kernels/gpu/kv_write.py`, and what a CPU uses.

A stored byte is the E4M3 number nearest to float32(value) / float32(scale), ties to even, clamped to -448..448; the
fold convention is scale 1.0. Plain pages hold the value rounded to their type. `slots` int64 [tokens] says where each
token goes; a negative slot is padding and is skipped, a slot beyond the pool is refused and counted. Slots are
distinct.

`counts` int64 [3] is added to: values with |value / scale| > 448, NaN values (stored as NaN), rows refused.
"""

import torch

from quantkit.kernels import pages as layouts
from quantkit.kernels.checks import check_tensor, require

LARGEST = 448.0
SMALLEST_AMAX = 1e-4  # of a ds_mla group, so that a row of zeros has a scale


def write_mla(
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
) -> None:
    """Write `latent` [T, latent] and `rope` [T, rope] (BF16, float16 or float32) into MLA `pages`, scaled by `scale`,
    or, in ds_mla pages, the latent by a power of two for each 128 and the rope part as BF16.
    """
    check_mla(latent, rope, pages, slots, scale, counts)
    kept = _kept(slots, pages, counts)
    rows, where = torch.cat([latent.float(), rope.float()], dim=1)[kept], slots[kept]
    if not layouts.is_ds_mla(pages, latent.shape[1], rope.shape[1]):
        _write(rows, pages, where, scale, counts)
        return
    parts = layouts.ds_parts(pages.flatten(0, 1))
    values, tail = rows[:, : layouts.DS_LATENT], rows[:, layouts.DS_LATENT :]
    groups = values.reshape(len(rows), -1, layouts.DS_GROUP)
    scales = ds_scale(groups)
    parts[0][where] = _encode(groups / scales[:, :, None], counts).flatten(1)
    parts[1][where] = scales
    parts[2][where] = tail.to(torch.bfloat16)
    counts[1] += tail.isnan().sum()


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
    """Write `key` and `value` [T, kv_heads, head_size] into their pages, each scaled by its own scale."""
    check_gqa(key, value, key_pages, value_pages, slots, key_scale, value_scale, counts)
    kept = _kept(slots, key_pages, counts)
    _write(key[kept].float(), key_pages, slots[kept], key_scale, counts)
    _write(value[kept].float(), value_pages, slots[kept], value_scale, counts)


def ds_scale(groups: torch.Tensor) -> torch.Tensor:
    """The ds_mla scale of each group of float32 `groups` [..., size]: the smallest power of two that is at least
    max(largest finite magnitude, 1e-4) / 448; NaN counts as nothing, an infinity as the largest float32.
    """
    magnitude = groups.abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    ratio = magnitude.amax(-1).clamp(min=SMALLEST_AMAX) / LARGEST
    return ((ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def check_mla(
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
) -> None:
    """Refuse what `write_mla` cannot write."""
    _check_indices(slots, counts)
    for name, values in (("latent", latent), ("rope", rope)):
        require(values.dim() == 2, f"{name} has shape {list(values.shape)}, not [tokens, width]")
        layouts.check_source(name, values, slots.shape[0])
    layouts.check_mla_pages(pages, latent.shape[1], rope.shape[1], scale)


def check_gqa(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slots: torch.Tensor,
    key_scale: float,
    value_scale: float,
    counts: torch.Tensor,
) -> None:
    """Refuse what `write_gqa` cannot write."""
    _check_indices(slots, counts)
    for name, values in (("key", key), ("value", value)):
        require(values.dim() == 3, f"{name} has shape {list(values.shape)}, not [tokens, kv_heads, head_size]")
        layouts.check_source(name, values, slots.shape[0])
    require(key.shape == value.shape, f"key has shape {list(key.shape)}, value {list(value.shape)}")
    layouts.check_gqa_pages(key_pages, value_pages, (key.shape[1], key.shape[2]), key_scale, value_scale)


def _check_indices(slots: torch.Tensor, counts: torch.Tensor) -> None:
    check_tensor("slots", slots, (None,), torch.int64)
    check_tensor("counts", counts, (len(layouts.COUNT_NAMES),), torch.int64)


def _kept(slots: torch.Tensor, pages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Which tokens are to be written, bool [T]; those with a slot beyond the pool are counted."""
    beyond = slots >= pages.shape[0] * pages.shape[1]
    counts[2] += beyond.sum()
    return (slots >= 0) & ~beyond


def _write(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, scale: float, counts: torch.Tensor) -> None:
    target = pages.flatten(0, 1)
    if layouts.is_e4m3(pages):
        target.view(torch.uint8)[slots] = _encode(rows / rows.new_tensor(scale), counts)
    else:
        counts[1] += rows.isnan().sum()
        target[slots] = rows.to(pages.dtype)


def _encode(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    counts[0] += (values.abs() > LARGEST).sum()
    counts[1] += values.isnan().sum()
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)

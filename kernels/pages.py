"""What a page of a KV cache holds: the row layouts, and the checks that the kernels and their references share.

    MLA, one scale    pages [num_pages, page_size, latent + rope] in E4M3, BF16 or float32; value = stored * scale
    MLA, ds_mla       pages [num_pages, page_size, 656] bytes. A row, which needs no scale from outside:
                      0         512              528              656
                      | 512 E4M3 | 4 float32      | 64 BF16        |
                      | latent   | scales, one    | rope, not      |
                      |          | per 128 latent | quantized      |
    GQA               key and value pages [num_pages, page_size, kv_heads, head_size], a scale for each of the two

A slot is a row's number in the pool, page * page_size + offset. E4M3 pages are float8_e4m3fn or their bytes (uint8).
"""

import math

import torch

from quantkit.kernels.checks import require

E4M3_TYPES = (torch.float8_e4m3fn, torch.uint8)
PLAIN_TYPES = (torch.bfloat16, torch.float32)
SOURCE_TYPES = (torch.bfloat16, torch.float16, torch.float32)

DS_LATENT = 512
DS_GROUP = 128
DS_ROPE = 64
DS_ROW = DS_LATENT + DS_LATENT // DS_GROUP * 4 + DS_ROPE * 2

COUNT_NAMES = ("saturated", "nan", "refused")  # what the int64 [3] `counts` of the writers hold


def is_e4m3(pages: torch.Tensor) -> bool:
    """Whether `pages` hold E4M3 numbers or bytes."""
    return pages.dtype in E4M3_TYPES


def is_ds_mla(pages: torch.Tensor, latent: int, rope: int) -> bool:
    """Whether `pages` are rows of 656 bytes with their own scales, for a latent of 512 and a rope part of 64."""
    return is_e4m3(pages) and pages.shape[-1] == DS_ROW and (latent, rope) == (DS_LATENT, DS_ROPE)


def ds_parts(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of ds_mla `pages`: latent bytes uint8 [..., 512], scales float32 [..., 4], rope BF16 [..., 64]."""
    row = pages.view(torch.uint8)
    scales, rope = row.view(torch.float32), row.view(torch.bfloat16)
    first = DS_ROW - DS_ROPE * 2
    return row[..., :DS_LATENT], scales[..., DS_LATENT // 4 : first // 4], rope[..., first // 2 :]


def check_scale(name: str, scale: float, pages: torch.Tensor) -> None:
    """Refuse a scale that is not a positive finite number, and any but 1.0 for pages that are not E4M3."""
    require(
        math.isfinite(scale) and scale > 0,
        f"{name} is {scale}, not a positive finite number",
        "calibrate it again, or fold it into the weights and use 1.0",
    )
    require(
        scale == 1.0 or is_e4m3(pages),
        f"{name} is {scale}, but the pages are {pages.dtype} and are not scaled",
        "use 1.0, or E4M3 pages",
    )


def check_pages(name: str, pages: torch.Tensor, row: tuple[int, ...]) -> None:
    """Refuse pages that are not a contiguous [num_pages, page_size, *row] of a known type."""
    shape = tuple(pages.shape)
    require(
        len(shape) == 2 + len(row) and shape[2:] == row,
        f"{name} have shape {list(shape)}, not [num_pages, page_size, {', '.join(map(str, row))}]",
    )
    require(
        pages.dtype in E4M3_TYPES + PLAIN_TYPES,
        f"{name} are {pages.dtype}; known are E4M3 (or uint8), BF16 and float32",
    )
    require(pages.is_contiguous(), f"{name} are not contiguous", "pass the whole pool of one layer")
    require(0 not in shape, f"{name} have shape {list(shape)}: no room for a single row")


def check_mla_pages(pages: torch.Tensor, latent: int, rope: int, scale: float) -> None:
    """Refuse MLA pages that are neither rows of latent + rope numbers nor ds_mla rows, or a scale that does not fit."""
    if is_ds_mla(pages, latent, rope):
        check_pages("MLA pages", pages, (DS_ROW,))
        require(scale == 1.0, f"scale is {scale}, but ds_mla rows have their own", "use 1.0")
    else:
        check_pages("MLA pages", pages, (latent + rope,))
        check_scale("scale", scale, pages)


def check_gqa_pages(
    key_pages: torch.Tensor, value_pages: torch.Tensor, row: tuple[int, int], key_scale: float, value_scale: float
) -> None:
    """Refuse GQA pages that are not both [num_pages, page_size, *row] of one type, or scales that do not fit."""
    check_pages("key pages", key_pages, row)
    check_pages("value pages", value_pages, row)
    require(
        key_pages.shape == value_pages.shape and key_pages.dtype == value_pages.dtype,
        f"key pages are {key_pages.dtype} {list(key_pages.shape)}, "
        f"value pages {value_pages.dtype} {list(value_pages.shape)}",
    )
    check_scale("key_scale", key_scale, key_pages)
    check_scale("value_scale", value_scale, value_pages)


def check_source(name: str, values: torch.Tensor, tokens: int) -> None:
    """Refuse values to write that are not floats of `tokens` rows, each row contiguous."""
    require(values.dtype in SOURCE_TYPES, f"{name} is {values.dtype}; known are BF16, float16 and float32")
    require(values.shape[0] == tokens, f"{name} has {values.shape[0]} tokens, slots {tokens}")
    require(values[:1].is_contiguous(), f"a token of {name} is not contiguous", "call .contiguous()")

"""Launches of the page kernels with real models' shapes, to be compiled without a GPU (see triton_support.py)."""

import functools
from collections.abc import Callable

import torch

from quantkit.kernels import pages as layouts
from quantkit.kernels.gpu.kv_write import write_gqa, write_mla
from quantkit.kernels.gpu.page_check import page_check
from quantkit.kernels.gpu.page_digest import page_digest
from quantkit.kernels.gpu.paged_decode import decode_gqa, decode_mla
from quantkit.kernels.reference.page_digest import Binding, Spans

REQUESTS, NUM_PAGES, PAGE_SIZE, MAX_PAGES = 16, 60_000, 64, 2_048
LATENT, ROPE = 512, 64
KV_HEADS, HEAD_SIZE = 8, 128
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

empty = functools.partial(torch.empty, device="meta")


def numbers(*shape: int) -> torch.Tensor:
    """Whole numbers int32 of this shape."""
    return empty(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    """Whole numbers int64 of this shape."""
    return empty(shape, dtype=torch.int64)


def mla_pages(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 512 + 64 numbers, or ds_mla rows for uint8."""
    return empty(NUM_PAGES, PAGE_SIZE, layouts.DS_ROW if dtype == torch.uint8 else LATENT + ROPE, dtype=dtype)


def write_latents(dtype: torch.dtype) -> None:
    """Write latents."""
    latent, rope = empty(REQUESTS, LATENT, dtype=BF16), empty(REQUESTS, ROPE, dtype=BF16)
    write_mla(latent, rope, mla_pages(dtype), longs(REQUESTS), 1.0, longs(3))


def write_heads(dtype: torch.dtype) -> None:
    """Write keys and values."""
    rows = empty(REQUESTS, KV_HEADS, HEAD_SIZE, dtype=BF16)
    pages = empty(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE, dtype=dtype)
    write_gqa(rows, rows, pages, pages, longs(REQUESTS), 1.0, 1.0, longs(3))


def decode_latents(heads: int, dtype: torch.dtype, topk: int | None = None) -> None:
    """MLA decode."""
    query, rope = empty(REQUESTS, heads, LATENT, dtype=BF16), empty(REQUESTS, heads, ROPE, dtype=BF16)
    indices = None if topk is None else numbers(REQUESTS, topk)
    table = numbers(REQUESTS, MAX_PAGES)
    decode_mla(query, rope, mla_pages(dtype), table, numbers(REQUESTS), 0.04, 1.0, indices)


def decode_heads(heads: int, dtype: torch.dtype) -> None:
    """GQA decode."""
    pages = empty(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE, dtype=dtype)
    query = empty(REQUESTS, heads, HEAD_SIZE, dtype=BF16)
    decode_gqa(query, pages, pages, numbers(REQUESTS, MAX_PAGES), numbers(REQUESTS), 0.09)


def check_pages() -> None:
    """Generations against expectations."""
    page_check(numbers(REQUESTS, MAX_PAGES), longs(REQUESTS, MAX_PAGES), numbers(REQUESTS), longs(NUM_PAGES))


def digest_pages() -> None:
    """The digest of E4M3 pages."""
    spans = Spans(numbers(REQUESTS), numbers(REQUESTS), numbers(REQUESTS), longs(REQUESTS))
    page_digest(mla_pages(E4M3), spans, Binding(longs(REQUESTS), longs(REQUESTS), longs(REQUESTS)))


KINDS = {"e4m3": E4M3, "bf16": BF16, "ds": torch.uint8}
LAUNCHES: dict[str, Callable[[], object]] = {
    **{f"write_mla {kind}": functools.partial(write_latents, dtype) for kind, dtype in KINDS.items()},
    "write_gqa e4m3": functools.partial(write_heads, E4M3),
    "write_gqa bf16": functools.partial(write_heads, BF16),
    "decode_mla e4m3 16 heads": functools.partial(decode_latents, 16, E4M3),
    "decode_mla e4m3 64 heads": functools.partial(decode_latents, 64, E4M3),
    "decode_mla bf16 16 heads": functools.partial(decode_latents, 16, BF16),
    "decode_mla bf16 64 heads": functools.partial(decode_latents, 64, BF16),
    "decode_mla e4m3 64 heads top 2048": functools.partial(decode_latents, 64, E4M3, 2048),
    "decode_mla ds 16 heads top 2048": functools.partial(decode_latents, 16, torch.uint8, 2048),
    "decode_mla ds 64 heads top 2048": functools.partial(decode_latents, 64, torch.uint8, 2048),
    "decode_gqa e4m3 64 heads": functools.partial(decode_heads, 64, E4M3),
    "decode_gqa bf16 64 heads": functools.partial(decode_heads, 64, BF16),
    "page_check": check_pages,
    "page_digest": digest_pages,
}

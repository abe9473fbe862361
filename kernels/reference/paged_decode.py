"""Decode attention over the pages of a KV cache, in torch: the truth for `kernels/gpu/paged_decode.py`, and what a CPU
uses.

Computed in float64 for float64 queries, else in float32. One request after another, so a request's result does not
depend on what else is in the batch, bit for bit; only the pages that its length needs are looked at.
"""

import functools
from collections.abc import Callable

import torch

from quantkit.kernels import pages as layouts
from quantkit.kernels.checks import check_tensor, require

Located = Callable[[torch.Tensor], torch.Tensor]  # pages -> the rows of one request's tokens


def decode_mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    scale: float = 1.0,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of absorbed queries `q_latent` [B, heads, latent] and `q_rope` [B, heads, rope] over MLA `pages`:
    the attended latent [B, heads, latent] in the queries' dtype, and the log-sum-exp [B, heads].

    `block_table` int32 [B, max_pages] and `lengths` int32 [B] give each request's pages and tokens. `indices` int32
    [B, topk] restricts a request to the listed token positions; those outside 0..length-1 (-1 is padding) are passed
    over, one listed twice counts twice. Without any token the result is 0, its log-sum-exp -inf.
    """
    check_mla(q_latent, q_rope, pages, block_table, lengths, scale, indices)
    dtype = _compute_dtype(q_latent)
    query = torch.cat([q_latent, q_rope], dim=-1).to(dtype)
    width = q_latent.shape[2]
    out = torch.zeros_like(q_latent)
    lse = q_latent.new_full(out.shape[:2], -torch.inf, dtype=dtype)
    for request, rows in enumerate(_requests(pages, block_table, lengths, indices)):
        if layouts.is_ds_mla(pages, width, q_rope.shape[2]):
            key = _ds_numbers(rows(pages), dtype)
        else:
            key = _numbers(rows(pages), dtype)
        if len(key):
            attended, lse[request] = _attend(query[request], key, key[:, :width], softmax_scale * scale)
            out[request] = attended * scale
    return out, lse


def decode_gqa(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` [B, heads, head_size] over `key_pages` and `value_pages`, heads a multiple of kv_heads:
    [B, heads, head_size] in the query's dtype, and the log-sum-exp [B, heads]; the rest as for `decode_mla`.
    """
    check_gqa(query, key_pages, value_pages, block_table, lengths, key_scale, value_scale)
    dtype = _compute_dtype(query)
    grouped = query.to(dtype).view(
        len(query), key_pages.shape[2], -1, query.shape[2]
    )  # [B, kv_heads, heads of each, head_size]
    out = torch.zeros_like(query)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=dtype)
    for request, rows in enumerate(_requests(key_pages, block_table, lengths, None)):
        key, value = (_numbers(rows(pages), dtype).transpose(0, 1) for pages in (key_pages, value_pages))
        if key.shape[1]:
            attended, sums = _attend(grouped[request], key, value, softmax_scale * key_scale)
            out[request] = (attended * value_scale).flatten(0, 1)
            lse[request] = sums.flatten()
    return out, lse


def check_mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    indices: torch.Tensor | None,
) -> None:
    """Refuse what `decode_mla` cannot compute."""
    types = (*layouts.SOURCE_TYPES, torch.float64)
    check_tensor("q_latent", q_latent, (None, None, None), *types)
    check_tensor("q_rope", q_rope, (*q_latent.shape[:2], None), q_latent.dtype)
    layouts.check_mla_pages(pages, q_latent.shape[2], q_rope.shape[2], scale)
    _check_requests(q_latent.shape[0], block_table, lengths)
    if indices is not None:
        check_tensor("indices", indices, (q_latent.shape[0], None), torch.int32)


def check_gqa(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    """Refuse what `decode_gqa` cannot compute."""
    check_tensor("query", query, (None, None, None), *layouts.SOURCE_TYPES, torch.float64)
    kv_heads = key_pages.shape[2] if key_pages.dim() == 4 else 1
    layouts.check_gqa_pages(key_pages, value_pages, (kv_heads, query.shape[2]), key_scale, value_scale)
    require(query.shape[1] % kv_heads == 0, f"{query.shape[1]} query heads are not a multiple of {kv_heads} key heads")
    _check_requests(query.shape[0], block_table, lengths)


def _check_requests(requests: int, block_table: torch.Tensor, lengths: torch.Tensor) -> None:
    check_tensor("block_table", block_table, (requests, None), torch.int32)
    check_tensor("lengths", lengths, (requests,), torch.int32)


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _requests(
    pages: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor | None
) -> list[Located]:
    """For each request a function that takes its rows [tokens, ...] out of a pool; lengths and pages are checked."""
    num_pages, page_size = pages.shape[:2]
    located: list[Located] = []
    for request, length in enumerate(lengths.tolist()):
        require(
            0 <= length <= block_table.shape[1] * page_size,
            f"request {request} has {length} tokens, its block table {block_table.shape[1]} pages of {page_size}",
        )
        table = block_table[request, : -(-length // page_size)]
        outside = (table < 0) | (table >= num_pages)
        require(
            not outside.any(), f"request {request}: page {table[outside][:1].tolist()} is not in a pool of {num_pages}"
        )
        if indices is None:
            located.append(functools.partial(_all_rows, table=table, length=length))
        else:
            chosen = indices[request]
            position = chosen[(chosen >= 0) & (chosen < length)]
            slots = table[position // page_size].long() * page_size + position % page_size
            located.append(functools.partial(_chosen_rows, slots=slots))
    return located


def _all_rows(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return _bytes(pages)[table].flatten(0, 1)[:length]


def _chosen_rows(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return _bytes(pages).flatten(0, 1)[slots]


def _bytes(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.uint8) if layouts.is_e4m3(pages) else pages


def _numbers(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `rows`; bytes are looked up in a table, which is several times faster than torch's conversion."""
    if rows.dtype == torch.uint8:
        return torch.index_select(_e4m3(dtype).to(rows.device), 0, rows.flatten().int()).view(rows.shape)
    return rows.to(dtype)


def _ds_numbers(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, scales, rope = layouts.ds_parts(rows)
    latent = _numbers(codes, dtype).view(*scales.shape, layouts.DS_GROUP) * scales[..., None].to(dtype)
    return torch.cat([latent.flatten(-2), rope.to(dtype)], dim=-1)


@functools.cache
def _e4m3(dtype: torch.dtype) -> torch.Tensor:
    """The number of each E4M3 byte, [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [..., heads, C] over keys [..., tokens, C] and values [..., tokens, D], and its log-sum-exp."""
    scores = query @ key.transpose(-1, -2) * scale
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]) @ value, lse

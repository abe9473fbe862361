"""The pages of a KV cache: Triton where they lie on a GPU, else the torch reference.

Layouts, checks and errors are those of `quantkit.kernels.pages`.
"""

import torch

from quantkit.kernels.reference.page_digest import Binding, Spans


def write_mla(
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
) -> None:
    """Write rows `latent` [T, latent] and `rope` [T, rope] into MLA `pages` at `slots` int64 [T], divided by `scale`.

    `counts` int64 [3] is added to: values that saturated, NaN values, rows refused.
    """
    if pages.is_cuda:
        from quantkit.kernels.gpu.kv_write import write_mla as write
    else:
        from quantkit.kernels.reference.kv_write import write_mla as write
    write(latent, rope, pages, slots, scale, counts)


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
    """Write `key` and `value` [T, kv_heads, head_size] into their pages, as `write_mla` does."""
    if key_pages.is_cuda:
        from quantkit.kernels.gpu.kv_write import write_gqa as write
    else:
        from quantkit.kernels.reference.kv_write import write_gqa as write
    write(key, value, key_pages, value_pages, slots, key_scale, value_scale, counts)


def decode_mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    scale: float = 1.0,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one row of each of B requests, [B, heads, latent], as `kernels.reference.paged_decode` says."""
    arguments = q_latent, q_rope, pages, block_table, lengths, softmax_scale, scale, indices
    if pages.is_cuda:
        from quantkit.kernels.gpu import paged_decode as gpu

        return gpu.decode_mla(*arguments)[0]
    from quantkit.kernels.reference import paged_decode as reference

    return reference.decode_mla(*arguments)[0]


def decode_gqa(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of one row of each of B requests, [B, heads, head_size], as `kernels.reference.paged_decode` says."""
    arguments = query, key_pages, value_pages, block_table, lengths, softmax_scale, key_scale, value_scale
    if key_pages.is_cuda:
        from quantkit.kernels.gpu import paged_decode as gpu

        return gpu.decode_gqa(*arguments)[0]
    from quantkit.kernels.reference import paged_decode as reference

    return reference.decode_gqa(*arguments)[0]


def read_rows(pages: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """The rows of `pages` at `slots` int64 [T], [T, ...]: E4M3 as float32 times `scale`, others as they are."""
    if pages.dtype == torch.float8_e4m3fn:
        rows = pages.flatten(0, 1).view(torch.uint8)[slots].view(torch.float8_e4m3fn)
        return rows.float() * scale
    return pages.flatten(0, 1)[slots]


def check(
    block_table: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor, generations: torch.Tensor
) -> torch.Tensor:
    """For each of B requests the first position whose page is not as expected, or -1: int32 [B].

    `block_table` int32 and `expected` int64 [B, max_pages], of which the first `counts` int32 [B] are compared with
    `generations` int64 [num_pages].
    """
    arguments = block_table, expected, counts, generations
    if generations.is_cuda:
        from quantkit.kernels.gpu import page_check as gpu

        return gpu.page_check(*arguments)
    from quantkit.kernels.reference import page_check as reference

    return reference.page_check(*arguments)


def digest(
    pages: torch.Tensor, spans: Spans, binding: Binding, first_word: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and the digests, int64 [N] each, of `spans` in `pages`, as `kernels.reference.page_digest` says."""
    if pages.is_cuda:
        from quantkit.kernels.gpu import page_digest as gpu

        return gpu.page_digest(pages, spans, binding, first_word)
    from quantkit.kernels.reference import page_digest as reference

    return reference.page_digest(pages, spans, binding, first_word)

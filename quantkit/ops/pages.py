"""The pages of a KV cache: Triton where they lie on a GPU, else the torch reference.

Layouts, checks and errors are those of `quantkit.kernels.pages`.
"""

import torch


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

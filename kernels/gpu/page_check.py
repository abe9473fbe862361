"""Are the pages of a batch still those that its requests were given? One launch for the whole batch.

    result[b] = the first position p < counts[b] with generations[block_table[b, p]] != expected[b, p], or -1

Run it before attention and apart from it, and read the result with the sampled tokens. No byte of a page is read.
Reference, with what the generations have to be: `quantkit.kernels.reference.page_check`.
"""

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import check_tensor
from quantkit.kernels.gpu.launching import run
from quantkit.kernels.reference.page_check import ALL_GOOD, check

_BLOCK = 1024
_ALL_GOOD = tl.constexpr(ALL_GOOD)


def page_check(
    block_table: torch.Tensor,
    expected: torch.Tensor,
    counts: torch.Tensor,
    generations: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each request the first logical position whose page is not as expected, or -1: int32 [B], or in `out`.

    `block_table` int32 and `expected` int64 [B, max_pages], `counts` int32 [B], `generations` int64 [num_pages].
    """
    check(block_table, expected, counts, generations)
    requests, max_pages = block_table.shape
    out = counts.new_empty(requests) if out is None else out
    check_tensor("out", out, (requests,), torch.int32)
    if requests:
        block = min(_BLOCK, triton.next_power_of_2(max_pages + 1))
        arguments = block_table, expected, counts, generations, out, max_pages, generations.numel()
        run(_check, (requests,), *arguments, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _check(  # type: ignore[no-untyped-def]
    table,  # [B, max_pages] int32
    expected,  # [B, max_pages] int64
    counts,  # [B] int32
    generations,  # [num_pages] int64
    out,  # [B] int32
    max_pages,
    num_pages,
    BLOCK: tl.constexpr,
):
    """A program for each request."""
    request = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + request), max_pages + 1)
    first = max_pages + 1
    for start in range(0, count, BLOCK):
        position = start + tl.arange(0, BLOCK)
        live = position < tl.minimum(count, max_pages)
        page = tl.load(table + request * max_pages + position, mask=live, other=-1)
        inside = (page >= 0) & (page < num_pages)
        current = tl.load(generations + page.to(tl.int64), mask=inside, other=0)
        wanted = tl.load(expected + request * max_pages + position, mask=live, other=0)
        bad = (position < count) & ((current != wanted) | ~inside)
        first = tl.minimum(first, tl.min(tl.where(bad, position, max_pages + 1), axis=0))
    tl.store(out + request, tl.where(first <= max_pages, first, _ALL_GOOD))

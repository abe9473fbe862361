"""Are the pages of a batch still those that its requests were given? The truth for `kernels/gpu/page_check.py`, and
what a CPU uses: in NumPy, whose calls on small arrays cost less than torch's.

A request expects a generation of each page of its block table; the pool has one for each page, and gives a page a new
one whenever it is allocated or freed. Generations come from one counter of the whole pool, so no two pages ever have
the same: then a page in another's place is seen as well as a page used again. No byte of a page is read.
"""

import numpy as np
import torch

from quantkit.kernels import pages as layouts

ALL_GOOD = -1


def page_check(
    block_table: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor, generations: torch.Tensor
) -> torch.Tensor:
    """For each request the first logical position whose page is not as expected, or ALL_GOOD: int32 [B].

    `block_table` int32 and `expected` int64 [B, max_pages], of which the first `counts` int32 [B] are compared with
    `generations` int64 [num_pages]. A page id outside the pool is bad; a count above max_pages is bad at max_pages.
    """
    check(block_table, expected, counts, generations)
    table, wanted, count, current = (tensor.cpu().numpy() for tensor in (block_table, expected, counts, generations))
    max_pages = table.shape[1]
    first = np.where(count > max_pages, np.int32(max_pages), np.int32(ALL_GOOD))
    bad = table.view(np.uint32) >= len(current)  # a negative id is a large one
    if len(current):
        bad |= current.take(table, mode="clip") != wanted
    bad &= np.arange(max_pages) < count[:, None]
    if bad.any():
        first = np.where(bad.any(axis=1), bad.argmax(axis=1).astype(np.int32), first)
    return torch.from_numpy(first).to(counts.device)


def check(block_table: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor, generations: torch.Tensor) -> None:
    """Refuse tensors that do not fit together."""
    layouts.check_tensor("block_table", block_table, (None, None), torch.int32)
    layouts.check_tensor("expected", expected, tuple(block_table.shape), torch.int64)
    layouts.check_tensor("counts", counts, (block_table.shape[0],), torch.int32)
    layouts.check_tensor("generations", generations, (None,), torch.int64)

"""Are the pages of a batch still those that its requests were given? The truth for `kernels/gpu/page_check.py`, and
what a CPU uses: in NumPy, whose calls on small arrays cost less than torch's.

A request expects a generation of each page of its block table; the pool has one for each page, and gives a page a new
one whenever it is allocated or freed. Generations come from one counter of the whole pool, so no two pages ever have
the same: then a page in another's place is seen as well as a page used again. No byte of a page is read.
"""

import functools

import numpy as np
import torch

from quantkit.kernels.checks import check_tensor

ALL_GOOD = -1
_DTYPES = torch.int32, torch.int64, torch.int32, torch.int64


def page_check(
    block_table: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor, generations: torch.Tensor
) -> torch.Tensor:
    """For each request the first logical position whose page is not as expected, or ALL_GOOD: int32 [B].

    `block_table` int32 and `expected` int64 [B, max_pages], of which the first `counts` int32 [B] are compared with
    `generations` int64 [num_pages]. A page id outside the pool is bad; a count above max_pages is bad at max_pages.
    """
    check(block_table, expected, counts, generations)
    table, wanted, count, current = (
        tensor.numpy(force=True) for tensor in (block_table, expected, counts, generations)
    )
    max_pages = table.shape[1]
    bad = table.view(np.uint32) >= len(current)  # a negative id is a large one
    if len(current):
        bad |= current.take(table, mode="clip") != wanted
    bad &= _positions(max_pages) < count[:, None]
    beyond = count > max_pages
    first = np.full(len(table), ALL_GOOD, dtype=np.int32)
    if bad.any() or beyond.any():
        first[beyond] = max_pages
        first = np.where(bad.any(axis=1), bad.argmax(axis=1).astype(np.int32), first)
    return torch.from_numpy(first).to(counts.device)


@functools.cache
def _positions(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(count)


def check(block_table: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor, generations: torch.Tensor) -> None:
    """Refuse tensors that do not fit together. Each step asks, so the answer for those that do is quick."""
    if (
        (block_table.dtype, expected.dtype, counts.dtype, generations.dtype) == _DTYPES
        and (block_table.dim(), generations.dim(), expected.shape) == (2, 1, block_table.shape)
        and counts.shape == block_table.shape[:1]
        and all(tensor.is_contiguous() for tensor in (block_table, expected, counts, generations))
    ):
        return
    check_tensor("block_table", block_table, (None, None), torch.int32)
    check_tensor("expected", expected, tuple(block_table.shape), torch.int64)
    check_tensor("counts", counts, (block_table.shape[0],), torch.int32)
    check_tensor("generations", generations, (None,), torch.int64)

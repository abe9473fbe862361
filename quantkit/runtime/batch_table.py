"""The block tables of a step's passes as one tensor, which is made anew only when one of them changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quantkit.runtime.pages import PagePool


@dataclass(frozen=True)
class BatchTable:
    """What attention reads.

    pages     int32 [B, most pages]; after a request's pages the number of the pool's, which is no page's
    counts    of the pages of each pass, or those that it needs if they are more
    is_sound  whether all of them are pages of the pool
    """

    pages: torch.Tensor
    counts: tuple[int, ...]
    is_sound: bool


class BatchTables:
    """Makes tables for passes over `pool`."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._known: list[list[int]] = []
        self._table = BatchTable(torch.zeros((0, 0), dtype=torch.int32), (), True)

    def of(self, pages: Sequence[Sequence[int]], stops: Sequence[int]) -> BatchTable:
        """The table of passes whose requests have `pages`, and which read their first `stops` tokens."""
        needed = map(self._pool.spec.pages_for, stops)
        counts = tuple(max(len(own), need) for own, need in zip(pages, needed, strict=True))
        if pages != self._known or counts != self._table.counts:
            self._table = self._make(pages, counts)
            self._known = [list(own) for own in pages]
        return self._table

    def _make(self, pages: Sequence[Sequence[int]], counts: tuple[int, ...]) -> BatchTable:
        num_pages, is_sound = self._pool.num_pages, True
        table = np.full((len(pages), max(counts)), num_pages, dtype=np.int32)
        for row, own, count in zip(table, pages, counts, strict=True):
            if own and not (min(own) >= 0 and max(own) < num_pages):
                own = [page if 0 <= page < num_pages else num_pages for page in own]
                is_sound = False
            row[: len(own)] = own
            is_sound &= len(own) == count
        return BatchTable(torch.from_numpy(table).to(self._pool.device), counts, is_sound)

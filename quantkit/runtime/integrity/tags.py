"""Tags: are the pages that a step will touch still those which its requests were given? For any pool.

A tag proves that a page was neither given back nor to anybody else since the request got it, and that the block table
names it at its place. It says nothing about the bytes.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quantkit.kernels.cpu.page_check import has_generations
from quantkit.ops import pages as ops
from quantkit.runtime.allocator import NOTHING, Generations
from quantkit.runtime.integrity.causes import Cause
from quantkit.runtime.integrity.counters import IntegrityCounters


class PageTracker(Protocol):
    """What a pool tells and asks; requests and pages are numbers, the rest is tensors."""

    def allocate(self, pages: Sequence[int]) -> list[int]:
        """`pages` come into use: their new generations."""

    def free(self, pages: Sequence[int]) -> None:
        """The last user of `pages` left."""

    def expect(self, request: int, generations: Sequence[int]) -> None:
        """The pages of `request` have these generations, in the order of its block table."""

    def forget(self, request: int) -> None:
        """`request` ended; safe to repeat."""

    def check(self, requests: Sequence[int], block_table: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
        """For each of B requests the first position whose page is not as expected, or -1: int32 [B], where the pages
        lie; None where it is known at once that all are as expected.

        `block_table` int32 [B, max_pages] is the one that attention will read, the first `counts` [B] of it. With
        the number of all pages after them a CPU is quicker.
        """

    def write(self, slots: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
        """`slots` int64 [T], -1 for rows whose page does not have the writer's `generations` int64 [T] any more."""


_PADDING = NOTHING.to_bytes(1, "little", signed=True)  # eight of it are a tag


class TagTracker(PageTracker):
    """The tracker by generations. A batch's expectations are laid side by side anew only when one of them changes."""

    def __init__(self, generations: Generations, page_size: int, device: torch.device | str = "cpu") -> None:
        self.counters = IntegrityCounters()
        self._generations, self._page_size, self._device = generations, page_size, torch.device(device)
        self._on_cpu = self._device.type == "cpu"
        self._numbers = np.frombuffer(generations.tags, dtype=np.int64)
        self._shared = torch.frombuffer(generations.tags, dtype=torch.int64)
        self._tags, self._copied = self._shared.to(self._device), generations.newest
        self._expected: dict[int, bytes] = {}
        self._batch: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
        self._gathered, self._is_complete = np.empty(0, dtype=np.int64), False
        self._placed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._table, self._pages = torch.empty(0), np.empty((0, 0), dtype=np.int32)

    def allocate(self, pages: Sequence[int]) -> list[int]:
        return [self._generations.renew(page) for page in pages]

    def free(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._generations.renew(page)

    def expect(self, request: int, generations: Sequence[int]) -> None:
        """Where one of them is no page's, nothing is expected."""
        self._expected[request] = b"" if NOTHING in generations else array("q", generations).tobytes()
        self._batch = None

    def forget(self, request: int) -> None:
        if self._expected.pop(request, None) is not None:
            self._batch = None

    def check(self, requests: Sequence[int], block_table: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
        """Nothing is expected of an unknown request, so each of its pages is wrong."""
        batch = tuple(requests), tuple(counts), block_table.shape[1]
        if batch != self._batch:
            self._gather(*batch)
            self._batch = batch
        self.counters.steps += 1
        self.counters.pages += sum(counts)
        if self._on_cpu and self._is_clean(block_table):
            return None
        return ops.check(block_table, *self._place(), self._current()[:-1])

    def write(self, slots: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
        """Rows that are refused are counted as late writes."""
        tags = self._current()
        pages = (slots // self._page_size).clamp(0, len(tags) - 1)  # the last one is nobody's
        late = (slots >= 0) & (tags[pages] != generations)
        self.counters.faults[Cause.LATE_WRITE] += int(late.sum())
        return slots.masked_fill(late, -1)

    def _current(self) -> torch.Tensor:
        """The pool's tags where the pages lie, int64 [num_pages + 1]."""
        if not self._on_cpu and self._copied != self._generations.newest:
            self._tags.copy_(self._shared)
            self._copied = self._generations.newest
        return self._tags

    def _gather(self, requests: Sequence[int], counts: Sequence[int], width: int) -> None:
        """Lay the expectations of a batch side by side: they serve until one of them changes."""
        rows = [self._expected.get(request, b"") for request in requests]
        sizes = [count * self._tags.itemsize for count in counts]
        padded = width * self._tags.itemsize
        cut = [row[:size].ljust(padded, _PADDING) for row, size in zip(rows, sizes, strict=True)]
        self._gathered, self._placed = np.frombuffer(bytearray().join(cut), dtype=np.int64), None
        self._is_complete = [len(row) for row in rows] == sizes

    def _is_clean(self, block_table: torch.Tensor) -> bool:
        """Whether a CPU finds the expected tag everywhere, and none after the pages: quick, and without where not."""
        if block_table is not self._table:
            self._table, self._pages = block_table, block_table.numpy()
        return self._is_complete and has_generations(self._pages, self._gathered, self._numbers)

    def _place(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's expectations, int64 [B, max_pages], and counts, int32 [B], where the pages lie."""
        if self._placed is None:
            assert self._batch is not None
            _, counts, width = self._batch
            tags = torch.from_numpy(self._gathered).view(len(counts), width)
            self._placed = tags.to(self._device), torch.tensor(counts, dtype=torch.int32, device=self._device)
        return self._placed

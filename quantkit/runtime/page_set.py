"""A request's pages outside of any pool, with what their numbers mean, so that another pool can take them or refuse.

A set is filled page by page and sealed in the end. It opens only whole, and only in a pool of the same spec: the same
model, dtype, page size, layout and scales.
"""

from collections.abc import Iterator, Sequence

import torch

from quantkit.errors import CacheError
from quantkit.runtime.pages import CacheSpec, PagePool
from quantkit.runtime.tables import BlockTable


class PageSet:
    """Room for the pages of `tokens`.

    spec      what the numbers mean
    tokens    of the request, whose numbers the pages hold
    tensors   by layer and part, [pages, page_size, ...]
    complete  whether all pages were filled and the set was sealed
    digests   of each page, where its pool knows what it ought to hold: what is compared when the set is used
    """

    def __init__(self, spec: CacheSpec, tokens: Sequence[int]) -> None:
        self.spec, self.tokens = spec, tuple(tokens)
        self.complete = False
        self.digests: tuple[int, ...] | None = None
        self._count = spec.pages_for(len(self.tokens))
        self._filled: set[int] = set()
        self.tensors = {
            (part.layer, part.name): torch.empty((self._count, spec.page_size, *part.row), dtype=spec.dtype)
            for part in spec.parts
        }

    def fill(self, number: int, pool: PagePool, page: int) -> None:
        """Copy a pool's page as the set's page `number`. Raises CacheError if the pool is of another spec."""
        self._check(pool)
        for place, tensor in pool.tensors.items():
            self.tensors[place][number].view(torch.uint8).copy_(tensor[page].view(torch.uint8))
        self._filled.add(number)

    def seal(self) -> None:
        """Call the set complete. Raises CacheError if a page is missing."""
        if missing := sorted(set(range(self._count)) - self._filled):
            raise CacheError(f"page {missing[0]} of {self._count} was not filled: the pages are not complete")
        self.complete = True

    def open(self, pool: PagePool) -> BlockTable | None:
        """The pages in `pool`; None if it has too few left.

        Raises CacheError for a set that is not complete, or a pool of another spec, with both sides' values.
        """
        self._check(pool)
        if not self.complete:
            raise CacheError(f"the pages are not complete: {len(self._filled)} of {self._count} were filled")
        table = BlockTable(pool)
        if not table.prepare(0, len(self.tokens)):
            return None
        for number, page in enumerate(table.pages):
            for place, tensor in pool.tensors.items():
                tensor[page].view(torch.uint8).copy_(self.tensors[place][number].view(torch.uint8))
        return table

    def _check(self, pool: PagePool) -> None:
        for what, ours, theirs in _compared(self.spec, pool.spec):
            if ours != theirs:
                raise CacheError(f"the pages' {what} is {ours}, and the pool's {theirs}")


def export_pages(pool: PagePool, pages: Sequence[int], tokens: Sequence[int]) -> PageSet:
    """A complete set of the pages that hold `tokens`."""
    exported = PageSet(pool.spec, tokens)
    for number, page in enumerate(pages[: pool.spec.pages_for(len(tokens))]):
        exported.fill(number, pool, page)
    exported.seal()
    return exported


def _compared(ours: CacheSpec, theirs: CacheSpec) -> Iterator[tuple[str, object, object]]:
    yield "model", ours.model, theirs.model
    yield "dtype", ours.dtype, theirs.dtype
    yield "page size", ours.page_size, theirs.page_size
    yield "layout", layout_of(ours), layout_of(theirs)
    yield "digest of KV scales", ours.scales.digest, theirs.scales.digest


def layout_of(spec: CacheSpec) -> str:
    """What a page keeps of a token, layer by layer, in words."""
    rows = [f"{part.layer}.{part.name} {'x'.join(map(str, part.row))}" for part in spec.parts]
    return ", ".join(rows)

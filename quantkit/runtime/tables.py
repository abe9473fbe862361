"""A request's block table: which pages hold its tokens, in order."""

import hashlib
from collections.abc import Sequence

from quantkit.runtime.pages import PagePool


class BlockTable:
    """Pages of one request. Full pages may be shared; one that is appended to is its own, by a copy if need be.

    pages        what a pass reads and writes
    given        the pages as the pool gave them, and their
    generations  when it did; what `pages` is checked against, and what goes back to the pool
    version      changes with them
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []
        self.given: list[int] = []
        self.generations: list[int] = []
        self.version = 0

    def is_current(self, position: int) -> bool:
        """Whether the page at a logical position is the one that the pool gave, and still the request's."""
        if position >= min(len(self.pages), len(self.given)):
            return False
        page = self.given[position]
        return self.pages[position] == page and self.generations[position] == self._pool.allocator.generations[page]

    def adopt(self, pages: Sequence[int]) -> None:
        """Share `pages` as the next ones."""
        for page in pages:
            self._pool.allocator.share(page)
            self._add(page)

    def prepare(self, start: int, stop: int) -> bool:
        """Make room for writing the tokens `start` to `stop`, not included; False, and no change, if pages lack.

        A page that is not the request's any more is left to the check before the pass.
        """
        allocator, spec = self._pool.allocator, self._pool.spec
        missing = max(0, spec.pages_for(stop) - len(self.pages))
        half, filled = divmod(start, spec.page_size)
        copied = filled > 0 and self.is_current(half) and allocator.references[self.pages[half]] > 1
        if missing + copied > allocator.available:
            return False
        if copied:
            shared, own = self.pages[half], allocator.take()
            self._pool.copy(shared, own)
            allocator.release(shared)
            self.pages[half] = self.given[half] = own
            self.generations[half] = allocator.generations[own]
            self.version += 1
        for _ in range(missing):
            self._add(allocator.take())
        return True

    def first_stale(self, tokens: int) -> int | None:
        """Of the pages of the first `tokens`, the first position whose page is not the request's any more."""
        positions = range(self._pool.spec.pages_for(tokens))
        return next((position for position in positions if not self.is_current(position)), None)

    def fork(self, tokens: int) -> "BlockTable":
        """Another table that shares the pages of the first `tokens`, none of which is stale."""
        other = BlockTable(self._pool)
        other.adopt(self.pages[: self._pool.spec.pages_for(tokens)])
        return other

    def release(self) -> None:
        """Give all pages back that are still the request's; safe to repeat."""
        while self.given:
            page, generation = self.given.pop(), self.generations.pop()
            if self._pool.allocator.generations[page] == generation:
                self._pool.allocator.release(page)
        self.pages.clear()
        self.version += 1

    def _add(self, page: int) -> None:
        self.pages.append(page)
        self.given.append(page)
        self.generations.append(self._pool.allocator.generations[page])
        self.version += 1


def prefix_hashes(root: bytes, tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """A hash for each full page of `tokens`, of all tokens up to its end and of `root`."""
    hashes = []
    for begin in range(0, len(tokens) - page_size + 1, page_size):
        root = next_hash(root, tokens[begin : begin + page_size])
        hashes.append(root)
    return tuple(hashes)


def next_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of `tokens` of a page, and of all before it, whose hash is `before`."""
    return hashlib.sha256(before + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()

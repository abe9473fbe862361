"""A request's block table: which pages hold its tokens, in order."""

import hashlib
from collections.abc import Sequence

from quantkit.runtime.pages import PagePool


class BlockTable:
    """Pages of one request. Full pages may be shared; one that is appended to is its own, by a copy if need be."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []

    def adopt(self, pages: Sequence[int]) -> None:
        """Share `pages` as the next ones."""
        for page in pages:
            self._pool.allocator.share(page)
        self.pages += pages

    def prepare(self, start: int, stop: int) -> bool:
        """Make room for writing the tokens `start` to `stop`, not included; False, and no change, if pages lack."""
        allocator, spec = self._pool.allocator, self._pool.spec
        missing = max(0, spec.pages_for(stop) - len(self.pages))
        half, filled = divmod(start, spec.page_size)
        copied = filled > 0 and allocator.references[self.pages[half]] > 1
        if missing + copied > allocator.available:
            return False
        if copied:
            shared, self.pages[half] = self.pages[half], allocator.take()
            self._pool.copy(shared, self.pages[half])
            allocator.release(shared)
        self.pages += [allocator.take() for _ in range(missing)]
        return True

    def fork(self, tokens: int) -> "BlockTable":
        """Another table that shares the pages of the first `tokens`."""
        other = BlockTable(self._pool)
        other.adopt(self.pages[: self._pool.spec.pages_for(tokens)])
        return other

    def release(self) -> None:
        """Give all pages back; safe to repeat."""
        while self.pages:
            self._pool.allocator.release(self.pages.pop())


def prefix_hashes(root: bytes, tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """A hash for each full page of `tokens`, of all tokens up to its end and of `root`."""
    hashes = []
    for begin in range(0, len(tokens) - page_size + 1, page_size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + page_size])
        root = hashlib.sha256(root + page).digest()
        hashes.append(root)
    return tuple(hashes)

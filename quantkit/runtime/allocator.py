"""Which pages of a pool are free, in use or kept: numbers only, no bytes.

    free    nobody's, and nothing in it can be found again
    used    in the block tables of one or more requests, whose number is its count of references
    cached  nobody's, but full of a known prefix: found again by its hash, or taken when no free page is left, oldest
            first

Free, used and cached pages are all pages, always. A page gets a new generation whenever it comes into use and whenever
its last user leaves. Generations come from one counter of the pool, so no two are ever the same.
"""

from collections import deque
from collections.abc import Sequence

from quantkit.errors import UsageError


class Allocator:
    """The bookkeeping of `num_pages` pages."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise UsageError(f"a pool of {num_pages} pages holds nothing", hint="Give it more memory.")
        self.references = [0] * num_pages
        self.generations = list(range(num_pages))
        self._next_generation = num_pages
        self._free = deque(range(num_pages))
        self._cached: dict[int, None] = {}  # oldest first
        self._hashes: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def num_pages(self) -> int:
        """All pages."""
        return len(self.references)

    @property
    def available(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody uses and that can be found by their hash."""
        return len(self._cached)

    def take(self) -> int:
        """A page for one user; IndexError where none is available."""
        if not self._free:
            oldest = next(iter(self._cached), None)
            if oldest is None:
                raise IndexError("no page is available")
            del self._cached[oldest]
            self._forget(oldest)
            self._free.append(oldest)
        page = self._free.popleft()
        self._use(page)
        return page

    def share(self, page: int) -> None:
        """One more user for a page that is in use or cached."""
        if self.references[page]:
            self.references[page] += 1
        else:
            del self._cached[page]
            self._use(page)

    def release(self, page: int) -> None:
        """One user less; after the last the page is cached if it has a hash, else free."""
        assert self.references[page] > 0, f"page {page} is released twice"
        self.references[page] -= 1
        if not self.references[page]:
            self._renew(page)
            if page in self._hashes:
                self._cached[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, prefix: bytes) -> None:
        """Let a page in use be found by the hash of its prefix, unless another one is."""
        assert self.references[page] > 0, f"page {page} is nobody's"
        if page not in self._hashes and prefix not in self._pages:
            self._hashes[page], self._pages[prefix] = prefix, page

    def match(self, prefixes: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of `prefixes` from the first on that are known; nobody's use changes."""
        pages: list[int] = []
        for prefix in prefixes:
            if prefix not in self._pages:
                break
            pages.append(self._pages[prefix])
        return pages

    def clear_cache(self) -> None:
        """Forget every prefix: nothing that was computed so far will be found again."""
        for page in list(self._hashes):
            self._forget(page)
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert that free, used and cached pages are all pages, each once."""
        used = [page for page, count in enumerate(self.references) if count]
        assert sorted([*self._free, *self._cached, *used]) == list(range(self.num_pages))
        assert {prefix: page for page, prefix in self._hashes.items()} == self._pages
        assert all(page in self._hashes for page in self._cached)
        assert not any(page in self._hashes for page in self._free)

    def _use(self, page: int) -> None:
        self.references[page] = 1
        self._renew(page)

    def _renew(self, page: int) -> None:
        self.generations[page] = self._next_generation
        self._next_generation += 1

    def _forget(self, page: int) -> None:
        del self._pages[self._hashes.pop(page)]

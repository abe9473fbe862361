"""Which pages of a pool are free, in use or kept: numbers only, no bytes.

    free    nobody's, and nothing in it can be found again
    used    in the block tables of one or more requests, whose number is its count of references
    cached  nobody's, but full of a known prefix: found again by its hash, or taken when no free page is left, oldest
            first
    held    given back while a step runs, which may still read or write it: free or cached once the step has retired

Free, used, cached and held pages are all pages, always. A page gets a new generation whenever it comes into use and
whenever its last user leaves. Generations come from one counter of the pool, so no two are ever the same.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quantkit.errors import UsageError

NOTHING = -1  # no page's generation
Carried = Callable[[int, int, int], None]  # page, its generation so far, its new one


class Generations:
    """A number for each page that changes when the page does, and that no page ever had before.

    numbers  what the bookkeeping goes by
    tags     the same once more, in memory that a check reads, int64; in the end NOTHING, the tag of no page
    """

    def __init__(self, num_pages: int) -> None:
        self.numbers = list(range(num_pages))
        self.tags = array("q", [*self.numbers, NOTHING])
        self.newest = num_pages - 1

    def renew(self, page: int) -> int:
        """A new generation for `page`."""
        self.newest += 1
        self.numbers[page] = self.tags[page] = self.newest
        return self.newest


class Allocator:
    """The bookkeeping of `num_pages` pages.

    carried  is told when a page that is full of a known prefix gets another generation
    doubled  pages that were taken while in use: what nothing but a fault of the bookkeeping does
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise UsageError(f"a pool of {num_pages} pages holds nothing", hint="Give it more memory.")
        self.references = [0] * num_pages
        self.ledger = Generations(num_pages)
        self.generations = self.ledger.numbers
        self.carried: Carried = lambda page, old, new: None
        self.doubled: set[int] = set()
        self.steps_retired = 0
        self._step_runs = False
        self._free = deque(range(num_pages))
        self._cached: dict[int, None] = {}  # oldest first
        self._held: dict[int, None] = {}
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

    @contextmanager
    def step(self) -> Iterator[int]:
        """A step, whose number this gives: no page that is given back within it comes into use before its end."""
        self._step_runs = True
        try:
            yield self.steps_retired
        finally:
            self._step_runs = False
            self.steps_retired += 1
            for page in self._held:
                self._put_back(page)
            self._held.clear()

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
        if self.references[page]:
            self.doubled.add(page)
        self._forget(page)
        self._use(page)
        return page

    def share(self, page: int) -> None:
        """One more user for a page that is in use or can be found."""
        if self.references[page]:
            self.references[page] += 1
        else:
            del (self._held if page in self._held else self._cached)[page]
            old = self.generations[page]
            self._use(page)
            self.carried(page, old, self.generations[page])

    def release(self, page: int) -> None:
        """One user less; after the last the page is cached if it has a hash, else free, at the end of the step."""
        assert self.references[page] > 0, f"page {page} is released twice"
        self.references[page] -= 1
        if not self.references[page]:
            old = self.generations[page]
            new = self.ledger.renew(page)
            self.doubled.discard(page)
            if page in self._hashes:
                self.carried(page, old, new)
            if self._step_runs:
                self._held[page] = None
            else:
                self._put_back(page)

    def publish(self, page: int, prefix: bytes) -> None:
        """Let a page in use be found by the hash of its prefix, unless another one is."""
        assert self.references[page] > 0, f"page {page} is nobody's"
        if page not in self._hashes and prefix not in self._pages:
            self._hashes[page], self._pages[prefix] = prefix, page

    def match(self, prefixes: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of `prefixes` from the first on that are known; nobody's use changes."""
        pages: list[int] = []
        for prefix in prefixes:
            page = self._pages.get(prefix)
            if page is None or self._hashes.get(page) != prefix:
                break
            pages.append(page)
        return pages

    def distrust(self, page: int) -> None:
        """Let a page not be found any more."""
        self._forget(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def clear_cache(self) -> None:
        """Forget every prefix: nothing that was computed so far will be found again."""
        for page in list(self._hashes):
            self._forget(page)
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert that free, used, cached and held pages are all pages, each once."""
        used = [page for page, count in enumerate(self.references) if count]
        assert sorted([*self._free, *self._cached, *self._held, *used]) == list(range(self.num_pages))
        assert {prefix: page for page, prefix in self._hashes.items()} == self._pages
        assert all(page in self._hashes for page in self._cached)
        assert not any(page in self._hashes for page in self._free)
        assert list(self.ledger.tags) == [*self.generations, NOTHING]
        assert not self._held or self._step_runs

    def _use(self, page: int) -> None:
        self.references[page] = 1
        self.ledger.renew(page)

    def _put_back(self, page: int) -> None:
        if page in self._hashes:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _forget(self, page: int) -> None:
        if page in self._hashes:
            del self._pages[self._hashes.pop(page)]

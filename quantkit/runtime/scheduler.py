"""Who computes what in the next step: continuous batching over one pool.

    waiting --admit--> running --finish--> gone
        ^                 |
        +---- preempt ----+

Both are kept in order of arrival. The oldest waiting request is admitted once its tokens fit beside a spare page for
each running one, so nobody is overtaken. In a step the oldest request with an unfinished prompt computes one chunk, and
every other running one its next token. Where pages lack, the youngest running request gives all its pages back and
waits; its tokens are kept, and computed again later. The oldest one is never preempted for another, so it always
finishes, and all do.

In exact mode each row of a request goes through the model in the same company, always: chunks begin at multiples of the
chunk size, pages are shared only if they were computed in full chunks, and a request that was preempted computes its
generated tokens one by one again.
"""

import math
from bisect import insort
from dataclasses import dataclass

from quantkit.runtime.paged_cache import Segment
from quantkit.runtime.pages import PagePool
from quantkit.runtime.requests import Counters, Request
from quantkit.runtime.tables import prefix_hashes


@dataclass(frozen=True)
class SchedulerOptions:
    """How requests are cut and shared.

    chunk_size      tokens of a prompt in one pass
    exact           rows of a request depend on nothing but itself, bit for bit
    share_prefixes  whether requests with equal beginnings share pages
    """

    chunk_size: int
    exact: bool
    share_prefixes: bool


@dataclass(frozen=True)
class Pass:
    """Tokens `start` to `stop`, not included, of a request that are computed next."""

    request: Request
    start: int
    stop: int

    @property
    def is_decode(self) -> bool:
        """Whether it is one generated token."""
        return self.start >= len(self.request.prompt) and self.stop == self.start + 1

    @property
    def segment(self) -> Segment:
        """Its rows and pages."""
        return Segment(tuple(self.request.table.pages), self.start, self.stop)


class Scheduler:
    """The requests over `pool`; `counters` get what it does."""

    def __init__(self, pool: PagePool, options: SchedulerOptions, counters: Counters) -> None:
        self._pool, self._options, self._counters = pool, options, counters
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that are not finished."""
        return (*self._running, *self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have pages."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Let a request wait for pages, or run at once if it has some."""
        if self._options.share_prefixes:
            size = self._pool.spec.page_size
            unit = self._options.chunk_size if self._options.exact else size
            whole = request.prompt[: len(request.prompt) // unit * unit]
            request.prefixes = prefix_hashes(self._pool.spec.digest, whole, size)
        insort(self._running if request.table.pages else self._waiting, request, key=_number)

    def remove(self, request: Request) -> None:
        """Take a request out and its pages back."""
        (self._running if request in self._running else self._waiting).remove(request)
        request.table.release()

    def restart(self, request: Request) -> None:
        """Take a running request's pages back, and let it wait: all its tokens are computed again."""
        self._running.remove(request)
        request.table.release()
        request.computed = 0
        insort(self._waiting, request, key=_number)

    def plan(self) -> list[Pass]:
        """What to compute in this step, with room for it; empty only if there is no request."""
        self._admit()
        passes = []
        prefilling = False
        for request in tuple(self._running):
            if request not in self._running:
                break  # preempted, as are all younger ones
            planned = self._next_pass(request)
            if not planned.is_decode and prefilling:
                continue
            if self._make_room(planned):
                passes.append(planned)
                prefilling |= not planned.is_decode
        return passes

    def advance(self, done: Pass) -> None:
        """Note that a pass was computed, and let its full pages be found."""
        request, size, rows = done.request, self._pool.spec.page_size, done.stop - done.start
        if done.is_decode:
            self._counters.decode_tokens += rows
        else:
            self._counters.prefill_tokens += rows
        self._counters.repeated_tokens += max(0, min(done.stop, request.reached) - done.start)
        request.computed = done.stop
        request.reached = max(request.reached, done.stop)
        last = min(done.stop // size, len(request.prefixes))
        for page in range(done.start // size, last):
            if request.table.is_current(page):
                self._pool.allocator.publish(request.table.pages[page], request.prefixes[page])

    def _admit(self) -> None:
        allocator, spec = self._pool.allocator, self._pool.spec
        while self._waiting:
            request = self._waiting[0]
            shared = self._shareable(request)
            unused = sum(not allocator.references[page] for page in shared)
            needed = spec.pages_for(len(request.tokens)) - len(shared) + unused
            if needed + len(self._running) > allocator.available:
                return
            request.table.adopt(shared)
            request.computed = len(shared) * spec.page_size
            self._counters.shared_tokens += request.computed
            insort(self._running, self._waiting.pop(0), key=_number)

    def _shareable(self, request: Request) -> list[int]:
        """Known pages of the request's prompt, up to a border of its chunks and before its last token."""
        size = self._pool.spec.page_size
        unit = math.lcm(size, self._options.chunk_size) if self._options.exact else size
        found = self._pool.allocator.match(request.prefixes)
        tokens = min(len(found) * size, len(request.prompt) - 1)
        return found[: tokens // unit * unit // size]

    def _next_pass(self, request: Request) -> Pass:
        chunked = len(request.prompt) if self._options.exact else len(request.tokens)
        left = max(1, chunked - request.computed)
        return Pass(request, request.computed, request.computed + min(left, self._options.chunk_size))

    def _make_room(self, planned: Pass) -> bool:
        """Preempt the youngest until the pass has its pages; False if that was the request itself."""
        request = planned.request
        while not request.table.prepare(planned.start, planned.stop):
            victim = self._running[-1]
            self.restart(victim)
            self._counters.preempted += 1
            if victim is request:
                return False
        return True


def _number(request: Request) -> int:
    return request.number

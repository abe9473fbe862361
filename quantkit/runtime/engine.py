"""The engine: requests in, tokens out, over a model and a pool of pages.

    engine = Engine(decoder, pool)
    number = engine.submit(prompt, max_new_tokens=100)
    while engine.busy:
        for event in engine.step(): ...

Where pages are checked, a step's verdict is read with its logits: nothing that a request computed from pages that are
not sound is used. It is computed again as far as the budget of retries goes, else it ends with an IntegrityError; the
others go on.

In reference mode (`batched=False`) each pass has the rows of one request, so its output does not depend on what else is
there, bit for bit: neither on other requests, nor on sharing, nor on preemption. In batched mode all requests that
generate go through the model together, which is faster and changes last bits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import IntegrityError, QuantkitError, RequestError, UsageError
from quantkit.runtime.computing import Computed, Computer
from quantkit.runtime.computing import Model as Model
from quantkit.runtime.integrity.steps import StepTracker
from quantkit.runtime.page_set import PageSet, export_pages
from quantkit.runtime.pages import PagePool
from quantkit.runtime.requests import Completion, Counters, Event, Finish, Request, check_request
from quantkit.runtime.sampling import GREEDY, Sampling, choose
from quantkit.runtime.scheduler import Scheduler, SchedulerOptions
from quantkit.runtime.tables import BlockTable


@dataclass(frozen=True)
class EngineOptions:
    """How an engine works.

    chunk_size      tokens of a prompt in one pass
    batched         requests that generate share a pass; else no request's output depends on another
    share_prefixes  whether prompts with equal beginnings share pages
    integrity       what is checked before a step reads pages
    fp8_query       whether attention's queries are rounded to E4M3, as `PagedCache` says
    """

    chunk_size: int = 256
    batched: bool = False
    share_prefixes: bool = True
    integrity: IntegrityLevel = IntegrityLevel.TAGS
    fp8_query: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise UsageError(f"chunks of {self.chunk_size} tokens get nowhere")


class Engine:
    """Serves requests; `counters` and `pool.counts` say what it did, `tracker.counters` what was checked.

    tracker  None where nothing is checked. One of tags may be taken out between two steps and put back between others.
    """

    def __init__(
        self, model: Model, pool: PagePool, options: EngineOptions | None = None, tracker: StepTracker | None = None
    ) -> None:
        options = options or EngineOptions()
        checked = options.integrity is not IntegrityLevel.OFF
        self.tracker = tracker or (StepTracker(pool, options.integrity) if checked else None)
        self.pool = pool
        self.counters = Counters()
        self._config = model.config
        self._computer = Computer(model, pool, options.batched, options.fp8_query)
        exact = SchedulerOptions(options.chunk_size, not options.batched, options.share_prefixes)
        self._scheduler = Scheduler(pool, exact, self.counters)
        self._requests: dict[int, Request] = {}
        self._ended: list[Event] = []
        self._next = 0

    @property
    def busy(self) -> bool:
        """Whether there is something to compute, or an event to tell."""
        return bool(self._scheduler.requests or self._ended)

    @property
    def num_running(self) -> int:
        """Requests that have pages."""
        return self._scheduler.num_running

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: Iterable[int] = (),
        pages: PageSet | None = None,
    ) -> int:
        """Add a request that ends after `max_new_tokens` tokens or after one of `stop`; its number.

        `pages` hold the first tokens of the prompt, or all; they are used if the pool has room for them now. Raises
        RequestError for a request that could never be served: an empty prompt, a token that the model does not have,
        more tokens than the model or the pool hold; CacheError for pages that are not the pool's kind, IntegrityError
        for pages that do not hold what was put into them.
        """
        table = BlockTable(self.pool)
        request = Request(self._next, tuple(prompt), max_new_tokens, sampling, frozenset(stop), table)
        try:
            check_request(prompt, max_new_tokens, self._config, self.pool.spec, self.pool.num_pages)
        except RequestError:
            self.counters.refused += 1
            raise
        if pages is not None:
            self._open(pages, request)
        self._accept(request)
        return request.number

    def export(self, number: int) -> PageSet:
        """Copies of the pages of a request that is not finished, with what is computed so far.

        Raises IntegrityError for a page that is not the request's any more.
        """
        request = self._find_live(number)
        if self.tracker:
            self.tracker.require_own(request)
        pages = export_pages(self.pool, request.table.pages, request.tokens[: request.computed])
        pages.digests = self.tracker.digests(request) if self.tracker else None
        return pages

    def fork(self, number: int, sampling: Sampling) -> int:
        """Go on from a request that is not finished in another way too; the other's number. Pages are shared."""
        origin = self._find_live(number)
        if self.tracker:
            self.tracker.require_own(origin)
        table = origin.table.fork(origin.computed)
        request = replace(origin, number=self._next, sampling=sampling, table=table, tokens=[*origin.tokens])
        self._accept(request)
        return request.number

    def abort(self, number: int) -> None:
        """End a request now; its pages are free. One that is finished stays so."""
        request = self._find(number)
        if not request.finish:
            self._ended.append(self._end(request, Finish.ABORTED))

    def step(self) -> tuple[Event, ...]:
        """Compute one pass of each request that has room, and tell what came of it."""
        events, self._ended = self._ended, []
        passes = self._scheduler.plan()
        if not passes and self._scheduler.requests:
            raise RequestError("no request fits: all pages are held by others than the engine's requests")
        self.counters.steps += bool(passes)
        if passes:
            with self.pool.allocator.step() as number:
                for computed in self._computer.compute(passes, self.tracker, number):
                    events += self._conclude(computed)
        return tuple(events)

    def take(self, number: int) -> Completion:
        """What came of a finished request, which is forgotten."""
        request = self._find(number)
        if not request.finish:
            raise RequestError(f"request {number} is not finished")
        del self._requests[number]
        return Completion(request.generated, request.finish, request.error)

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        """Step until all requests are finished; `on_event` is told each token when it comes."""
        while self.busy:
            for event in self.step():
                on_event(event)

    def _open(self, pages: PageSet, request: Request) -> None:
        if pages.tokens != request.prompt[: len(pages.tokens)]:
            raise RequestError("the pages hold other tokens than those that the prompt begins with")
        if table := pages.open(self.pool):
            request.table = table
            request.computed = min(len(pages.tokens), len(request.prompt) - 1)  # the last one gives the logits
            self._check_given(request, pages)

    def _check_given(self, request: Request, pages: PageSet) -> None:
        try:
            if self.tracker:
                self.tracker.note_given(request, pages)
        except IntegrityError:
            request.table.release()
            self.counters.refused += 1
            raise

    def _accept(self, request: Request) -> None:
        self._requests[request.number] = request
        self._next += 1
        self.counters.submitted += 1
        self._scheduler.add(request)

    def _find(self, number: int) -> Request:
        if number not in self._requests:
            raise RequestError(f"there is no request {number}")
        return self._requests[number]

    def _find_live(self, number: int) -> Request:
        request = self._find(number)
        if request.finish:
            raise RequestError(f"request {number} is finished and has no pages")
        return request

    def _conclude(self, computed: Computed) -> list[Event]:
        """What comes of a pass: its pages can be found and its request has a token, unless it was hit."""
        request, tracker, hit = computed.done.request, self.tracker, computed.hit
        if request.finish:  # while it was computed
            return []
        if tracker and hit:
            if tracker.allows_retry(request, hit, self.counters.steps):
                request.retried += 1
                self._scheduler.restart(request)
                return []
            return [self._end(request, Finish.FAILED, tracker.error(request, hit))]
        if tracker:
            tracker.note_computed(computed.done)
        self._scheduler.advance(computed.done)
        return [] if computed.logits is None else [self._extend(request, computed.logits)]

    def _extend(self, request: Request, logits: torch.Tensor) -> Event:
        """Give a request its next token."""
        if logits.isnan().any():
            where = f"request {request.number}: the logits after token {len(request.tokens) - 1} are not numbers"
            return self._end(request, Finish.FAILED, RequestError(where, hint="Weights or KV scales are unsound."))
        token = choose(logits, request.sampling, len(request.generated))
        request.tokens.append(token)
        if token in request.stop:
            return replace(self._end(request, Finish.STOP), token=token)
        if len(request.generated) == request.max_new_tokens:
            return replace(self._end(request, Finish.LENGTH), token=token)
        return Event(request.number, token)

    def _end(self, request: Request, finish: Finish, error: QuantkitError | None = None) -> Event:
        """The one way in which a request ends and its pages come back."""
        request.finish, request.error = finish, error
        self._scheduler.remove(request)
        if self.tracker:
            self.tracker.forget(request.number)
        self.counters.aborted += finish is Finish.ABORTED
        self.counters.failed += finish is Finish.FAILED
        self.counters.finished += finish in (Finish.STOP, Finish.LENGTH)
        return Event(request.number, finish=finish, error=error)

"""The engine: requests in, tokens out, over a model and a pool of pages.

    engine = Engine(decoder, pool)
    number = engine.submit(prompt, max_new_tokens=100)
    while engine.busy:
        for event in engine.step(): ...

In reference mode (`batched=False`) each pass has the rows of one request, so its output does not depend on what else is
there, bit for bit: neither on other requests, nor on sharing, nor on preemption. In batched mode all requests that
generate go through the model together, which is faster and changes last bits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from quantkit.errors import QuantkitError, RequestError, UsageError
from quantkit.models.cache import Cache
from quantkit.models.config import ModelConfig
from quantkit.runtime.page_set import PageSet, export_pages
from quantkit.runtime.paged_cache import PagedCache
from quantkit.runtime.pages import PagePool
from quantkit.runtime.requests import Completion, Counters, Event, Finish, Request
from quantkit.runtime.sampling import GREEDY, Sampling, choose
from quantkit.runtime.scheduler import Pass, Scheduler, SchedulerOptions
from quantkit.runtime.tables import BlockTable


class Model(Protocol):
    """What the engine runs; `quantkit.models.Decoder` is one."""

    @property
    def config(self) -> ModelConfig:
        """Its numbers."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Hidden states [T, hidden] of `tokens` at `positions`, int64 [T] each."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] for the next token."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine works.

    chunk_size      tokens of a prompt in one pass
    batched         requests that generate share a pass; else no request's output depends on another
    share_prefixes  whether prompts with equal beginnings share pages
    """

    chunk_size: int = 256
    batched: bool = False
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise UsageError(f"chunks of {self.chunk_size} tokens get nowhere")


class Engine:
    """Serves requests; `counters` and `pool.counts` say what it did."""

    def __init__(self, model: Model, pool: PagePool, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        self.pool = pool
        self.counters = Counters()
        self._model, self._batched = model, options.batched
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
        more tokens than the model or the pool hold; CacheError for pages that are not the pool's kind.
        """
        table = BlockTable(self.pool)
        request = Request(self._next, tuple(prompt), max_new_tokens, sampling, frozenset(stop), table)
        try:
            self._check(request)
        except RequestError:
            self.counters.refused += 1
            raise
        if pages is not None:
            self._open(pages, request)
        self._accept(request)
        return request.number

    def export(self, number: int) -> PageSet:
        """Copies of the pages of a request that is not finished, with what is computed so far."""
        request = self._find(number)
        return export_pages(self.pool, request.table.pages, request.tokens[: request.computed])

    def fork(self, number: int, sampling: Sampling) -> int:
        """Go on from a request that is not finished in another way too; the other's number. Pages are shared."""
        origin = self._find(number)
        if origin.finish:
            raise RequestError(f"request {number} is finished and cannot be forked")
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
        for group in self._grouped(passes):
            events += self._compute(group)
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

    def _check(self, request: Request) -> None:
        if not request.prompt or request.max_new_tokens < 1:
            raise RequestError("a request needs a prompt of one token or more, and one new token or more")
        config, size = self._model.config, self.pool.spec.page_size
        if bad := [token for token in request.prompt if not 0 <= token < config.vocab]:
            raise RequestError(f"token {bad[0]} is not one of the model's {config.vocab:,}")
        sizes = f"{len(request.prompt):,} tokens of prompt and {request.max_new_tokens:,} new ones"
        if config.max_length is not None and request.most_tokens + 1 > config.max_length:
            raise RequestError(f"{sizes} are more than the model's {config.max_length:,}", hint="Ask for fewer tokens.")
        needed = self.pool.spec.pages_for(request.most_tokens)
        if needed > self.pool.num_pages:
            raise RequestError(
                f"{sizes} need {needed:,} pages of {size} tokens, and the pool has {self.pool.num_pages:,}",
                hint="Ask for fewer tokens, or give the pool more memory.",
            )

    def _open(self, pages: PageSet, request: Request) -> None:
        if pages.tokens != request.prompt[: len(pages.tokens)]:
            raise RequestError("the pages hold other tokens than those that the prompt begins with")
        if table := pages.open(self.pool):
            request.table = table
            request.computed = min(len(pages.tokens), len(request.prompt) - 1)  # the last one gives the logits

    def _accept(self, request: Request) -> None:
        self._requests[request.number] = request
        self._next += 1
        self.counters.submitted += 1
        self._scheduler.add(request)

    def _find(self, number: int) -> Request:
        if number not in self._requests:
            raise RequestError(f"there is no request {number}")
        return self._requests[number]

    def _grouped(self, passes: Sequence[Pass]) -> list[list[Pass]]:
        """The passes that go through the model together."""
        if not self._batched:
            return [[planned] for planned in passes]
        decoding = [planned for planned in passes if planned.is_decode]
        return [[planned] for planned in passes if not planned.is_decode] + ([decoding] if decoding else [])

    def _compute(self, group: Sequence[Pass]) -> list[Event]:
        device = self.pool.device
        tokens = [token for planned in group for token in planned.request.tokens[planned.start : planned.stop]]
        positions = [position for planned in group for position in range(planned.start, planned.stop)]
        cache = PagedCache(self.pool, [planned.segment for planned in group])
        given = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        hidden = self._model.forward(*given, cache)
        last, row = [], -1
        for planned in group:
            self._scheduler.advance(planned)
            row += planned.stop - planned.start
            if planned.stop == len(planned.request.tokens):
                last.append((planned.request, row))
        if not last:
            return []
        logits = self._model.logits(hidden[[row for _, row in last]])
        return [self._extend(request, row) for (request, _), row in zip(last, logits, strict=True)]

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
        self.counters.aborted += finish is Finish.ABORTED
        self.counters.failed += finish is Finish.FAILED
        self.counters.finished += finish in (Finish.STOP, Finish.LENGTH)
        return Event(request.number, finish=finish, error=error)

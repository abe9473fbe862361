"""Any sequence of serving, handing over, late writing and faults: no wrong token, and no alarm without a fault."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantkit.choices import IntegrityLevel
from quantkit.errors import IntegrityError
from quantkit.runtime import Engine, Finish, Sampling
from quantkit.runtime.integrity import Cause, RetryBudget, StepTracker
from quantkit.runtime.page_set import PageSet
from quantkit.runtime.requests import Request
from support import integrity_faults as faults
from support.counting_model import CountingModel, expected, make_pool, options

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)  # two letters: many prefixes are equal
PLACES = st.integers(0, 99)
BOOKS = (faults.stale_table, faults.swapped_pages, faults.early_release, faults.reused_page, faults.flipped_tag)
BYTES = (faults.flipped_bit_of_last_row, faults.replayed_bytes, faults.flipped_digest, faults.flipped_sum)


class Guarded(RuleBasedStateMachine):
    """An engine whose pages are checked, larger than what can be explored to the end."""

    @initialize(
        page_size=st.integers(1, 4),
        tokens=st.integers(24, 80),
        batched=st.booleans(),
        level=st.sampled_from([IntegrityLevel.TAGS, IntegrityLevel.CONTENT]),
        retries=st.integers(0, 2),
    )
    def start(self, page_size: int, tokens: int, batched: bool, level: IntegrityLevel, retries: int) -> None:
        """An engine without requests."""
        pool = make_pool(-(-tokens // page_size), page_size)
        self.tracker = StepTracker(pool, level, RetryBudget(retries, burst=5, steps=20))
        self.engine = Engine(CountingModel(), pool, replace(options(4, batched), integrity=level), self.tracker)
        self.wanted: dict[int, tuple[int, ...]] = {}
        self.told: dict[int, list[int]] = {}
        self.sets: list[PageSet] = []
        self.writers: list[Any] = []
        self.spoiled = False

    @rule(prompt=PROMPTS, count=st.integers(1, 9))
    def submit(self, prompt: tuple[int, ...], count: int) -> None:
        """One more request, which fits."""
        self.wanted[self.engine.submit(prompt, count)] = expected(prompt, count)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        """Compute; pages that nobody has are poisoned first."""
        for _ in range(steps):
            for page in self.engine.pool.allocator._free:
                for tensor in self.engine.pool.tensors.values():
                    if not self.engine.pool.allocator.references[page]:
                        tensor[page] = torch.nan
            for event in self.engine.step():
                if event.token is not None:
                    self.told.setdefault(event.request, []).append(event.token)

    @precondition(lambda self: self.live)
    @rule(place=PLACES)
    def abort(self, place: int) -> None:
        """End a request."""
        self.engine.abort(self.live[place % len(self.live)].number)

    @precondition(lambda self: self.live)
    @rule(place=PLACES)
    def fork(self, place: int) -> None:
        """A second request goes on in another way, unless the first was spoiled."""
        request, sampling = self.live[place % len(self.live)], Sampling(1.0, seed=place)
        try:
            other = self.engine.fork(request.number, sampling)
        except IntegrityError:
            assert self.spoiled
            return
        self.wanted[other] = expected(request.prompt, request.max_new_tokens, sampling, request.generated)
        self.told[other] = list(request.generated)

    @precondition(lambda self: self.live)
    @rule(place=PLACES)
    def export(self, place: int) -> None:
        """Copy a request's pages, unless it was spoiled."""
        try:
            self.sets.append(self.engine.export(self.live[place % len(self.live)].number))
        except IntegrityError:
            assert self.spoiled

    @precondition(lambda self: self.sets)
    @rule(place=PLACES, count=st.integers(1, 4))
    def hand_over(self, place: int, count: int) -> None:
        """A request comes with copied pages and goes on from them."""
        pages = self.sets[place % len(self.sets)]
        prompt = pages.tokens or (1,)
        if self.engine.pool.spec.pages_for(len(prompt) + count) > self.engine.pool.num_pages:
            return
        try:
            self.wanted[self.engine.submit(prompt, count, pages=pages)] = expected(prompt, count)
        except IntegrityError:
            assert self.spoiled

    @precondition(lambda self: self.holders)
    @rule(place=PLACES)
    def fall_behind(self, place: int) -> None:
        """A pass that writes a request's last row once more, some time."""
        request = self.holders[place % len(self.holders)]
        position = request.computed - 1
        page, row = request.table.pages[position // self.size], position % self.size
        rows = [self.engine.pool.tensors[0, name][page, row : row + 1].clone() for name in ("key", "value")]
        if request.table.first_stale(request.computed) is None:
            self.writers.append((faults.late_pass(self.engine, request.number), position, rows))

    @precondition(lambda self: self.writers)
    @rule(place=PLACES)
    def write_late(self, place: int) -> None:
        """The pass writes now, whoever has the page."""
        cache, position, rows = self.writers.pop(place % len(self.writers))
        cache.append_heads(0, torch.tensor([position]), *rows)

    @precondition(lambda self: self.holders)
    @rule(place=PLACES, kind=PLACES)
    def spoil(self, place: int, kind: int) -> None:
        """A fault of the bookkeeping, or, where bytes are checked, of bytes."""
        known = BOOKS + BYTES * (self.tracker.contents is not None)
        references = self.engine.pool.allocator.references
        victims = [one for one in self.holders if len(one.table.pages) > 1 and references[one.table.pages[1]] == 1]
        victims = [one for one in victims if one.table.first_stale(len(one.table.pages) * self.size) is None]
        if victims:
            victim = victims[place % len(victims)]
            others = [one for one in self.holders if one is not victim] or [victim]
            known[kind % len(known)](_Scene(self.engine, (others[0].number, victim.number)))
            self.spoiled = True
            self.reclaim()

    def reclaim(self) -> None:
        """Pages that a fault gave to nobody come back to the pool."""
        allocator = self.engine.pool.allocator
        owned = {pair for one in self.live for pair in zip(one.table.given, one.table.generations, strict=True)}
        for page, count in enumerate(allocator.references):
            if count and (page, allocator.generations[page]) not in owned:
                allocator.release(page)

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return self.engine.pool.spec.page_size

    @property
    def live(self) -> list[Request]:
        """Requests that are not finished."""
        return list(self.engine._scheduler.requests)

    @property
    def holders(self) -> list[Request]:
        """Those with computed tokens."""
        return [request for request in self.live if request.computed]

    @invariant()
    def sound(self) -> None:
        """Every page is in one place."""
        allocator = self.engine.pool.allocator
        allocator.check() if not self.spoiled else None

    def teardown(self) -> None:
        """Each request has its text, or ended with a typed error after a fault; without one nothing was counted."""
        while self.engine.busy:
            self.step(1)
        counted = {cause for cause, count in self.tracker.counters.faults.items() if count}
        assert self.spoiled or counted <= {Cause.LATE_WRITE}
        for number, wanted in self.wanted.items():
            completion = self.engine.take(number)
            assert completion.tokens == tuple(self.told.get(number, ())) == wanted[: len(completion.tokens)]
            if completion.finish is Finish.FAILED:
                assert self.spoiled
                assert isinstance(completion.error, IntegrityError)
            else:
                assert completion.finish is Finish.ABORTED or completion.tokens == wanted


class _Scene(faults.Scene):
    """Two requests, the second of which is the victim."""


Guarded.TestCase.settings = settings(suppress_health_check=list(HealthCheck))
TestGuarded = Guarded.TestCase

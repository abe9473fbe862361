"""Scheduling, sharing and preemption, on a model whose text is known: no request is lost or mixed up."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantkit.runtime import Engine, Event, Finish, Sampling
from quantkit.runtime.tables import prefix_hashes
from support.counting_model import CountingModel, expected, make_pool, make_prompts, options, serve

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)  # two letters: many prefixes are equal


class Serving(RuleBasedStateMachine):
    """Any sequence of submitting, stepping, aborting and forking, over pools of any shape."""

    @initialize(
        page_size=st.integers(1, 4),
        tokens=st.integers(22, 80),
        chunk_size=st.integers(1, 6),
        batched=st.booleans(),
        share=st.booleans(),
    )
    def start(self, page_size: int, tokens: int, chunk_size: int, batched: bool, share: bool) -> None:
        """An engine without requests."""
        self.pool = make_pool(-(-tokens // page_size), page_size)
        self.engine = Engine(CountingModel(), self.pool, options(chunk_size, batched, share))
        self.wanted: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()
        self.told: dict[int, list[int]] = {}

    @rule(prompt=PROMPTS, count=st.integers(1, 9), temperature=st.integers(0, 1))
    def submit(self, prompt: tuple[int, ...], count: int, temperature: float) -> None:
        """One more request, which fits."""
        sampling = Sampling(temperature)
        number = self.engine.submit(prompt, count, sampling)
        self.wanted[number] = expected(prompt, count, sampling)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        """Compute; pages that nobody has are poisoned first."""
        for _ in range(steps):
            for page in self.pool.allocator._free:
                for tensor in self.pool.tensors.values():
                    tensor[page] = torch.nan
            for event in self.engine.step():
                self.note(event)

    @precondition(lambda self: self.wanted)
    @rule(place=st.integers(0, 99))
    def abort(self, place: int) -> None:
        """End a request that runs, waits or is finished."""
        number = place % len(self.wanted)
        if self.engine._requests[number].finish is None:
            self.aborted.add(number)
        self.engine.abort(number)

    @precondition(lambda self: self.engine.busy)
    @rule(place=st.integers(0, 99))
    def fork(self, place: int) -> None:
        """A second request that goes on from where one is, to another text."""
        live = [request for request in self.engine._requests.values() if request.finish is None]
        if live:
            request = live[place % len(live)]
            sampling = Sampling(1.0, seed=place)
            other = self.engine.fork(request.number, sampling)
            self.wanted[other] = expected(request.prompt, request.max_new_tokens, sampling, request.generated)
            self.told[other] = list(request.generated)

    @invariant()
    def sound(self) -> None:
        """After each rule."""
        self.check()

    def check(self) -> None:
        """Free, cached and used pages are all; a page has as many references as tables that list it."""
        self.pool.allocator.check()
        listed = Counter(page for request in self.engine._requests.values() for page in request.table.pages)
        assert [listed[page] for page in range(self.pool.num_pages)] == self.pool.allocator.references
        for request in self.engine._requests.values():
            held = 0 if request.finish else request.computed
            assert held <= len(request.table.pages) * self.pool.spec.page_size

    def note(self, event: Event) -> None:
        """Keep what a step told."""
        if event.token is not None:
            self.told.setdefault(event.request, []).append(event.token)

    def teardown(self) -> None:
        """In the end each request has its text, or was aborted, and no page is used."""
        while self.engine.busy:
            self.step(1)
            self.check()
        for number, wanted in self.wanted.items():
            completion = self.engine.take(number)
            assert completion.tokens == tuple(self.told.get(number, ()))
            if number in self.aborted:
                assert completion.finish is Finish.ABORTED
                assert wanted[: len(completion.tokens)] == completion.tokens
            else:
                assert (completion.finish, completion.tokens) == (Finish.LENGTH, wanted)
        assert not any(self.pool.allocator.references)
        self.pool.allocator.clear_cache()
        assert self.pool.allocator.available == self.pool.num_pages
        assert self.pool.allocator.cached == 0
        self.pool.allocator.check()


Serving.TestCase.settings = settings(suppress_health_check=[HealthCheck.too_slow])
TestServing = Serving.TestCase


@pytest.mark.parametrize("batched", [False, True], ids=["reference", "batched"])
@pytest.mark.parametrize(("num_pages", "chunk_size"), [(12, 4), (16, 4), (12, 1)])
def test_exhausted_pool_loses_no_request(num_pages: int, chunk_size: int, batched: bool) -> None:
    """A pool for one long request or two serves twenty by preemption, each with its own text."""
    prompts = make_prompts(20)
    engine = Engine(CountingModel(), make_pool(num_pages, 4), options(chunk_size, batched, share_prefixes=False))

    assert serve(engine, prompts) == [expected(prompt, 8) for prompt in prompts]
    assert engine.counters.finished == 20
    assert engine.counters.preempted > 0
    assert engine.counters.repeated_tokens > 0
    assert not any(engine.pool.allocator.references)


def test_repeating_beside_one_that_goes_on() -> None:
    """In a shared pass, a preempted request's known tokens and another's next token do not mix."""
    engine = Engine(CountingModel(), make_pool(6, 2), options(chunk_size=1, batched=True, share_prefixes=False))
    asked = [((1,), 12), ((2,), 5), ((3,), 6)]
    numbers = [engine.submit(prompt, count) for prompt, count in asked]
    engine.run()

    assert engine.counters.repeated_tokens > 0
    assert [engine.take(number).tokens for number in numbers] == [expected(*one) for one in asked]


def test_passes_do_not_depend_on_others() -> None:
    """In reference mode a preempted request's rows are computed again in the same company."""
    prompts = make_prompts(6)

    def passes(num_pages: int, asked: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
        model = CountingModel()
        engine = Engine(model, make_pool(num_pages, 4), options())
        serve(engine, asked)
        assert (engine.counters.preempted > 0) == (len(asked) > 1)
        return {tuple(positions) for positions in model.passes}

    assert passes(12, prompts) == set.union(*(passes(100, [prompt]) for prompt in prompts))


def test_oldest_request_is_not_preempted() -> None:
    """The first of many is computed without a single repetition, and nobody is overtaken in waiting."""
    engine = Engine(CountingModel(), make_pool(10, 4), options(share_prefixes=False))
    prompts = make_prompts(8, longest=20)
    numbers = [engine.submit(prompt, 8) for prompt in prompts]
    ended: list[int] = []
    steps = 0
    while not ended:
        ended += [event.request for event in engine.step() if event.finish]
        steps += 1

    assert ended == [numbers[0]]
    assert steps == -(-len(prompts[0]) // 4) + 7


@pytest.mark.exhaustive
def test_500_equal_requests_get_500_equal_texts() -> None:
    """Pages go round many times, and no text decays."""
    engine = Engine(CountingModel(), make_pool(30, 4), options(batched=True))
    prompt = tuple(range(18))

    assert serve(engine, [prompt] * 500, 6) == [expected(prompt, 6)] * 500


def test_shared_prefix_is_computed_once() -> None:
    """A second prompt computes only what comes after the last common full chunk."""
    engine = Engine(CountingModel(), make_pool(50, 2), options(chunk_size=4))
    first, second = tuple(range(11)), (*range(10), 50, 51)
    assert serve(engine, [first], 2) == [expected(first, 2)]
    assert engine.counters.shared_tokens == 0

    assert serve(engine, [second], 2) == [expected(second, 2)]
    assert engine.counters.shared_tokens == 8
    assert engine.counters.prefill_tokens == 11 + 4


def test_equal_prompt_still_computes_its_last_chunk() -> None:
    """A prompt that is known altogether needs its last token's logits, so its last chunk is computed."""
    engine = Engine(CountingModel(), make_pool(50, 2), options(chunk_size=4))
    prompt = tuple(range(8))

    assert serve(engine, [prompt], 3) + serve(engine, [prompt], 3) == [expected(prompt, 3)] * 2
    assert engine.counters.shared_tokens == 4


def test_only_pages_of_full_chunks_are_found() -> None:
    """In reference mode the pages of a prompt's last, shorter chunk are not shared; in batched mode they are."""
    prompt = tuple(range(14))
    for batched, pages in ((False, 4), (True, 7)):
        engine = Engine(CountingModel(), make_pool(50, 2), options(chunk_size=8, batched=batched))
        serve(engine, [prompt], 4)
        hashes = prefix_hashes(engine.pool.spec.digest, prompt, 2)
        assert len(engine.pool.allocator.match(hashes)) == pages


@pytest.mark.parametrize(("num_pages", "running"), [(8, 1), (9, 2)])
def test_admission_leaves_a_spare_page(num_pages: int, running: int) -> None:
    """A request is admitted if its tokens fit beside a spare page for each running one; cached pages count once."""
    engine = Engine(CountingModel(), make_pool(num_pages, 4), options())
    prefix = tuple(range(16))
    serve(engine, [prefix], 1)  # leaves four pages cached
    engine.submit((50,) * 10, 8)
    for _ in range(3):
        engine.step()  # three pages
    engine.submit((*prefix, 1, 2, 3), 4)  # needs five, of which four are cached
    engine.step()

    assert engine.num_running == running


def test_evicted_prefix_is_not_found() -> None:
    """A page that went to another prompt is not served to the first one any more."""
    engine = Engine(CountingModel(), make_pool(6, 4), options())
    prompts = [tuple(range(first, first + 16)) for first in (0, 40, 0)]
    for prompt in prompts:
        assert serve(engine, [prompt], 8) == [expected(prompt, 8)]

    assert engine.counters.shared_tokens == 0

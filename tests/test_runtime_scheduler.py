"""Scheduling, sharing and preemption, on a model whose text is known: no request is lost or mixed up."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from counting_model import VOCAB, CountingModel, expected, make_pool, options
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantkit.errors import RequestError, UsageError
from quantkit.runtime import Engine, Event, Finish, Sampling
from quantkit.runtime.page_set import PageSet
from quantkit.runtime.tables import prefix_hashes

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


Serving.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestServing = Serving.TestCase


def serve(engine: Engine, prompts: list[tuple[int, ...]], count: int = 8) -> list[tuple[int, ...]]:
    """The tokens of all prompts, as one batch."""
    numbers = [engine.submit(prompt, count) for prompt in prompts]
    engine.run()
    return [engine.take(number).tokens for number in numbers]


def make_prompts(count: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Random prompts, always the same."""
    rng = random.Random(0)
    return [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))) for _ in range(count)]


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


def test_request_that_never_fits_is_refused() -> None:
    """Of a pool of 8 pages a request for 9 is refused at once, with the sizes; the next one is served."""
    engine = Engine(CountingModel(), make_pool(8, 4), options())
    with pytest.raises(RequestError, match=r"30 tokens of prompt and 4 new ones need 9 pages of 4 tokens.* 8"):
        engine.submit((1,) * 30, 4)

    assert serve(engine, [(1,) * 30], 3) == [expected((1,) * 30, 3)]  # the last token is never computed
    assert engine.counters.refused == 1


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ((), 1, "a prompt of one token or more"),
        ((1,), 0, "one new token or more"),
        ((1, VOCAB), 1, "token 97 is not one of the model's 97"),
        ((-1,), 1, "token -1 is not"),
        ((1,) * 400, 101, "400 tokens of prompt and 101 new ones are more than the model's 500"),
    ],
)
def test_impossible_requests(prompt: tuple[int, ...], count: int, message: str) -> None:
    """What could never be computed is refused, by what is wrong."""
    engine = Engine(CountingModel(), make_pool(1000, 4), options())

    with pytest.raises(RequestError, match=message):
        engine.submit(prompt, count)
    assert not engine.busy


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


def test_finish_and_abort_in_the_same_step() -> None:
    """Ending twice, in either order, frees pages once and tells one end."""
    engine = Engine(CountingModel(), make_pool(20, 4), options(chunk_size=8))
    first, second = engine.submit((1, 2, 3), 1), engine.submit((4, 5), 5)
    events: list[Event] = list(engine.step())
    engine.abort(first)
    engine.abort(second)
    engine.abort(second)
    while engine.busy:
        events += engine.step()

    ends = [(event.request, event.finish) for event in events if event.finish]
    assert ends == [(first, Finish.LENGTH), (second, Finish.ABORTED)]
    assert not any(engine.pool.allocator.references)


def test_stop_token_ends_a_request() -> None:
    """Generation ends after a stop token, which is the last of the tokens."""
    prompt = (1, 2, 3)
    text = expected(prompt, 8)
    engine = Engine(CountingModel(), make_pool(20, 4), options())
    number = engine.submit(prompt, 8, stop=[text[3]])
    engine.run()

    completion = engine.take(number)
    assert (completion.tokens, completion.finish) == (text[: text.index(text[3]) + 1], Finish.STOP)


def test_unsound_logits_fail_one_request() -> None:
    """A request whose logits are NaN ends with a typed error; another one goes on."""
    engine = Engine(CountingModel(), make_pool(20, 4), options(share_prefixes=False))
    hit, sound = engine.submit((1, 2, 3), 6), engine.submit((4, 5, 6), 6)
    for _ in range(3):
        engine.step()
    page = engine._requests[hit].table.pages[0]
    engine.pool.tensors[0, "value"][page, 1] = torch.nan
    engine.run()

    completion = engine.take(hit)
    assert completion.finish is Finish.FAILED
    assert isinstance(completion.error, RequestError)
    assert "are not numbers" in str(completion.error)
    assert engine.take(sound).tokens == expected((4, 5, 6), 6)
    assert engine.counters.failed == 1


def test_finished_request_cannot_be_forked() -> None:
    """There is nothing to go on from."""
    engine = Engine(CountingModel(), make_pool(4, 4), options())
    number = engine.submit((1,), 1)
    engine.run()

    with pytest.raises(RequestError, match="request 0 is finished"):
        engine.fork(number, Sampling())
    engine.take(number)
    with pytest.raises(RequestError, match="there is no request 0"):
        engine.fork(number, Sampling())


def test_fork_copies_the_half_filled_page_only() -> None:
    """A fork shares its pages until one of the two writes, then only the page that is written to is copied."""
    engine = Engine(CountingModel(), make_pool(20, 4), options(chunk_size=10))
    prompt = tuple(range(10))
    number = engine.submit(prompt, 4)
    engine.step()
    other = engine.fork(number, Sampling())
    assert max(engine.pool.allocator.references) == 2
    engine.step()

    tables = [engine._requests[one].table.pages for one in (number, other)]
    assert [a == b for a, b in zip(*tables, strict=True)] == [True, True, False]
    engine.run()
    assert engine.take(number).tokens == engine.take(other).tokens == expected(prompt, 4)


def test_request_goes_on_in_another_engine() -> None:
    """Pages that one engine exports save another one the prompt; without room for them it is computed."""
    prompt = tuple(range(10))
    first = Engine(CountingModel(), make_pool(20, 4), options(chunk_size=10))
    number = first.submit(prompt, 4)
    first.step()
    pages = first.export(number)
    assert pages.tokens == prompt

    for num_pages, others in ((20, 0), (8, 1)):
        engine = Engine(CountingModel(), make_pool(num_pages, 4), options(chunk_size=10))
        waiting = [engine.submit((50,) * 24, 8) for _ in range(others)]
        for _ in waiting:
            engine.step()
        taken = engine.submit(prompt, 4, pages=pages)
        engine.run()
        assert engine.take(taken).tokens == expected(prompt, 4)
        assert engine.counters.prefill_tokens == (34 if others else 1)


def test_pages_of_other_tokens_are_refused() -> None:
    """Pages serve only a prompt that begins with their tokens."""
    engine = Engine(CountingModel(), make_pool(20, 4), options())
    pages = PageSet(engine.pool.spec, (1, 2, 3))

    with pytest.raises(RequestError, match="other tokens"):
        engine.submit((1, 2), 4, pages=pages)


def test_streaming_tells_each_token_once() -> None:
    """The callback gets the tokens of each request in order, the last with its end."""
    engine = Engine(CountingModel(), make_pool(12, 4), options())
    prompts = make_prompts(5)
    told: dict[int, list[Any]] = {}
    numbers = [engine.submit(prompt, 5) for prompt in prompts]
    engine.run(lambda event: told.setdefault(event.request, []).append((event.token, event.finish)))

    for number, prompt in zip(numbers, prompts, strict=True):
        assert told[number] == [
            *((token, None) for token in expected(prompt, 5)[:-1]),
            (expected(prompt, 5)[-1], Finish.LENGTH),
        ]


def test_pool_held_by_others_is_an_error() -> None:
    """Where pages outside of the engine leave no room, a step says so and does not wait for ever."""
    engine = Engine(CountingModel(), make_pool(4, 4), options())
    for _ in range(3):
        engine.pool.allocator.take()
    engine.submit((1,) * 8, 2)

    with pytest.raises(RequestError, match="held by others"):
        engine.step()


def test_chunks_of_no_tokens_are_refused() -> None:
    """A chunk has at least one token."""
    with pytest.raises(UsageError, match="chunks of 0 tokens"):
        options(chunk_size=0)

"""Faults of pages and their bookkeeping, each as one function, and a run of three requests that one of them hits.

The counting model's text is known, so a wrong token is seen wherever it comes from. The victim is the second request,
so that the pool's first page is another's; a fault happens between two steps, when all three have some pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import IntegrityError
from quantkit.models import Decoder
from quantkit.runtime import (
    GREEDY,
    Completion,
    Engine,
    EngineOptions,
    Finish,
    PagePool,
    cache_spec,
    uniform_scales,
)
from quantkit.runtime.batch_table import BatchTables
from quantkit.runtime.integrity import Cause, RetryBudget, StepTracker
from quantkit.runtime.integrity.steps import Checked
from quantkit.runtime.paged_cache import PagedCache
from quantkit.runtime.pages import FP8
from quantkit.runtime.requests import Request
from quantkit.runtime.scheduler import Pass
from support.counting_model import CountingModel, expected, make_pool

PROMPTS = (tuple(range(40, 49)), tuple(range(11)), (7, 7, 7, 7, 7))
VICTIM = 1
COUNT = 9
STEPS = 8  # before the fault
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of the requests, and what was found."""

    completions: tuple[Completion, ...]
    faults: dict[Cause, int]
    retries: int

    @property
    def found(self) -> set[Cause]:
        """The causes that were counted."""
        return {cause for cause, count in self.faults.items() if count}


@dataclass(frozen=True)
class Scene:
    """What a fault may touch."""

    engine: Engine
    numbers: tuple[int, ...]

    @property
    def pool(self) -> PagePool:
        """The engine's pages."""
        return self.engine.pool

    @property
    def requests(self) -> list[Request]:
        """In order."""
        return [self.engine._requests[number] for number in self.numbers]

    @property
    def victim(self) -> Request:
        """Whose page is hit."""
        return self.requests[VICTIM]


Fault = Callable[[Scene], None]


def texts() -> list[Tokens]:
    """What the requests say without a fault."""
    return [expected(prompt, COUNT) for prompt in PROMPTS]


def serve(level: IntegrityLevel, fault: Fault, retries: int = 0, batched: bool = True) -> Outcome:
    """Three requests, of which the second is hit after some steps, and may be computed again so often."""
    pool = make_pool(16, 4)
    budget = RetryBudget(each=retries)
    tracker = None if level is IntegrityLevel.OFF else StepTracker(pool, level, budget)
    engine = Engine(CountingModel(), pool, EngineOptions(4, batched, integrity=level), tracker)
    scene = Scene(engine, tuple(engine.submit(prompt, COUNT) for prompt in PROMPTS))
    for _ in range(STEPS):
        engine.step()
    fault(scene)
    engine.run()
    completions = tuple(engine.take(number) for number in scene.numbers)
    counters = engine.tracker.counters if engine.tracker else None
    return Outcome(completions, dict(counters.faults) if counters else {}, counters.retries if counters else 0)


# --- faults of the bookkeeping


def stale_table(scene: Scene) -> None:
    """The table names a page of another request."""
    scene.victim.table.pages[0] = scene.requests[0].table.pages[0]


def stale_last_page(scene: Scene) -> None:
    """The table names a page of another request, and its next row would be written there."""
    scene.victim.table.pages[-1] = scene.requests[0].table.pages[-1]


def table_outside_pool(scene: Scene) -> None:
    """The table names a page that there is not."""
    scene.victim.table.pages[1] = 1 << 40


def short_table(scene: Scene) -> None:
    """The table lost its last page."""
    scene.victim.table.pages.pop()


def swapped_pages(scene: Scene) -> None:
    """Two pages of the table changed places."""
    pages = scene.victim.table.pages
    pages[0], pages[1] = pages[1], pages[0]


def double_allocation(scene: Scene) -> None:
    """A page in use is given to somebody else."""
    allocator = scene.pool.allocator
    allocator._free.appendleft(scene.victim.table.pages[1])
    assert allocator.take() == scene.victim.table.pages[1]


def early_release(scene: Scene) -> None:
    """A page is given back while in use."""
    scene.pool.allocator.release(scene.victim.table.pages[1])


def reused_page(scene: Scene) -> None:
    """A page is given back while in use, given to another, given back and given out again: A, B, A."""
    allocator, page = scene.pool.allocator, scene.victim.table.pages[1]
    for _ in range(2):
        allocator.distrust(page)
        allocator.release(page)
        allocator._free.remove(page)
        allocator._free.appendleft(page)
        assert allocator.take() == page


def flipped_tag(scene: Scene) -> None:
    """A bit of a page's tag."""
    scene.pool.allocator.ledger.tags[scene.victim.table.pages[0]] ^= 1 << 33


# --- faults of bytes


def flipped_bit(scene: Scene) -> None:
    """A bit of a value in a full page."""
    flip(scene.pool, (0, "value"), scene.victim.table.pages[0], row=1)


def flipped_bit_of_last_row(scene: Scene) -> None:
    """A bit of the newest row, in a page that is being filled."""
    page, row = divmod(scene.victim.computed - 1, scene.pool.spec.page_size)
    flip(scene.pool, (0, "key"), scene.victim.table.pages[page], row)


def swapped_bytes(scene: Scene) -> None:
    """The bytes of two full pages of the victim changed places."""
    first, second = scene.victim.table.pages[:2]
    for tensor in scene.pool.tensors.values():
        tensor[[first, second]] = tensor[[second, first]]


def replayed_bytes(scene: Scene) -> None:
    """A page holds what it held before its last row was written."""
    page, row = divmod(scene.victim.computed - 1, scene.pool.spec.page_size)
    for tensor in scene.pool.tensors.values():
        tensor[scene.victim.table.pages[page], row] = torch.nan


def flipped_digest(scene: Scene) -> None:
    """A bit of the digest that a page is compared with."""
    tracker = scene.engine.tracker
    if tracker and tracker.contents:
        tracker.contents.digests[scene.victim.table.pages[0]] ^= 1 << 5


def flipped_sum(scene: Scene) -> None:
    """A bit of the sum that the digest of a page that is being filled grows from."""
    tracker = scene.engine.tracker
    if tracker and tracker.contents:
        tracker.contents.sums[scene.victim.table.pages[-1]] ^= 1 << 5


def flip(pool: PagePool, place: tuple[int, str], page: int, row: int, number: int = 0, bit: int = 0) -> None:
    """Flip one bit of a number in a page."""
    row_bytes = pool.tensors[place][page, row].view(torch.uint8).flatten()
    row_bytes[number * pool.spec.dtype.itemsize] ^= 1 << bit


BOTH, CONTENT, NONE = {"tags", "content"}, {"content"}, set[str]()

DETECTED: dict[str, tuple[Fault, set[str], Cause]] = {
    "stale block table": (stale_table, BOTH, Cause.WRONG_PAGE),
    "stale page that is written to": (stale_last_page, BOTH, Cause.WRONG_PAGE),
    "page outside the pool": (table_outside_pool, BOTH, Cause.WRONG_PAGE),
    "table too short": (short_table, BOTH, Cause.WRONG_PAGE),
    "pages of a table swapped": (swapped_pages, BOTH, Cause.WRONG_PAGE),
    "double allocation": (double_allocation, BOTH, Cause.DOUBLE_ALLOCATION),
    "page given back too early": (early_release, BOTH, Cause.STALE_PAGE),
    "page used again twice (ABA)": (reused_page, BOTH, Cause.STALE_PAGE),
    "bit of a tag": (flipped_tag, BOTH, Cause.TAG),
    "bit of a full page": (flipped_bit, CONTENT, Cause.CONTENT),
    "bit of the newest row": (flipped_bit_of_last_row, CONTENT, Cause.CONTENT),
    "bytes of two pages swapped": (swapped_bytes, CONTENT, Cause.CONTENT),
    "old bytes replayed": (replayed_bytes, CONTENT, Cause.CONTENT),
    "bit of a digest": (flipped_digest, CONTENT, Cause.CONTENT),
    "bit of a sum": (flipped_sum, CONTENT, Cause.CONTENT),
}


def check_detected(name: str, level: IntegrityLevel) -> None:
    """The fault is found before anything is computed from it: the victim ends with a typed error and no wrong token,
    or is computed again and says what it would have said; the others say that anyway.
    """
    fault, _, cause = DETECTED[name]
    ended, again = serve(level, fault), serve(level, fault, retries=1)
    for outcome in (ended, again):
        assert outcome.found == {cause}
        for place, wanted in enumerate(texts()):
            if place != VICTIM:
                assert outcome.completions[place] == Completion(wanted, Finish.LENGTH)
    hit, wanted = ended.completions[VICTIM], texts()[VICTIM]
    assert isinstance(hit.error, IntegrityError)
    assert (hit.error.cause, hit.error.request) == (cause, VICTIM)
    assert 0 < len(hit.tokens) < COUNT
    assert hit.tokens == wanted[: len(hit.tokens)]
    assert (ended.retries, again.retries) == (0, 1)
    assert again.completions[VICTIM] == Completion(wanted, Finish.LENGTH)


# --- what passes between requests


def engine_of(level: IntegrityLevel, retries: int = 1, num_pages: int = 16) -> Engine:
    """An engine whose pool nobody uses."""
    pool = make_pool(num_pages, 4)
    return Engine(
        CountingModel(), pool, EngineOptions(4, integrity=level), StepTracker(pool, level, RetryBudget(retries))
    )


def one(engine: Engine, prompt: Tokens, count: int = 4) -> Completion:
    """What a prompt alone comes to."""
    number = engine.submit(prompt, count)
    engine.run()
    return engine.take(number)


def check_cached_page() -> None:
    """A bit of a page that is kept for its prefix: found when it is used again, and the page is not found twice."""
    engine, prompt = engine_of(IntegrityLevel.CONTENT), tuple(range(13))
    one(engine, prompt)
    flip(engine.pool, (0, "value"), page=1, row=2)
    for _ in range(2):
        assert one(engine, prompt) == Completion(expected(prompt, 4), Finish.LENGTH)
    assert engine.tracker is not None
    assert engine.tracker.counters.faults[Cause.CONTENT] == 1


def check_replayed_cached_page() -> None:
    """Bytes, sum and all that is noted of another page, but for the digest, put into a page that is kept."""
    engine, prompt = engine_of(IntegrityLevel.CONTENT), tuple(range(13))
    one(engine, prompt)
    assert engine.tracker is not None
    contents = engine.tracker.contents
    assert contents is not None
    for tensor in (*engine.pool.tensors.values(), contents.sums):
        tensor[1] = tensor[0]
    assert one(engine, prompt) == Completion(expected(prompt, 4), Finish.LENGTH)
    assert engine.tracker.counters.faults[Cause.CONTENT] == 1


def check_stale_prefix() -> None:
    """The cache's entry of a prompt names a page of another: a miss, at any level."""
    engine, prompts = engine_of(IntegrityLevel.TAGS), (tuple(range(9)), tuple(range(50, 59)))
    for prompt in prompts:
        one(engine, prompt)
    known = engine.pool.allocator._pages
    first, _, other, _ = known
    known[first] = known[other]
    assert one(engine, prompts[0]) == Completion(expected(prompts[0], 4), Finish.LENGTH)


def check_wrong_hand_off() -> None:
    """Pages of one prompt, said to be another's: refused, and no page stays in use; the prompt's own pages serve."""
    engine, prompts = engine_of(IntegrityLevel.CONTENT), (tuple(range(9)), tuple(range(50, 59)))
    sets = []
    for prompt in prompts:
        number = engine.submit(prompt, 4)
        while engine._requests[number].computed < len(prompt):
            engine.step()
        sets.append(engine.export(number))
        engine.abort(number)
    sets[0].tokens = sets[1].tokens
    with pytest.raises(IntegrityError) as refused:
        engine.submit(prompts[1], 4, pages=sets[0])
    assert refused.value.cause == Cause.HAND_OFF
    assert not any(engine.pool.allocator.references)
    number = engine.submit(prompts[1], 4, pages=sets[1])
    engine.run()
    assert engine.take(number) == Completion(expected(prompts[1], 4), Finish.LENGTH)


def check_spoiled_hand_off() -> None:
    """A bit of a page on its way from one pool to another."""
    engine, prompt = engine_of(IntegrityLevel.CONTENT), tuple(range(9))
    number = engine.submit(prompt, 4)
    engine.step()
    pages = engine.export(number)
    pages.tensors[0, "key"][0, 3].view(torch.uint8)[0, 0] ^= 4
    with pytest.raises(IntegrityError) as refused:
        engine_of(IntegrityLevel.CONTENT).submit(prompt, 4, pages=pages)
    assert (refused.value.cause, refused.value.position) == (Cause.HAND_OFF, 0)


def check_stale_export() -> None:
    """A request whose table is stale is neither forked nor exported."""
    engine = engine_of(IntegrityLevel.TAGS)
    numbers = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
    for _ in range(STEPS):
        engine.step()
    stale_table(Scene(engine, tuple(numbers)))
    for act in (engine.export, lambda number: engine.fork(number, GREEDY)):
        with pytest.raises(IntegrityError) as refused:
            act(numbers[VICTIM])
        assert refused.value.cause == Cause.WRONG_PAGE


def check_copy_of_stale_page() -> None:
    """The half-filled page that would be copied before it is written is another's: it is not taken for one's own."""
    engine = engine_of(IntegrityLevel.TAGS)
    numbers = [engine.submit(prompt, COUNT) for prompt in PROMPTS[:2]]
    for _ in range(STEPS):
        engine.step()
    forks = [engine.fork(numbers[0], GREEDY) for _ in range(2)]
    stale_last_page(Scene(engine, tuple(numbers)))
    engine.run()
    assert engine.tracker is not None
    assert engine.tracker.counters.faults[Cause.WRONG_PAGE] == 1
    for number, prompt in zip((*numbers, *forks), (*PROMPTS[:2], *PROMPTS[:1] * 2), strict=True):
        assert engine.take(number) == Completion(expected(prompt, COUNT), Finish.LENGTH)


def check_no_storm() -> None:
    """A fault that comes again and again costs as many retries as the pool's budget has, then each request ends."""
    pool = make_pool(16, 4)
    tracker = StepTracker(pool, IntegrityLevel.TAGS, RetryBudget(each=2, burst=3, steps=1000))
    engine = Engine(CountingModel(), pool, EngineOptions(4, integrity=IntegrityLevel.TAGS), tracker)
    numbers = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
    for _ in range(100):
        for request in engine._scheduler.requests:
            if request.table.pages:
                pool.allocator.ledger.tags[request.table.pages[0]] ^= 2
        engine.step()
    assert not engine.busy
    assert all(isinstance(engine.take(number).error, IntegrityError) for number in numbers)
    assert (tracker.counters.retries, tracker.counters.retries_refused) == (3, 3)


def check_late_write() -> None:
    """The page of an aborted request goes to another while a pass of the first is not written yet: refused."""
    engine = engine_of(IntegrityLevel.TAGS)
    first = engine.submit((1, 2, 3), 4)
    engine.step()
    late = late_pass(engine, first)
    engine.abort(first)
    engine.pool.allocator._free.reverse()
    second = engine.submit(PROMPTS[0], COUNT)
    engine.step()
    assert engine._requests[second].table.pages[0] == 0
    late.append_heads(0, torch.tensor([3]), torch.full((1, 1, 2), 9.0), torch.full((1, 1, 2), 9.0))
    engine.run()
    assert engine.take(second) == Completion(expected(PROMPTS[0], COUNT), Finish.LENGTH)
    assert engine.tracker is not None
    assert engine.tracker.counters.faults[Cause.LATE_WRITE] == 1


def late_pass(engine: Engine, number: int) -> PagedCache:
    """A pass of a request's last row, found clean and not written."""
    request, tracker = engine._requests[number], engine.tracker
    assert tracker is not None
    planned = Pass(request, request.computed - 1, request.computed)
    with engine.pool.allocator.step() as step:
        table = BatchTables(engine.pool).of([request.table.pages], [planned.stop]).pages
        guard = tracker.guard(Checked(step, table, None, None, None), [0], [planned])
        return PagedCache(engine.pool, [planned.segment], table, guard)


def serve_trained(
    decoder: Decoder, spoil: Callable[[PagePool, tuple[int, ...]], None] | None
) -> tuple[Engine, list[Completion]]:
    """Two requests on FP8 pages at level `content`; `spoil` is given the pool and the first one's pages."""
    pool = PagePool(cache_spec(decoder.config, FP8, 8, uniform_scales(decoder.config.layers, 0.25)), 12)
    tracker = StepTracker(pool, IntegrityLevel.CONTENT, RetryBudget(each=0))
    engine = Engine(decoder, pool, EngineOptions(32, integrity=IntegrityLevel.CONTENT), tracker)
    numbers = [engine.submit(range(first, first + 19), 4) for first in (300, 400)]
    for _ in range(3):
        engine.step()
    if spoil:
        spoil(pool, tuple(engine._requests[numbers[0]].table.pages))
    engine.run()
    return engine, [engine.take(number) for number in numbers]


def check_scale(decoder: Decoder) -> None:
    """A KV scale that changes under the pages hits everybody, and nothing that was read with it is used."""

    def spoil(pool: PagePool, pages: tuple[int, ...]) -> None:
        object.__setattr__(pool.spec.scales.layers[2], "key", 0.5)

    _, ended = serve_trained(decoder, spoil)
    assert [getattr(one.error, "cause", None) for one in ended] == [Cause.SCALE] * 2
    _, sound = serve_trained(decoder, None)
    assert all(one.tokens == whole.tokens[: len(one.tokens)] for one, whole in zip(ended, sound, strict=True))

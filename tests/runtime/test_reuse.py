"""Faults of paged serving as users of other engines reported them: pages that go to a new request while an old one
still writes, pages that are freed twice, caches that answer with what is stale, tables that are read past their end.
"""

import pytest
import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import CacheError, RequestError
from quantkit.ops import pages as ops
from quantkit.runtime import Engine, EngineOptions, Finish, PagePool, cache_spec, uniform_scales
from quantkit.runtime.allocator import Allocator
from quantkit.runtime.pages import FP8
from quantkit.runtime.tables import prefix_hashes
from support import integrity_faults as faults
from support.counting_model import CONFIG, CountingModel, expected, make_pool

pytestmark = pytest.mark.usefixtures("one_thread")

Tokens = tuple[int, ...]


def make_engine(num_pages: int, level: IntegrityLevel = IntegrityLevel.TAGS) -> Engine:
    """An engine over pages of four tokens."""
    return Engine(CountingModel(), make_pool(num_pages, 4), EngineOptions(4, integrity=level))


def serve(engine: Engine, prompt: Tokens, count: int = 4) -> Tokens:
    """What a prompt alone comes to."""
    return faults.one(engine, prompt, count).tokens


def check_pages_add_up(engine: Engine) -> None:
    """Free, cached, held and used pages are all pages, and each has as many references as tables that list it."""
    engine.pool.allocator.check()
    listed = [page for request in engine._requests.values() for page in request.table.pages]
    assert [listed.count(page) for page in range(engine.pool.num_pages)] == engine.pool.allocator.references


def test_late_write_to_a_page_of_another_is_refused() -> None:
    """E01: page p is A's, a write is pending, A is aborted, p is B's, the write lands: refused by its generation and
    counted, and B says what it would have said.
    """
    faults.check_late_write()


@pytest.mark.exhaustive
def test_500_equal_requests_say_the_same_beside_late_writers() -> None:
    """E01: with requests that are aborted all the time and write late, text does not decay, in 500 requests."""
    engine, prompt, late = make_engine(12), tuple(range(6)), 0
    numbers = []
    for round_ in range(500):
        numbers.append(engine.submit(prompt, 2))
        if round_ % 25 == 0:
            doomed = engine.submit((*prompt[:2], 90, 91), 9)
            while not engine._requests[doomed].computed:
                engine.step()
            writer = faults.late_pass(engine, doomed)
            engine.abort(doomed)
            engine.run()
            ones = torch.ones(1, 1, 2)
            writer.append_heads(0, torch.tensor([3]), ones, ones)
            late += 1
    engine.run()

    assert {engine.take(number).tokens for number in numbers} == {expected(prompt, 2)}
    assert engine.tracker is not None
    found = {cause: count for cause, count in engine.tracker.counters.faults.items() if count}
    assert found == {faults.Cause.LATE_WRITE: late}


@pytest.mark.parametrize("level", list(IntegrityLevel))
def test_pages_are_freed_once(level: IntegrityLevel) -> None:
    """E02: a request that finishes and is aborted, in the same step and twice, gives its pages back once."""
    engine = make_engine(20, level)
    first, second = engine.submit((1, 2, 3), 1), engine.submit((4, 5), 5)
    for act in (engine.step, lambda: engine.abort(first), lambda: engine.abort(second), lambda: engine.abort(second)):
        act()
        check_pages_add_up(engine)
    engine.run()

    assert [engine.take(number).finish for number in (first, second)] == [Finish.LENGTH, Finish.ABORTED]
    assert engine.pool.allocator.available == 20


@pytest.mark.parametrize("level", list(IntegrityLevel))
def test_five_shared_pages_are_counted_once(level: IntegrityLevel) -> None:
    """E02: two requests share five pages; one ends, then the other, then a third takes the whole pool."""
    engine, prefix = make_engine(9, level), tuple(range(20))
    serve(engine, prefix, 1)
    assert engine.pool.allocator.cached == 5
    numbers = [engine.submit((*prefix, last), count) for last, count in ((30, 1), (31, 3))]
    while engine.busy:
        engine.step()
        check_pages_add_up(engine)
        if engine.num_running == 2:
            assert sorted(engine.pool.allocator.references)[-5:] == [2] * 5
    assert [engine.take(number).tokens for number in numbers] == [
        expected((*prefix, last), count) for last, count in ((30, 1), (31, 3))
    ]
    assert engine.counters.shared_tokens == 40

    other = tuple(range(40, 75))
    assert serve(engine, other, 2) == expected(other, 2)
    check_pages_add_up(engine)
    assert engine.pool.allocator.match(prefix_hashes(engine.pool.spec.digest, prefix, 4)) == []
    assert serve(engine, prefix, 2) == expected(prefix, 2)


@pytest.mark.parametrize("level", list(IntegrityLevel))
def test_evicted_prefix_misses(level: IntegrityLevel) -> None:
    """E03: a page that held X and now holds Y is not found for X, nor is X's hash kept."""
    allocator = Allocator(1)
    page = allocator.take()
    allocator.publish(page, b"X")
    allocator.release(page)
    assert allocator.match([b"X"]) == [page]
    assert allocator.take() == page
    allocator.publish(page, b"Y")
    assert (allocator.match([b"X"]), allocator.match([b"Y"])) == ([], [page])

    engine = make_engine(4, level)
    for first in (0, 40, 0):
        prompt = tuple(range(first, first + 12))
        assert serve(engine, prompt) == expected(prompt, 4)
    assert engine.counters.shared_tokens == 0


def test_other_scales_miss() -> None:
    """E03: with other KV scales the same prompt is not found in the same pool."""
    prompt = tuple(range(12))
    specs = [cache_spec(CONFIG, FP8, 4, uniform_scales(1, scale)) for scale in (1.0, 0.5)]
    pool = PagePool(specs[0], 8)
    engine = Engine(CountingModel(), pool, EngineOptions(4))
    engine.submit(prompt, 1)
    engine.run()
    found = [pool.allocator.match(prefix_hashes(spec.digest, prompt, 4)) for spec in specs]
    assert [len(pages) for pages in found] == [3, 0]

    pool.spec = specs[1]
    second = Engine(CountingModel(), pool, EngineOptions(4))
    second.submit(prompt, 1)
    second.run()
    assert second.counters.shared_tokens == 0
    again = Engine(CountingModel(), pool, EngineOptions(4))
    again.submit(prompt, 1)
    again.run()
    assert again.counters.shared_tokens == 8  # of what was written with the scales of now


def test_table_is_not_read_past_its_end() -> None:
    """E04: as many tokens as pages have room for work, whatever lies behind the table; one more is an error."""
    pool = make_pool(8, 4)
    memory = torch.full((2, 64), 0x7FFFFFFF, dtype=torch.int32)
    memory[0, :3] = torch.tensor([5, 0, 7])
    table, length = memory[:1, :3], 12
    value = torch.arange(12, dtype=torch.float32)[:, None, None].expand(-1, 1, 2).contiguous()
    slots = pool.slots((5, 0, 7), 0, length)
    ops.write_gqa(torch.zeros(12, 1, 2), value, *pool.heads(0), slots, 1.0, 1.0, pool.counts)
    query = torch.zeros(1, 1, 2)
    mean = ops.decode_gqa(query, *pool.heads(0), table.contiguous(), torch.tensor([length], dtype=torch.int32), 1.0)
    assert mean.flatten().tolist() == pytest.approx([5.5, 5.5])

    with pytest.raises(CacheError, match="tokens 0 to 13 do not lie in 3 pages of 4"):
        pool.slots((5, 0, 7), 0, 13)


@pytest.mark.parametrize("level", list(IntegrityLevel))
def test_request_of_all_pages_works_and_one_more_is_refused(level: IntegrityLevel) -> None:
    """E04: a request that fills every page to its last row is served; with one token more it is refused, with sizes."""
    engine, prompt = make_engine(8, level), (7,) * 29
    assert serve(engine, prompt, 4) == expected(prompt, 4)

    with pytest.raises(RequestError, match=r"30 tokens of prompt and 4 new ones need 9 pages of 4 tokens.* has 8"):
        engine.submit((7,) * 30, 4)


def test_request_that_never_fits_does_not_block_the_next() -> None:
    """E05: in a pool of 8 pages a request for 9 is refused at once, and a small one after it completes."""
    engine = make_engine(8)
    with pytest.raises(RequestError, match="need 9 pages"):
        engine.submit((1,) * 33, 4)
    assert not engine.busy

    assert serve(engine, (1, 2, 3)) == expected((1, 2, 3), 4)
    assert engine.counters.refused == 1

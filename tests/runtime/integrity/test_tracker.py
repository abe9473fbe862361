"""The tracker by itself: what another pool uses, clean checks without end, counters, budget, and `off`."""

import json
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import UsageError
from quantkit.runtime import Engine, EngineOptions, PagePool, cache_spec, unscaled
from quantkit.runtime.allocator import Generations
from quantkit.runtime.integrity import Cause, IntegrityReport, PageTracker, RetryBudget, TagTracker
from quantkit.runtime.integrity.content import PageContents
from quantkit.runtime.integrity.digests import Bound
from quantkit.runtime.integrity.prefixes import Prefixes
from support.counting_model import CONFIG, CountingModel, expected, make_pool
from support.integrity_faults import COUNT, PROMPTS

pytestmark = pytest.mark.usefixtures("one_thread")


def calls_of_steps(level: IntegrityLevel) -> Counter[str]:
    """How often each function of the integrity package is called while an engine serves."""
    engine = Engine(CountingModel(), make_pool(16, 4), EngineOptions(4, batched=True, integrity=level))
    numbers = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/runtime/integrity/" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        engine.run()
    finally:
        sys.setprofile(None)
    assert [engine.take(number).tokens for number in numbers] == [expected(prompt, COUNT) for prompt in PROMPTS]
    return called


def test_off_calls_nothing() -> None:
    """With integrity off, no function of the package is called in any step; with tags, one check for each step."""
    assert not calls_of_steps(IntegrityLevel.OFF)
    called = calls_of_steps(IntegrityLevel.TAGS)

    assert called["admit"] > 0
    assert called["check"] == 2 * called["_is_clean"] > 0  # of the step, and of its tags


def test_tracker_can_be_taken_out_between_steps() -> None:
    """Tags that are checked in every other step only raise no alarm, and the text is the same."""
    engine = Engine(CountingModel(), make_pool(16, 4), EngineOptions(4))
    numbers = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
    tracker, steps = engine.tracker, 0
    assert tracker is not None
    while engine.busy:
        engine.tracker = tracker if steps % 2 else None
        engine.step()
        steps += 1

    assert [engine.take(number).tokens for number in numbers] == [expected(prompt, COUNT) for prompt in PROMPTS]
    assert 0 < tracker.counters.steps < engine.counters.steps
    assert not any(tracker.counters.faults.values())


def test_another_pool_can_use_it() -> None:
    """Numbers and tensors alone: allocate, expect, check, write, free."""
    tracker: PageTracker = TagTracker(Generations(8), page_size=4)
    generations = tracker.allocate([5, 2])
    tracker.expect(70, generations)
    tracker.expect(71, tracker.allocate([1]))
    table = torch.tensor([[5, 2], [1, 8]], dtype=torch.int32)
    assert tracker.check([70, 71], table, [2, 1]) is None
    slots = torch.tensor([5 * 4, 2 * 4 + 3, -1])
    writers = torch.tensor([*generations, 0])
    assert tracker.write(slots, writers).tolist() == [20, 11, -1]

    tracker.free([2])
    verdict = tracker.check([70, 71], table, [2, 1])
    assert verdict is not None
    assert verdict.tolist() == [1, -1]
    assert tracker.write(slots, writers).tolist() == [20, -1, -1]
    tracker.forget(71)
    tracker.forget(71)
    verdict = tracker.check([71], table[1:, :1], [1])
    assert verdict is not None
    assert verdict.tolist() == [0]  # nothing is expected of a request that ended


@pytest.mark.parametrize("wrong", [-1, -2, -9, 8, 9, 16, 1 << 30, 3])
def test_pages_that_look_like_others_are_wrong(wrong: int) -> None:
    """Ids outside of the pool are no page, whatever a careless look-up would find; so is another page."""
    tracker = TagTracker(Generations(8), page_size=4)
    tracker.expect(0, tracker.allocate([7, 0]))
    for position in (0, 1):
        table = torch.tensor([[7, 0]], dtype=torch.int32)
        table[0, position] = wrong
        verdict = tracker.check([0], table, [2])
        assert verdict is not None
        assert verdict.tolist() == [position]


def test_more_pages_than_expected_are_wrong() -> None:
    """A table that is longer than what the request was given is wrong at the first page too many."""
    tracker = TagTracker(Generations(8), page_size=4)
    tracker.expect(0, tracker.allocate([4]))
    verdict = tracker.check([0], torch.tensor([[4, 8]], dtype=torch.int32), [2])

    assert verdict is not None
    assert verdict.tolist() == [1]


def test_a_million_clean_tags_raise_no_alarm() -> None:
    """Requests that come, grow and go for a million and more pages checked: never a hit."""
    tracker, generator = TagTracker(Generations(20000), page_size=64), torch.Generator().manual_seed(0)
    pages = torch.randperm(20000, generator=generator).tolist()
    tables: dict[int, list[int]] = {}
    generations: dict[int, list[int]] = {}
    for number in range(120):
        if len(tables) == 40:
            gone = min(tables)
            tracker.free(tables[gone])
            tracker.forget(gone)
            pages += tables.pop(gone)
        tables[number], generations[number] = [], []
        for request in tables:
            more = [pages.pop() for _ in range(15)]
            tables[request] += more
            generations[request] += tracker.allocate(more)
            tracker.expect(request, generations[request])
        counts = [len(own) for own in tables.values()]
        table = torch.full((len(tables), max(counts)), 20000, dtype=torch.int32)
        for row, own in zip(table, tables.values(), strict=True):
            row[: len(own)] = torch.tensor(own)
        assert tracker.check(list(tables), table, counts) is None
    assert tracker.counters.pages > 1_000_000
    assert not any(tracker.counters.faults.values())


@pytest.mark.exhaustive
def test_a_million_clean_digests_raise_no_alarm() -> None:
    """Pages that grow row by row, full ones and half-filled ones: their bytes are always what was written."""
    num_pages, page_size = 4096, 4
    pool = PagePool(cache_spec(CONFIG, torch.float32, page_size, unscaled(1)), num_pages)
    contents, pages = PageContents(pool), torch.randperm(num_pages, dtype=torch.int32)
    generator, checked = torch.Generator().manual_seed(0), 0
    numbers = torch.randint(-(1 << 62), 1 << 62, (num_pages,), generator=generator).tolist()

    def bound(rows: int) -> Bound:
        return Bound([rows] * num_pages, numbers, range(num_pages), numbers)

    for _ in range(42):
        rows = 0
        while rows < page_size:
            start, rows = rows, min(page_size, rows + int(torch.randint(1, 3, (), generator=generator)))
            for tensor in pool.tensors.values():
                tensor[:, start:rows] = torch.randn(num_pages, rows - start, 1, 2, generator=generator)
            contents.write(pages.tolist(), bound(rows), [start] * num_pages)
            for tensor in pool.tensors.values():
                tensor[:, rows:] = torch.nan  # what is not written yet does not count
            for _ in range(2):
                assert contents.check(pages, bound(rows)).all()
                checked += num_pages
    assert checked > 1_000_000
    assert not contents.check(pages, bound(page_size - 1)).any()


def test_prefixes_tell_every_token() -> None:
    """The number of a page changes with each token up to its last and with the root, and with no other."""
    tokens = tuple(range(11))
    first = Prefixes(b"a", 4).bound(0, tokens, 11, range(3))
    assert first.rows == [4, 4, 3]
    for place in range(11):
        other = Prefixes(b"a", 4).bound(0, (*tokens[:place], 99, *tokens[place + 1 :]), 11, range(3))
        same = [a == b for a, b in zip(first.prefix, other.prefix, strict=True)]
        assert same == [page < place // 4 for page in range(3)]
    assert not set(first.prefix) & set(Prefixes(b"b", 4).bound(0, tokens, 11, range(3)).prefix)
    grown = Prefixes(b"a", 4)
    assert [grown.bound(0, tokens, stop, range(3)).prefix[-1] for stop in range(1, 12)] == [
        Prefixes(b"a", 4).bound(0, tokens, stop, range(3)).prefix[-1] for stop in range(1, 12)
    ]


def test_counters_as_text_and_json() -> None:
    """Each cause has its line in Prometheus' text, each pool its own registry, and JSON comes back as it was."""
    first, second = (TagTracker(Generations(4), 4).counters for _ in range(2))
    first.faults[Cause.LATE_WRITE] += 3
    text, report = first.to_prometheus(), first.report("tags")

    for cause in Cause:
        assert f'quantkit_integrity_faults_total{{cause="{cause}"}} {3.0 if cause is Cause.LATE_WRITE else 0.0}' in text
    assert 'cause="late_write"} 0.0' in second.to_prometheus()
    assert json.loads(report.to_json())["faults"]["late_write"] == 3
    assert IntegrityReport.from_json(report.to_json()) == report


def test_budget_of_retries() -> None:
    """A request is retried as often as it may, all of them as often as the pool may, one more every so many steps."""
    budget = RetryBudget(each=2, burst=3, steps=10)
    assert [budget.allows(retried, 0) for retried in (0, 1, 2, 0, 0)] == [True, True, False, True, False]
    assert not budget.allows(0, 9)
    assert budget.allows(0, 10)
    assert not budget.allows(0, 19)
    assert [budget.allows(0, 1000) for _ in range(4)] == [True, True, True, False]

    with pytest.raises(UsageError, match="not a rate"):
        RetryBudget(steps=0)

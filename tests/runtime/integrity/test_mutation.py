"""Each check of the integrity code is needed: with it taken out, a proof fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.choices import IntegrityLevel
from quantkit.models import load
from quantkit.runtime import Engine
from quantkit.runtime.allocator import Allocator, Generations
from quantkit.runtime.integrity import RetryBudget, StepTracker, TagTracker
from quantkit.runtime.integrity.content import PageContents
from quantkit.runtime.integrity.digests import Bound
from quantkit.runtime.page_set import PageSet
from quantkit.runtime.tables import BlockTable
from support import integrity_faults as faults
from support.page_world import World, explore
from support.paths import GLM_TINY

pytestmark = pytest.mark.usefixtures("one_thread")

Proof = Callable[[], object]


def tags(name: str) -> Proof:
    """The fault is found by tags."""
    return lambda: faults.check_detected(name, IntegrityLevel.TAGS)


def content(name: str) -> Proof:
    """The fault is found by content."""
    return lambda: faults.check_detected(name, IntegrityLevel.CONTENT)


def explored() -> None:
    """Every order of events in a small pool is sound."""
    explore(World(1, ((1, 1, 1), (2,))), 10)


def scale() -> None:
    """A scale that changes is found."""
    faults.check_scale(load(GLM_TINY, torch.float32))


def release_what_is_read(table: BlockTable) -> None:
    """Give back the pages that the table names, whoever has them."""
    while table.pages:
        table._pool.allocator.release(table.pages.pop())
        table.given.pop()
        table.generations.pop()
    table.version += 1


@contextmanager
def step_without_hold(allocator: Allocator) -> Iterator[int]:
    """Pages that are given back in a step are free at once."""
    yield allocator.steps_retired
    allocator.steps_retired += 1


def keep_generation(function: Callable[[Allocator, int], None]) -> Callable[[Allocator, int], None]:
    """The same, without a new generation for the page."""

    def run(allocator: Allocator, page: int) -> None:
        renew = allocator.ledger.renew
        allocator.ledger.renew = lambda page: allocator.generations[page]  # type: ignore[method-assign]
        function(allocator, page)
        allocator.ledger.renew = renew  # type: ignore[method-assign]

    return run


def changed(function: Callable[..., Any], **fields: Any) -> Callable[..., Any]:
    """The same, with other fields in its result."""
    return lambda *arguments: replace(function(*arguments), **fields)


def forget_hit(conclude: Callable[..., Any]) -> Callable[..., Any]:
    """Go on as if the pass had not been hit."""
    return lambda engine, computed: conclude(engine, replace(computed, hit=None))


def read_as_it_is(check: Callable[..., Any]) -> Callable[..., Any]:
    """The step's own table for attention, whatever was found."""
    return lambda tracker, passes, table, step: replace(check(tracker, passes, table, step), table=table.pages)


def without_digests(note: Callable[..., Any]) -> Callable[..., Any]:
    """Take pages from elsewhere as they are."""

    def run(tracker: StepTracker, request: Any, pages: PageSet) -> None:
        pages.digests = None
        note(tracker, request, pages)

    return run


def always_bound(contents: PageContents, source: int, old: int, target: int, new: int) -> None:
    """Bind a page to its new generation, whether it was sound in the old one or not."""
    bound = [contents._rows, contents._prefixes, contents._positions]
    digest = contents.sums[source]
    numbers = [[int(one[source])] for one in bound]
    contents.digests[target] = Bound(*numbers, [new]).digest(digest[None])[0]


MUTATIONS: dict[str, tuple[type, str, Any, Proof]] = {
    "tags are compared": (TagTracker, "check", lambda *arguments: None, tags("bit of a tag")),
    "the quick answer looks": (TagTracker, "_is_clean", lambda *arguments: True, tags("stale block table")),
    "late rows are refused": (TagTracker, "write", lambda self, slots, generations: slots, faults.check_late_write),
    "late rows are looked at": (StepTracker, "admit", lambda self, slots, *rest: slots, explored),
    "the verdict is read": (
        StepTracker,
        "read",
        lambda self, checked, passes: [None] * len(passes),
        tags("bit of a tag"),
    ),
    "the verdict counts": (Engine, "_conclude", forget_hit(Engine._conclude), tags("stale block table")),
    "rows of a hit pass are not written": (
        StepTracker,
        "guard",
        changed(StepTracker.guard, hit=None),
        tags("stale page that is written to"),
    ),
    "pages of a hit pass are not read": (
        StepTracker,
        "check",
        read_as_it_is(StepTracker.check),
        tags("page outside the pool"),
    ),
    "pages are held until the step retires": (Allocator, "step", step_without_hold, explored),
    "a page that is given back has a new generation": (
        Allocator,
        "release",
        keep_generation(Allocator.release),
        tags("page given back too early"),
    ),
    "a page that is given has a new generation": (
        Allocator,
        "_use",
        keep_generation(Allocator._use),
        tags("double allocation"),
    ),
    "generations are written where the check reads": (
        Generations,
        "renew",
        lambda self, page: self.numbers[page],
        explored,
    ),
    "only own pages are given back": (BlockTable, "release", release_what_is_read, tags("stale block table")),
    "a page that is copied is one's own": (
        BlockTable,
        "is_current",
        lambda self, position: True,
        faults.check_copy_of_stale_page,
    ),
    "pages of a fork and an export are one's own": (
        StepTracker,
        "require_own",
        lambda self, request: None,
        faults.check_stale_export,
    ),
    "a prefix and its page agree": (
        Allocator,
        "match",
        lambda self, prefixes: [self._pages[prefix] for prefix in prefixes if prefix in self._pages],
        faults.check_stale_prefix,
    ),
    "a page that was hit is not found again": (
        Allocator,
        "distrust",
        lambda self, page: None,
        faults.check_cached_page,
    ),
    "bytes are compared": (
        PageContents,
        "check",
        lambda self, pages, bound: torch.ones(len(pages), dtype=torch.bool),
        content("bit of a full page"),
    ),
    "only sound digests get another generation": (
        PageContents,
        "_bind_again",
        always_bound,
        faults.check_replayed_cached_page,
    ),
    "digests of a hand-off are compared": (
        StepTracker,
        "note_given",
        without_digests(StepTracker.note_given),
        faults.check_wrong_hand_off,
    ),
    "scales are compared": (StepTracker, "_is_same_spec", True, scale),
    "retries have an end": (RetryBudget, "allows", lambda self, retried, step: True, faults.check_no_storm),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_check_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof holds with the check and fails without."""
    owner, attribute, replacement, proof = MUTATIONS[name]
    proof()
    monkeypatch.setattr(owner, attribute, replacement)

    assert fails(proof)


def fails(proof: Proof) -> bool:
    """Whether it ends with an error of any kind."""
    try:
        proof()
    except (Exception, pytest.fail.Exception):
        return True
    return False

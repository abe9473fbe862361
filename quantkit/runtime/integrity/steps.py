"""What the engine asks of integrity, step by step.

    plan -> check -> compute -> read the verdict with the logits -> publish and sample, or discard

One check for all passes of a step, before the first of them, of the very table that attention then reads. A request
that is hit reads page 0 and writes nothing in this step, and nothing that it computed is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import IntegrityError
from quantkit.kernels.reference.page_check import ALL_GOOD
from quantkit.runtime.allocator import NOTHING
from quantkit.runtime.batch_table import BatchTable
from quantkit.runtime.integrity.causes import Cause
from quantkit.runtime.integrity.content import PageContents
from quantkit.runtime.integrity.counters import IntegrityReport
from quantkit.runtime.integrity.digests import Bound, digest_pages
from quantkit.runtime.integrity.prefixes import Prefixes
from quantkit.runtime.integrity.retries import RetryBudget
from quantkit.runtime.integrity.tags import TagTracker
from quantkit.runtime.page_set import PageSet
from quantkit.runtime.paged_cache import Guard
from quantkit.runtime.pages import PagePool
from quantkit.runtime.requests import Request
from quantkit.runtime.scheduler import Pass

_OUTSIDE = -1  # no pool has this page


@dataclass(frozen=True)
class Hit:
    """A request's page that is not what it must be."""

    position: int
    cause: Cause


@dataclass(frozen=True)
class Checked:
    """The verdict on a step's passes, where the pages lie.

    step     the number of the step
    table    int32 [B, pages]: the step's, with page 0 for passes that were hit
    hit      bool [B], None where it is known already that none was
    tags     the first position whose page is not as expected, or -1: int32 [B]
    content  the first position whose bytes are not, or -1: int32 [B]; either is None where it is known at once, or not
             checked
    """

    step: int
    table: torch.Tensor
    hit: torch.Tensor | None
    tags: torch.Tensor | None
    content: torch.Tensor | None


class StepTracker:
    """Checks the steps of an engine over `pool`."""

    def __init__(self, pool: PagePool, level: IntegrityLevel, budget: RetryBudget | None = None) -> None:
        self.level, self.budget = level, budget or RetryBudget()
        self.tags = TagTracker(pool.allocator.ledger, pool.spec.page_size, pool.device)
        self.contents = PageContents(pool) if level is IntegrityLevel.CONTENT else None
        self._prefixes = Prefixes(pool.spec.digest, pool.spec.page_size)
        self.counters = self.tags.counters
        self._pool = pool
        self._versions: dict[int, int] = {}

    @property
    def _is_same_spec(self) -> bool:
        """Whether pages still mean what they meant: KV scales, model, layout."""
        return self._pool.spec.digest == self._prefixes.root

    @property
    def report(self) -> IntegrityReport:
        """What was checked and found so far."""
        return self.counters.report(self.level)

    def check(self, passes: Sequence[Pass], table: BatchTable, step: int) -> Checked:
        """The one check of a step, before anything of it is computed."""
        for planned in passes:
            request = planned.request
            if self._versions.get(request.number) != request.table.version:
                self._expect(request)
        tags = self.tags.check([one.request.number for one in passes], table.pages, table.counts)
        safe = table.pages if tags is None else table.pages.masked_fill((tags != ALL_GOOD)[:, None], 0)
        content = None if self.contents is None else self._check_contents(passes, safe, self.contents)
        found = [verdict != ALL_GOOD for verdict in (tags, content) if verdict is not None]
        if not found:
            return Checked(step, safe, None, None, None)
        hit = torch.stack(found).any(dim=0)
        return Checked(step, table.pages.masked_fill(hit[:, None], 0), hit, tags, content)

    def guard(self, checked: Checked, places: Sequence[int], passes: Sequence[Pass]) -> Guard:
        """For the passes at `places`, which go through the model together."""
        size = self._pool.spec.page_size
        written = [one.request.table.generations[one.start // size : -(-one.stop // size)] for one in passes]

        def expected() -> list[int]:
            rows = zip(written, passes, strict=True)
            return [
                own[position // size - one.start // size]
                for own, one in rows
                for position in range(one.start, one.stop)
            ]

        hit = None if checked.hit is None else checked.hit[list(places)]
        return Guard(hit, lambda slots: self.admit(slots, expected, checked.step))

    def admit(self, slots: torch.Tensor, expected: Callable[[], Sequence[int]], step: int) -> torch.Tensor:
        """`slots` int64 [T] of a pass of `step`, -1 for rows whose page does not have the `expected` generation any
        more. Within the step all have: no page that was given back since is anybody's yet.
        """
        if self._pool.allocator.steps_retired == step:
            return slots
        return self.tags.write(slots, torch.tensor(expected(), dtype=torch.int64, device=slots.device))

    def read(self, checked: Checked, passes: Sequence[Pass]) -> list[Hit | None]:
        """The verdict on each pass, counted by cause."""
        good = [ALL_GOOD] * len(passes)
        tags, content = (good if one is None else one.tolist() for one in (checked.tags, checked.content))
        hits = [self._classify(*one) for one in zip((one.request for one in passes), tags, content, strict=True)]
        for hit in hits:
            if hit:
                self.counters.faults[hit.cause] += 1
        return hits

    def note_computed(self, done: Pass) -> None:
        """The rows of a sound pass are in its pages."""
        if self.contents is not None:
            self._note(done.request, done.start, done.stop)

    def note_given(self, request: Request, pages: PageSet) -> None:
        """A request came with pages, which are in its table now. Raises IntegrityError for one that does not hold what
        was put into the set for the request's tokens.
        """
        if pages.digests:
            bound = self._in_transit(request, len(pages.tokens))
            table = torch.tensor(request.table.pages, dtype=torch.int32, device=self._pool.device)
            _, found = digest_pages(self._pool.tensors, table, bound)
            wrong = (one for one, (a, b) in enumerate(zip(found.tolist(), pages.digests, strict=True)) if a != b)
            if (position := next(wrong, None)) is not None:
                raise self._note_fault(request, Hit(position, Cause.HAND_OFF))
        if self.contents is not None and request.computed:
            self._note(request, 0, request.computed)

    def require_own(self, request: Request) -> None:
        """Raise IntegrityError for a page with computed tokens that is not the request's any more."""
        position = request.table.first_stale(request.computed)
        if position is not None:
            raise self._note_fault(request, Hit(position, self._cause(request, position)))

    def digests(self, request: Request) -> tuple[int, ...] | None:
        """Of the pages of a request's computed tokens, for a set of them; None where bytes are not tracked."""
        if self.contents is None:
            return None
        bound = self._in_transit(request, request.computed)
        pages = torch.tensor(request.table.pages[: len(bound.rows)], dtype=torch.int64, device=self._pool.device)
        return tuple(bound.digest(self.contents.sums[pages]).tolist())

    def forget(self, request: int) -> None:
        """A request ended."""
        self._versions.pop(request, None)
        self.tags.forget(request)
        self._prefixes.forget(request)

    def allows_retry(self, request: Request, hit: Hit, step: int) -> bool:
        """Whether a request that was hit is computed again; its page is not found by others any more."""
        if hit.position < len(request.table.given):
            self._pool.allocator.distrust(request.table.given[hit.position])
        allowed = self.budget.allows(request.retried, step)
        self.counters.retries += allowed
        self.counters.retries_refused += not allowed
        return allowed

    def error(self, request: Request, hit: Hit) -> IntegrityError:
        """The fault, as the request's user is told."""
        pages = request.table.pages
        page = pages[hit.position] if hit.position < len(pages) else _OUTSIDE
        return IntegrityError(
            f"request {request.number}: page {page} at position {hit.position}: {hit.cause.replace('_', ' ')}",
            cause=hit.cause,
            request=request.number,
            page=page,
            position=hit.position,
            hint="Nothing computed from it was used; submit the request again.",
        )

    def _note_fault(self, request: Request, hit: Hit) -> IntegrityError:
        self.counters.faults[hit.cause] += 1
        return self.error(request, hit)

    def _in_transit(self, request: Request, stop: int) -> Bound:
        """What the pages of its first `stop` tokens are bound to outside of a pool: to no generation."""
        nowhere = [NOTHING] * self._pool.spec.pages_for(stop)
        return self._prefixes.bound(request.number, request.tokens, stop, nowhere)

    def _expect(self, request: Request) -> None:
        self.tags.expect(request.number, request.table.generations)
        self._versions[request.number] = request.table.version

    def _check_contents(self, passes: Sequence[Pass], table: torch.Tensor, contents: PageContents) -> torch.Tensor:
        """For each pass the first position whose bytes are not as written, or -1: int32 [B]."""
        if not self._is_same_spec:
            return torch.zeros_like(table[:, 0])
        first = torch.full_like(table[:, 0], ALL_GOOD)
        bounds = [
            self._prefixes.bound(one.request.number, one.request.tokens, one.start, one.request.table.generations)
            for one in passes
        ]
        counts = [len(bound.rows) for bound in bounds]
        if not any(counts):
            return first
        pages = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
        for place, sound in enumerate(contents.check(pages, Bound.join(bounds)).split_with_sizes(counts)):
            if counts[place]:
                first[place] = torch.where(sound.all(), ALL_GOOD, (~sound).int().argmax())
        return first

    def _note(self, request: Request, start: int, stop: int) -> None:
        assert self.contents is not None
        size, table = self._pool.spec.page_size, request.table
        first = start // size
        bound = self._prefixes.bound(request.number, request.tokens, stop, table.generations, first)
        begin = [start % size, *[0] * (len(bound.rows) - 1)]
        self.contents.write(table.pages[first : first + len(bound.rows)], bound, begin)

    def _classify(self, request: Request, tag: int, content: int) -> Hit | None:
        if tag != ALL_GOOD:
            return Hit(tag, self._cause(request, tag))
        if content == ALL_GOOD:
            return None
        return Hit(content, Cause.CONTENT if self._is_same_spec else Cause.SCALE)

    def _cause(self, request: Request, position: int) -> Cause:
        table, allocator = request.table, self._pool.allocator
        if position >= min(len(table.pages), len(table.given)) or table.pages[position] != table.given[position]:
            return Cause.WRONG_PAGE
        page = table.given[position]
        if allocator.generations[page] == table.generations[position]:
            return Cause.TAG
        return Cause.DOUBLE_ALLOCATION if page in allocator.doubled else Cause.STALE_PAGE

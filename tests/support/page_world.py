"""A pool of two or three pages and its requests as one small value, so that all that can happen to them can be tried.

The bookkeeping is the runtime's own: `Allocator`, `BlockTable`, `BatchTables` and `StepTracker` at level `tags`. Only
the bytes are replaced: a cell holds the tokens up to its own, which is all that a row of a cache depends on. So a
request that reads another's cell, or an old one, is seen at once.

A state is a plain tuple. Pages are numbered in the order in which they are met, generations too: what differs only in
those is one state. So is what differs only in cells that nobody may read, which hold nothing, whatever was written
there (who reads one misreads it), or in a late writer whose page has moved on, which is refused from then on.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkit.choices import IntegrityLevel
from quantkit.runtime import GREEDY
from quantkit.runtime.allocator import NOTHING, Allocator
from quantkit.runtime.batch_table import BatchTables
from quantkit.runtime.integrity import StepTracker
from quantkit.runtime.requests import Request
from quantkit.runtime.scheduler import Pass
from quantkit.runtime.tables import BlockTable

SIZE = 2
MOST_TOKENS = 4
State = tuple[Any, ...]
Cell = tuple[int, ...]


class Misread(AssertionError):
    """A request read a cell that is not its own, and nothing was detected."""


@dataclass(frozen=True)
class Spec:
    """As much of a `CacheSpec` as the bookkeeping asks for."""

    page_size: int = SIZE
    digest: bytes = b"root"

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` fill."""
        return -(-tokens // self.page_size)


@dataclass
class Writing:
    """A pass whose row is not written yet: of request `owner`, token `at`, in step `step`; not alive after an abort."""

    owner: int
    at: int
    slot: int
    generation: int
    value: Cell
    step: int
    alive: bool = True


class World:
    """The pool, `prompts` of its requests, at most one pass under way, one late writer, and one set of pages."""

    def __init__(self, num_pages: int, prompts: tuple[tuple[int, ...], ...]) -> None:
        self.spec, self.device, self.num_pages = Spec(), torch.device("cpu"), num_pages
        self.allocator = Allocator(num_pages)
        self.prompts = prompts
        self.tracker = StepTracker(self, IntegrityLevel.TAGS)  # type: ignore[arg-type]
        self.tables = BatchTables(self)  # type: ignore[arg-type]
        self.cells: list[list[Cell]] = [[()] * SIZE for _ in range(num_pages)]
        self.requests: list[Request | None] = [None] * len(prompts)
        self.running: Any = None  # the step's context
        self.passing: Writing | None = None
        self.late: Writing | None = None
        self.exported: tuple[Cell, tuple[tuple[Cell, ...], ...]] | None = None
        self.detected = 0

    # what a pool has

    def copy(self, source: int, target: int) -> None:
        """Copy the cells of a page."""
        self.cells[target] = list(self.cells[source])

    # what can happen

    def actions(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """All that can happen now."""
        for number, request in enumerate(self.requests):
            if request is None:
                yield f"submit {number}", lambda number=number: self.submit(number)
                if self.exported and self.exported[0][: len(self.prompts[number])] == self.prompts[number]:
                    yield f"open {number}", lambda number=number: self.open(number)
                continue
            yield f"abort {number}", lambda number=number: self.abort(number)
            if self.passing is None and len(request.tokens) <= MOST_TOKENS and request.computed < MOST_TOKENS:
                yield f"begin {number}", lambda number=number: self.begin(number)
            if request.computed and not (self.passing and self.passing.alive and self.passing.owner == number):
                yield f"export {number}", lambda number=number: self.export(number)
                for other, taken in enumerate(self.requests):
                    if taken is None:
                        yield f"fork {number} {other}", lambda a=number, b=other: self.fork(a, b)
        if self.passing:
            yield "finish", self.finish
            if self.late is None:
                yield "leave the writer behind", self.leave
        if self.late:
            yield "late write", self.write_late

    def submit(self, number: int) -> None:
        """A request comes, and shares the known pages before its last token."""
        request = self._make(number, self.prompts[number])
        known = self.allocator.match([_prefix(request.tokens, end) for end in range(SIZE, len(request.tokens), SIZE)])
        request.table.adopt(known)
        request.computed = len(known) * SIZE

    def begin(self, number: int) -> None:
        """Its next token's pass is planned and checked, and reads its pages. One that is hit is aborted."""
        request = self.requests[number]
        assert request is not None
        at = request.computed
        if not request.table.prepare(at, at + 1):
            return
        self.running = self.allocator.step()
        step = self.running.__enter__()
        planned = Pass(request, at, at + 1)
        table = self.tables.of([request.table.pages], [at + 1])
        checked = self.tracker.check([planned], table, step)
        hits = self.tracker.read(checked, [planned])
        if hits[0]:
            self.detected += 1
            self.retire()
            self.abort(number)
            return
        self._read(request, table.pages[0].tolist())
        page = int(checked.table[0, at // SIZE])
        generation = request.table.generations[at // SIZE]
        value = tuple(request.tokens[: at + 1])
        self.passing = Writing(number, at, page * SIZE + at % SIZE, generation, value, step)

    def finish(self) -> None:
        """The pass's row is written, its step retires, and what it computed is used unless it was aborted."""
        writing, self.passing = self.passing, None
        assert writing is not None
        self._write(writing)
        request = self.requests[writing.owner]
        if request is not None and writing.alive:
            request.computed = writing.at + 1
            if request.computed == len(request.tokens):
                request.tokens.append(10 + writing.owner)
            page = writing.at // SIZE
            full = request.computed % SIZE == 0 and request.computed <= len(self.prompts[writing.owner])
            if full and request.table.is_current(page):
                self.allocator.publish(request.table.pages[page], _prefix(request.tokens, request.computed))
        self.retire()

    def leave(self) -> None:
        """The step retires with its request aborted, and the row is not written yet."""
        writing, self.passing = self.passing, None
        assert writing is not None
        if writing.alive:
            self.abort(writing.owner)
        self.late = replace(writing, alive=False)
        self.retire()

    def write_late(self) -> None:
        """The row that was left behind is written now."""
        writing, self.late = self.late, None
        assert writing is not None
        self._write(writing)

    def retire(self) -> None:
        """The step ends."""
        self.running.__exit__(None, None, None)
        self.running = None

    def abort(self, number: int) -> None:
        """A request ends; its pages are given back."""
        request = self.requests[number]
        assert request is not None
        request.table.release()
        request.table.release()  # safe to repeat
        self.tracker.forget(request.number)
        self.requests[number] = None
        if self.passing and self.passing.owner == number:
            self.passing.alive = False

    def fork(self, number: int, other: int) -> None:
        """A second request goes on from where one is."""
        origin = self.requests[number]
        assert origin is not None
        if origin.table.first_stale(origin.computed) is not None:
            self.detected += 1
            return
        request = self._make(other, tuple(origin.tokens[: max(origin.computed, len(self.prompts[number]))]))
        request.table, request.computed = origin.table.fork(origin.computed), origin.computed
        if request.computed == len(request.tokens):
            request.tokens.append(10 + other)

    def export(self, number: int) -> None:
        """Its pages are copied out of the pool."""
        request = self.requests[number]
        assert request is not None
        if request.table.first_stale(request.computed) is not None:
            self.detected += 1
            return
        pages = request.table.pages[: self.spec.pages_for(request.computed)]
        self.exported = tuple(request.tokens[: request.computed]), tuple(tuple(self.cells[page]) for page in pages)

    def open(self, number: int) -> None:
        """A request comes with the copied pages, if they fit."""
        assert self.exported is not None
        tokens, cells = self.exported
        request = self._make(number, tokens)
        if request.table.prepare(0, len(tokens)):
            for page, row in zip(request.table.pages, cells, strict=True):
                self.cells[page] = list(row)
            request.computed = len(tokens)
            request.tokens.append(10 + number)

    # how it is kept

    def check(self) -> None:
        """Every page is in one place, and has as many references as tables that were given it."""
        self.allocator.check()
        given = [page for request in self.requests if request for page in request.table.given]
        assert [given.count(page) for page in range(self.num_pages)] == self.allocator.references

    def dump(self) -> State:
        """The state, with pages and generations renumbered, and without what nobody may read."""
        self._reduce()
        allocator = self.allocator
        live = [(number, request) for number, request in enumerate(self.requests) if request]
        writers = [writing for writing in (self.passing, self.late) if writing]
        hashed = sorted(allocator._hashes, key=allocator._hashes.__getitem__)
        met = [page for _, request in live for page in (*request.table.given, *request.table.pages)]
        met += [writing.slot // SIZE for writing in writers]
        met += [*hashed, *allocator._cached, *allocator._held, *allocator._free, *range(self.num_pages)]
        pages = list(dict.fromkeys(page for page in met if 0 <= page < self.num_pages))
        at = {page: place for place, page in enumerate(pages)}
        wanted = [one for _, request in live for one in request.table.generations]
        wanted += [writing.generation for writing in writers]
        current = [allocator.generations[page] for page in pages]
        tags = [allocator.ledger.tags[page] for page in pages]
        rank = {one: place for place, one in enumerate(dict.fromkeys([*current, *tags, *wanted]))}
        place = at.get
        return (
            tuple(
                (
                    number,
                    tuple(request.tokens),
                    request.computed,
                    *(tuple(place(page, page) for page in own) for own in (request.table.pages, request.table.given)),
                    tuple(rank[one] for one in request.table.generations),
                )
                for number, request in live
            ),
            tuple(
                writing
                and (
                    writing.owner,
                    writing.at,
                    at[writing.slot // SIZE],
                    rank[writing.generation],
                    writing.value,
                    writing.step == allocator.steps_retired,
                    writing.alive,
                )
                for writing in (self.passing, self.late)
            ),
            self.exported,
            tuple(tuple(self.cells[page]) for page in pages),
            tuple(allocator.references[page] for page in pages),
            tuple(rank[one] for one in current),
            tuple(rank[one] for one in tags),
            *(tuple(at[page] for page in kept) for kept in (allocator._free, allocator._cached, allocator._held)),
            tuple((at[page], allocator._hashes[page]) for page in hashed),
            self.running is not None,
            tuple(sorted(at[page] for page in allocator.doubled)),
        )

    def load(self, state: State) -> None:
        """Be in the state."""
        requests, writers, self.exported, cells, references, current, tags, free, cached, held, hashes, runs, double = (
            state
        )
        allocator = self.allocator
        self.cells = [list(page) for page in cells]
        allocator.references[:] = references
        allocator.ledger.numbers[:] = current
        for page, tag in enumerate(tags):
            allocator.ledger.tags[page] = tag
        allocator.ledger.newest = 99  # more than any rank
        allocator._free, allocator._cached, allocator._held = deque(free), dict.fromkeys(cached), dict.fromkeys(held)
        allocator._hashes = dict(hashes)
        allocator._pages = {prefix: page for page, prefix in hashes}
        allocator._step_runs, allocator.doubled, allocator.steps_retired = runs, set(double), 1
        self.running = _Ending(allocator) if runs else None
        self.requests = [None] * len(self.prompts)
        self.tracker._versions.clear()
        for number, tokens, computed, pages, given, generations in requests:
            request = self._make(number, tokens)
            request.computed = computed
            request.table.pages, request.table.given = list(pages), list(given)
            request.table.generations = list(generations)
        self.passing, self.late = (
            one and Writing(one[0], one[1], one[2] * SIZE + one[1] % SIZE, one[3], one[4], int(one[5]), one[6])
            for one in writers
        )

    def _reduce(self) -> None:
        """Empty the cells that nobody may read, and make all late writers whose page has moved on one."""
        readable = dict.fromkeys(self.allocator._hashes, SIZE)
        for request in filter(None, self.requests):
            for place, page in enumerate(request.table.pages):
                readable[page] = max(readable.get(page, 0), request.computed - place * SIZE)
        for page, cells in enumerate(self.cells):
            for place in range(max(0, readable.get(page, 0)), SIZE):
                cells[place] = ()
        late = self.late
        if late and self.allocator.ledger.tags[late.slot // SIZE] != late.generation:
            self.late = replace(late, owner=0, at=0, slot=0, generation=NOTHING, value=())

    def _make(self, number: int, tokens: tuple[int, ...]) -> Request:
        table = BlockTable(self)  # type: ignore[arg-type]
        request = Request(number, self.prompts[number], MOST_TOKENS, GREEDY, frozenset(), table, tokens=list(tokens))
        self.requests[number] = request
        return request

    def _read(self, request: Request, pages: list[int]) -> None:
        for position in range(request.computed):
            page = pages[position // SIZE]
            if not 0 <= page < self.num_pages:
                raise Misread(f"page {page} is not in the pool")
            found, wanted = self.cells[page][position % SIZE], tuple(request.tokens[: position + 1])
            if found != wanted:
                raise Misread(f"request {request.number} reads {found} for {wanted}")

    def _write(self, writing: Writing) -> None:
        slots = torch.tensor([writing.slot])
        slot = int(self.tracker.admit(slots, lambda: [writing.generation], writing.step)[0])
        if slot != NOTHING:
            self.cells[slot // SIZE][slot % SIZE] = writing.value


class _Ending:
    """The rest of a step that was under way."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def __exit__(self, *failure: object) -> None:
        step = self._allocator.step()
        held = dict(self._allocator._held)
        step.__enter__()
        self._allocator._held = held
        step.__exit__(None, None, None)


def explore(world: World, depth: int | None = None) -> tuple[int, int, list[State]]:
    """All states within `depth` actions, each checked: how many there are, how many transitions, and the states."""
    start = world.dump()
    seen, frontier, transitions = {start}, [start], 0
    while frontier and depth != 0:
        reached = []
        for state in frontier:
            world.load(state)
            for _, act in list(world.actions()):
                world.load(state)
                act()
                world.check()
                transitions += 1
                after = world.dump()
                if after not in seen:
                    seen.add(after)
                    reached.append(after)
        frontier, depth = reached, None if depth is None else depth - 1
    return len(seen), transitions, list(seen)


def _prefix(tokens: list[int], end: int) -> bytes:
    return bytes(tokens[:end])

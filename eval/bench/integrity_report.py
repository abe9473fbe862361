"""What `bench integrity` reports: what checking pages costs, by number of requests."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.records import Report
from quantkit.tables import Line, Style, TextTable

LIMIT = 0.01  # of what `tags` may cost, upper bounds included


@dataclass(frozen=True)
class Cost:
    """A share that something takes more, 0.01 being one percent, and its 95 % interval."""

    value: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Costs:
    """What steps of one kind take more than those with `off`: all of them together, and the step at the 95th
    percentile; in CPU time and on the wall clock.
    """

    pairs: int
    cpu: Cost
    cpu_p95: Cost
    wall: Cost
    wall_p95: Cost


@dataclass(frozen=True)
class CostRow:
    """With `requests` that generate.

    pages            that a step reads and `tags` compares, at most
    cpu, wall        seconds of a step with `off`, the median
    off              another `off` beside the first: the noise
    off_holds        whether no cost of it is, judged over all rows together, other than nothing
    """

    requests: int
    pages: int
    cpu: float
    wall: float
    tags: Costs
    off: Costs
    off_holds: bool
    content: Costs | None

    def problems(self) -> Iterator[str]:
        """What is not as it must be, by CPU time."""
        for what, cost in (("throughput", self.tags.cpu), ("p95", self.tags.cpu_p95)):
            if not cost.upper < LIMIT:
                bound = f"tags cost up to {cost.upper:.2%} of {what}, and must cost less than {LIMIT:.0%}"
                yield f"{self.requests} requests: {bound}"
        if not self.off_holds:
            yield f"{self.requests} requests: steps with `off` differ from steps with `off`: the clock is not fair"


@dataclass(frozen=True)
class IntegrityCostReport(Report):
    """What integrity costs on one model; `problems` say why it has not `passed`."""

    model: str
    passed: bool
    problems: tuple[str, ...]
    rows: tuple[CostRow, ...]
    settings: dict[str, int]

    def tables(self) -> Iterator[TextTable]:
        """Costs over `off`, a line for each kind of step; what is wrong."""
        how = "prompts of {prompt_tokens:,} tokens, pages of {page_size}, {threads} threads".format(**self.settings)
        state = "passed" if self.passed else "FAILED"
        title = f"{self.model}: what a decode step costs more than with integrity off, {how}: {state}"
        headings = ("requests", "pages", "ms", "arm:", "pairs", *_headings("CPU time"), *_headings("wall clock"))
        yield TextTable(title, headings, tuple(cells for row in self.rows for cells in _lines(row)))
        if self.problems:
            yield TextTable("not as it must be", ("why:",), tuple((text,) for text in self.problems))

    def answer(self) -> Line:
        """Whether tags cost less than they may."""
        if self.passed:
            return Line(f"passed: tags cost less than {LIMIT:.0%} of a decode step", Style.GOOD)
        return Line(f"FAILED: {len(self.problems)} costs are not as they must be", Style.BAD)


def _headings(clock: str) -> tuple[str, str]:
    return f"throughput, {clock}", f"p95, {clock}"


def _lines(row: CostRow) -> Iterator[tuple[str, ...]]:
    first = f"{row.requests}", f"{row.pages:,}", f"{1e3 * row.cpu:.1f}"
    for name, costs in (("off", row.off), ("tags", row.tags), ("content", row.content)):
        if costs:
            cells = map(_cell, (costs.cpu, costs.cpu_p95, costs.wall, costs.wall_p95))
            yield (*first, name, f"{costs.pairs:,}", *cells)
            first = "", "", ""


def _cell(cost: Cost) -> str:
    return f"{cost.value:+.2%} [{cost.lower:+.2%}, {cost.upper:+.2%}]"

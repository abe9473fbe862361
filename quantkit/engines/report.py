"""What `engines` reports, and its table."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.engines import ENGINES
from quantkit.engines.rules import Status
from quantkit.records import Report
from quantkit.tables import Line, Style, TextTable


@dataclass(frozen=True)
class RuleResult:
    """What one rule says for one engine.

    status   `ok`, `warning`, `needs a flag`, `not ok` or `not applicable`
    module   the first that breaks the rule, and `modules` the number of all
    problem  what is wrong with the first
    ranks    for how many it is wrong, where that matters
    fix     the flag, or the change of a recipe or config, that helps
    source   package, file and function that the rule was read from
    """

    engine: str
    rule: str
    status: str
    demand: str
    why: str
    module: str
    modules: int
    problem: str
    ranks: int | None
    fix: str
    source: str


@dataclass(frozen=True)
class Compatibility(Report):
    """The rules of each engine and what they say of a checkpoint.

    tp      ranks that share the model; None for the usual numbers, which only warn
    passed  whether no rule is broken
    """

    checkpoint: str
    tp: int | None
    passed: bool
    results: tuple[RuleResult, ...]

    def tables(self) -> Iterator[TextTable]:
        """Rules that apply x engines; a rule that an engine has not is blank."""
        rules: dict[str, list[RuleResult]] = {}
        for result in self.results:
            if result.status != Status.NOT_APPLICABLE:
                rules.setdefault(result.rule, []).append(result)
        engines = tuple(engine.name for engine in ENGINES)
        rows = (
            (rule, *({found.engine: found.status for found in results}.get(engine, "") for engine in engines), demand)
            for rule, results in rules.items()
            for demand in [results[0].demand]
        )
        headings = ("rule", *(f"{engine}:" for engine in engines), "demand:")
        yield TextTable(f"{self.checkpoint}, {self._ranks}", headings, tuple(rows))

    def lines(self) -> Iterator[Line]:
        """What is not as it should be: where, and in words with what helps."""
        for found in self.results:
            if found.problem:
                more = f" (and {found.modules - 1:,} more)" if found.modules > 1 else ""
                text = f"{found.module}{more} {found.problem}. {found.fix}"
                yield Line(text, Style.WARNING, f"{found.engine}, {found.rule}, {found.status}")

    def answer(self) -> Line:
        """Whether a rule is broken."""
        if self.passed:
            return Line(f"{self.checkpoint}, {self._ranks}: no rule is broken", Style.GOOD)
        broken = {found.rule for found in self.results if found.status == Status.BROKEN}
        return Line(f"{self.checkpoint}, {self._ranks}: NOT OK, {len(broken)} rules are broken", Style.BAD)

    @property
    def _ranks(self) -> str:
        return "the usual numbers of ranks" if self.tp is None else f"{self.tp} ranks"

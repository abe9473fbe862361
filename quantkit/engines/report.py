"""What `engines` reports, and its table."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.engines import ENGINES
from quantkit.engines.rules import Status
from quantkit.records import Report, TextTable


@dataclass(frozen=True)
class RuleResult:
    """What one rule says for one engine.

    status   `ok`, `warning`, `needs a flag`, `not ok` or `not applicable`
    module   the first that breaks the rule, and `modules` the number of all
    problem  what is wrong with the first
    ranks    for how many it is wrong, where that matters
    mend     the flag, or the change of a recipe or config, that helps
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
    mend: str
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

    def findings(self) -> Iterator[tuple[str, str]]:
        """What is not as it should be: where, and in words with what mends it."""
        for found in self.results:
            if found.problem:
                more = f" (and {found.modules - 1:,} more)" if found.modules > 1 else ""
                text = f"{found.module}{more} {found.problem}. {found.mend}"
                yield f"{found.engine}, {found.rule}, {found.status}", text

    def table(self) -> TextTable:
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
        ranks = "the usual numbers of ranks" if self.tp is None else f"{self.tp} ranks"
        title = f"{self.checkpoint}, {ranks}: {'no rule is broken' if self.passed else 'NOT OK'}"
        return TextTable(title, ("rule", *(f"{engine}:" for engine in engines), "demand:"), tuple(rows))

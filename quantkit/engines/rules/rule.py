"""A rule of an engine, and what it says of a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from quantkit.engines.rules.facts import Facts, Module

BOTH = ("vLLM", "SGLang")


class Status(StrEnum):
    """What a rule says, from good to bad."""

    NOT_APPLICABLE = "not applicable"
    OK = "ok"
    WARNING = "warning"  # it loads and may be slow, less exact or not proved
    FLAG = "needs a flag"  # it is served rightly only with the flag that the rule names
    BROKEN = "not ok"  # it does not load, or is served wrongly


Concern = Callable[[Facts, Module], bool]
Problem = Callable[[Facts, Module, str, int], str | None]


@dataclass(frozen=True)
class Rule:
    """One thing that engines demand of a module.

    sources   engine -> file and function that it was read from
    fix       the flag or the change of a recipe or config that helps
    concerns  whether the rule is about a module
    problem   what is wrong with a module for an engine and a number of ranks, or None
    severity  the status where something is wrong
    shared    the size that the ranks share, for a rule that depends on their number
    """

    id: str
    demand: str
    why: str
    sources: Mapping[str, str]
    fix: str
    concerns: Concern
    problem: Problem
    severity: Status = Status.BROKEN
    shared: Callable[[Facts, Module], int] | None = None


@dataclass(frozen=True)
class Judgement:
    """What a rule says for one engine.

    module   the first that breaks the rule, and `modules` the number of all
    problem  what is wrong with the first
    ranks    for which it is, where the rule depends on their number
    """

    rule: Rule
    engine: str
    status: Status
    modules: int = 0
    module: str = ""
    problem: str = ""
    ranks: int | None = None

    @property
    def text(self) -> str:
        """The problem in one sentence."""
        more = f" (and {self.modules - 1:,} more)" if self.modules > 1 else ""
        return f"{self.module}{more} {self.problem}"

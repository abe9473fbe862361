"""The rule book: what vLLM 0.33.0, SGLang 0.5.23 and transformers 5.17 demand of a checkpoint, read from their sources.

facts      what the rules look at
rule       what a rule is
loading    which module may have which format
storing    how the tensors lie there
describing what the config must say
sharing    what becomes of shared experts
splitting  what tensor parallelism asks of shapes
kernels    what loads, and is slow, less exact or not proved

Paths are those of the packages: `model_executor/...` of vLLM, `srt/...` of SGLang. tests/engine_loaders holds the rules
against the loaders of vLLM 0.32.0 and SGLang 0.5.23, run on a CPU. No rule was tried on a GPU.
"""

from collections.abc import Collection, Iterator

from quantkit.engines.rules import describing, kernels, loading, sharing, splitting, storing
from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import Judgement, Rule, Status
from quantkit.errors import EngineError

__all__ = ["RULES", "Facts", "Judgement", "Module", "Rule", "Status", "judge"]

RULES: tuple[Rule, ...] = (
    *loading.RULES,
    *storing.RULES,
    *describing.RULES,
    *sharing.RULES,
    *splitting.RULES,
    *kernels.RULES,
)
_USUAL_RANKS = (1, 2, 4, 8)
_SMALLEST_PART = 128  # rows or columns; nobody gives a rank less


def judge(facts: Facts, ranks: int | None = None, *, without: Collection[str] = ()) -> Iterator[Judgement]:
    """What every rule but those called `without` says for each of its engines, in the order of the rule book.

    ranks  among which tensor parallelism shares the model; None tries the usual numbers, and only warns

    Raises EngineError for a malformed config.
    """
    facts.matchers  # noqa: B018 - a malformed config is refused here, not by the first rule that reads it
    for rule in RULES:
        if rule.id not in without:
            for engine in rule.sources:
                yield _judge(facts, rule, engine, ranks)


def _judge(facts: Facts, rule: Rule, engine: str, ranks: int | None) -> Judgement:
    concerned = [site for site in facts.sites if rule.concerns(facts, site.module)]
    if not concerned:
        return Judgement(rule, engine, Status.NOT_APPLICABLE)
    for number in ((ranks,) if ranks else _USUAL_RANKS) if rule.shared else (1,):
        usual = rule.shared is not None and ranks is None
        broken = [
            (site, problem)
            for site in concerned
            if not (usual and number > 1 and _is_unusual(facts, rule, site.module, number))
            and (problem := _problem(facts, rule, site.module, engine, number))
        ]
        if broken:
            first, problem = broken[0]
            no_target = rule.severity is Status.BROKEN and engine not in facts.targets
            status = Status.WARNING if usual or no_target else rule.severity
            count = sum(site.count for site, _ in broken)
            name = first.module.name.module
            return Judgement(rule, engine, status, count, name, problem, number if rule.shared else None)
    return Judgement(rule, engine, Status.OK)


def _is_unusual(facts: Facts, rule: Rule, module: Module, ranks: int) -> bool:
    assert rule.shared is not None
    return rule.shared(facts, module) // ranks < _SMALLEST_PART


def _problem(facts: Facts, rule: Rule, module: Module, engine: str, ranks: int) -> str | None:
    try:
        return rule.problem(facts, module, engine, ranks)
    except EngineError as error:  # the engine refuses what the config says of this module
        return f"cannot be built: {error}"

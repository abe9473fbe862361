"""What an engine could not load is refused, by name; what needs a flag or is not at its best is a warning."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantkit.checkpoint.source import Source
from quantkit.choices import ScaleMethod
from quantkit.conversion.steps import Step
from quantkit.engines.rules import Facts, Judgement, Module, Status, judge
from quantkit.errors import PlanError
from quantkit.recipe import Recipe


def planned_facts(
    source: Source, recipe: Recipe, steps: Iterable[Step], quantization_config: Mapping[str, Any] | None
) -> Facts:
    """What the engines' rules look at, of the checkpoint that `steps` of `recipe` make of `source`."""
    steps = tuple(steps)
    signed = any(step.changes and step.treatment.scale is ScaleMethod.SIGNED for step in steps)
    return Facts(
        modules=tuple(map(_module, steps)),
        config=source.text_config,
        quantization=quantization_config,
        num_hidden_layers=source.num_hidden_layers,
        signed=signed,
        targets=frozenset(recipe.engines),
        whole=source.config,
    )


def check_engines(facts: Facts) -> tuple[str, ...]:
    """Hold a planned checkpoint against every engine's rules, and return the warnings.

    Raises PlanError, naming engine, rule and module, and with what fixes it, for one that an engine could not load.
    """
    judgements = tuple(judge(facts))
    broken = next((judgement for judgement in judgements if judgement.status is Status.BROKEN), None)
    if broken:
        raise PlanError(
            f"{broken.engine} could not load this: {broken.text} (rule {broken.rule.id}: {broken.rule.demand})",
            hint=broken.rule.fix,
        )
    return tuple(_warnings(judgements))


def _warnings(judgements: Iterable[Judgement]) -> Iterator[str]:
    """One for each rule and what it says, with the engines that it is for."""
    engines: dict[tuple[str, str], list[Judgement]] = {}
    for judgement in judgements:
        if judgement.status in (Status.WARNING, Status.FLAG):
            engines.setdefault((judgement.rule.id, judgement.text), []).append(judgement)
    for (_, text), found in engines.items():
        yield f"{', '.join(judgement.engine for judgement in found)}: {text}. {found[0].rule.fix}"


def _module(step: Step) -> Module:
    leaves = frozenset(spec.name.rpartition(".")[2] for spec in step.outputs)
    return Module(step.weight.name, step.weight.shape, step.label, leaves, step.format)

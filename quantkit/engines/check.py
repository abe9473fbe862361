"""A checkpoint held against the engines' rules; nothing is run but the rules."""

from collections.abc import Iterable
from pathlib import Path

from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.source import Source
from quantkit.choices import EngineName, ScaleMethod
from quantkit.engines.report import Compatibility, RuleResult
from quantkit.engines.rules import Facts, Judgement, Status, judge
from quantkit.errors import UsageError
from quantkit.families.locate import describe_model
from quantkit.weights.encodings import NVFP4
from quantkit.weights.grouping import read_weights
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Weight


def check_compatibility(model: str | Path, *, tp: int | None = None, revision: str | None = None) -> Compatibility:
    """Hold `model` against the engines' rules: a folder, or an alias or Hub repository by its config alone.

    tp  ranks that share the model; None tries 1, 2, 4 and 8, and only warns of what does not fit

    Raises SourceError for weights that are not understood and EngineError for a malformed config.
    """
    if tp is not None and tp < 1:
        raise UsageError(f"tp is {tp}; it must be at least 1")
    source = describe_model(model, revision)
    results = tuple(map(_result, judge(_facts(source), tp)))
    passed = all(result.status != Status.BROKEN for result in results)
    return Compatibility(source.name, tp, passed, results)


def _facts(source: Source) -> Facts:
    """What is stored, and, of a folder, what its manifest and its global scales say."""
    weights = read_weights(source)
    if source.folder is None:
        return Facts.of(source, weights)
    made, unequal = read_manifest(source.folder), unequal_globals(source, weights)
    kept = {"signed": is_signed(made), "folded": made is not None and made.fold is not None}
    return Facts.of(source, weights, **kept, unequal_globals=unequal, targets=targets_of(made))


def _result(judgement: Judgement) -> RuleResult:
    rule = judgement.rule
    return RuleResult(
        engine=judgement.engine,
        rule=rule.id,
        status=judgement.status,
        demand=rule.demand,
        why=rule.why,
        module=judgement.module,
        modules=judgement.modules,
        problem=judgement.problem,
        ranks=judgement.ranks,
        fix=rule.fix,
        source=rule.sources[judgement.engine],
    )


def is_signed(made: Manifest | None) -> bool:
    """Whether the recipe in a manifest lets INT4 scales be negative."""
    return made is not None and any(rule.get("scale") == ScaleMethod.SIGNED for rule in made.recipe["rules"])


def targets_of(made: Manifest | None) -> frozenset[str]:
    """The engines that the recipe in a manifest is for; all without one."""
    return frozenset(made.recipe.get("engines", EngineName) if made else EngineName)


def unequal_globals(checkpoint: Source, weights: Iterable[Weight]) -> dict[str, str]:
    """The fused projections whose NVFP4 parts have different global scales, with these in words.

    Raises SourceError for a scale that cannot be read or is not positive.
    """
    reader = Reader(checkpoint)
    partners: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.encoding is NVFP4 and (fused := weight.name.fused_projection):
            partners.setdefault(fused, []).append(weight)
    unequal = {}
    for fused, parts in partners.items():
        values = {part.module: NVFP4.multiplier(reader, part) for part in parts}
        if len(set(values.values())) > 1:
            unequal[fused] = ", ".join(f"{value:g} of {module}" for module, value in values.items())
    return unequal

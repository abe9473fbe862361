"""A checkpoint held against the engines' rules; nothing is run but the rules."""

from pathlib import Path

from quantkit.checkpoint.engines.rules import Facts, Judgement, Status, judge
from quantkit.checkpoint.locate import describe_model
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import read_weights
from quantkit.compatibility.report import Compatibility, RuleResult
from quantkit.errors import UsageError
from quantkit.verification.soundness import is_signed, targets_of, unequal_globals


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
        mend=rule.mend,
        source=rule.sources[judgement.engine],
    )

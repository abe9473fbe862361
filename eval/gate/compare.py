"""The accuracy gate's verdict on a candidate: its answers compared with its baseline's, item by item.

The family of tests is every task and, when there are several, all their items pooled: a drop shared by all tasks shows
nowhere but there, and one more member costs the others little. Holm's procedure over this family keeps the chance of a
FAIL without any drop at most alpha. With one task the pooled items are it.

    FAIL           a member's drop is significant (McNemar, Holm) and larger than the margin; or it is significantly
                   over the margin (Tango's score test, Holm): the upper bound is below it
    PASS           else, when the pooled lower bound and that of each task with enough power are above -margin, no
                   task's drop is significant, and the items are enough to pass if all answers were equal
    CANNOT DECIDE  else

A small true drop can be called FAIL, too, when chance makes it look larger than the margin: in up to a sixth of all
runs for one of half the margin. `quantkit.eval.gate.paired` defines the statistics.

The point rule is the one that publishers of quantized models use: FAIL if a task's difference is below -margin.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from quantkit.errors import UsageError
from quantkit.eval.gate import paired
from quantkit.eval.gate.report import Comparison, Verdict

RULES = ("paired", "point")
POOL = "all tasks"  # the name of all items together
MAX_ITEMS = 10_000_000  # more than this is no advice
FORMAT_GAP = 0.1  # between two filters of one task; answers that only lack the expected form differ by this and more


@dataclass(frozen=True)
class Paired:
    """Whether each item of a task is right, 0 or 1, in the baseline's run and in the candidate's, in the same order."""

    task: str
    metric: str
    filter: str
    baseline: Sequence[float]
    candidate: Sequence[float]


@dataclass(frozen=True)
class Counts:
    """How many items of a task the baseline has right, and how many only it (lost) or only the candidate (gained)."""

    task: str
    metric: str
    filter: str
    items: int
    baseline_correct: int
    lost: int
    gained: int


@dataclass(frozen=True)
class Outcome:
    """The verdict, what decided it in sentences, and the evidence. needed_items: as in `AccuracyReport`."""

    verdict: Verdict
    reasons: tuple[str, ...]
    tasks: tuple[Comparison, ...]
    pooled: Comparison
    needed_items: int | None


@dataclass(frozen=True)
class _Member:
    """A comparison of the family with the p-value, by Holm, of the hypothesis that its drop is within the margin."""

    comparison: Comparison
    over_margin: float


def compare(pairs: Sequence[Paired], *, rule: str = "paired", max_drop: float = 0.008, alpha: float = 0.05) -> Outcome:
    """The verdict by `rule`: paired or point. UsageError for values other than 0 and 1 and for what cannot be paired.

    max_drop  the margin, a share: 0.008 is 0.8 points
    alpha     the chance of a false FAIL that is accepted
    """
    return decide([count(pair) for pair in pairs], rule=rule, max_drop=max_drop, alpha=alpha)


def count(pair: Paired) -> Counts:
    """What the items of a task come to; UsageError if they cannot be paired, or if a value is not 0 or 1."""
    if len(pair.baseline) != len(pair.candidate):
        raise UsageError(
            f"{_name(pair)}: the baseline has {len(pair.baseline)} items and the candidate {len(pair.candidate)}",
            hint="Run both with the same harness version, tasks and --limit.",
        )
    if not all(value in (0, 1) for value in (*pair.baseline, *pair.candidate)):
        raise UsageError(
            f"{_name(pair)}: its items' values are not all 0 or 1, so there are no right and wrong answers to pair",
            hint="Choose another metric, one that is 0 or 1 for each item, such as acc or exact_match.",
        )
    answers = list(zip(pair.baseline, pair.candidate, strict=True))
    return Counts(
        pair.task,
        pair.metric,
        pair.filter,
        items=len(answers),
        baseline_correct=sum(1 for before, _ in answers if before),
        lost=sum(1 for before, after in answers if before > after),
        gained=sum(1 for before, after in answers if before < after),
    )


def merge(task: str, metric: str, filter: str, counts: Sequence[Counts]) -> Counts:
    """The items of several tasks as those of one."""
    numbers = ((table.items, table.baseline_correct, table.lost, table.gained) for table in counts)
    return Counts(task, metric, filter, *map(sum, zip(*numbers, strict=True)))


def decide(counts: Sequence[Counts], *, rule: str = "paired", max_drop: float = 0.008, alpha: float = 0.05) -> Outcome:
    """The verdict on tasks that are already counted, as `compare`'s."""
    _check(counts, rule, max_drop, alpha)
    family = _measure(counts, max_drop, alpha)
    comparisons = [member.comparison for member in family]
    tasks = tuple(comparisons[: len(counts)])
    pooled = replace(comparisons[-1], task=POOL, metric="", filter="")
    if rule == "point":
        return Outcome(*_apply_point_rule(tasks, max_drop), tasks, pooled, None)
    if faults := [
        f"{_describe(member.comparison)}: {fault}." for member in family if (fault := _fault(member, max_drop, alpha))
    ]:
        return Outcome(Verdict.FAIL, tuple(faults), tasks, pooled, None)
    if doubtful := _doubtful(comparisons, len(tasks), max_drop, alpha):
        needed = _items_needed(doubtful, pooled.items, max_drop, alpha / len(family))
        reasons = [f"{_describe(doubt)}: {_explain(doubt, max_drop)}." for doubt in doubtful]
        reasons.append(
            f"About {float(f'{needed:.2g}'):.0f} items in all would decide."
            if needed
            else "More items would not decide."
        )
        return Outcome(Verdict.CANNOT_DECIDE, tuple(reasons), tasks, pooled, needed)
    reasons = [f"{_describe(comparisons[-1])}: the true drop is less than {_allowed(max_drop)}."]
    if small := sum(not task.has_power for task in tasks):
        reasons.append(f"{small} of {len(tasks)} tasks have too few items to show that by themselves.")
    return Outcome(Verdict.PASS, tuple(reasons), tasks, pooled, None)


def explain_format_gap(task: str, metric: str, items: int, correct: Mapping[str, int]) -> str | None:
    """A sentence on one run's filters of a task if they disagree so much that the answers' format must be the cause.

    correct  how many of the items each filter finds right
    """
    low, high = min(correct, key=correct.__getitem__), max(correct, key=correct.__getitem__)
    gap = (correct[high] - correct[low]) / items
    if gap < FORMAT_GAP:
        return None
    return (
        f"{task} {metric}: {low} finds {correct[low]} of {items} answers right and {high} {correct[high]}, a gap of "
        f"{100 * gap:.1f} points: a problem of the answers' format, not of accuracy; fix it or judge by {high}."
    )


def check_rule(rule: str, max_drop: float) -> None:
    """Raise UsageError for a rule or a margin that `decide` would refuse."""
    if rule not in RULES:
        raise UsageError(f"there is no rule {rule!r}", hint=f"Choose one of: {', '.join(RULES)}.")
    if not 0 < max_drop < 1:
        raise UsageError(f"max_drop is {max_drop}; it must be a share between 0 and 1", hint="0.008 is 0.8 points.")


def _check(counts: Sequence[Counts], rule: str, max_drop: float, alpha: float) -> None:
    check_rule(rule, max_drop)
    if not 0 < alpha < 0.5:
        raise UsageError(f"alpha is {alpha}; it must be between 0 and 0.5")
    if not counts:
        raise UsageError("there is no task to compare")
    seen: dict[str, str] = {}
    for table in counts:
        if table.items == 0:
            raise UsageError(f"{_name(table)} has no items")
        if table.task in seen:  # its items would count twice in the pool, as if they were more evidence
            raise UsageError(
                f"{table.task} comes twice: as {seen[table.task]} and as {_name(table)}",
                hint="Choose one metric and filter for each task.",
            )
        seen[table.task] = _name(table)


def _measure(counts: Sequence[Counts], max_drop: float, alpha: float) -> list[_Member]:
    """The family: the tasks in their order, then the pool of all their items if there are several."""
    family = [*counts, merge(POOL, "", "", counts)] if len(counts) > 1 else counts
    tables = [(table.items, table.lost, table.gained) for table in family]
    p_values = [paired.mcnemar(table.lost, table.gained) for table in family]
    over_margin = paired.holm([paired.exceeds_drop(*table, max_drop) for table in tables])
    comparisons = [
        _compare_one(table, p_value, adjusted, max_drop, alpha / len(family))
        for table, p_value, adjusted in zip(family, p_values, paired.holm(p_values), strict=True)
    ]
    return [_Member(*member) for member in zip(comparisons, over_margin, strict=True)]


def _compare_one(table: Counts, p_value: float, adjusted: float, max_drop: float, first_step: float) -> Comparison:
    """`first_step` is the level of Holm's first step, at which a single drop has to be found."""
    numbers = table.items, table.lost, table.gained
    share = paired.discordance(*numbers)
    return Comparison(
        task=table.task,
        metric=table.metric,
        filter=table.filter,
        items=table.items,
        baseline_correct=table.baseline_correct,
        candidate_correct=table.baseline_correct - table.lost + table.gained,
        lost=table.lost,
        gained=table.gained,
        difference=(table.gained - table.lost) / table.items,
        lower=paired.lower_bound(*numbers),
        upper=-paired.lower_bound(table.items, table.gained, table.lost),
        p_value=p_value,
        adjusted_p_value=adjusted,
        detectable_drop=paired.detectable_drop(table.items, share, first_step),
        has_power=paired.can_pass(table.items, share, max_drop),
    )


def _apply_point_rule(tasks: Sequence[Comparison], max_drop: float) -> tuple[Verdict, tuple[str, ...]]:
    exceeded = [_loss(task) > Fraction(str(max_drop)) for task in tasks]
    reasons = tuple(
        f"{_name(task)}: {task.baseline_correct} -> {task.candidate_correct} of {task.items} items right, "
        f"{100 * task.difference:+.3f} points: {'more' if over else 'not more'} than {_allowed(max_drop)}."
        for task, over in zip(tasks, exceeded, strict=True)
    )
    return Verdict.FAIL if any(exceeded) else Verdict.PASS, reasons


def _loss(comparison: Comparison) -> Fraction:
    return Fraction(comparison.lost - comparison.gained, comparison.items)  # exact: equal to the margin is allowed


def _drops(comparison: Comparison, alpha: float) -> bool:
    return comparison.adjusted_p_value <= alpha and comparison.difference < 0


def _fault(member: _Member, max_drop: float, alpha: float) -> str | None:
    """What makes the family fail, if this member does."""
    if member.over_margin <= alpha:
        return f"the true drop is more than {_allowed(max_drop)}"
    if _drops(member.comparison, alpha) and _loss(member.comparison) > Fraction(str(max_drop)):
        return f"a significant drop, measured as more than {_allowed(max_drop)}"
    return None


def _doubtful(comparisons: Sequence[Comparison], num_tasks: int, max_drop: float, alpha: float) -> list[Comparison]:
    """What keeps a family without failures from passing; its last member is the pool, or the only task."""
    pooled = comparisons[-1]
    unbounded = [each for each in comparisons if each.lower <= -max_drop and (each.has_power or each is pooled)]
    dropped = [task for task in comparisons[:num_tasks] if _drops(task, alpha)]
    few = [pooled] if pooled.items < paired.fewest_to_pass(max_drop) else []
    return [each for each in comparisons if each in unbounded + dropped + few]


def _explain(doubt: Comparison, max_drop: float) -> str:
    if doubt.lower <= -max_drop:
        return f"the true drop may be less or more than {_allowed(max_drop)}"
    return (
        f"a significant drop, though within {_allowed(max_drop)}" if doubt.difference < 0 else "too few items to pass"
    )


def _items_needed(doubtful: Sequence[Comparison], items: int, max_drop: float, first_step: float) -> int | None:
    """Of all tasks, in their present proportions; None for more than ten million, or if no number would do."""
    needed = float(paired.fewest_to_pass(max_drop))
    for each in doubtful:
        if each.lower > -max_drop and each.difference < 0:
            return None  # a drop that is significant and within the margin stays so
        level = paired.LEVEL if each.difference > -max_drop else 1 - first_step
        share = paired.discordance(each.items, each.lost, each.gained)
        enough = paired.items_to_decide(each.difference, share, max_drop, level, MAX_ITEMS)
        needed = max(needed, enough * items / each.items)
    return math.ceil(needed) if needed <= MAX_ITEMS else None


def _allowed(max_drop: float) -> str:
    return f"the {100 * max_drop:g} points allowed"


def _describe(comparison: Comparison) -> str:
    """A comparison in numbers, differences in points."""
    difference, lower, upper, drop = (
        100 * share for share in (comparison.difference, comparison.lower, comparison.upper, comparison.detectable_drop)
    )
    finds = f"enough to find a drop of {drop:.1f} points" if drop < 100 else "too few to find any drop"
    return (
        f"{_name(comparison)}, {comparison.items} items ({finds}): "
        f"{comparison.lost} lost, {comparison.gained} gained, {difference:+.2f} points, "
        f"one-sided 95 % bounds {lower:+.2f} and {upper:+.2f}, p = {comparison.p_value:.2g} "
        f"({comparison.adjusted_p_value:.2g} by Holm)"
    )


def _name(task: Paired | Counts | Comparison) -> str:
    """As the harness writes it: `gsm8k exact_match,strict-match`."""
    return f"{task.task} {','.join(filter(None, (task.metric, task.filter)))}".rstrip()

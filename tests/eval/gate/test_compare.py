"""The gate's verdicts keep their promised rates in simulation, and come out right where other gates were wrong."""

import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest

from quantkit.errors import UsageError
from quantkit.eval.gate import paired
from quantkit.eval.gate.compare import Counts, Outcome, Paired, compare, count, decide, explain_format_gap
from quantkit.eval.gate.report import Comparison, Verdict
from support.tiers import exhaustive

MARGIN, ALPHA = 0.008, 0.05
DISCORDANT = [0.03, 0.06, 0.1, 0.15]
GSM8K = 1319


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of a table are computed once: simulations meet the same ones again and again."""
    for name in ("mcnemar", "exceeds_drop", "lower_bound", "can_pass", "detectable_drop", "items_to_decide"):
        monkeypatch.setattr(paired, name, functools.cache(getattr(paired, name)))


def table(items: int, lost: int, gained: int, task: str = "gsm8k") -> Counts:
    """A task of which the baseline has every item right that can be."""
    return Counts(task, "exact_match", "strict-match", items, items - gained, lost, gained)


def simulate(tasks: Sequence[int], discordant: float, drop: float, runs: int, seed: int = 0) -> dict[Verdict, float]:
    """The share of each verdict over `runs` comparisons of tasks with so many items and the same true drop."""
    random = np.random.default_rng(seed)
    shares = [(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant]
    draws = np.stack([random.multinomial(items, shares, runs)[:, :2] for items in tasks], axis=1)
    families, frequency = np.unique(draws, axis=0, return_counts=True)
    verdicts: Counter[Verdict] = Counter()
    for family, times in zip(families.tolist(), frequency.tolist(), strict=True):
        counts = [
            table(items, pair[0], pair[1], f"task {i}")
            for i, (items, pair) in enumerate(zip(tasks, family, strict=True))
        ]
        verdicts[decide(counts).verdict] += times
    return {verdict: verdicts[verdict] / runs for verdict in Verdict}


def noise(rate: float, runs: int) -> float:
    """Three standard errors of a simulated rate."""
    return 3 * math.sqrt(rate * (1 - rate) / runs)


@pytest.mark.parametrize("discordant", DISCORDANT)
@pytest.mark.parametrize("items", [50, 246, GSM8K])
def test_false_fail_is_at_most_alpha(items: int, discordant: float) -> None:
    """A candidate without a drop fails in at most alpha of all runs."""
    rates = simulate([items], discordant, 0.0, runs=2000)

    assert rates[Verdict.FAIL] <= ALPHA + noise(ALPHA, 2000)


@pytest.mark.parametrize("discordant", [0.03, 0.15])
@pytest.mark.parametrize(("number", "items"), [(5, GSM8K), exhaustive(60, 246)])
def test_false_fail_is_at_most_alpha_for_many_tasks(number: int, items: int, discordant: float) -> None:
    """Alpha is for the whole family: sixty tasks give no more false alarms than one."""
    rates = simulate([items] * number, discordant, 0.0, runs=400)

    assert rates[Verdict.FAIL] <= ALPHA + noise(ALPHA, 400)


@pytest.mark.parametrize("discordant", DISCORDANT)
@pytest.mark.parametrize("items", [GSM8K, exhaustive(5000)])
def test_small_drops_fail_rarely(items: int, discordant: float) -> None:
    """A true drop of half the margin is mistaken for one over it in at most a sixth of all runs."""
    rates = simulate([items], discordant, MARGIN / 2, runs=2000)

    assert rates[Verdict.FAIL] <= 1 / 6 + noise(1 / 6, 2000)


@pytest.mark.parametrize("discordant", [0.03, 0.06, 0.1])
def test_three_points_are_caught(discordant: float) -> None:
    """A true drop of three points in 1319 items fails in at least 80 % of all runs."""
    assert simulate([GSM8K], discordant, 0.03, runs=2000)[Verdict.FAIL] >= 0.8


def test_a_drop_of_all_tasks_is_caught_in_the_pool() -> None:
    """Sixty tasks that lose 1.5 points each fail together in at least 80 % of all runs, though each has few items."""
    assert simulate([246] * 60, 0.1, 0.015, runs=200)[Verdict.FAIL] >= 0.8


def test_fifty_items_never_pass() -> None:
    """No outcome of 50 items is a PASS, not even without a single lost one."""
    verdicts = {decide([table(50, lost, gained)]).verdict for lost in range(51) for gained in range(51 - lost)}

    assert verdicts == {Verdict.FAIL, Verdict.CANNOT_DECIDE}


@pytest.mark.parametrize("discordant", DISCORDANT)
@pytest.mark.parametrize("items", [GSM8K, exhaustive(5000)])
def test_false_pass_is_rare(items: int, discordant: float) -> None:
    """A true drop of the margin passes in at most 5 % of all runs."""
    assert simulate([items], discordant, MARGIN, runs=2000)[Verdict.PASS] <= 0.05 + noise(0.05, 2000)


def test_enough_items_pass() -> None:
    """Without a drop, a task with just enough power passes in about 80 % of all runs."""
    items = next(n for n in range(3000, 10_000, 100) if paired.can_pass(n, 0.06, MARGIN))

    assert 0.8 - noise(0.8, 2000) <= simulate([items], 0.06, 0.0, runs=2000)[Verdict.PASS] <= 0.85


@pytest.mark.parametrize(("lost", "gained", "verdict"), [(66, 66, Verdict.PASS), (80, 58, Verdict.FAIL)])
def test_needed_items_decide(lost: int, gained: int, verdict: Verdict) -> None:
    """With so many items as CANNOT DECIDE asks for, 80 % of all runs decide if nothing else changes."""
    outcome = decide([table(GSM8K, lost, gained)])

    assert outcome.verdict is Verdict.CANNOT_DECIDE
    assert outcome.needed_items
    assert outcome.needed_items < 20_000
    assert outcome.reasons[-1] == f"About {round(outcome.needed_items, -2)} items in all would decide."
    drop = (lost - gained) / GSM8K
    rates = simulate([outcome.needed_items], (lost + gained) / GSM8K, drop, runs=2000)
    assert rates[verdict] >= 0.8 - noise(0.8, 2000)


def test_no_number_of_items_decides_at_the_margin() -> None:
    """A difference that equals the margin asks for no number of items."""
    outcome = decide([table(1250, 60, 50)])

    assert outcome.verdict is Verdict.CANNOT_DECIDE
    assert outcome.needed_items is None
    assert "More items would not decide." in outcome.reasons


def test_a_paired_drop_fails() -> None:
    """25 of 220 items lost and 9 gained fail, with p = .009, though the unpaired z test sees nothing (case D03)."""
    outcome = decide([Counts("gsm8k", "exact_match", "strict-match", 220, 165, 25, 9)])

    assert outcome.verdict is Verdict.FAIL
    assert outcome.tasks[0].candidate_correct == 149
    assert outcome.tasks[0].p_value == pytest.approx(0.009, abs=0.0005)
    assert outcome.tasks[0].detectable_drop == pytest.approx(0.08, abs=0.01)
    for part in ("gsm8k exact_match,strict-match, 220 items", "25 lost, 9 gained", "-7.27 points", "p = 0.009", "0.8"):
        assert part in outcome.reasons[0]


def test_point_rule_on_the_published_table() -> None:
    """GSM8K's 94.39 -> 93.56 fails on exact match and 94.24 -> 93.48 passes on flexible, without rounding."""
    for name, before, after, verdict in [
        ("strict-match", 1245, 1234, Verdict.FAIL),
        ("flexible-extract", 1243, 1233, Verdict.PASS),
    ]:
        baseline, candidate = ([1] * right + [0] * (GSM8K - right) for right in (before, after))
        outcome = compare([Paired("gsm8k", "exact_match", name, baseline, candidate)], rule="point")

        assert outcome.verdict is verdict
        assert f"gsm8k exact_match,{name}: {before} -> {after} of 1319 items right" in outcome.reasons[0]


@pytest.mark.parametrize(("items", "max_drop"), [(1250, 0.008), (1000, 0.009), (10, 0.3), (1000, 0.029)])
def test_point_rule_is_exact(items: int, max_drop: float) -> None:
    """A drop equal to the margin passes and one item more fails, whatever the margin's binary fraction is."""
    allowed = round(items * max_drop)

    assert decide([table(items, allowed, 0)], rule="point", max_drop=max_drop).verdict is Verdict.PASS
    assert decide([table(items, allowed + 1, 0)], rule="point", max_drop=max_drop).verdict is Verdict.FAIL


def test_one_bad_task_fails_by_name() -> None:
    """A task's significant drop fails although all items together would pass."""
    outcome = decide([table(20_000, 100, 100, "large"), table(200, 18, 2, "small")])

    assert outcome.pooled.lower > -MARGIN
    assert outcome.verdict is Verdict.FAIL
    assert [reason.split(",")[0] for reason in outcome.reasons] == ["small exact_match"]


def test_a_task_with_power_must_pass_itself() -> None:
    """A task with enough items blocks if its own bound is beyond the margin, and one with too few does not."""
    blocked = decide([table(10_000, 20, 20, "a"), table(5000, 95, 65, "b")])
    passed = decide([table(10_000, 20, 20, "a"), table(100, 5, 5, "b")])

    assert [task.has_power for task in (*blocked.tasks, *passed.tasks)] == [True, True, True, False]
    assert blocked.pooled.lower > -MARGIN
    assert blocked.verdict is Verdict.CANNOT_DECIDE
    assert blocked.reasons[0].startswith("b exact_match,strict-match, 5000 items")
    assert blocked.needed_items
    assert blocked.needed_items > 15_000
    assert passed.verdict is Verdict.PASS
    assert passed.reasons[1].startswith("1 of 2 tasks")


def test_a_significant_drop_within_the_margin_does_not_pass() -> None:
    """A task's drop that is real but small is left to a person, and no number of items is asked for."""
    outcome = decide([table(40_000, 300, 220)])

    assert outcome.tasks[0].lower > -MARGIN
    assert outcome.verdict is Verdict.CANNOT_DECIDE
    assert outcome.needed_items is None
    assert "a significant drop, though within the 0.8 points allowed" in outcome.reasons[0]


def test_a_significant_gain_passes() -> None:
    """A candidate that is better than its baseline passes, also with too few items to show that an equal one is."""
    outcome = decide([table(GSM8K, 40, 80)])

    assert outcome.verdict is Verdict.PASS
    assert outcome.tasks[0].adjusted_p_value < ALPHA
    assert not outcome.tasks[0].has_power


def test_pool_sums_all_items() -> None:
    """The pooled comparison is that of all items of all tasks, and one member more of Holm's family."""
    outcome = decide([table(100, 9, 2, "a"), table(300, 5, 6, "b")])

    pooled = outcome.pooled
    assert (pooled.task, pooled.metric, pooled.filter) == ("all tasks", "", "")
    assert (pooled.items, pooled.lost, pooled.gained) == (400, 14, 8)
    assert (pooled.baseline_correct, pooled.candidate_correct) == (98 + 294, 91 + 295)
    assert outcome.tasks[0].adjusted_p_value == pytest.approx(3 * outcome.tasks[0].p_value)
    assert outcome.tasks[0].upper < -MARGIN  # at its own 5 %, not at a third of it
    assert outcome.verdict is Verdict.CANNOT_DECIDE


def test_a_single_task_is_the_pool() -> None:
    """With one task the pooled comparison is the task's, and nothing is adjusted."""
    outcome = decide([table(220, 25, 9)])

    def numbers(comparison: Comparison) -> dict[str, object]:
        return {key: value for key, value in asdict(comparison).items() if key not in ("task", "metric", "filter")}

    assert numbers(outcome.pooled) == numbers(outcome.tasks[0])
    assert outcome.tasks[0].adjusted_p_value == outcome.tasks[0].p_value


@pytest.mark.parametrize("kind", [bool, int, float, np.bool_])
def test_items_are_counted(kind: type) -> None:
    """Right answers come as booleans, integers, floats or numpy's, and the counts are plain numbers."""
    baseline, candidate = ([kind(value) for value in values] for values in ([1, 1, 1, 0, 0], [1, 0, 0, 1, 0]))

    counts = count(Paired("arc", "acc", "", baseline, candidate))

    assert counts == Counts("arc", "acc", "", items=5, baseline_correct=3, lost=2, gained=1)
    assert json.dumps(asdict(decide([counts]).pooled))


@pytest.mark.parametrize("value", [0.5, 2, math.nan, None, "1"])
def test_other_values_are_refused(value: object) -> None:
    """A metric that is not 0 or 1 for each item is refused by name, with the remedy."""
    with pytest.raises(UsageError, match=r"squad f1,none: its items' values are not all 0 or 1") as caught:
        compare([Paired("squad", "f1", "none", [1, value], [1, 0])])  # type: ignore[list-item]

    assert "another metric" in str(caught.value.hint)


def test_what_cannot_be_paired_is_refused() -> None:
    """Different lengths, no items, no tasks and the same task twice are errors that name the task."""
    with pytest.raises(UsageError, match="gsm8k acc: the baseline has 2 items and the candidate 1"):
        compare([Paired("gsm8k", "acc", "", [1, 0], [1])])
    with pytest.raises(UsageError, match="gsm8k acc has no items"):
        compare([Paired("gsm8k", "acc", "", [], [])])
    with pytest.raises(UsageError, match="no task"):
        compare([])
    with pytest.raises(UsageError, match="gsm8k comes twice"):
        decide([table(100, 1, 1), table(100, 2, 2)])


@pytest.mark.parametrize(
    "options", [{"max_drop": 0}, {"max_drop": 1.0}, {"max_drop": math.nan}, {"alpha": 0}, {"alpha": 0.5}, {"rule": "p"}]
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    """A margin or an alpha that means nothing, and an unknown rule, are usage errors."""
    with pytest.raises(UsageError, match=next(iter(options))):
        decide([table(100, 1, 1)], **options)  # type: ignore[arg-type]


def test_format_gap_is_told() -> None:
    """A strict filter at 0 % and a flexible one at 55 % are reported as a problem of the format (case D06)."""
    sentence = explain_format_gap("gsm8k", "exact_match", GSM8K, {"strict-match": 0, "flexible-extract": 725})

    assert sentence
    for part in ("gsm8k exact_match: strict-match finds 0 of 1319", "flexible-extract 725", "55.0 points", "format"):
        assert part in sentence
    assert explain_format_gap("gsm8k", "exact_match", GSM8K, {"strict-match": 1245, "flexible-extract": 1243}) is None


@pytest.mark.parametrize("items", [1, 3, 20])
def test_few_items_get_a_verdict(items: int) -> None:
    """The smallest tasks, lost or gained as a whole, neither crash nor pass."""
    for lost, gained in ((0, 0), (items, 0), (0, items)):
        outcome: Outcome = decide([table(items, lost, gained)])

        assert outcome.verdict is not Verdict.PASS
        assert 0 < outcome.pooled.detectable_drop <= 1

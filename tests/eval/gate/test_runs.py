"""Two runs are compared only if nothing but the weights differs and both are sound; each refusal names its cause."""

from dataclasses import replace
from typing import Any

import pytest

from quantkit.errors import UsageError
from quantkit.eval.gate.runs import (
    Fault,
    Item,
    TaskRun,
    find_faults,
    find_format_gap,
    find_incomparable,
    pair,
    summarize_settings,
)
from quantkit.eval.gate.task_specs import TaskSpec

STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"
SETTINGS: dict[str, Any] = {
    "lm_eval": "0.4.13",
    "transformers": "5.17.0",
    "torch": "2.13.0",
    "backend": "hf",
    "dtype": "float32",
    "definition": "1f3a",
    "version": "3",
    "num_fewshot": 5,
    "items": 100,
    "seed": 0,
    "generation": {"until": ["Question:"], "do_sample": False, "temperature": 0.0},
    "generation_defaults": {"eos_token_id": [1, 2]},
    "chat_template": "9c2e",
}
DIFFERENT: dict[str, Any] = {
    "lm_eval": "0.4.9",
    "transformers": "5.0.0",
    "torch": "2.6.0",
    "backend": "vllm",
    "dtype": "bfloat16",
    "definition": "77d0",
    "version": "2",
    "num_fewshot": 0,
    "items": 50,
    "seed": 1,
    "generation": {"until": ["Question:"], "do_sample": True, "temperature": 0.6},
    "generation_defaults": {"eos_token_id": [1, 2], "temperature": 1.0},
    "chat_template": "none",
}


def make_run(items: int = 100, strict: int = 60, flexible: int = 60, **settings: Any) -> TaskRun:
    """A run of gsm8k whose first items are right, so many by each filter."""
    scores = [{STRICT: float(number < strict), FLEXIBLE: float(number < flexible)} for number in range(items)]
    return TaskRun(
        "gsm8k",
        SETTINGS | settings,
        {STRICT: True, FLEXIBLE: True},
        tuple(Item(f"document {number}", f"prompt {number}", scores[number]) for number in range(items)),
        seconds=1.5,
    )


def change_items(run: TaskRun, number: int, **changes: Any) -> TaskRun:
    """The run with the first `number` items changed."""
    return replace(run, items=(*(replace(item, **changes) for item in run.items[:number]), *run.items[number:]))


def test_json_gives_the_run_back() -> None:
    """What `to_json` writes, `from_json` reads: items, scores, faults and settings."""
    run = change_items(make_run(), 3, faults=(Fault.ANSWER_CUT, Fault.EMPTY))

    assert TaskRun.from_json(run.to_json()) == run


@pytest.mark.parametrize("text", ["", "3", "null", "[]", "{}", '{"schema": 0}', '{"schema": 1, "items": [{}]}'])
def test_json_of_anything_else_is_refused(text: str) -> None:
    """Text that is no run of this version raises one of three errors, so that it can be told from a bug."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        TaskRun.from_json(text)


# --- what a run is judged by (case D06)


@pytest.mark.parametrize(
    "spec",
    [
        TaskSpec("gsm8k", "exact_match", "strict-match"),
        TaskSpec("gsm8k", None, "strict-match"),
    ],
)
def test_judged_by_the_named_filter(spec: TaskSpec) -> None:
    """A metric and filter that are named are taken."""
    assert make_run().judged_by(spec) == STRICT


@pytest.mark.parametrize("spec", [TaskSpec("gsm8k"), TaskSpec("gsm8k", "exact_match")])
def test_several_filters_must_be_told_apart(spec: TaskSpec) -> None:
    """No filter is picked among several: neither the kind one nor the strict one; the message shows both."""
    with pytest.raises(UsageError, match="has several filters") as caught:
        make_run().judged_by(spec)

    assert STRICT in str(caught.value)
    assert FLEXIBLE in str(caught.value)
    assert caught.value.hint == "Name one: --tasks gsm8k:METRIC,FILTER."


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (TaskSpec("gsm8k", "acc"), "acc,any"),
        (TaskSpec("gsm8k", "exact_match", "none"), "exact_match,none"),
        (TaskSpec("gsm8k", None, "none"), "metric,none"),
    ],
)
def test_unknown_metric_or_filter_is_refused(spec: TaskSpec, missing: str) -> None:
    """A metric or filter that the task does not have is named, with those that it has."""
    with pytest.raises(UsageError, match=f"gsm8k has no {missing}: {STRICT}; {FLEXIBLE}"):
        make_run().judged_by(spec)


def test_first_metric_of_one_filter_is_taken() -> None:
    """With one filter there is nothing to tell apart, and the task's first metric counts unless another is named."""
    run = replace(make_run(), higher={"acc,none": True, "acc_norm,none": True})

    assert run.judged_by(TaskSpec("gsm8k")) == "acc,none"
    assert run.judged_by(TaskSpec("gsm8k", "acc_norm")) == "acc_norm,none"


def test_metric_of_which_less_is_better_is_refused() -> None:
    """A perplexity has no right and wrong answers, and its drop is no loss."""
    run = replace(make_run(), higher={"ppl,none": False, "acc,none": True})

    with pytest.raises(UsageError, match="less is better of ppl,none"):
        run.judged_by(TaskSpec("gsm8k", "ppl"))


# --- comparability (cases D04 and D08)


def test_equal_runs_are_comparable() -> None:
    """Other scores and other times are no reason not to compare."""
    assert find_incomparable(make_run(), replace(make_run(strict=10), seconds=99.0)) == []


@pytest.mark.parametrize("field", SETTINGS)
def test_each_setting_is_compared(field: str) -> None:
    """A setting that differs is refused by its name, with both values."""
    other = replace(make_run(), settings=SETTINGS | {field: DIFFERENT[field]})

    found = find_incomparable(make_run(), other)

    assert found == [
        f"gsm8k: {field} is {SETTINGS[field]!r} for the baseline and {DIFFERENT[field]!r} for the candidate"
    ]


def test_a_setting_of_one_run_only_is_compared() -> None:
    """What an older run did not record is not taken for equal."""
    older = make_run()
    del older.settings["generation_defaults"]

    assert "generation_defaults is None for the baseline" in find_incomparable(older, make_run())[0]
    assert "and None for the candidate" in find_incomparable(make_run(), older)[0]


def test_number_of_items_is_compared() -> None:
    """Runs of more and of fewer items are refused, even if their settings say the same."""
    found = find_incomparable(make_run(), make_run(items=98))

    assert found == ["gsm8k: the number of items is 100 for the baseline and 98 for the candidate"]


@pytest.mark.parametrize("field", ["document", "prompt"])
def test_each_item_is_compared(field: str) -> None:
    """Another document, or another prompt as by a lost chat template, is counted over the items."""
    found = find_incomparable(make_run(), change_items(make_run(), 7, **{field: "another"}))

    assert found == [f"gsm8k: 7 of 100 items have another {field}"]


def test_all_differences_are_found() -> None:
    """One refusal does not hide another."""
    found = find_incomparable(make_run(), change_items(make_run(seed=1, lm_eval="0.5"), 1, document="x", prompt="y"))

    assert [sentence.split()[1] for sentence in found] == ["lm_eval", "seed", "1", "1"]


# --- soundness (cases D01 and D07)


def test_sound_run_has_no_faults() -> None:
    """A run without a fault gives neither a refusal nor a warning."""
    assert find_faults(make_run(), "baseline") == ([], [])


def test_faults_are_counted_by_cause() -> None:
    """7 % errors and 3 % empty answers make a run invalid, with the count and share of each cause."""
    run = change_items(make_run(), 7, faults=(Fault.ERROR,))
    run = replace(run, items=(*run.items[:-3], *(replace(item, faults=(Fault.EMPTY,)) for item in run.items[-3:])))

    invalid, tolerated = find_faults(run, "candidate")

    assert invalid == [
        "gsm8k, candidate: 3 of 100 items (3.0%): empty answer",
        "gsm8k, candidate: 7 of 100 items (7.0%): error",
    ]
    assert tolerated == []


@pytest.mark.parametrize(("items", "faulty", "tolerated"), [(100, 1, True), (100, 2, False), (99, 1, False)])
@pytest.mark.parametrize("fault", Fault)
def test_one_item_in_a_hundred_may_be_faulty(fault: Fault, items: int, faulty: int, tolerated: bool) -> None:
    """Up to one per cent of a cause is worth a warning; more makes the run invalid."""
    found = find_faults(change_items(make_run(items), faulty, faults=(fault,)), "baseline")

    sentence = f"gsm8k, baseline: {faulty} of {items} items ({faulty / items:.1%}): {fault}"
    assert found == (([], [sentence]) if tolerated else ([sentence], []))


def test_strict_and_flexible_filter_far_apart_is_a_format_problem() -> None:
    """0 % by the strict filter and 55 % by the flexible one is called a problem of the format, whichever judges."""
    run = make_run(strict=0, flexible=55)

    for judged_by in (STRICT, FLEXIBLE):
        gap = find_format_gap(run, judged_by)
        assert gap is not None
        assert "strict-match finds 0 of 100 answers right and flexible-extract 55" in gap
        assert "a problem of the answers' format, not of accuracy" in gap


def test_near_filters_and_other_metrics_have_no_format_gap() -> None:
    """Filters that nearly agree, a single filter, and a gap between two metrics say nothing of the format."""
    metrics = {"acc,none": True, "acc_norm,none": True}
    items = tuple(Item(str(number), "", {"acc,none": 0.0, "acc_norm,none": 1.0}) for number in range(100))

    assert find_format_gap(make_run(strict=55, flexible=60), STRICT) is None
    assert find_format_gap(TaskRun("arc", {}, metrics, items), "acc,none") is None


# --- what goes on to the verdict


def test_pair_takes_the_scores_of_one_metric_and_filter() -> None:
    """The scores of both runs come in the items' order, under the names of the metric and the filter."""
    paired = pair(make_run(items=4, strict=2), make_run(items=4, strict=1, flexible=3), STRICT)

    assert (paired.task, paired.metric, paired.filter) == ("gsm8k", "exact_match", "strict-match")
    assert paired.baseline == [1, 1, 0, 0]
    assert paired.candidate == [1, 0, 0, 0]


def test_settings_are_summarized() -> None:
    """What all runs share is said once, and what differs under each task's name."""
    other = replace(make_run(num_fewshot=25), task="arc_challenge")

    summary = summarize_settings([make_run(), other])

    assert summary.pop("tasks") == {"gsm8k": {"num_fewshot": 5}, "arc_challenge": {"num_fewshot": 25}}
    assert summary == {name: value for name, value in SETTINGS.items() if name != "num_fewshot"}
    assert summarize_settings([]) == {}

"""What the gate runs is named as lm-eval names it."""

from collections.abc import Iterator
from typing import Any

import pytest

from quantkit.errors import UsageError
from quantkit.eval.gate import accuracy
from quantkit.eval.gate.task_specs import PUBLISHED, TaskSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("arc_easy", TaskSpec("arc_easy")),
        ("arc_easy:acc_norm", TaskSpec("arc_easy", "acc_norm")),
        ("gsm8k:exact_match,strict-match", TaskSpec("gsm8k", "exact_match", "strict-match")),
    ],
)
def test_parse(text: str, spec: TaskSpec) -> None:
    """A task, its metric and its filter, each of which needs those before it."""
    assert TaskSpec.parse(text) == spec


@pytest.mark.parametrize("text", ["", ":acc", "arc_easy:", "arc_easy:,none", "gsm8k:exact_match,", "gsm8k:,"])
def test_parse_refuses_anything_else(text: str) -> None:
    """A part that is announced and left out is refused, with the three forms that there are."""
    with pytest.raises(UsageError, match=f"--tasks {text}: not a task") as caught:
        TaskSpec.parse(text)

    assert caught.value.hint == "Write TASK, TASK:METRIC or TASK:METRIC,FILTER."


def leaves(index: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The definitions of a task, or of all tasks in a group or under a tag."""
    entry = index[name]
    kind = entry.kind.name
    if kind == "TASK":
        yield entry.cfg
    else:
        for child in entry.cfg["task"] if kind == "GROUP" else sorted(entry.tags):
            yield from leaves(index, child)


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize(
    ("spec", "tasks"),
    list(zip(PUBLISHED, (1, 1, 1, 57, 14), strict=True)),
    ids=[spec.name for spec in PUBLISHED],
)
def test_published_tasks_are_those_of_the_harness(spec: TaskSpec, tasks: int) -> None:
    """Each task of the suite exists, and it and all that it stands for have the metric and the filter named."""
    definitions = list(leaves(accuracy._task_manager().task_index, spec.name))

    assert len(definitions) == tasks
    for definition in definitions:
        assert spec.metric in [metric["metric"] for metric in definition["metric_list"]]
        assert spec.filter in [each["name"] for each in definition.get("filter_list", [{"name": "none"}])]

"""What one checkpoint answered to one task, item by item, and whether two such runs may be compared at all."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from quantkit.errors import UsageError
from quantkit.eval.gate.compare import Paired, explain_format_gap
from quantkit.eval.gate.task_specs import TaskSpec

FAULTS_ALLOWED = 0.01  # of a run's items, by each cause; with more it measures the harness, not the model
SCHEMA = 1  # of runs that are kept: others are run anew


class Fault(StrEnum):
    """Why an item's score says nothing of the model."""

    ANSWER_CUT = "answer cut at the token cap"
    PROMPT_CUT = "prompt cut to the model's length"
    EMPTY = "empty answer"
    NOT_A_NUMBER = "likelihood that is not a number"
    ERROR = "error"


@dataclass(frozen=True)
class Item:
    """One item: hashes of the document and of the prompt that the model saw, scores by `metric,filter`, faults."""

    document: str
    prompt: str
    scores: dict[str, float]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskRun:
    """One task's items and all that they depend on but the weights.

    settings  harness and library versions, hash of the task's definition, few-shot, limit, seed, sampling, template
    higher    of each `metric,filter`, whether more is better
    pages     dtype and KV scales of the model's cache, if it has pages: they are compared as the weights are
    remarks   what is to be said of the pass that this run was part of
    """

    task: str
    settings: dict[str, Any]
    higher: dict[str, bool]
    items: tuple[Item, ...]
    seconds: float = 0.0
    pages: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The run as JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "TaskRun":
        """The run that `to_json` wrote; ValueError, KeyError or TypeError if it is none."""
        content = dict(json.loads(text))
        if content.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        items = tuple(Item(**(item | {"faults": tuple(item["faults"])})) for item in content.pop("items"))
        remarks = tuple(content.pop("remarks", ()))
        return cls(items=items, remarks=remarks, **content)

    def judged_by(self, spec: TaskSpec) -> str:
        """The `metric,filter` that `spec` names; UsageError if there is none such, or if it must be told."""
        fitting = [
            key
            for key in self.higher
            if spec.metric in (None, key.partition(",")[0]) and spec.filter in (None, key.partition(",")[2])
        ]
        if not fitting or len({key.partition(",")[2] for key in fitting}) > 1:
            problem = "has several filters" if fitting else f"has no {spec.metric or 'metric'},{spec.filter or 'any'}"
            raise UsageError(
                f"{self.task} {problem}: {'; '.join(self.higher)}",
                hint=f"Name one: --tasks {spec.name}:METRIC,FILTER.",
            )
        if not self.higher[fitting[0]]:
            raise UsageError(f"{self.task}: less is better of {fitting[0]}", hint="Choose another metric.")
        return fitting[0]


def find_incomparable(baseline: TaskRun, candidate: TaskRun) -> list[str]:
    """Each thing in which two runs of a task differ though only the weights should; a sentence that names the field."""
    found = []
    for name in sorted(baseline.settings.keys() | candidate.settings.keys()):
        ours, theirs = candidate.settings.get(name), baseline.settings.get(name)
        if ours != theirs:
            found.append(f"{baseline.task}: {name} is {theirs!r} for the baseline and {ours!r} for the candidate")
    if len(baseline.items) != len(candidate.items):
        numbers = f"{len(baseline.items)} for the baseline and {len(candidate.items)} for the candidate"
        return [*found, f"{baseline.task}: the number of items is {numbers}"]
    for name in ("document", "prompt"):
        pairs = zip(baseline.items, candidate.items, strict=True)
        if different := sum(getattr(one, name) != getattr(other, name) for one, other in pairs):
            found.append(f"{baseline.task}: {different} of {len(baseline.items)} items have another {name}")
    return found


def find_faults(run: TaskRun, arm: str) -> tuple[list[str], list[str]]:
    """The causes, in sentences, that make a run invalid, and those that are too rare for that."""
    counts = Counter(fault for item in run.items for fault in item.faults)
    invalid: list[str] = []
    tolerated: list[str] = []
    for fault, count in sorted(counts.items()):
        sentence = f"{run.task}, {arm}: {count} of {len(run.items)} items ({count / len(run.items):.1%}): {fault}"
        (invalid if count > FAULTS_ALLOWED * len(run.items) else tolerated).append(sentence)
    return invalid, tolerated


def find_format_gap(run: TaskRun, judged_by: str) -> str | None:
    """A sentence if the filters of the metric that a run is judged by disagree as only a format problem can."""
    metric = judged_by.partition(",")[0]
    correct = {
        key.partition(",")[2]: sum(item.scores[key] == 1 for item in run.items)
        for key in run.higher
        if key.partition(",")[0] == metric
    }
    return explain_format_gap(run.task, metric, len(run.items), correct) if len(correct) > 1 else None


def pair(baseline: TaskRun, candidate: TaskRun, judged_by: str) -> Paired:
    """The scores of two comparable runs of a task."""
    scores = ([item.scores[judged_by] for item in run.items] for run in (baseline, candidate))
    metric, _, chosen = judged_by.partition(",")
    return Paired(baseline.task, metric, chosen, *scores)


def summarize_settings(runs: Sequence[TaskRun]) -> dict[str, Any]:
    """What the runs share, and by task what they do not."""
    if not runs:
        return {}
    common = {key: value for key, value in runs[0].settings.items() if all(r.settings.get(key) == value for r in runs)}
    own = {run.task: {key: value for key, value in run.settings.items() if key not in common} for run in runs}
    return common | {"tasks": own}

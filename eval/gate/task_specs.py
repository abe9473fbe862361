"""What the gate runs: a task of lm-eval, and the one metric and filter that it is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import UsageError


@dataclass(frozen=True)
class TaskSpec:
    """A task, or a group of tasks, as lm-eval names it.

    metric, filter  None: the task's only or first one; several filters must be told apart
    limit           at most so many items of each task, from the first on
    part_of         the name under which its items are judged, together with others'; None is its own
    overrides       entries that replace those of the task's definition, such as where its data lies
    """

    name: str
    metric: str | None = None
    filter: str | None = None
    limit: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    part_of: str | None = None

    @classmethod
    def parse(cls, text: str) -> "TaskSpec":
        """`TASK`, `TASK:METRIC` or `TASK:METRIC,FILTER`; UsageError for anything else."""
        name, _, judged = text.partition(":")
        metric, _, chosen = judged.partition(",")
        if not name or (":" in text and not metric) or ("," in judged and not chosen):
            raise UsageError(f"--tasks {text}: not a task", hint="Write TASK, TASK:METRIC or TASK:METRIC,FILTER.")
        return cls(name, metric or None, chosen or None)


PUBLISHED = (
    TaskSpec("gsm8k", "exact_match", "strict-match"),
    TaskSpec("arc_easy", "acc_norm", "none"),
    TaskSpec("arc_challenge", "acc_norm", "none"),
    TaskSpec("mmlu", "acc", "none"),
    TaskSpec("mmlu_pro", "exact_match", "custom-extract"),
)

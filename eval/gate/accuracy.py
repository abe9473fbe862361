"""Runs tasks of lm-eval on a checkpoint, item by item. The only user of lm_eval.

Models are those that `backends` load. What the harness only logs is recorded with each item: prompts cut
from the left, answers cut at the token cap, empty answers.
"""

import hashlib
import inspect
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from quantkit.errors import DependencyError, SourceError, UsageError
from quantkit.eval.gate.loading import Loaded
from quantkit.eval.gate.observed import Faults, observe
from quantkit.eval.gate.paged_model import take_remarks
from quantkit.eval.gate.runs import Item, TaskRun
from quantkit.eval.gate.task_specs import TaskSpec

_ELSEWHERE = {"dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset"}  # where the data lie: they are hashed
_DEFAULTS = "generation_config.json"  # transformers applies a checkpoint's own sampling settings
_TRANSFORMERS: Mapping[str, str] = MappingProxyType({"backend": "hf"})
NO_TEMPLATE = "none"  # the setting of a checkpoint without a chat template where one is asked for


@dataclass(frozen=True)
class HarnessTask:
    """A task of the harness, loaded, its items limited; `settings` are those that no checkpoint has a part in."""

    spec: TaskSpec
    name: str
    task: Any
    items: int
    settings: dict[str, Any]


def load_tasks(
    specs: Sequence[TaskSpec], *, limit: int | None = None, seed: int = 0, chat_template: bool = False
) -> list[HarnessTask]:
    """Load the tasks that `specs` name, groups as the tasks in them, with their data.

    limit          at most so many items of each task, instead of the spec's own limit
    seed           of few-shot examples
    chat_template  whether prompts are put into the checkpoint's chat template

    Raises UsageError for a task that the harness does not know, that comes twice, or whose data cannot be had.
    """
    loaded: list[HarnessTask] = []
    for spec in specs:
        with _quiet():
            tasks = _load_one(spec)
        for name, task in tasks.items():
            if name in (other.name for other in loaded):
                raise UsageError(f"the task {name} comes twice", hint="Name each task once, by itself or in a group.")
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            documents = task.eval_docs
            items = min(limit or spec.limit or len(documents), len(documents))
            settings = _settings(task, [documents[number] for number in range(items)], seed)
            loaded.append(HarnessTask(spec, name, task, items, settings | {"chat_template": chat_template}))
    return loaded


def run_settings(
    task: HarnessTask, folder: Path, tokenizer: Any, backend: Mapping[str, str] = _TRANSFORMERS
) -> dict[str, Any]:
    """All that a run of `task` by the checkpoint in `folder` depends on but its weights and pages; `backend` is what
    the backend's `settings` are."""
    template = None
    if task.settings["chat_template"]:
        template = _sha256(tokenizer.chat_template) if tokenizer.chat_template else NO_TEMPLATE
    path = folder / _DEFAULTS
    try:
        defaults = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}") from error
    ignored = ("_from_model_config", "transformers_version")
    return (
        task.settings
        | dict(backend)
        | {
            "chat_template": template,
            "generation_defaults": {key: value for key, value in defaults.items() if key not in ignored},
        }
    )


def run_tasks(
    tasks: Sequence[HarnessTask],
    loaded: Loaded,
    settings: Sequence[dict[str, Any]],
    *,
    seed: int,
    pages: Mapping[str, str] = MappingProxyType({}),
) -> list[TaskRun]:
    """Run the tasks in one pass on a model in memory; `settings` are those of `run_settings`, `pages` the backend's."""
    start = time.monotonic()
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    for task in tasks:
        task.task.set_fewshot_seed(seed=seed)  # anew: drawing examples moves it on, and both arms have the same task
    templated = any(one["chat_template"] not in (None, NO_TEMPLATE) for one in settings)
    with _quiet():
        model, faults = observe(loaded)
        results = _harness("evaluator").evaluate(
            model,
            {"tasks": {task.name: task.task for task in tasks}, "groups": {}, "group_map": {}},
            samples={task.name: list(range(task.items)) for task in tasks},
            bootstrap_iters=0,
            apply_chat_template=templated,
            fewshot_as_multiturn=templated,
        )
    seconds = (time.monotonic() - start) / len(tasks)
    remarks = take_remarks(loaded.model)
    collected = [
        _collect(task, one, results["samples"][task.name], faults) for task, one in zip(tasks, settings, strict=True)
    ]
    return [replace(run, seconds=seconds, pages=dict(pages), remarks=remarks) for run in collected]


@cache
def _task_manager() -> Any:
    """The harness's index of all its tasks; reading it takes ten seconds."""
    return _harness("tasks").TaskManager()


def _load_one(spec: TaskSpec) -> dict[str, Any]:
    whole = "output_type" in spec.overrides  # a definition of its own
    if not whole and spec.name not in _task_manager().task_index:
        raise UsageError(f"lm-eval knows no task {spec.name}", hint="`lm-eval ls tasks` lists them.")
    wanted: Any = spec.name
    if spec.overrides:  # a bare dict would not be merged with the harness's own definition
        wanted = {"group": f"{spec.name} with changes", "task": [{"task": spec.name, **spec.overrides}]}
    try:
        if whole:
            return {spec.name: _harness("api").task.ConfigurableTask(config={"task": spec.name, **spec.overrides})}
        return dict(_task_manager().load([wanted])["tasks"])
    except (KeyError, ValueError, OSError, ImportError, RuntimeError) as error:
        raise UsageError(
            f"the task {spec.name} cannot be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            hint="Its data come from the Hub; without a connection use --suite offline or quick.",
        ) from error


def _settings(task: Any, documents: list[Any], seed: int) -> dict[str, Any]:
    config = {key: value for key, value in task.dump_config().items() if key not in _ELSEWHERE}
    examples = list(task.fewshot_docs()) if config["num_fewshot"] else []
    return {
        "dtype": "float32",
        **{package: metadata.version(package) for package in ("lm_eval", "transformers", "torch")},
        "definition": _sha256([_describe(config), documents, examples]),
        "version": str(task.VERSION),
        "num_fewshot": config["num_fewshot"],
        "items": len(documents),
        "seed": seed,
        "generation": config.get("generation_kwargs") if config["output_type"] == "generate_until" else None,
    }


def _collect(task: HarnessTask, settings: dict[str, Any], samples: list[Any], faults: Faults) -> TaskRun:
    """The harness lists each item once for each filter."""
    items: dict[int, Item] = {}
    higher: dict[str, bool] = {}
    for sample in samples:
        asked = [one if isinstance(one[-1], str) and len(one) == 2 else one[0] for one in sample["arguments"]]
        found = {fault for request in asked for fault in faults.get(request, ())}
        item = Item(sample["doc_hash"], sample["prompt_hash"], {}, tuple(sorted(found)))
        item = items.setdefault(sample["doc_id"], item)
        for metric in sample["metrics"]:
            if isinstance(sample[metric], int | float | np.integer | np.floating | np.bool_):
                item.scores[f"{metric},{sample['filter']}"] = float(sample[metric])
                higher[f"{metric},{sample['filter']}"] = task.task.higher_is_better().get(metric) is not False
    return TaskRun(task.name, settings, higher, tuple(items[number] for number in sorted(items)))


def _describe(config: dict[str, Any]) -> str:
    """A task's definition as text that is the same in every process: functions by their source, not their address."""

    def source(value: Any) -> str:
        try:
            return inspect.getsource(value)
        except (TypeError, OSError):
            return str(value)

    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(config, sort_keys=True, default=source))


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _harness(module: str) -> Any:
    try:
        import lm_eval.evaluator
        import lm_eval.tasks
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"{error.name} is not installed", hint="Install what evaluation needs: pip install 'quantkit[eval]'."
        ) from error
    return getattr(lm_eval, module)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's remarks, and without its progress bars unless someone sees them."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
            yield
    finally:
        logger.setLevel(level)

"""Tasks run through lm-eval: what is recorded of each item, what a run's settings depend on, and which faults are seen.

The models are random Llamas of two layers, or stand-ins whose `generate` says what it is told to.
"""

import copy
import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import DependencyError, SourceError, UsageError
from quantkit.eval.gate import accuracy
from quantkit.eval.gate.loading import Loaded
from quantkit.eval.gate.runs import TaskRun
from quantkit.eval.gate.task_specs import TaskSpec

TaskMaker = Callable[..., TaskSpec]

pytestmark = pytest.mark.usefixtures("harness", "one_thread")


def run(specs: Sequence[TaskSpec], loaded: Loaded, folder: Path, *, seed: int = 0, **options: Any) -> list[TaskRun]:
    """Load the tasks and run them."""
    tasks = accuracy.load_tasks(specs, seed=seed, **options)
    settings = [accuracy.run_settings(task, folder, loaded.tokenizer) for task in tasks]
    return accuracy.run_tasks(tasks, loaded, settings, seed=seed)


# --- items


def test_items_of_a_choice_task(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """Each item has the hashes of its own document and prompt and a score of 0 or 1, and no fault."""
    [found] = run([make_task(items=9)], llama, llama_folder)

    assert found.task == "colours"
    assert found.higher == {"acc,none": True}
    assert len(found.items) == len({item.document for item in found.items}) == 9
    assert len({item.prompt for item in found.items}) == 9
    assert {score for item in found.items for score in item.scores.values()} <= {0.0, 1.0}
    assert {item.faults for item in found.items} == {()}
    assert found.seconds > 0


def test_a_run_can_be_repeated(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """The same model and seed give the same items, in one pass with another task or alone."""
    first, second = make_task("first", num_fewshot=2), make_task("second", generates=True)

    together = run([first, second], llama, llama_folder)
    alone = run([first], llama, llama_folder) + run([second], llama, llama_folder)

    assert [one.items for one in together] == [one.items for one in alone]
    assert [one.settings for one in together] == [one.settings for one in alone]


def test_both_arms_see_the_same_few_shot_examples(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """Examples are drawn anew for each run by the seed: a second run of the same loaded task has the same prompts."""
    tasks = accuracy.load_tasks([make_task(num_fewshot=3)])
    settings = [accuracy.run_settings(tasks[0], llama_folder, llama.tokenizer)]
    prompts = [
        [item.prompt for item in accuracy.run_tasks(tasks, llama, settings, seed=seed)[0].items] for seed in (0, 0, 1)
    ]

    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]


def test_limits_take_the_first_items(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """The caller's limit, else the task's own one, else all documents: the first ones, as many as there are."""
    [whole] = run([make_task(items=8)], llama, llama_folder)
    own = replace(make_task(items=8), limit=5)

    for spec, limit, expected in ((own, None, 5), (own, 3, 3), (own, 7, 7), (make_task(items=8), 100, 8)):
        [found] = run([spec], llama, llama_folder, limit=limit)
        assert found.items == whole.items[:expected]
        assert found.settings["items"] == expected


def test_less_is_better_is_recorded(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """Whether more of a metric is better comes from the task's definition."""
    metrics = [{"metric": "acc", "higher_is_better": False}, {"metric": "acc_norm", "higher_is_better": True}]
    [found] = run([make_task(metric_list=metrics)], llama, llama_folder)

    assert found.higher == {"acc,none": False, "acc_norm,none": True}


def test_whole_texts_have_no_score_to_judge_by(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """A task that scores whole texts by their perplexity has no score of an item, and is refused in words."""
    task = make_task(
        output_type="loglikelihood_rolling", doc_to_target="{{answer}}", metric_list=[{"metric": "word_perplexity"}]
    )
    [found] = run([task], llama, llama_folder)

    with pytest.raises(UsageError, match="colours has no metric"):
        found.judged_by(task)


# --- settings


def test_settings_name_all_that_a_run_depends_on(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """Versions, definition, shots, items, seed, sampling, template: of the run and not of this machine or hour."""
    [found] = run([make_task(generates=True)], llama, llama_folder, seed=3)
    own = json.loads((llama_folder / "generation_config.json").read_text())

    assert set(found.settings) == {
        *("backend", "dtype", "lm_eval", "transformers", "torch", "definition", "version", "num_fewshot", "items"),
        *("seed", "generation", "generation_defaults", "chat_template"),
    }
    assert found.settings["seed"] == 3
    assert found.settings["num_fewshot"] == 0
    assert found.settings["generation"] == {"until": ["\n"], "max_gen_toks": 8}
    assert found.settings["generation_defaults"]["eos_token_id"] == own["eos_token_id"] == [0, 4]
    assert "transformers_version" not in found.settings["generation_defaults"]
    assert found.settings["chat_template"] is None
    assert json.loads(json.dumps(found.settings)) == found.settings


def definition(spec: TaskSpec, **options: Any) -> str:
    """The hash that stands for the task's definition and documents."""
    [task] = accuracy.load_tasks([spec], **options)
    return str(task.settings["definition"])


def from_file(make_task: TaskMaker, path: Path, answer: str = "answer 0") -> TaskSpec:
    """The task with its documents in a file."""
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"question": f"Question {number}", "answer": answer}) + "\n" for number in range(4)]
    path.write_text("".join(lines))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
    return make_task(custom_dataset=None, fewshot_split=None, **data)


def test_definition_is_not_where_the_data_lie(
    make_task: TaskMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same documents in another folder are the same task; another document is another task."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    here = definition(from_file(make_task, tmp_path / "here" / "data.jsonl"))

    assert here == definition(from_file(make_task, tmp_path / "there" / "other.jsonl"))
    assert here != definition(from_file(make_task, tmp_path / "changed" / "data.jsonl", answer="answer 1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"items": 9},
        {"doc_to_text": "{{question}}?"},
        {"doc_to_choice": ["answer 0", "answer 1", "answer 3"]},
        {"description": "Choose."},
        {"num_fewshot": 1},
        {"metric_list": [{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_definition_is_all_that_makes_the_prompts(make_task: TaskMaker, changes: dict[str, Any]) -> None:
    """Documents, templates, choices, description, shots and metrics each change the definition's hash."""
    assert definition(make_task()) == definition(make_task())
    assert definition(make_task()) != definition(make_task(**changes))


def test_definition_of_the_items_that_are_run(make_task: TaskMaker) -> None:
    """Of a task that is cut short, documents that are left out do not count."""
    assert definition(make_task(items=8), limit=4) == definition(make_task(items=9), limit=4)


def process_documents(documents: Any, limit: int = 8) -> Any:
    """A task may have functions in its definition, which stand at another address in each process."""
    return documents.select(range(limit))


def test_definition_is_not_where_functions_lie(make_task: TaskMaker) -> None:
    """Functions count by their source, not by their address, or a history would never find a run again."""

    def copy_of(function: Any) -> Any:
        return type(function)(function.__code__, function.__globals__, argdefs=function.__defaults__)

    ours, theirs = (
        definition(make_task(process_docs=function)) for function in (process_documents, copy_of(process_documents))
    )
    partial, other = (
        definition(make_task(process_docs=functools.partial(copy_of(process_documents), limit=4))) for _ in range(2)
    )

    assert ours == theirs
    assert partial == other
    assert ours != definition(make_task())


def test_chat_template_is_part_of_prompts_and_settings(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """With the chat template every prompt is another, and the settings hold the template's hash."""
    [plain] = run([make_task()], llama, llama_folder)
    [templated] = run([make_task()], llama, llama_folder, chat_template=True)

    assert {item.prompt for item in plain.items}.isdisjoint(item.prompt for item in templated.items)
    assert len(templated.settings["chat_template"]) == 64


def test_missing_chat_template_is_part_of_the_settings(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """A checkpoint without the template that is asked for runs on plain prompts, and its settings say so."""
    tokenizer = copy.deepcopy(llama.tokenizer)
    tokenizer.chat_template = None
    [plain] = run([make_task()], llama, llama_folder)

    [found] = run([make_task()], Loaded(llama.model, tokenizer), llama_folder, chat_template=True)

    assert found.settings["chat_template"] == accuracy.NO_TEMPLATE
    assert found.items == plain.items


# --- tasks that cannot be run


def test_unknown_task_is_refused() -> None:
    """A name that the harness does not know is refused with where the known ones are."""
    with pytest.raises(UsageError, match="lm-eval knows no task nothing") as caught:
        accuracy.load_tasks([TaskSpec("nothing")])

    assert caught.value.hint == "`lm-eval ls tasks` lists them."


def test_a_task_may_not_come_twice(make_task: TaskMaker) -> None:
    """A task that is named twice, say with two metrics, is refused before anything runs."""
    with pytest.raises(UsageError, match="the task colours comes twice"):
        accuracy.load_tasks([make_task(), make_task("other"), make_task()])


def test_data_that_cannot_be_fetched_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a connection a task whose data lie on the Hub is refused, with the suites that need none."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)

    with pytest.raises(UsageError, match="the task gsm8k cannot be loaded: ") as caught:
        accuracy.load_tasks([TaskSpec("gsm8k")])

    assert "--suite offline or quick" in str(caught.value.hint)


def test_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, make_task: TaskMaker) -> None:
    """Without lm-eval, which a plain installation lacks, there is an error that says what to install."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)

    with pytest.raises(DependencyError, match=r"lm_eval.* is not installed") as caught:
        accuracy.load_tasks([make_task()])

    assert "quantkit[eval]" in str(caught.value.hint)


def test_the_harness_is_quiet_for_a_while(
    llama: Loaded, llama_folder: Path, make_task: TaskMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run prints nothing, on stdout or on stderr, which is no terminal here; then the harness may speak again."""
    logger = logging.getLogger("lm_eval")
    before = logger.level

    run([make_task(num_fewshot=1), make_task("second", generates=True)], llama, llama_folder)

    assert capfd.readouterr() == ("", "")
    assert logger.level == before != logging.ERROR


def test_generation_config_that_is_no_json(llama: Loaded, tmp_path: Path, make_task: TaskMaker) -> None:
    """A checkpoint's damaged sampling settings are an error that names the file."""
    (tmp_path / "generation_config.json").write_text("{")
    [task] = accuracy.load_tasks([make_task(items=2)])

    with pytest.raises(SourceError, match=r"generation_config\.json: cannot be read as JSON"):
        accuracy.run_settings(task, tmp_path, llama.tokenizer)

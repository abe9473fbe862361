"""Runs that differ in more than the weights, or that are not sound, are invalid: never a drop, and with the cause."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import UsageError
from quantkit.eval.gate import loading
from quantkit.eval.gate.evaluation import Options, evaluate
from quantkit.eval.gate.loading import Loaded
from quantkit.eval.gate.report import AccuracyReport, Verdict
from quantkit.eval.gate.task_specs import TaskSpec

TaskMaker = Callable[..., TaskSpec]
Answering = Callable[[Loaded, Sequence[Sequence[int]]], Loaded]

pytestmark = pytest.mark.usefixtures("harness", "one_thread")


def judge(
    candidate: Path, baseline: Path, *tasks: TaskSpec, history: Path | None = None, **options: Any
) -> AccuracyReport:
    """The gate's report by these tasks alone."""
    return evaluate(candidate, baseline, Options(tasks=tasks, **options), history=history)


@pytest.mark.parametrize("shots", [0, 2])
def test_comparable_runs_are_compared(
    llama_folder: Path, other_llama_folder: Path, make_task: TaskMaker, shots: int
) -> None:
    """Two models on the same task are not refused, with drawn examples neither; the settings are those of both."""
    report = judge(other_llama_folder, llama_folder, make_task(num_fewshot=shots), seed=5)

    assert report.verdict is Verdict.CANNOT_DECIDE
    assert report.settings["seed"] == 5
    assert report.settings["num_fewshot"] == shots
    assert report.suite == "tasks"
    assert report.distribution is None


def test_other_sampling_is_refused(llama_folder: Path, make_task: TaskMaker, tmp_path: Path) -> None:
    """A candidate whose generation_config.json differs would answer differently for that, so the field is named."""
    other = shutil.copytree(llama_folder, tmp_path / "other")
    config = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.6}))

    report = judge(other, llama_folder, make_task())

    assert report.verdict is Verdict.INVALID
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith("colours: generation_defaults is ")
    assert (report.tasks, report.pooled) == ((), None)


@pytest.mark.parametrize("lost_by", ["candidate", "baseline"])
def test_chat_template_of_one_arm_only_is_refused(
    llama_folder: Path, make_llama: Callable[..., Path], make_task: TaskMaker, lost_by: str
) -> None:
    """A lost, or made-up, chat template is refused by its hash and by the items' prompts (case D08)."""
    without = make_llama(0, template=False)
    folders = (without, llama_folder) if lost_by == "candidate" else (llama_folder, without)

    report = judge(*folders, make_task(), chat_template=True)

    assert report.verdict is Verdict.INVALID
    assert report.reasons[0].startswith("colours: chat_template is ")
    assert f"'none' for the {lost_by}" in report.reasons[0]
    assert report.reasons[1] == "colours: 8 of 8 items have another prompt"


def test_chat_template_of_no_arm_is_refused(make_llama: Callable[..., Path], make_task: TaskMaker) -> None:
    """An option that could do nothing is not passed over."""
    without = make_llama(0, template=False)

    with pytest.raises(UsageError, match="neither checkpoint has a chat template"):
        judge(without, without, make_task(), chat_template=True)


def let_answer(monkeypatch: pytest.MonkeyPatch, models: dict[Path, Loaded]) -> None:
    """The models in these folders are these ones."""
    monkeypatch.setattr(loading, "load", models.__getitem__)


def test_cut_answers_are_no_drop(
    make_llama: Callable[..., Path], make_task: TaskMaker, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that thinks for 300 tokens before its answer, of 256 allowed, is no worse, but measured wrongly."""
    folders = make_llama(0, length=1024), make_llama(1, length=1024)
    baseline, candidate = (loading.load(folder) for folder in folders)
    answer = baseline.tokenizer("answer 0\n")["input_ids"]
    let_answer(
        monkeypatch,
        {
            folders[0]: answering(baseline, [answer] * 100),
            folders[1]: answering(candidate, [answer] * 60 + [[500] * 300 + answer] * 40),
        },
    )
    generation = {"until": ["\n"], "max_gen_toks": 256}
    task = make_task(generates=True, items=100, doc_to_target="answer 0", generation_kwargs=generation)

    report = judge(folders[1], folders[0], task)

    assert report.verdict is Verdict.INVALID
    assert report.reasons == ("colours, candidate: 40 of 100 items (40.0%): answer cut at the token cap",)
    assert report.tasks == ()


def test_cut_prompts_are_no_drop(make_llama: Callable[..., Path], make_task: TaskMaker) -> None:
    """Prompts of 900 tokens for models of 512 make both runs invalid, with the share that was cut."""
    text = "{% if question == 'Question 3' %}" + "word " * 900 + "{% endif %}{{question}}:"

    report = judge(make_llama(1, length=512), make_llama(0, length=512), make_task(doc_to_text=text))

    assert report.verdict is Verdict.INVALID
    assert report.reasons == tuple(
        f"colours, {arm}: 1 of 8 items (12.5%): prompt cut to the model's length" for arm in ("baseline", "candidate")
    )


@pytest.mark.parametrize(("empty", "valid"), [(1, True), (3, False)])
def test_few_faults_are_a_warning(
    llama: Loaded,
    llama_folder: Path,
    other_llama_folder: Path,
    make_task: TaskMaker,
    answering: Answering,
    monkeypatch: pytest.MonkeyPatch,
    empty: int,
    valid: bool,
) -> None:
    """Of a hundred items one may be faulty, which is said; with three empty answers the run is invalid."""
    answer, nothing = (llama.tokenizer(text)["input_ids"] for text in ("answer 0\n", "\n"))
    let_answer(
        monkeypatch,
        {
            llama_folder: answering(llama, [answer] * 100),
            other_llama_folder: answering(llama, [answer] * (100 - empty) + [nothing] * empty),
        },
    )
    report = judge(other_llama_folder, llama_folder, make_task(generates=True, items=100, doc_to_target="answer 0"))

    sentence = f"colours, candidate: {empty} of 100 items ({empty}.0%): empty answer"
    assert report.verdict is (Verdict.CANNOT_DECIDE if valid else Verdict.INVALID)
    assert report.warnings == ((sentence,) if valid else ())
    assert (sentence in report.reasons) is not valid


def test_filters_must_be_named_and_compared(
    llama: Loaded,
    llama_folder: Path,
    other_llama_folder: Path,
    make_task: TaskMaker,
    answering: Answering,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of two filters one must be named; a candidate that lost only the form drops by the strict one, with a remark."""
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern}, {"function": "take_first"}]}
        for name, pattern in (("strict", "#### ([0-9]+)"), ("flexible", "([0-9]+)"))
    ]
    task = make_task(generates=True, items=40, filter_list=filters, doc_to_target="7")
    formal, loose = (llama.tokenizer(text)["input_ids"] for text in ("#### 7\n", "so 7\n"))
    models = {llama_folder: answering(llama, [formal] * 40), other_llama_folder: answering(llama, [loose] * 40)}
    let_answer(monkeypatch, models)

    with pytest.raises(UsageError, match="has several filters: exact_match,strict; exact_match,flexible"):
        judge(other_llama_folder, llama_folder, task, history=tmp_path / "history")
    strict, flexible = (
        judge(other_llama_folder, llama_folder, replace(task, filter=name), history=tmp_path / "history")
        for name in ("strict", "flexible")
    )

    assert (strict.verdict, strict.tasks[0].lost) == (Verdict.FAIL, 40)
    assert (flexible.verdict, flexible.tasks[0].lost) == (Verdict.CANNOT_DECIDE, 0)
    for report in (strict, flexible):
        assert len(report.warnings) == 1
        assert report.warnings[0].startswith("candidate: colours exact_match: strict finds 0 of 40 answers right")

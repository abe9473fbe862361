"""The accuracy gate from checkpoints to a verdict: what passes, what fails, what is refused, and what is run again."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import OutputError, SourceError, UsageError
from quantkit.eval.gate import accuracy, loading
from quantkit.eval.gate.evaluation import Options, evaluate, write_report
from quantkit.eval.gate.report import AccuracyReport, Verdict
from quantkit.eval.gate.task_specs import TaskSpec

TaskMaker = Callable[..., TaskSpec]
QUICK = Options("quick", limit=8, window=64, max_tokens=1024)

pytestmark = pytest.mark.usefixtures("harness", "one_thread")


@pytest.fixture(scope="module")
def quick(harness: Any, glm_tiny_converted: dict[str, Path]) -> AccuracyReport:
    """The trained checkpoint in INT4 against its decoding to BF16."""
    return evaluate(glm_tiny_converted["glm-5.2-int4"], glm_tiny_converted["bf16"], QUICK)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each task has been run by a model, and not been found in the history."""
    counted: Counter[str] = Counter()
    real = accuracy.run_tasks

    def count(tasks: Sequence[accuracy.HarnessTask], *args: Any, **kwargs: Any) -> Any:
        counted.update(task.name for task in tasks)
        return real(tasks, *args, **kwargs)

    monkeypatch.setattr(accuracy, "run_tasks", count)
    return counted


def judge(
    candidate: Path, baseline: Path, *tasks: TaskSpec, history: Path | None = None, **options: Any
) -> AccuracyReport:
    """The gate's report by these tasks alone."""
    return evaluate(candidate, baseline, Options(tasks=tasks, **options), history=history)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint's first file."""
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- the suite quick


def test_a_sound_conversion_is_not_refused(quick: AccuracyReport) -> None:
    """INT4 against its own decoding passes, or there are too few items: a few wrong tokens are no failure."""
    assert quick.verdict in (Verdict.PASS, Verdict.CANNOT_DECIDE)
    assert quick.suite == "quick"
    assert [(task.task, task.items) for task in quick.tasks] == [("next token", 16 * 63), ("quantkit_continuation", 8)]
    assert quick.pooled is not None
    assert quick.pooled.items == 16 * 63 + 8
    assert quick.candidate_digest != quick.baseline_digest


@pytest.mark.exhaustive
def test_nvfp4_is_judged(glm_tiny_converted: dict[str, Path]) -> None:
    """NVFP4 is measured as INT4 is; experts without their global scales would leave nothing of the model."""
    report = evaluate(glm_tiny_converted["glm-5.2-nvfp4"], glm_tiny_converted["bf16"], QUICK)

    assert report.verdict in (Verdict.PASS, Verdict.CANNOT_DECIDE), report.reasons
    assert report.distribution is not None
    assert 0 < report.distribution.kl_divergence < 0.02
    assert report.warnings == (f"{report.candidate} is measured with unquantized activations (input_activations null)",)


def test_what_cannot_be_measured_is_refused_first(glm_tiny_converted: dict[str, Path]) -> None:
    """ModelOpt's NVFP4 is refused with the command that respells it, as candidate and as baseline."""
    modelopt, bf16 = glm_tiny_converted["glm-5.2-nvfp4-modelopt"], glm_tiny_converted["bf16"]

    for folders in ((modelopt, bf16), (bf16, modelopt)):
        with pytest.raises(SourceError, match="ModelOpt's spelling") as caught:
            evaluate(*folders, QUICK)
        assert f"quantkit convert {modelopt} --format compressed-tensors -o FOLDER" in str(caught.value.hint)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("baseline", "unsigned"),
    [("glm-5.2-nvfp4", False), ("glm-5.2-int4-bf16rest", False), ("bf16", True)],
)
def test_only_what_can_be_compared_is_verified(
    glm_tiny_converted: dict[str, Path], tmp_path: Path, baseline: str, unsigned: bool
) -> None:
    """A baseline that is 4-bit itself, and a candidate by another tool, are no reason to fail a candidate."""
    candidate = tmp_path / "candidate"
    shutil.copytree(glm_tiny_converted["glm-5.2-int4"], candidate)
    if unsigned:
        (candidate / "quantkit.json").unlink()

    report = evaluate(candidate, glm_tiny_converted[baseline], QUICK)

    assert report.verdict in (Verdict.PASS, Verdict.CANNOT_DECIDE), report.reasons


def test_distributions_are_a_task_of_their_own(quick: AccuracyReport) -> None:
    """The tokens that each model ranks first are compared as the other tasks' items are."""
    found, task = quick.distribution, quick.tasks[0]

    assert found is not None
    assert 0 < found.kl_divergence < 0.05
    assert (task.items, task.lost, task.gained) == (found.scored_tokens, found.lost, found.gained)
    assert task.baseline_correct == found.baseline_correct > 0.2 * task.items


def test_unquantized_activations_are_told(quick: AccuracyReport) -> None:
    """The INT4 checkpoint's engine would quantize activations; that it is measured without is said."""
    assert quick.warnings == (f"{quick.candidate} is measured with unquantized activations (input_activations null)",)


def test_report_comes_back_from_json(quick: AccuracyReport) -> None:
    """A report that is read from its JSON is the same one, and the JSON is one that any reader takes."""
    assert AccuracyReport.from_json(quick.to_json()) == quick

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(quick.to_json(), parse_constant=refuse)


def test_report_is_written_twice(quick: AccuracyReport, tmp_path: Path) -> None:
    """The folder gets report.json, which `push --gate` reads, and report.md with verdict, tasks and settings."""
    write_report(quick, tmp_path / "new" / "folder")

    written = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(written) == {"report.json", "report.md"}
    assert AccuracyReport.from_json(written["report.json"]) == quick
    assert "quantkit_continuation" in written["report.md"]
    assert str(quick.verdict) in written["report.md"].lower()


def test_report_that_cannot_be_written_is_an_error(quick: AccuracyReport, tmp_path: Path) -> None:
    """A file in the folder's place is named, not overwritten."""
    (tmp_path / "report").write_text("mine")

    with pytest.raises(OutputError, match=r"report\.json: cannot be written"):
        write_report(quick, tmp_path / "report")
    assert (tmp_path / "report").read_text() == "mine"


def test_broken_weights_fail(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """A candidate whose weights `verify` finds wrong fails by that, however few tokens it loses."""
    broken = shutil.copytree(glm_tiny_converted["glm-5.2-int4"], tmp_path / "broken")
    change_weights(
        broken,
        lambda tensors: [
            tensors[name].mul_(2) for name in tensors if name.endswith("experts.0.gate_proj.weight_scale")
        ],
    )

    report = evaluate(broken, glm_tiny_converted["bf16"], replace(QUICK, limit=4, max_tokens=64))

    assert report.verdict is Verdict.FAIL
    assert report.reasons[0].startswith("verify: ")
    assert any("gate_proj" in reason for reason in report.reasons)
    assert [task.task for task in report.tasks] == ["next token", "quantkit_continuation"]


@pytest.mark.exhaustive
def test_broken_weights_fail_rather_than_be_invalid(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """Weights that are known to be wrong are a failure, even if the runs could not be compared, too."""
    broken = shutil.copytree(glm_tiny_converted["glm-5.2-int4"], tmp_path / "broken")
    change_weights(broken, lambda tensors: tensors["lm_head.weight"].add_(1))
    config = json.loads((broken / "generation_config.json").read_text())
    (broken / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.6}))

    report = evaluate(broken, glm_tiny_converted["bf16"], replace(QUICK, limit=4, max_tokens=64))

    assert report.verdict is Verdict.FAIL
    assert report.reasons[0].startswith("verify: ")
    assert any("generation_defaults" in reason for reason in report.reasons)


# --- what is run, and what is known (case D02)


def test_nothing_is_run_twice(
    llama_folder: Path, other_llama_folder: Path, make_task: TaskMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its history the gate gives the same report again, without loading a model."""
    first = judge(other_llama_folder, llama_folder, make_task(), history=tmp_path / "history")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model is needed")

    monkeypatch.setattr(loading, "load", refuse)
    monkeypatch.setattr(accuracy, "run_tasks", refuse)
    again = judge(other_llama_folder, llama_folder, make_task(), history=tmp_path / "history")

    assert replace(again, seconds=first.seconds) == first


def test_changed_weights_at_the_same_path_are_run(
    llama_folder: Path, other_llama_folder: Path, make_task: TaskMaker, tmp_path: Path, runs: Counter[str]
) -> None:
    """A candidate that is converted anew is another one; its baseline is not run again."""
    candidate = shutil.copytree(llama_folder, tmp_path / "candidate")
    task = make_task(items=40)

    same = judge(candidate, llama_folder, task, history=tmp_path / "history")
    assert runs == {"colours": 1}  # both hold the same bytes
    shutil.copyfile(other_llama_folder / "model.safetensors", candidate / "model.safetensors")
    changed = judge(candidate, llama_folder, task, history=tmp_path / "history")

    assert runs == {"colours": 2}
    assert (same.tasks[0].lost, same.tasks[0].gained) == (0, 0)
    assert changed.tasks[0].lost + changed.tasks[0].gained > 0
    assert changed.tasks[0].baseline_correct == same.tasks[0].baseline_correct
    assert changed.baseline_digest == same.candidate_digest != changed.candidate_digest


def test_only_what_is_not_known_is_run(
    llama_folder: Path, other_llama_folder: Path, make_task: TaskMaker, tmp_path: Path, runs: Counter[str]
) -> None:
    """Another task, limit or seed is run, and what was run before is not."""
    history = tmp_path / "history"
    for tasks, options in (
        ((make_task("one"),), {}),
        ((make_task("one"), make_task("two")), {}),
        ((make_task("one"),), {"limit": 4}),
        ((make_task("one"),), {"limit": 4, "seed": 1}),
        ((make_task("one"), make_task("two")), {}),
    ):
        judge(other_llama_folder, llama_folder, *tasks, history=history, **options)

    assert runs == {"one": 6, "two": 2}


def test_without_history_everything_is_run(
    llama_folder: Path, other_llama_folder: Path, make_task: TaskMaker, runs: Counter[str]
) -> None:
    """No history, no memory."""
    for _ in range(2):
        judge(other_llama_folder, llama_folder, make_task())

    assert runs == {"colours": 4}


# --- the report


def test_tasks_of_a_group_are_judged_as_one(llama_folder: Path, other_llama_folder: Path, make_task: TaskMaker) -> None:
    """Tasks that are parts of one have one row with all their items."""
    parts = [replace(make_task(name, items=items), part_of="whole") for name, items in (("one", 8), ("two", 5))]

    report = judge(other_llama_folder, llama_folder, *parts, make_task("other"))

    assert [(task.task, task.items) for task in report.tasks] == [("whole", 13), ("other", 8)]
    assert set(report.settings["tasks"]) == {"one", "two", "other"}


# --- what means nothing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "all"}, "there is no suite 'all'"),
        ({"limit": 0}, "limit is 0"),
        ({"rule": "strict"}, "there is no rule 'strict'"),
        ({"max_drop": 0.0}, "max_drop is 0.0"),
        ({"max_drop": 1.0}, "max_drop is 1.0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    """A wrong option is refused before anything is loaded or run."""
    with pytest.raises(UsageError, match=words):
        Options(**options)


def test_nothing_to_compare_is_refused(llama_folder: Path) -> None:
    """Neither a suite, nor a task, nor a text: there is no verdict on nothing."""
    with pytest.raises(UsageError, match="there is no task to compare"):
        evaluate(llama_folder, llama_folder, Options())


@pytest.mark.parametrize("text", [b"\xff\xfe", None])
def test_text_that_is_none_is_refused(llama_folder: Path, tmp_path: Path, text: bytes | None) -> None:
    """A file that is not there or not UTF-8 is named."""
    path = tmp_path / "text"
    if text is not None:
        path.write_bytes(text)

    with pytest.raises(UsageError, match=f"{path}: cannot be read as UTF-8 text"):
        evaluate(llama_folder, llama_folder, Options(text=path))


def test_offline_suite_wants_its_data(llama_folder: Path, tmp_path: Path) -> None:
    """Without its data the suite offline says how to get them."""
    with pytest.raises(UsageError) as caught:
        evaluate(llama_folder, llama_folder, Options("offline"), data_folder=tmp_path)

    assert "quantkit eval --prepare offline" in str(caught.value.hint)

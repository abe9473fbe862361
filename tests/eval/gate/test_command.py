"""`quantkit eval`: each verdict's exit code, what stands on stdout and on stderr, and what the options mean."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.choices import KvDtype
from quantkit.eval.gate import evaluation
from quantkit.eval.gate.compare import Counts, decide
from quantkit.eval.gate.report import AccuracyReport, DistributionReport, PositionRange, Verdict
from quantkit.eval.gate.task_specs import TaskSpec
from quantkit.runtime.cache_options import CacheOptions
from support.program import Result, Runner

COUNTS = {
    Verdict.PASS: [
        Counts("arc_easy", "acc_norm", "none", 20_000, 15_000, 101, 97),
        Counts("gsm8k", "exact_match", "strict-match", 9000, 6000, 40, 41),
    ],
    Verdict.FAIL: [Counts("gsm8k", "exact_match", "strict-match", 220, 165, 25, 9)],
    Verdict.CANNOT_DECIDE: [Counts("gsm8k", "exact_match", "strict-match", 300, 200, 12, 9)],
}
EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 3, Verdict.CANNOT_DECIDE: 4, Verdict.INVALID: 1}
CUT = "gsm8k, candidate: 40 of 100 items (40.0%): answer cut at the token cap"
SIZES = ("--limit", "4", "--window", "32", "--max-tokens", "64", "--no-history")
NOTE = "INT4 is measured with unquantized activations (input_activations null)"


def make_report(verdict: Verdict, **changes: Any) -> AccuracyReport:
    """A report as the gate makes it, with that verdict."""
    outcome = decide(COUNTS[verdict]) if verdict in COUNTS else None
    if outcome:
        assert outcome.verdict is verdict
    report = AccuracyReport(
        candidate="INT4",
        baseline="BF16",
        candidate_digest="c" * 64,
        baseline_digest="b" * 64,
        suite="published",
        rule="paired",
        max_drop=0.008,
        verdict=verdict,
        reasons=outcome.reasons if outcome else (CUT,),
        tasks=outcome.tasks if outcome else (),
        pooled=outcome.pooled if outcome else None,
        needed_items=outcome.needed_items if outcome else None,
        distribution=None,
        settings={"seed": 0},
        seconds={"load tasks": 1.0},
    )
    return replace(report, **changes)


@dataclass
class Eval:
    """The program in this process with a gate that gives `report`; `calls` holds what the gate was asked."""

    quantkit: Runner
    report: AccuracyReport
    calls: list[dict[str, Any]]

    def __call__(self, *arguments: str | Path) -> Result:
        """Exit code, stdout and stderr of `quantkit eval` with these arguments."""
        return self.quantkit("eval", *arguments)


@pytest.fixture
def run(quantkit: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Eval:
    """Runs `quantkit eval` with a gate that runs nothing."""
    monkeypatch.setenv("QUANTKIT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    made = Eval(quantkit, make_report(Verdict.PASS), [])

    def evaluate(candidate: Any, baseline: Any, options: evaluation.Options, **others: Any) -> AccuracyReport:
        made.calls.append({"candidate": candidate, "baseline": baseline, "options": options, **others})
        return made.report

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    return made


# --- what is printed


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
@pytest.mark.parametrize("verdict", Verdict)
def test_verdict_is_the_exit_code(run: Eval, verdict: Verdict, form: tuple[str, ...]) -> None:
    """0 for pass, 3 for fail, 4 for cannot decide, 1 for invalid; all but a pass say so on stderr."""
    run.report = make_report(verdict)

    code, stdout, stderr = run("INT4", "--baseline", "BF16", *form)

    assert code == EXIT_CODES[verdict]
    assert stderr == ("" if verdict is Verdict.PASS else f"error: INT4: {verdict}\n")
    assert stdout


@pytest.mark.parametrize("verdict", Verdict)
def test_json_is_the_report(run: Eval, verdict: Verdict) -> None:
    """--json prints one object on stdout, and it is the whole report."""
    run.report = make_report(verdict, warnings=(NOTE,))

    _, stdout, _ = run("INT4", "--baseline", "BF16", "--json")

    assert AccuracyReport.from_json(stdout) == run.report
    assert list(json.loads(stdout))[:2] == ["schema_version", "kind"]
    assert stdout == run.report.to_json()


@pytest.mark.parametrize("verdict", Verdict)
def test_tables_show_verdict_and_reasons(run: Eval, verdict: Verdict) -> None:
    """The verdict is the last line, in capitals with suite, rule and margin, and each reason above it in full."""
    run.report = make_report(verdict)

    _, stdout, _ = run("INT4", "--baseline", "BF16")

    reasons = [f"  {reason}" for reason in run.report.reasons]
    answer = f"{verdict.upper()}  (suite published, rule paired, margin 0.8 points)"
    assert stdout.splitlines()[-len(reasons) - 1 :] == [*reasons, answer]


def test_tables_show_the_evidence(run: Eval) -> None:
    """A row for each task and for all items: scores, lost and gained, difference, bounds, p, and what can be found."""
    _, stdout, _ = run("INT4", "--baseline", "BF16")

    rows = [line.split() for line in stdout.splitlines()]
    assert rows[0] == ["INT4", "against", "BF16"]
    assert rows[1][-6:] == ["difference", "lower", "upper", "p", "(Holm)", "detectable"]
    numbers = ["20,000", "75.00%", "74.98%", "101", "97", "-0.02", "-0.14", "+0.10", "1"]
    detectable = run.report.tasks[0].detectable_drop
    assert rows[2] == ["arc_easy", "acc_norm,none", *numbers, f"{100 * detectable:.2f}"]
    assert [row[0] for row in rows[2:4]] == ["arc_easy", "gsm8k"]
    assert rows[4][:3] == ["all", "tasks", "29,000"]
    run.report = make_report(Verdict.FAIL)
    assert "all tasks" not in run("INT4", "--baseline", "BF16")[1]  # of one task they are that task


def test_many_tasks_are_cut_short(run: Eval) -> None:
    """Of many tasks those with the smallest p are shown, and how many are not."""
    counts = [Counts(f"task {n:02}", "acc", "none", 900, 500, 3 + 40 * (n == 41), 3) for n in range(45)]
    run.report = make_report(Verdict.PASS, tasks=decide(counts).tasks)

    _, stdout, _ = run("INT4", "--baseline", "BF16")

    shown = [line for line in stdout.splitlines() if line.startswith("task ") and "acc,none" in line]
    assert len(shown) == 20
    assert any(line.startswith("task 41") for line in shown)
    assert "and 25 more tasks" in stdout


def test_distributions_are_shown(run: Eval) -> None:
    """Bits per byte of both, KL divergence, agreement and flips stand above the tasks."""
    positions = (PositionRange(1, 4, 1.0, 1.1, 0.001, 0.98), PositionRange(5, 9, 0.9, 1.0, 0.003, 0.97))
    figures = (0.95, 1.0475, 0.00211, 0.9734, 4200, 36, 30, 0.0066)
    found = DistributionReport("INT4", "BF16", "sample", 10, 9990, 31_000, *figures, positions)
    run.report = make_report(Verdict.PASS, distribution=found)

    _, stdout, _ = run("INT4", "--baseline", "BF16")

    for words in ("0.9500", "1.0475", "+0.0975", "0.00211", "97.34%", "0.66%", "36 tokens lost, 30 gained"):
        assert words in stdout
    assert "0.00100 0.00300" in stdout
    assert stdout.index("KL divergence") < stdout.index("arc_easy")


def test_pages_are_shown(run: Eval) -> None:
    """What the runtime's pages held stands beside the verdict: two arms may be the same checkpoint."""
    run.report = make_report(Verdict.PASS, pages={"candidate": {"kv": "fp8"}, "baseline": {"kv": "bf16"}})

    _, stdout, _ = run("INT4", "--baseline", "BF16")

    assert "margin 0.8 points, candidate on FP8 pages, baseline on BF16 pages)" in stdout


def test_warnings_are_talk(run: Eval) -> None:
    """A warning stands on stderr; the tables do not have it."""
    run.report = make_report(Verdict.PASS, warnings=(NOTE,))

    code, stdout, stderr = run("INT4", "--baseline", "BF16")

    assert (code, stderr) == (0, f"warning: {NOTE}\n")
    assert "unquantized" not in stdout


@pytest.mark.parametrize("verdict", Verdict)
def test_output_holds_the_report_of_any_verdict(run: Eval, tmp_path: Path, verdict: Verdict) -> None:
    """--output writes report.json and report.md, for a failure as well."""
    run.report = make_report(verdict)

    code, _, _ = run("INT4", "--baseline", "BF16", "--output", "new/folder")

    assert code == EXIT_CODES[verdict]
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.md"]
    assert (folder / "report.json").read_text() == run.report.to_json()


# --- what the options mean


def test_options_reach_the_gate(run: Eval, tmp_path: Path) -> None:
    """Every option goes where it belongs; points become a share."""
    tasks = "--tasks arc_easy:acc_norm --tasks gsm8k:exact_match,strict-match --suite published --limit 7"
    text = "--text words --window 64 --max-tokens 999"

    run(*f"INT4 --baseline BF16 {tasks} {text} --max-drop 0.5 --rule point --seed 3 --chat-template".split())

    [call] = run.calls
    assert (call["candidate"], call["baseline"]) == (Path("INT4"), Path("BF16"))
    assert call["data_folder"] == tmp_path / "data"
    assert call["options"] == evaluation.Options(
        suite="published",
        tasks=(TaskSpec("arc_easy", "acc_norm"), TaskSpec("gsm8k", "exact_match", "strict-match")),
        text=Path("words"),
        window=64,
        max_tokens=999,
        limit=7,
        seed=3,
        chat_template=True,
        rule="point",
        max_drop=0.005,
    )


def test_pages_reach_the_gate(run: Eval) -> None:
    """The runtime's pages, KV scales and rounded queries go to the arm that they are for; else pages are BF16."""
    for options in (
        "--kv fp8 --kv-scale 0.5 --fp8-query",
        "--baseline-kv fp8 --baseline-kv-scales scales.json --baseline-fp8-query",
        "--kv fp8 --kv-scales mine.json --baseline-kv fp8 --baseline-kv-scale 2",
    ):
        run("INT4", "--baseline", "FP8", "--backend", "runtime", *options.split())

    asked = [call["options"] for call in run.calls]
    assert {options.backend for options in asked} == {"runtime"}
    assert [(options.cache, options.baseline_cache) for options in asked] == [
        (CacheOptions(KvDtype.FP8, 0.5, fp8_query=True), CacheOptions()),
        (CacheOptions(), CacheOptions(KvDtype.FP8, None, Path("scales.json"), fp8_query=True)),
        (CacheOptions(KvDtype.FP8, None, Path("mine.json")), CacheOptions(KvDtype.FP8, 2.0)),
    ]


@pytest.mark.parametrize(
    ("options", "suite"),
    [
        ("", "quick"),
        ("--limit 5", "quick"),
        ("--tasks arc_easy", None),
        ("--text words", None),
        ("--tasks arc_easy --suite quick", "quick"),
        ("--suite offline", "offline"),
    ],
)
def test_suite_is_quick_unless_something_else_is_named(run: Eval, options: str, suite: str | None) -> None:
    """Tasks or a text of one's own stand alone unless a suite is named with them."""
    run("INT4", "--baseline", "BF16", *options.split())

    assert run.calls[0]["options"].suite == suite


def test_margin_is_exactly_the_published_one(run: Eval) -> None:
    """Without --max-drop the margin is 0.8 points, to the last bit, because a drop that equals it is allowed."""
    run("INT4", "--baseline", "BF16")

    assert run.calls[0]["options"].max_drop == 0.008


@pytest.mark.parametrize(
    ("options", "history"),
    [
        ("", "data/history.sqlite"),
        ("--history mine.sqlite", "mine.sqlite"),
        ("--no-history", None),
        ("--no-history --history mine.sqlite", None),
    ],
)
def test_history_is_where_data_are(run: Eval, tmp_path: Path, options: str, history: str | None) -> None:
    """Results are remembered beside the data unless another file is named, or none is wanted."""
    run("INT4", "--baseline", "BF16", *options.split())

    found = run.calls[0]["history"]
    assert (found and found.absolute()) == (history and tmp_path / history)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "a candidate and a baseline are needed"),
        ("INT4", "a candidate and a baseline are needed"),
        ("--baseline BF16", "a candidate and a baseline are needed"),
        ("INT4 --baseline BF16 --suite all", "there is no suite 'all'"),
        ("INT4 --baseline BF16 --backend vllm", "there is no backend 'vllm'"),
        ("INT4 --baseline BF16 --kv fp8 --kv-scale 1.0", "transformers keeps no pages"),
        ("INT4 --baseline BF16 --baseline-kv fp8", "transformers keeps no pages"),
        ("INT4 --baseline BF16 --rule strict", "there is no rule 'strict'"),
        ("INT4 --baseline BF16 --max-drop 0", "max_drop is 0.0"),
        ("INT4 --baseline BF16 --tasks arc_easy:", "--tasks arc_easy:: not a task"),
        ("--prepare published", "only the suite offline has data to lay ready"),
    ],
)
def test_what_means_nothing_is_exit_code_2(run: Eval, line: str, words: str) -> None:
    """A mistake in the command line is one sentence on stderr, and nothing is run."""
    code, stdout, stderr = run(*line.split())

    assert (code, stdout, run.calls) == (2, "", [])
    assert stderr.startswith("error: ")
    assert words in stderr


# --- without stand-ins


@pytest.mark.parametrize("backend", ["", "--backend runtime --kv fp8 --kv-scale 1.0"], ids=["hf", "runtime"])
@pytest.mark.usefixtures("harness", "one_thread")
def test_a_run_prints_one_object_and_nothing_else(
    run: Eval, monkeypatch: pytest.MonkeyPatch, llama_folder: Path, make_llama: Callable[..., Path], backend: str
) -> None:
    """Models, tasks and the harness at work leave stdout to the report, and stderr to the verdict."""
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    arguments = make_llama(1), "--baseline", llama_folder, "--suite", "quick", *SIZES, *backend.split()
    code, stdout, stderr = run(*arguments, "--json")

    report = AccuracyReport.from_json(stdout)
    assert code == EXIT_CODES[report.verdict]
    assert stderr == f"error: {report.candidate}: {report.verdict}\n"
    assert [task.task for task in report.tasks] == ["next token", "quantkit_continuation"]
    assert report.settings["backend"] == ("runtime" if backend else "hf")
    assert {arm: pages["kv"] for arm, pages in report.pages.items()} == (
        {"candidate": "fp8", "baseline": "bf16"} if backend else {}
    )


@pytest.mark.usefixtures("one_thread")
def test_missing_harness_is_exit_code_1(run: Eval, monkeypatch: pytest.MonkeyPatch, llama_folder: Path) -> None:
    """Without lm-eval a task cannot be run, and the error says what to install."""
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)

    code, stdout, stderr = run(llama_folder, "--baseline", llama_folder, "--suite", "quick", *SIZES)

    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: lm_eval")
    assert "pip install 'quantkit[eval]'" in stderr

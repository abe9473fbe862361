"""`quantkit eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.choices import KvDtype
from quantkit.cli.options import Json, KvScale, KvScales
from quantkit.errors import CheckFailed, NotComparable, Undecided, UsageError

if TYPE_CHECKING:
    from quantkit.eval.gate.report import AccuracyReport

Checkpoint = Annotated[Path | None, typer.Argument(help="The folder of the converted checkpoint.", show_default=False)]
Baseline = Annotated[Path | None, typer.Option("--baseline", help="What to compare with.", show_default=False)]
Suite = Annotated[str | None, typer.Option("--suite", help="quick (default), offline or published.")]
Tasks = Annotated[list[str] | None, typer.Option("--tasks", help="TASK[:METRIC[,FILTER]] of lm-eval; repeatable.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many items of each task.")]
MaxDrop = Annotated[float, typer.Option("--max-drop", help="The margin in points: a smaller drop may ship.")]
Rule = Annotated[str, typer.Option("--rule", help="paired, or point: no drop of any score over the margin.")]
Text = Annotated[Path | None, typer.Option("--text", help="A UTF-8 text to compare distributions on.")]
Window = Annotated[int, typer.Option("--window", min=2, help="Tokens in one forward pass over the text.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=2, help="At most so many tokens of the text.")]
Seed = Annotated[int, typer.Option("--seed", help="Of few-shot examples and sampling.")]
Template = Annotated[bool, typer.Option("--chat-template", help="Put prompts into the chat template.")]
Output = Annotated[Path | None, typer.Option("--output", help="A folder for report.json and report.md.")]
HistoryFile = Annotated[Path | None, typer.Option("--history", help="The SQLite file of earlier results.")]
NoHistory = Annotated[bool, typer.Option("--no-history", help="Neither use nor keep results.")]
Prepare = Annotated[str | None, typer.Option("--prepare", help="Lay a suite's data ready and leave: offline.")]
Backend = Annotated[
    str, typer.Option("--backend", help="hf (transformers), or runtime: quantkit's own, on weights as they are stored.")
]
Kv = Annotated[KvDtype, typer.Option("--kv", help="What the pages of the candidate's cache hold, by the runtime.")]
Fp8Query = Annotated[
    bool, typer.Option("--fp8-query", help="Round the candidate's queries to E4M3, too, as many engines do.")
]
BaselineKv = Annotated[KvDtype, typer.Option("--baseline-kv", help="The same for the baseline.")]
BaselineKvScale = Annotated[float | None, typer.Option("--baseline-kv-scale", help="The same for the baseline.")]
BaselineKvScales = Annotated[Path | None, typer.Option("--baseline-kv-scales", help="The same for the baseline.")]
BaselineFp8Query = Annotated[bool, typer.Option("--baseline-fp8-query", help="The same for the baseline.")]


def evaluate(
    candidate: Checkpoint = None,
    baseline: Baseline = None,
    suite: Suite = None,
    tasks: Tasks = None,
    limit: Limit = None,
    max_drop: MaxDrop = 0.8,
    rule: Rule = "paired",
    text: Text = None,
    window: Window = 256,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    chat_template: Template = False,
    backend: Backend = "hf",
    kv: Kv = KvDtype.BF16,
    kv_scale: KvScale = None,
    kv_scales: KvScales = None,
    fp8_query: Fp8Query = False,
    baseline_kv: BaselineKv = KvDtype.BF16,
    baseline_kv_scale: BaselineKvScale = None,
    baseline_kv_scales: BaselineKvScales = None,
    baseline_fp8_query: BaselineFp8Query = False,
    output: Output = None,
    history: HistoryFile = None,
    no_history: NoHistory = False,
    prepare: Prepare = None,
    as_json: Json = False,
) -> None:
    """Say whether a conversion may ship: pass, fail or cannot decide, with the evidence.

    Leaves with exit code 0 for pass, 3 for fail, 4 for cannot decide, 1 for runs that cannot be compared.

    Examples:

    quantkit eval ./GLM-5.2-INT4 --baseline ./GLM-5.2-BF16

    quantkit eval ./INT4 --baseline ./BF16 --tasks arc_easy:acc_norm --limit 300

    quantkit eval INT4 --baseline FP8 --backend runtime --kv fp8 --kv-scale 1.0

    quantkit eval --prepare offline
    """
    if prepare is not None:
        return _prepare(prepare, as_json)
    if candidate is None or baseline is None:
        raise UsageError("a candidate and a baseline are needed", hint="quantkit eval CANDIDATE --baseline BASE.")
    from quantkit import console
    from quantkit.eval.gate import data_folder, evaluation
    from quantkit.eval.gate import history as known
    from quantkit.eval.gate.task_specs import TaskSpec
    from quantkit.runtime.cache_options import CacheOptions

    data = data_folder.data_folder()
    options = evaluation.Options(
        suite=suite or (None if tasks or text else "quick"),
        tasks=tuple(TaskSpec.parse(task) for task in tasks or ()),
        text=text,
        window=window,
        max_tokens=max_tokens,
        limit=limit,
        seed=seed,
        chat_template=chat_template,
        rule=rule,
        max_drop=max_drop / 100,
        backend=backend,
        cache=CacheOptions(kv, scale=kv_scale, scale_file=kv_scales, fp8_query=fp8_query),
        baseline_cache=CacheOptions(
            baseline_kv, scale=baseline_kv_scale, scale_file=baseline_kv_scales, fp8_query=baseline_fp8_query
        ),
    )
    kept = None if no_history else history or data / known.FILE
    report = evaluation.evaluate(candidate, baseline, options, history=kept, data_folder=data, tell=console.tell)
    if output is not None:
        evaluation.write_report(report, output)
    console.show(report, as_json=as_json)
    return _leave(report)


def _prepare(suite: str, as_json: bool) -> None:
    if suite != "offline":
        raise UsageError(f"--prepare {suite}: only the suite offline has data to lay ready")
    from quantkit import console
    from quantkit.eval.gate.data_folder import data_folder
    from quantkit.eval.gate.offline import prepare_offline

    console.show(prepare_offline(data_folder()), as_json=as_json)


def _leave(report: "AccuracyReport") -> None:
    from quantkit.eval.gate.report import Verdict

    errors = {Verdict.FAIL: CheckFailed, Verdict.CANNOT_DECIDE: Undecided, Verdict.INVALID: NotComparable}
    if report.verdict in errors:
        raise errors[report.verdict](f"{report.candidate}: {report.verdict}")

"""`python -m quantkit.eval.proofs.conversions MODEL...`: each way to 4 bits, judged by the gate, in one table.

A model in FP8 is compared with its own decoding to BF16, one in BF16 with itself. With --broken the first model's
default conversion is also broken in several ways, and a second table says which measures noticed. With --pages the
weights are run as they are stored, on pages of BF16 or of FP8 at scale 1, against the model itself on BF16 pages.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quantkit.checkpoint.source import open_source
from quantkit.choices import KvDtype, ScaleMethod, Scheme
from quantkit.conversion import Options as ConversionOptions
from quantkit.conversion import convert
from quantkit.errors import PlanError
from quantkit.eval.gate import evaluation
from quantkit.eval.gate.backends import RUNTIME
from quantkit.eval.gate.data_folder import data_folder
from quantkit.eval.gate.offline import offline_tasks
from quantkit.eval.gate.report import AccuracyReport, Comparison
from quantkit.eval.proofs.breakage import BREAKAGES, break_checkpoint
from quantkit.runtime.cache_options import CacheOptions
from quantkit.tables import markdown_row
from quantkit.weights.encodings import PLAIN
from quantkit.weights.grouping import read_weights

DEFAULT = "INT4 g=32 search"
CONVERSIONS = {
    DEFAULT: ConversionOptions(group_size=32),
    "INT4 g=32 signed": ConversionOptions(group_size=32, scale=ScaleMethod.SIGNED),
    "INT4 g=32 minmax": ConversionOptions(group_size=32, scale=ScaleMethod.MINMAX),
    "INT4 g=64 search": ConversionOptions(group_size=64),
    "INT4 g=128 search": ConversionOptions(group_size=128),
    "NVFP4 search": ConversionOptions(scheme=Scheme.NVFP4),
    "NVFP4 minmax": ConversionOptions(scheme=Scheme.NVFP4, scale=ScaleMethod.MINMAX),
}
PAGES = (
    (None, KvDtype.FP8),
    (DEFAULT, KvDtype.BF16),
    (DEFAULT, KvDtype.FP8),
    ("NVFP4 search", KvDtype.BF16),
    ("NVFP4 search", KvDtype.FP8),
)


@dataclass(frozen=True)
class Bench:
    """Where conversions go, and what each is judged by."""

    work: Path
    options: evaluation.Options

    def convert(self, model: Path, name: str) -> Path:
        """The 4-bit checkpoint of `model`, made unless it is there; `name` is a key of `CONVERSIONS`."""
        output = self.work / f"{model.name} {name}"
        if not output.exists():
            convert(model, output, options=CONVERSIONS[name])
        return output

    def baseline(self, model: Path) -> Path:
        """`model` itself, or its decoding to BF16 if it holds FP8."""
        if all(weight.encoding is PLAIN for weight in read_weights(open_source(model))):
            return model
        output = self.work / f"{model.name} bf16"
        if not output.exists():
            convert(model, output, "bf16")
        return output

    def judge(self, candidate: Path, baseline: Path, pages: KvDtype | None = None) -> AccuracyReport:
        """The gate's report; by the runtime if `pages` say what the candidate's hold."""
        options = self.options
        if pages:
            cache = CacheOptions(pages, 1.0 if pages is KvDtype.FP8 else None)
            options = replace(options, backend=RUNTIME, cache=cache)
        return evaluation.evaluate(candidate, baseline, options, history=self.work / "history.sqlite")


def judge_conversions(models: list[Path], names: list[str], bench: Bench) -> Iterator[str]:
    """The first table: a row for each conversion in `names`, a column for each task and for all items together."""

    def judge(model: Path, name: str) -> AccuracyReport:
        return bench.judge(bench.convert(model, name), bench.baseline(model))

    return _judge_all((model.name, name, partial(judge, model, name)) for model in models for name in names)


def judge_pages(models: list[Path], bench: Bench) -> Iterator[str]:
    """The same columns, a row for each of `PAGES`."""

    def judge(model: Path, name: str | None, pages: KvDtype) -> AccuracyReport:
        return bench.judge(bench.convert(model, name) if name else model, model, pages)

    return _judge_all(
        (model.name, f"{name or 'as it is'}, {pages.upper()} pages", partial(judge, model, name, pages))
        for model in models
        for name, pages in PAGES
    )


def _judge_all(judged: Iterable[tuple[str, str, Callable[[], AccuracyReport]]]) -> Iterator[str]:
    """A table of what is judged: the model, how it was changed, and the function that judges it."""
    heading = True
    for model, how, judge in judged:
        start = time.monotonic()
        try:
            report = judge()
        except PlanError as error:
            yield _row(model, how, f"not possible: {error}")
            continue
        tasks = [*report.tasks, *([report.pooled] if report.pooled else [])]
        if heading:
            yield _heading("model", "format", "KL", "top-1", *map(_title, tasks), "verdict", "s")
        heading = False
        verdict = f"{report.verdict}", f"{time.monotonic() - start:.0f}"
        yield _row(model, how, *_distribution(report), *map(_difference, tasks), *verdict)


def judge_breakages(model: Path, bench: Bench) -> Iterator[str]:
    """The second table, a sound conversion first."""
    sound, baseline = bench.convert(model, DEFAULT), bench.baseline(model)
    reports = {"nothing": bench.judge(sound, baseline)}
    for number, name in enumerate(BREAKAGES):
        broken = bench.work / f"{model.name} broken {number}"
        break_checkpoint(sound, broken, name)
        reports[name] = bench.judge(broken, baseline)
    tasks = map(_title, reports["nothing"].tasks)
    yield _heading("broken", "weights, by verify", "KL", "top-1", *tasks, "verdict")
    for name, report in reports.items():
        weights = "; ".join(reason.split(",")[0] for reason in report.reasons if reason.startswith("verify"))
        differences = map(_difference, report.tasks)
        yield _row(name, weights or "ok", *_distribution(report), *differences, str(report.verdict))


def _distribution(report: AccuracyReport) -> tuple[str, str]:
    measured = report.distribution
    assert measured is not None
    return f"{measured.kl_divergence:.4f}", f"{measured.top1_agreement:.1%}"


def _title(task: Comparison) -> str:
    return f"{task.task}, n = {task.items:,}"


def _difference(task: Comparison) -> str:
    """In points, with its one-sided 95 % bounds."""
    difference, lower, upper = (f"{100 * share:+.2f}" for share in (task.difference, task.lower, task.upper))
    return f"{difference} [{lower}, {upper}]"


def _heading(*cells: str) -> str:
    return _row(*cells) + _row(*("---" for _ in cells))


def _row(*cells: str) -> str:
    return f"{markdown_row(*cells)}\n"


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders of checkpoints in FP8 or BF16")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONVERSIONS,
        default=list(CONVERSIONS),
        metavar="FORMAT",
        help=f"of {', '.join(CONVERSIONS)} (default all)",
    )
    parser.add_argument("--broken", action="store_true", help="break the first model's conversion, too")
    parser.add_argument("--pages", action="store_true", help="run weights as they are stored, on BF16 and FP8 pages")
    parser.add_argument("--offline", nargs="*", default=[], help="tasks of the suite offline to run beside quick")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where to work (default build)")
    parser.add_argument("--limit", type=int, help="at most so many items of each task")
    arguments = parser.parse_args()
    known = {task.name: task for task in offline_tasks(data_folder())} if arguments.offline else {}
    tasks = tuple(known[name] for name in arguments.offline)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="proof-", dir=arguments.folder) as work:
        bench = Bench(Path(work), evaluation.Options(suite="quick", tasks=tasks, limit=arguments.limit))
        conversions = partial(judge_conversions, arguments.models, arguments.only)
        tables = [(partial(judge_pages, arguments.models) if arguments.pages else conversions)(bench)]
        if arguments.broken:
            tables.append(judge_breakages(arguments.models[0], bench))
        for table in tables:
            for row in table:
                sys.stdout.write(row)
                sys.stdout.flush()
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()

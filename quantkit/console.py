"""What a person sees: tables on stdout, progress, warnings and errors on stderr. The only user of rich."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from quantkit.checkpoint.manifest import Manifest
from quantkit.engines.report import Compatibility
from quantkit.errors import OutputError, QuantkitError
from quantkit.eval.gate.report import AccuracyReport, Comparison, Verdict
from quantkit.inspection import Inspection
from quantkit.planning.deployment import DriftReport, PhasePlan
from quantkit.planning.fit_tables import tables as capacity_tables
from quantkit.planning.phase_tables import drift_table, launch_texts, phase_tables
from quantkit.planning.report import CapacityReport, PublishedFigures
from quantkit.records import Report, TextTable
from quantkit.remote import PublishReport
from quantkit.verification.report import Check, Verification

_MOST_TASKS = 20  # in a table
_FILE_WIDTH = 160  # of tables that go to a file or a pipe
_OUT = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_WIDTH)
_ERR = Console(stderr=True, soft_wrap=True)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report on stdout: as one JSON object, or as tables."""
    with _written_to_stdout():
        if as_json:
            sys.stdout.write(report.to_json())
        else:
            _SHOWN_BY.get(type(report), _show_tables)(report)
    for warning in getattr(report, "warnings", ()):
        warn(warning)


@contextmanager
def _written_to_stdout() -> Iterator[None]:
    """Raise OutputError for a full disk behind stdout; a pipe whose reader has left is no fault."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left need not fail again at the exit
        raise OutputError(f"stdout cannot be written: {error.strerror}", hint="Send it to another place.") from error


def warn(what: str) -> None:
    """Print on stderr what should be known, and is no error."""
    _ERR.print(f"[yellow]warning:[/] {escape(what)}")


def tell(what: str) -> None:
    """Say on stderr, if that is a terminal, what is being done."""
    if _ERR.is_terminal:
        _ERR.print(f"[dim]{escape(what)} ...[/]")


def show_error(error: QuantkitError) -> None:
    """Print an error and its remedy on stderr."""
    _ERR.print(f"[red]error:[/] {escape(str(error))}")
    if error.hint:
        _ERR.print(f"[cyan]hint:[/] {escape(error.hint)}")


@contextmanager
def progress(label: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A progress bar on stderr, shown when that is a terminal: give it the total bytes, get what takes bytes done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_ERR, transient=True, disable=not _ERR.is_terminal) as bar:

        def start(total: int) -> Callable[[int], None]:
            task = bar.add_task(label, total=total)
            return lambda done: bar.advance(task, done)

        yield start


def _table(title: str, *headings: str) -> Table:
    """A table whose first column is text and the others are numbers, unless their heading ends in a colon."""
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=None)
    for number, heading in enumerate(headings):
        left = number == 0 or heading.endswith(":")
        table.add_column(heading.rstrip(":"), justify="left" if left else "right", no_wrap=True)
    return table


def _role(role: str, mtp: bool) -> str:
    return f"{role} (MTP)" if mtp else role


def _size(nbytes: int) -> str:
    """Decimal units, as disks and the Hub count."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.2f} {unit}" if unit != "B" else f"{nbytes} B"


def _show_manifest(manifest: Manifest) -> None:
    title = f"{manifest.source.name}  by  {manifest.recipe['name']}: {manifest.recipe['description']}"
    table = _table(escape(title), "role", "weights", "from:", "to:", "before", "after")
    for group in manifest.groups:
        row = (f"{group.weights:,}", group.source_format, group.format, _size(group.source_bytes), _size(group.nbytes))
        table.add_row(_role(group.role, group.mtp), *row)
    _OUT.print(table)
    source = manifest.source
    ratio = manifest.total_bytes / source.total_bytes if source.total_bytes else 1.0
    _OUT.print(
        f"source {source.total_bytes:,} bytes in {source.num_tensors:,} tensors; "
        f"output {manifest.total_bytes:,} bytes in {manifest.num_tensors:,} tensors ({ratio:.1%})"
    )
    if manifest.respelled:
        _OUT.print(f"{len(manifest.files)} files; of them config.json is new, and describes the same tensors")
    elif manifest.files:
        _OUT.print(f"{len(manifest.files)} files written")


def _show_verification(result: Verification) -> None:
    checks = _table(
        f"{escape(result.checkpoint)}: {'passed' if result.passed else 'FAILED'}", "check", "result:", "note:"
    )
    for check in result.checks:
        checks.add_row(check.name, _outcome(check), escape(check.note))
    _OUT.print(checks)
    for check in result.checks:
        for example in check.examples:
            _OUT.print(f"  [red]{check.name}[/]: {escape(example)}")
    if result.errors:
        errors = _table(
            f"error against {escape(str(result.against))}", "role", "to:", "weights", "RMS", "SQNR dB", "worst"
        )
        for entry in result.errors:
            row = (entry.format, f"{entry.weights:,}", f"{entry.relative_rms:.4%}", _decibel(entry.sqnr_db))
            errors.add_row(_role(entry.role, entry.mtp), *row, f"{entry.worst_relative_rms:.4%}")
        _OUT.print(errors)
        worst = _table(f"the worst {len(result.worst)}", "module", "to:", "RMS", "SQNR dB")
        for tensor in result.worst:
            worst.add_row(tensor.name, tensor.format, f"{tensor.relative_rms:.4%}", _decibel(tensor.sqnr_db))
        _OUT.print(worst)


def _outcome(check: Check) -> str:
    if check.problems is None:
        return "skipped"
    return "[green]ok[/]" if check.problems == 0 else f"[red]{check.problems:,} problems[/]"


def _decibel(value: float | None) -> str:
    return "exact" if value is None else f"{value:.2f}"


def _show_inspection(result: Inspection) -> None:
    title = f"{result.checkpoint}: {result.model_type}, quantization {result.quantization or 'none'}"
    table = _table(escape(title), "role", "format:", "weights", "parameters", "bytes")
    for holding in result.holdings:
        row = (holding.format, f"{holding.weights:,}", f"{holding.parameters:,}", _size(holding.nbytes))
        table.add_row(_role(holding.role, holding.mtp), *row)
    _OUT.print(table)
    layers = _table("layers that hold the same", "layers", "bytes each", "weights of each:")
    for group in result.layers:
        weights = "; ".join(f"{count} {kind}" for kind, count in group.weights.items())
        layers.add_row(_role(group.layers, group.mtp), _size(group.nbytes), weights)
    layers.columns[0].no_wrap = layers.columns[2].no_wrap = False
    _OUT.print(layers)
    _OUT.print(
        f"{result.parameters:,} parameters, {result.total_bytes:,} bytes in {result.num_tensors:,} tensors "
        f"and {result.num_shards} shards"
    )


def _show_compatibility(report: Compatibility) -> None:
    _print_tables((report.table(),))
    for where, text in report.findings():
        _OUT.print(f"[yellow]{escape(where)}:[/] {escape(text)}", highlight=False)


def _show_tables(report: Report) -> None:
    _print_tables(report.tables())


def _print_tables(tables: Iterable[TextTable]) -> None:
    for content in tables:
        table = _table(escape(content.title), *content.headings)
        for row in content.rows:
            table.add_row(*map(escape, row))
        table.columns[-1].no_wrap = False
        _OUT.print(table)


def _show_capacity(report: CapacityReport | PublishedFigures) -> None:
    _print_tables(capacity_tables(report))


def _show_phases(plan: PhasePlan) -> None:
    """Command lines are printed as they are, to be copied."""
    _print_tables(phase_tables(plan))
    for reason in plan.reasons:
        _OUT.print(escape(reason))
    for engine, texts in launch_texts(plan):
        _OUT.print(f"\n[bold]{escape(engine)}[/]")
        for text in texts:
            sys.stdout.write(f"{text}\n")


def _show_drift(report: DriftReport) -> None:
    _print_tables((drift_table(report),))
    for drift in report.drifts:
        what = f"{drift.pool}, {drift.field}: expected {drift.expected}, found {drift.found}"
        _OUT.print(f"[red]drift:[/] {escape(what)}", highlight=False)
    for text in report.unchecked:
        _OUT.print(f"not checked: {escape(text)}")


def _show_accuracy(report: AccuracyReport) -> None:
    if report.distribution:
        _print_tables(report.distribution.tables())
    headings = ("task", "metric:", "items", "baseline", "candidate", "lost", "gained", "difference", "lower", "upper")
    table = _table(f"{escape(report.candidate)} against {escape(report.baseline)}", *headings, "p (Holm)", "detectable")
    shown = sorted(report.tasks, key=lambda task: task.adjusted_p_value)[:_MOST_TASKS]
    for task in (*(task for task in report.tasks if task in shown), report.pooled):
        if task and (task is not report.pooled or len(report.tasks) > 1):
            table.add_row(*_comparison_row(task))
    _OUT.print(table)
    if hidden := len(report.tasks) - len(shown):
        _OUT.print(f"and {hidden} more tasks with larger p; --json shows all")
    color = {Verdict.PASS: "green", Verdict.FAIL: "red"}.get(report.verdict, "yellow")
    pages = "".join(f", {arm} on {kept['kv'].upper()} pages" for arm, kept in report.pages.items())
    margin = f"suite {report.suite}, rule {report.rule}, margin {100 * report.max_drop:g} points{pages}"
    _OUT.print(f"[bold {color}]{report.verdict.upper()}[/]  ({margin})")
    for reason in report.reasons:
        _OUT.print(f"  {escape(reason)}")


def _comparison_row(task: Comparison) -> tuple[str, ...]:
    shares = (f"{correct / task.items:.2%}" for correct in (task.baseline_correct, task.candidate_correct))
    points = (f"{100 * share:+.2f}" for share in (task.difference, task.lower, task.upper))
    metric = ",".join(filter(None, (task.metric, task.filter)))
    counts = (f"{task.lost:,}", f"{task.gained:,}", *points, f"{task.adjusted_p_value:.2g}")
    return (escape(task.task), escape(metric), f"{task.items:,}", *shares, *counts, f"{100 * task.detectable_drop:.2f}")


def _show_publication(report: PublishReport) -> None:
    """A dry run shows the card, which is what remains to be judged."""
    if report.commit is None:
        sys.stdout.write(f"{report.card}\n")
    visibility = "private" if report.private else "public"
    sent = f"{report.uploaded} {'to send' if report.commit is None else 'sent'} ({_size(report.uploaded_bytes)})"
    _OUT.print(
        f"{escape(report.url)} ({visibility}), {escape(report.revision)}: {len(report.files)} files, {sent}, "
        f"{report.already_there} already there" + (f"; commit {report.commit}" if report.commit else "")
    )


_SHOWN_BY: dict[type[Report], Callable[[Any], None]] = {
    Manifest: _show_manifest,
    Verification: _show_verification,
    Inspection: _show_inspection,
    Compatibility: _show_compatibility,
    AccuracyReport: _show_accuracy,
    PublishReport: _show_publication,
    CapacityReport: _show_capacity,
    PublishedFigures: _show_capacity,
    PhasePlan: _show_phases,
    DriftReport: _show_drift,
}

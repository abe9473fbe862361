"""What a person sees: tables on stdout, progress, warnings and errors on stderr. The only user of rich."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from quantkit.errors import OutputError, QuantkitError
from quantkit.progress import Advance, Progress
from quantkit.records import Record, Report
from quantkit.tables import Line, Style, TextTable

_FILE_WIDTH = 160  # of tables that go to a file or a pipe
_OUT = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_WIDTH)
_ERR = Console(stderr=True, soft_wrap=True)


def show(report: Report, *, as_json: bool, printed: bool = False) -> None:
    """Print a report on stdout, as one JSON object or as tables and text, and on stderr its remarks and warnings.

    printed  its text is there already: it was printed while it came
    """
    if as_json:
        show_json(report)
    else:
        with _written_to_stdout():
            _show(report, printed)
        for line in report.remarks():
            _ERR.print(_text(line), highlight=False)
    for warning in getattr(report, "warnings", ()):
        warn(warning)


def show_json(record: Record) -> None:
    """Print a record on stdout as one JSON object."""
    with _written_to_stdout():
        sys.stdout.write(record.to_json())


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
def progress(label: str) -> Iterator[Progress]:
    """A progress bar on stderr, shown when that is a terminal: give it the total bytes, get what takes bytes done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=_ERR, transient=True, disable=not _ERR.is_terminal) as bar:

        def start(total: int) -> Advance:
            task = bar.add_task(label, total=total)
            return lambda done: bar.advance(task, done)

        yield start


def _show(report: Report, printed: bool) -> None:
    for content in report.tables():
        _OUT.print(_table(content))
    for line in report.lines():
        _OUT.print(_text(line), highlight=False)
    if printed or (text := report.verbatim()):
        sys.stdout.write("\n" if printed else f"{text}\n")
    if answer := report.answer():
        _OUT.print(_text(answer), highlight=False)


def _table(content: TextTable) -> Table:
    """Numbers are never cut or wrapped; text is wrapped where the terminal is too narrow."""
    table = Table(title=escape(content.title), title_justify="left", title_style="bold", pad_edge=False, box=None)
    for name, is_text in content.columns:
        table.add_column(escape(name), justify="left" if is_text else "right", no_wrap=not is_text)
    for row in content.rows:
        table.add_row(*map(escape, row))
    return table


def _text(line: Line) -> Text:
    color = {Style.GOOD: "green", Style.BAD: "red", Style.WARNING: "yellow"}.get(line.style, "")
    if line.label:
        return Text.assemble((f"{line.label}:", color), " ", line.text)
    return Text(line.text, style=f"bold {color}" if color else "")

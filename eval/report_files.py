"""The folder that `--output` names: a report as JSON, and its tables as Markdown."""

from collections.abc import Iterable
from pathlib import Path

from quantkit.capacity.tables import TextTable
from quantkit.errors import OutputError
from quantkit.report import Report

REPORT_FILES = ("report.json", "report.md")


def write_report_files(report: Report, tables: str, folder: Path) -> None:
    """Write `report` and `tables`, its Markdown, into `folder`. Raises OutputError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(REPORT_FILES, (report.to_json(), tables), strict=True):
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder}: the report cannot be written: {error.strerror}") from error


def markdown(tables: Iterable[TextTable]) -> str:
    """Tables as Markdown."""
    parts = []
    for table in tables:
        headings = [heading.rstrip(":") for heading in table.headings]
        lines = [headings, ["---"] * len(headings), *table.rows]
        parts.append("\n".join((f"{table.title}\n", *(f"| {' | '.join(cells)} |" for cells in lines))))
    return "\n\n".join(parts) + "\n"

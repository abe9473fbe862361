"""The folder that `--output` names: a report as JSON, and its tables as Markdown."""

from collections.abc import Iterable
from pathlib import Path

from quantkit.checkpoint.writer import write_whole
from quantkit.records import Report, TextTable

REPORT_FILES = ("report.json", "report.md")


def write_report_files(report: Report, tables: str, folder: Path) -> None:
    """Write `report` and `tables`, its Markdown, into `folder`. Raises OutputError if it cannot be written to."""
    for name, text in zip(REPORT_FILES, (report.to_json(), tables), strict=True):
        write_whole(folder / name, text.encode())


def markdown(tables: Iterable[TextTable]) -> str:
    """Tables as Markdown."""
    parts = []
    for table in tables:
        headings = [heading.rstrip(":") for heading in table.headings]
        lines = [headings, ["---"] * len(headings), *table.rows]
        parts.append("\n".join((f"{table.title}\n", *(f"| {' | '.join(cells)} |" for cells in lines))))
    return "\n\n".join(parts) + "\n"

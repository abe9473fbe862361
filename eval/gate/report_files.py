"""The folder that `--output` names: a report as JSON, and its tables as Markdown."""

from pathlib import Path

from quantkit.checkpoint.writer import write_whole
from quantkit.records import Report
from quantkit.tables import markdown

REPORT_FILES = ("report.json", "report.md")


def write_report_files(report: Report, folder: Path, text: str | None = None) -> None:
    """Write `report` into `folder`, as JSON and as Markdown: `text`, or its tables.

    Raises OutputError if the folder cannot be written to.
    """
    shown = markdown(report.tables()) + "\n" if text is None else text
    for name, content in zip(REPORT_FILES, (report.to_json(), shown), strict=True):
        write_whole(folder / name, content.encode())

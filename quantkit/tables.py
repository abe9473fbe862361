"""What a report shows to a person: tables and lines of text, apart from how a terminal or Markdown draws them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class TextTable:
    """A title, headings (the first and those that end in a colon are text, the others numbers) and rows."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def columns(self) -> tuple[tuple[str, bool], ...]:
        """Each heading without its colon, and whether its column is text."""
        return tuple(
            (heading.removesuffix(":"), number == 0 or heading.endswith(":"))
            for number, heading in enumerate(self.headings)
        )


class Style(StrEnum):
    """How a line is to be taken; a terminal gives each a colour."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WARNING = "warning"


@dataclass(frozen=True)
class Line:
    """A line of text, after a `label` that has the style; without a label the line itself has it."""

    text: str
    style: Style = Style.PLAIN
    label: str = ""


def markdown(tables: Iterable[TextTable]) -> str:
    """Tables in Markdown, each below its title, if it has one."""
    return "\n\n".join(_markdown(table) for table in tables)


def _markdown(table: TextTable) -> str:
    rules = ("---" if is_text else "---:" for _, is_text in table.columns)
    rows = ((name for name, _ in table.columns), rules, *table.rows)
    return "\n".join(([table.title, ""] if table.title else []) + [markdown_row(*row) for row in rows])


def markdown_row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def role_name(role: str, mtp: bool) -> str:
    """A role, or layers, of the main model or of its multi-token prediction."""
    return f"{role} (MTP)" if mtp else role


def size(nbytes: int) -> str:
    """Bytes in decimal units, as disks and the Hub count."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.2f} {unit}" if unit != "B" else f"{nbytes} B"

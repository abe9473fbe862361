"""The recorded files."""

from pathlib import Path

OUTPUTS = Path(__file__).parent / "outputs"


def path_of(name: str) -> Path:
    """The file of a source."""
    return OUTPUTS / f"{name.replace(' ', '-')}.txt"


def write(name: str, lines: list[str]) -> None:
    """Write down a source's lines."""
    OUTPUTS.mkdir(exist_ok=True)
    path_of(name).write_text("\n".join(lines) + "\n")


def read(name: str) -> list[str]:
    """A source's lines, as written down; none if nothing was."""
    return path_of(name).read_text().splitlines() if path_of(name).exists() else []

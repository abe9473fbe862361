"""What `verify` reports."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.records import Report
from quantkit.tables import Line, Style, TextTable, role_name


@dataclass(frozen=True)
class Check:
    """One thing that was checked: `problems` in all, the first few in words (None: it was skipped), and what it covered
    or why it was skipped."""

    name: str
    problems: int | None
    examples: tuple[str, ...] = ()
    note: str = ""

    @property
    def outcome(self) -> str:
        """The result in a word or two."""
        if self.problems is None:
            return "skipped"
        return f"{self.problems:,} problems" if self.problems else "ok"


@dataclass(frozen=True)
class TensorError:
    """How far a weight is from its source: root mean square of the difference over that of the source, and signal to
    quantization noise, None for no error at all."""

    name: str
    role: str
    mtp: bool
    format: str
    relative_rms: float
    sqnr_db: float | None


@dataclass(frozen=True)
class RoleError:
    """The same for all weights of a role, pooled over their numbers, with the worst weight's."""

    role: str
    mtp: bool
    format: str
    weights: int
    relative_rms: float
    sqnr_db: float | None
    worst_relative_rms: float


@dataclass(frozen=True)
class Verification(Report):
    """What `verify` found. `errors` and `worst` are empty without a source to compare with."""

    checkpoint: str
    against: str | None
    passed: bool
    checks: tuple[Check, ...]
    errors: tuple[RoleError, ...]
    worst: tuple[TensorError, ...]
    seconds: float

    def tables(self) -> Iterator[TextTable]:
        """The checks; the error of each role, and the worst weights."""
        checks = ((check.name, check.outcome, check.note) for check in self.checks)
        yield TextTable(self.checkpoint, ("check", "result:", "note:"), tuple(checks))
        if self.errors:
            rows = (
                (
                    role_name(entry.role, entry.mtp),
                    entry.format,
                    f"{entry.weights:,}",
                    *_figures(entry),
                    f"{entry.worst_relative_rms:.4%}",
                )
                for entry in self.errors
            )
            headings = ("role", "to:", "weights", "RMS", "SQNR dB", "worst weight's RMS")
            yield TextTable(f"error against {self.against}", headings, tuple(rows))
            worst = ((tensor.name, tensor.format, *_figures(tensor)) for tensor in self.worst)
            yield TextTable(f"the worst {len(self.worst)}", ("module", "to:", "RMS", "SQNR dB"), tuple(worst))

    def lines(self) -> Iterator[Line]:
        """The first problems of each check."""
        for check in self.checks:
            yield from (Line(example, Style.BAD, check.name) for example in check.examples)

    def answer(self) -> Line:
        """Whether it passed."""
        if self.passed:
            return Line(f"{self.checkpoint} passed", Style.GOOD)
        problems = sum(check.problems or 0 for check in self.checks)
        return Line(f"{self.checkpoint} FAILED: {problems:,} problems", Style.BAD)


def _figures(error: TensorError | RoleError) -> tuple[str, str]:
    return f"{error.relative_rms:.4%}", "exact" if error.sqnr_db is None else f"{error.sqnr_db:.2f}"

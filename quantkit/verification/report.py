"""What `verify` reports."""

from dataclasses import dataclass

from quantkit.records import Report


@dataclass(frozen=True)
class Check:
    """One thing that was checked: `problems` in all, the first few in words (None: it was skipped), and what it covered
    or why it was skipped."""

    name: str
    problems: int | None
    examples: tuple[str, ...] = ()
    note: str = ""


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

"""What evaluations report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quantkit.records import Record, Report
from quantkit.tables import Line, Style, TextTable

_MOST_TASKS = 20  # in a table


@dataclass(frozen=True)
class PositionRange:
    """The same figures for the scored tokens at the positions `first` to `last` of a window, counted from 0."""

    first: int
    last: int
    baseline_bits_per_byte: float
    candidate_bits_per_byte: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True)
class DistributionReport(Record):
    """How far the next-token distributions of a candidate are from its baseline's on a text.

    kl_divergence     mean of KL(baseline || candidate) over the scored tokens, in nats
    top1_agreement    share of the scored tokens for which both rank the same token first
    baseline_correct  scored tokens that the baseline ranks first
    lost, gained      scored tokens that only the baseline, or only the candidate, ranks first
    flips             share of the scored tokens that are lost or gained
    """

    candidate: str
    baseline: str
    text: str
    window: int
    scored_tokens: int
    scored_bytes: int
    baseline_bits_per_byte: float
    candidate_bits_per_byte: float
    kl_divergence: float
    top1_agreement: float
    baseline_correct: int
    lost: int
    gained: int
    flips: float
    positions: tuple[PositionRange, ...]

    def tables(self) -> Iterator[TextTable]:
        """The figures, with what they mean."""
        difference = self.candidate_bits_per_byte - self.baseline_bits_per_byte
        half = len(self.positions) // 2
        early, late = (_mean_divergence(part) for part in (self.positions[:half], self.positions[half:]))
        rows = (
            ("bits per byte, baseline", f"{self.baseline_bits_per_byte:.4f}", ""),
            ("bits per byte, candidate", f"{self.candidate_bits_per_byte:.4f}", f"{difference:+.4f}"),
            ("KL divergence", f"{self.kl_divergence:.5f}", "nats per token; 0 is the same distribution"),
            ("top-1 agreement", f"{self.top1_agreement:.2%}", "both rank the same token first"),
            ("flips", f"{self.flips:.2%}", f"{self.lost:,} tokens lost, {self.gained:,} gained"),
            ("KL, first and second half", f"{early:.5f} {late:.5f}", "of the positions in a window"),
            ("scored tokens", f"{self.scored_tokens:,}", f"{self.scored_bytes:,} bytes of {self.text}"),
        )
        yield TextTable(f"{self.candidate} against {self.baseline}", ("", "value", "meaning:"), rows)


def _mean_divergence(positions: Sequence[PositionRange]) -> float:
    lengths = [part.last - part.first + 1 for part in positions]
    return sum(n * part.kl_divergence for n, part in zip(lengths, positions, strict=True)) / max(sum(lengths), 1)


class Verdict(StrEnum):
    """What the accuracy gate says of a candidate."""

    PASS = "pass"
    FAIL = "fail"
    CANNOT_DECIDE = "cannot decide"
    INVALID = "invalid"  # the two runs are not comparable, or one of them is not sound


@dataclass(frozen=True)
class Comparison:
    """One task's items, or all tasks' together, answered by both models. Differences are candidate minus baseline.

    metric, filter      as the harness names them; empty for all tasks together
    lost, gained        items that only the baseline, or only the candidate, has right
    lower, upper        one-sided 95 % bounds of the difference, each
    p_value             exact McNemar test, two-sided
    adjusted_p_value    the same by Holm over all tasks
    detectable_drop     the smallest true drop that so many items find in 80 % of all cases
    has_power           whether so many items pass in 80 % of all cases if there is no difference
    """

    task: str
    metric: str
    filter: str
    items: int
    baseline_correct: int
    candidate_correct: int
    lost: int
    gained: int
    difference: float
    lower: float
    upper: float
    p_value: float
    adjusted_p_value: float
    detectable_drop: float
    has_power: bool


@dataclass(frozen=True)
class AccuracyReport(Report):
    """The accuracy gate's verdict on a candidate, with its evidence.

    candidate, baseline    names; their digests stand for all bytes of the checkpoints
    rule, max_drop         `paired` or `point`, and the margin as a share: 0.008 is 0.8 points
    reasons, needed_items  in words, what decided; for `cannot decide`: about so many items in all would decide
    tasks, pooled          the comparisons, and that of all items together; none for an invalid run
    distribution           next-token distributions on a text, when they were compared
    settings               what both runs share: backend, versions of harness and libraries, seed, few-shot, sampling
    seconds                wall time of each stage; 0 where a result came from the cache
    pages                  of `candidate` and `baseline` by the runtime: `kv`, and of FP8 `scales` and `scales_digest`;
                           `query` where queries are FP8, too
    """

    candidate: str
    baseline: str
    candidate_digest: str
    baseline_digest: str
    suite: str
    rule: str
    max_drop: float
    verdict: Verdict
    reasons: tuple[str, ...]
    tasks: tuple[Comparison, ...]
    pooled: Comparison | None
    needed_items: int | None
    distribution: DistributionReport | None
    settings: dict[str, Any]
    seconds: dict[str, float]
    warnings: tuple[str, ...] = ()
    pages: dict[str, dict[str, str]] = field(default_factory=dict)

    def tables(self) -> Iterator[TextTable]:
        """The distributions; then the tasks with the smallest p, in their order, and all together."""
        if self.distribution:
            yield from self.distribution.tables()
        shown = [task for task in self.tasks if task in self._shown]
        if self.pooled and len(self.tasks) > 1:
            shown.append(self.pooled)
        headings = ("task", "metric:", "items", "baseline", "candidate", "lost", "gained", "difference")
        title = f"{self.candidate} against {self.baseline}"
        figures = ("lower", "upper", "p (Holm)", "detectable")
        yield TextTable(title, (*headings, *figures), tuple(map(_cells, shown)))

    def lines(self) -> Iterator[Line]:
        """How many tasks the table leaves out; what decided."""
        if hidden := len(self.tasks) - len(self._shown):
            yield Line(f"and {hidden} more tasks with larger p; --json shows all")
        yield from (Line(f"  {reason}") for reason in self.reasons)

    def answer(self) -> Line:
        """The verdict."""
        style = {Verdict.PASS: Style.GOOD, Verdict.FAIL: Style.BAD}.get(self.verdict, Style.WARNING)
        pages = "".join(f", {arm} on {kept['kv'].upper()} pages" for arm, kept in self.pages.items())
        margin = f"suite {self.suite}, rule {self.rule}, margin {100 * self.max_drop:g} points{pages}"
        return Line(f"{self.verdict.upper()}  ({margin})", style)

    @property
    def _shown(self) -> list[Comparison]:
        return sorted(self.tasks, key=lambda task: task.adjusted_p_value)[:_MOST_TASKS]


def _cells(task: Comparison) -> tuple[str, ...]:
    shares = (f"{correct / task.items:.2%}" for correct in (task.baseline_correct, task.candidate_correct))
    points = (f"{100 * share:+.2f}" for share in (task.difference, task.lower, task.upper))
    metric = ",".join(filter(None, (task.metric, task.filter)))
    counts = (f"{task.lost:,}", f"{task.gained:,}", *points, f"{task.adjusted_p_value:.2g}")
    return (task.task, metric, f"{task.items:,}", *shares, *counts, f"{100 * task.detectable_drop:.2f}")

"""What the checks did and found: numbers in memory, which become Prometheus text or JSON when they are asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from quantkit.records import Record
from quantkit.runtime.integrity.causes import Cause


@dataclass(frozen=True)
class IntegrityReport(Record):
    """What the checks did and found.

    steps            that were checked before they read pages
    pages            that were compared in them
    faults           by cause; of late writes, rows that were refused
    retries          requests that were hit and computed again
    retries_refused  requests that were hit and had no retry left
    """

    level: str
    steps: int
    pages: int
    faults: dict[str, int]
    retries: int
    retries_refused: int

    @property
    def num_faults(self) -> int:
        """Of all causes."""
        return sum(self.faults.values())

    def __add__(self, other: "IntegrityReport") -> "IntegrityReport":
        """Both together."""
        return IntegrityReport(
            self.level,
            self.steps + other.steps,
            self.pages + other.pages,
            {cause: count + other.faults[cause] for cause, count in self.faults.items()},
            self.retries + other.retries,
            self.retries_refused + other.retries_refused,
        )


class IntegrityCounters(Collector):
    """The numbers of one pool, with a registry of their own."""

    def __init__(self) -> None:
        self._clear()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The counters in Prometheus' terms."""
        return metrics({(): self.report("")})

    def to_prometheus(self) -> str:
        """Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def report(self, level: str) -> IntegrityReport:
        """The counters as they are now."""
        faults = {str(cause): count for cause, count in self.faults.items()}
        return IntegrityReport(level, self.steps, self.pages, faults, self.retries, self.retries_refused)

    def drain(self, level: str) -> IntegrityReport:
        """The counters as they are now; they begin again."""
        report = self.report(level)
        self._clear()
        return report

    def _clear(self) -> None:
        self.steps = self.pages = self.retries = self.retries_refused = 0
        self.faults = dict.fromkeys(Cause, 0)


def metrics(reports: Mapping[tuple[str, ...], IntegrityReport], labels: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Reports in Prometheus' terms, by their values of `labels`."""
    faults = CounterMetricFamily(
        "quantkit_integrity_faults", "Faults that the checks found.", labels=[*labels, "cause"]
    )
    for values, report in reports.items():
        for cause, count in report.faults.items():
            faults.add_metric([*values, cause], count)
    yield faults
    for name, text in (
        ("steps", "Steps that were checked before they read pages."),
        ("pages", "Pages that were compared."),
        ("retries", "Requests that were hit and computed again."),
        ("retries_refused", "Requests that were hit and had no retry left."),
    ):
        family = CounterMetricFamily(f"quantkit_integrity_{name}", text, labels=labels)
        for values, report in reports.items():
            family.add_metric(values, getattr(report, name))
        yield family

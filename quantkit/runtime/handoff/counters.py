"""What the coordinator did and what went wrong: numbers that become a report, or Prometheus text."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from quantkit.errors import HandoffError
from quantkit.records import Record
from quantkit.runtime.handoff.messages import Opened, Refused, Said
from quantkit.runtime.integrity.counters import IntegrityReport, metrics


@dataclass(frozen=True)
class HandoffReport(Record):
    """What two kinds of workers did together.

    prefill, decode    workers of each kind
    handoffs           that were opened: `source_pages` of the prefill workers, `nbytes` in all, became `pages`
    saturated, nan     values that were clamped when FP8 pages were written, and that are no numbers
    faults             in hand-offs, by cause
    checked            what the engines of each kind checked of their own pages, and found; empty where nothing is
    lost               workers that died or hung, by kind
    restarted          of them, those in whose place another one was started
    retried            attempts that came to nothing and were made again
    """

    prefill: int
    decode: int
    handoffs: int
    source_pages: int
    pages: int
    nbytes: int
    saturated: int
    nan: int
    faults: dict[str, int]
    checked: dict[str, IntegrityReport]
    lost: dict[str, int]
    restarted: int
    retried: int

    @property
    def num_faults(self) -> int:
        """All that were found, in hand-offs and in pages."""
        return sum(self.faults.values()) + sum(one.num_faults for one in self.checked.values())

    def __str__(self) -> str:
        parts = [
            f"{self.prefill} prefill and {self.decode} decode workers: {self.handoffs:,} hand-offs",
            f"{self.source_pages:,} pages of {self.nbytes:,} bytes became {self.pages:,}",
            f"{self.saturated:,} values clamped",
            *(f"{count:,} {kind} workers lost" for kind, count in self.lost.items()),
            *(f"{count:,} faults: {cause}" for cause, count in self.faults.items()),
        ]
        for kind, found in self.checked.items():
            parts.append(f"{found.pages:,} pages checked in {kind}")
            parts += [f"{count:,} faults in {kind}: {cause}" for cause, count in found.faults.items() if count]
            parts += [f"{found.retries:,} computed again in {kind}"] * bool(found.retries)
        return ", ".join(parts) + (f", {self.retried:,} attempts repeated" if self.retried else "")


class HandoffCounters(Collector):
    """The numbers of one coordinator, with a registry of their own."""

    def __init__(self) -> None:
        self.handoffs = self.source_pages = self.pages = self.nbytes = 0
        self.saturated = self.nan = self.restarted = self.retried = 0
        self.faults: Counter[str] = Counter()
        self.checked: dict[str, IntegrityReport] = {}
        self.lost: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def add(self, kind: str, message: Said) -> None:
        """What a worker of a kind did and found."""
        if message.checked:
            before = self.checked.get(kind)
            self.checked[kind] = before + message.checked if before else message.checked
        self.saturated += message.saturated
        self.nan += message.nan
        if isinstance(message, Opened):
            self.handoffs += 1
            self.source_pages += message.source_pages
            self.pages += message.pages
            self.nbytes += message.nbytes
        if isinstance(message, Refused) and isinstance(message.error, HandoffError):
            self.faults[message.error.cause] += 1  # an IntegrityError is among those that were `checked`

    def collect(self) -> Iterator[Metric]:
        """The counters in Prometheus' terms."""
        for name, label, counts, text in (
            ("faults", "cause", self.faults, "Faults in hand-offs."),
            ("workers_lost", "kind", self.lost, "Workers that died or hung."),
        ):
            family = CounterMetricFamily(f"quantkit_handoff_{name}", text, labels=[label])
            for key, count in counts.items():
                family.add_metric([key], count)
            yield family
        for name, number, text in (
            ("opened", self.handoffs, "Hand-offs that were opened."),
            ("pages", self.pages, "Pages of decode workers that came from hand-offs."),
            ("bytes", self.nbytes, "Bytes of pages that prefill workers handed over."),
            ("saturated", self.saturated, "Values that were clamped when FP8 pages were written."),
            ("nan", self.nan, "Values written to the cache that are no numbers."),
            ("restarted", self.restarted, "Workers that were started in the place of lost ones."),
            ("retried", self.retried, "Attempts that came to nothing and were made again."),
        ):
            yield CounterMetricFamily(f"quantkit_handoff_{name}", text, value=number)
        yield from metrics({(kind,): report for kind, report in self.checked.items()}, ("kind",))

    def to_prometheus(self) -> str:
        """Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def report(self, prefill: int, decode: int) -> HandoffReport:
        """The counters as they are now, of so many workers of each kind."""
        kept = {field.name: getattr(self, field.name) for field in fields(HandoffReport)[2:]}
        copied = {"faults": dict(self.faults), "checked": dict(self.checked), "lost": dict(self.lost)}
        return HandoffReport(prefill, decode, **kept | copied)

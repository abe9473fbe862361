"""What `bench decode` reports, and its tables in the shape in which such figures are published."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.records import Report
from quantkit.tables import Line, Style, TextTable


@dataclass(frozen=True)
class Speed:
    """One arm's turns.

    running  requests that ran at the same time; fewer than were asked for is out of memory
    tokens   that were computed in all timed turns
    turns    tokens per second of each; none if the pool did not hold all requests
    """

    running: int
    tokens: int
    turns: tuple[float, ...]


@dataclass(frozen=True)
class SpeedRow:
    """Both arms with `requests` at the same time; `ratios` are candidate to baseline, one for each round A B B A."""

    requests: int
    baseline: Speed
    candidate: Speed
    ratios: tuple[float, ...]

    def text(self) -> str:
        """Both arms' figures in words."""
        return " and ".join(_speed_cells(speed, self.requests)[0] for speed in (self.baseline, self.candidate))


@dataclass(frozen=True)
class WeightBytes:
    """A model's weights: how they are stored, bytes of all, and those that one token reads when it is alone."""

    name: str
    format: str
    nbytes: int
    token_bytes: int

    @property
    def label(self) -> str:
        """The format as tables have it."""
        return self.format.upper()


@dataclass(frozen=True)
class KvFormats:
    """Pages of two dtypes in as many bytes, under the candidate's weights; FP8 pages have scale 1."""

    pool_bytes: int
    bf16_tokens: int
    fp8_tokens: int
    rows: tuple[SpeedRow, ...]


@dataclass(frozen=True)
class DecodeReport(Report):
    """How fast two checkpoints of one model decode, by number of requests; and two kinds of pages.

    valid      False: the arms did not do the same work, and `problems` say why; no figure may be used
    bytes_ratio  baseline to candidate of what a token reads: the most that fewer bytes can bring to one request
    decode     tokens per second of all requests, BF16 pages
    prefill    of one prompt
    settings   what both arms share
    """

    baseline: WeightBytes
    candidate: WeightBytes
    valid: bool
    problems: tuple[str, ...]
    bytes_ratio: float
    decode: tuple[SpeedRow, ...]
    kv: KvFormats
    prefill: SpeedRow
    settings: dict[str, int]

    def tables(self) -> Iterator[TextTable]:
        """Weights, decoding, kinds of pages, prefill."""
        state = "" if self.valid else "INVALID: "
        names = self.baseline.label, self.candidate.label
        yield self._weights(state)
        how = "{threads} threads, prompts of {prompt_tokens} tokens, turns of {new_tokens} steps".format(
            **self.settings
        )
        yield _speeds(f"{state}decode, tokens per second, BF16 pages: {how}", "requests", names, self.decode)
        title = (
            f"{state}KV formats in {self.kv.pool_bytes:,} bytes, {self.candidate.label} weights: "
            f"{self.kv.bf16_tokens:,} tokens in BF16, {self.kv.fp8_tokens:,} in FP8"
        )
        yield _speeds(title, "requests", ("BF16 pages", "FP8 pages"), self.kv.rows)
        title = "{prefill_tokens} tokens, chunks of {chunk_size}".format(**self.settings)
        yield _speeds(f"{state}prefill, tokens per second: {title}", "prompts", names, (self.prefill,))
        if self.problems:
            yield TextTable("the arms did not do the same work", ("why:",), tuple((text,) for text in self.problems))

    def answer(self) -> Line:
        """How the candidate's speed compares at the fewest requests, if the arms did the same work."""
        if not self.valid:
            return Line("INVALID: the arms did not do the same work, and no figure may be used", Style.BAD)
        row = next((row for row in self.decode if row.ratios), None)
        if row is None:
            return Line("no number of requests ran on both checkpoints", Style.WARNING)
        ratio = f"{statistics.median(row.ratios):.2f} times as fast as {self.baseline.label}"
        return Line(f"{self.candidate.label} decodes {ratio} at {row.requests} requests")

    def _weights(self, state: str) -> TextTable:
        rows = tuple(
            (side, weights.name, weights.label, f"{weights.nbytes:,}", f"{weights.token_bytes:,}")
            for side, weights in (("baseline", self.baseline), ("candidate", self.candidate))
        )
        title = f"{state}weights: a token reads {self.bytes_ratio:.2f} times fewer bytes of the candidate's"
        return TextTable(title, ("", "checkpoint:", "format:", "bytes", "bytes a token reads"), rows)


def _speeds(title: str, unit: str, names: tuple[str, str], rows: tuple[SpeedRow, ...]) -> TextTable:
    baseline, candidate = names if names[0] != names[1] else (f"{names[0]}, baseline", f"{names[1]}, candidate")
    headings = (unit, baseline, "slowest to fastest", candidate, "slowest to fastest", "ratio", "of rounds")
    cells = tuple(
        (
            str(row.requests),
            *_speed_cells(row.baseline, row.requests),
            *_speed_cells(row.candidate, row.requests),
            *_spread(row.ratios, 2),
        )
        for row in rows
    )
    return TextTable(title, headings, cells)


def _speed_cells(speed: Speed, requests: int) -> tuple[str, str]:
    if speed.running < requests:
        return f"out of memory ({speed.running} of {requests} fit)", ""
    return _spread(speed.turns, 1)


def _spread(values: tuple[float, ...], digits: int) -> tuple[str, str]:
    """The middle one, and from the lowest to the highest."""
    if not values:
        return "", ""
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f}", f"{low:,.{digits}f} to {high:,.{digits}f}"

"""What a calibration found, in frozen dataclasses and as tables."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from quantkit.records import Record, Report
from quantkit.tables import Line, Style, TextTable


@dataclass(frozen=True)
class DataFacts:
    """What a model was calibrated on; every token counts, and there is no padding.

    samples           that were used, in part at least; `empty_samples` were rejected
    lengths           sequences by length: those of the key's power of two of tokens or less, and more than half of it
    bos_token         that the tokenizer begins texts with
    bos_of_sequences  sequences by how often they hold it
    """

    source: str
    tokens: int
    samples: int
    empty_samples: int
    sequences: int
    longest: int
    lengths: dict[str, int]
    bos_token: int | None
    bos_of_sequences: dict[str, int]
    packed: bool
    chat_template: bool


@dataclass(frozen=True)
class Range:
    """The magnitudes of one part of what attention handles, over all tokens.

    part       latent, rope, q_latent, q_rope; key, value, query
    values     how many numbers there were
    p50, ...   percentiles, within 0.4 %
    subnormal  share that E4M3 holds as subnormals at scale 1: below 2^-6, zeros apart
    clipped    share beyond 448
    """

    part: str
    values: int
    amax: float
    p50: float
    p99: float
    p999: float
    rms: float
    subnormal: float
    clipped: float


@dataclass(frozen=True)
class Loss:
    """Squared errors over those of the exact numbers' squares, on sampled queries and rows of the layer.

    logits_k   attention logits with keys in E4M3; what all logits of a query share is left out, as softmax does
    logits_kq  the same with queries in E4M3, too, at scale 1 after the fold
    values     what o_proj is given, each number weighed with its column
    """

    logits_k: float
    logits_kq: float
    values: float

    @property
    def total(self) -> float:
        """The sum over both modes, which the choice minimizes."""
        return self.logits_k + self.logits_kq + 2 * self.values


@dataclass(frozen=True)
class LayerCalibration(Record):
    """One layer's scales and why.

    attention      the name that the scales' names begin with
    scales         of each part that should not stay at 1: one number, or one for each channel or rotated pair; MLA's
                   parts latent and rope come together. Empty: nothing to do
    row_scale      of MLA's row as a whole, for engines that know only one: the best common power of two, with headroom
                   unless that costs more than it may
    absmax_scales  amax / 448 of each part, and of MLA's row: for reference, not used
    losses         of `one` (all scales 1), `chosen`, and `row`
    verdict        in words
    experts        tokens that each routed expert got
    """

    layer: int
    attention: str
    tokens: int
    ranges: tuple[Range, ...]
    scales: dict[str, tuple[float, ...]]
    row_scale: float | None
    absmax_scales: dict[str, float]
    losses: dict[str, Loss]
    verdict: str
    notes: tuple[str, ...] = ()
    experts: tuple[int, ...] = ()

    @property
    def unseen_experts(self) -> tuple[int, ...]:
        """The experts that got no token."""
        return tuple(expert for expert, tokens in enumerate(self.experts) if not tokens)

    @property
    def gain(self) -> float:
        """How many times the choice's squared errors go into those at scale 1; 1 where there are none."""
        one, chosen = (self.losses[name].total for name in ("one", "chosen"))
        return one / chosen if chosen else 1.0

    @property
    def row_gap(self) -> float:
        """How many times the choice's squared errors go into those with one scale for the row."""
        row, chosen = self.losses.get("row", self.losses["chosen"]).total, self.losses["chosen"].total
        return row / chosen if chosen else 1.0

    def range(self, part: str) -> Range:
        """The range of a part."""
        return next(entry for entry in self.ranges if entry.part == part)


@dataclass(frozen=True)
class CalibrationReport(Report):
    """What `calibrate` found.

    data_digest       the sha256 of all tokens
    left_alone        layers that were not run: those for multi-token prediction
    largest_layer     bytes of its weights as stored
    hidden_bytes      of all hidden states between two layers; `held_bytes` of them stayed in memory
    """

    model: str
    model_type: str
    revision: str | None
    kv: str
    dtype: str
    device: str
    data: DataFacts
    data_digest: str
    max_length: int | None
    layers: tuple[LayerCalibration, ...]
    left_alone: tuple[str, ...]
    largest_layer: int
    hidden_bytes: int
    held_bytes: int
    seconds: float
    warnings: tuple[str, ...] = field(default=())

    @property
    def losing(self) -> tuple[LayerCalibration, ...]:
        """The layers whose scales should not stay at 1."""
        return tuple(layer for layer in self.layers if layer.scales)

    def tables(self) -> Iterator[TextTable]:
        """The data, what each layer holds, and what was chosen."""
        yield self._data_table()
        yield _range_table(self.layers)
        yield _choice_table(self.layers)
        if any(layer.experts for layer in self.layers):
            yield _expert_table(self.layers)

    def answer(self) -> Line:
        """How many layers need scales."""
        if not self.losing:
            return Line(
                f"{self.model}: FP8 at scale 1 is fine in all {len(self.layers)} layers; there is nothing to fold"
            )
        return Line(f"{self.model}: {len(self.losing)} of {len(self.layers)} layers lose at scale 1", Style.WARNING)

    def _data_table(self) -> TextTable:
        data = self.data
        longest = f"{data.longest:,}" + (f"; the model takes {self.max_length:,}" if self.max_length else "")
        lengths = ", ".join(f"{count} up to {int(top):,}" for top, count in data.lengths.items())
        bos = ", ".join(f"{count} with {times}" for times, count in data.bos_of_sequences.items())
        rows = [
            ("tokens", f"{data.tokens:,}, from {data.samples:,} samples of {data.source}"),
            ("empty samples, rejected", f"{data.empty_samples:,}"),
            ("sequences", f"{data.sequences:,}, {'packed' if data.packed else 'one for each sample'}: {lengths}"),
            ("longest", longest),
            ("token at the beginning", f"{data.bos_token}: {bos}" if bos else "the tokenizer puts none"),
        ]
        if self.left_alone:
            rows.append(("not run", ", ".join(self.left_alone)))
        return TextTable(f"{self.model}: calibrated in {self.dtype}", ("", "value:"), tuple(rows))


def _range_table(layers: tuple[LayerCalibration, ...]) -> TextTable:
    parts = [entry.part for entry in layers[0].ranges]
    kept = [part for part in parts if not part.startswith("q")]
    headings = [*(f"{part} amax" for part in parts)]
    for part in kept:
        headings += [f"{part} rms", "p50", "p99.9", "subnormal", "clipped"]
    rows = []
    for layer in layers:
        row = [f"{layer.range(part).amax:.4g}" for part in parts]
        for part in kept:
            entry = layer.range(part)
            row += [f"{number:.3g}" for number in (entry.rms, entry.p50, entry.p999)]
            row += [f"{share:.2%}" for share in (entry.subnormal, entry.clipped)]
        rows.append((str(layer.layer), *row))
    return TextTable("ranges; shares at scale 1", ("layer", *headings), tuple(rows))


def _choice_table(layers: tuple[LayerCalibration, ...]) -> TextTable:
    """Errors are root mean squares, relative, in percent."""
    row = any(layer.row_scale is not None for layer in layers)
    names = ("one", "chosen", "row") if row else ("one", "chosen")
    headings = [f"{what} {name}" for name in names for what in ("K", "K+Q", "values")]
    rows = []
    for layer in layers:
        losses = (layer.losses[name] for name in names)
        numbers = [value for loss in losses for value in (loss.logits_k, loss.logits_kq, loss.values)]
        errors = [f"{100 * math.sqrt(number):.3g}" for number in numbers]
        common = [f"{layer.row_scale:g}"] if layer.row_scale is not None else []
        rows.append((str(layer.layer), *errors, *common, f"{layer.gain:.3g}", layer.verdict))
    title = "errors in percent: logits with K or K and Q in FP8, values; at scale 1 and as chosen"
    title += "; row: one scale for both parts" if row else ""
    return TextTable(title, ("layer", *headings, *(["row scale"] if row else []), "gain", "verdict:"), tuple(rows))


def _expert_table(layers: tuple[LayerCalibration, ...]) -> TextTable:
    rows = []
    for layer in layers:
        if counts := sorted(layer.experts):
            unseen = ", ".join(map(str, layer.unseen_experts)) or "none"
            median = counts[len(counts) // 2]
            rows.append((str(layer.layer), *(f"{count:,}" for count in (counts[0], median, counts[-1])), unseen))
    headings = ("layer", "fewest", "median", "most", "experts without a token:")
    return TextTable("tokens of routed experts", headings, tuple(rows))

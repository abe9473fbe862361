"""What `plan` returns. All sizes are bytes; *_rank_* and "per rank" mean the fullest of the tensor-parallel ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.records import Report
from quantkit.tables import Line, Style, TextTable, role_name

_GIB = 1 << 30


@dataclass(frozen=True)
class RoleSize:
    """The weights of one role that are stored and placed alike: bytes in the checkpoint and on one rank.

    loaded  whether an engine loads them: MTP layers only for speculative decoding
    whole   whether every rank holds all of them
    """

    role: str
    mtp: bool
    format: str
    checkpoint_bytes: int
    rank_bytes: int
    loaded: bool
    whole: bool


@dataclass(frozen=True)
class KvSize:
    """The KV cache in one layout.

    index_cache      which layers keep an index cache: `indexers` (vLLM), `all` (SGLang); empty for none
    bytes_per_token  of one rank
    tokens           that fit on all GPUs together
    requests         of `context` tokens each that fit on all GPUs together
    chosen           the one that the other figures are for
    """

    layout: str
    index_cache: str
    bytes_per_token: int
    tokens: int
    requests: int
    chosen: bool


@dataclass(frozen=True)
class DecodeRate:
    """The roofline of decoding.

    requests             at the same time in one replica
    experts_touched      expected number of routed experts of a layer that a step uses
    weight_bytes         that a step reads in one replica, each counted once
    rank_weight_bytes    that a step reads on one rank
    rank_kv_bytes        the same of KV and index cache
    milliseconds         of a step, at best
    bound                what the step waits for: `bytes` or `FLOPs`
    tokens_per_second    of all GPUs together, at best
    dollars_per_million  tokens, at best; None without a price
    """

    requests: int
    experts_touched: float
    weight_bytes: int
    rank_weight_bytes: int
    rank_kv_bytes: int
    milliseconds: float
    bound: str
    tokens_per_second: float
    dollars_per_million: float | None


@dataclass(frozen=True)
class PrefillRate:
    """The roofline of reading a prompt of `tokens` tokens in one replica; the rate is that of all GPUs together."""

    tokens: int
    milliseconds: float
    bound: str
    tokens_per_second: float
    dollars_per_million: float | None


@dataclass(frozen=True)
class CapacityReport(Report):
    """What a model needs on GPUs.

    recipe              that the sizes are for; None is the checkpoint as published
    parameters          in the main layers, and those of them that a token uses
    gpus, gpu           how many of which; tp ranks share one copy, so there are gpus / tp replicas
    mtp                 whether the MTP layers are loaded
    memory_bytes        of one GPU
    utilization         the share of it that the engine takes
    reserve_bytes       of that share for activations, graphs and the engine itself
    pool_bytes          what is left of it for the KV cache, on one rank; negative if the weights do not fit
    context             tokens of each request
    """

    model: str
    model_type: str
    recipe: str | None
    parameters: int
    active_parameters: int
    gpus: int
    gpu: str
    tp: int
    ep: bool
    dp_attention: bool
    mtp: bool
    roles: tuple[RoleSize, ...]
    checkpoint_bytes: int
    num_tensors: int
    rank_bytes: int
    rank_whole_bytes: int
    memory_bytes: int
    utilization: float
    reserve_bytes: int
    pool_bytes: int
    context: int
    kv: tuple[KvSize, ...]
    decode: tuple[DecodeRate, ...]
    prefill: PrefillRate
    warnings: tuple[str, ...] = ()

    def tables(self) -> Iterator[TextTable]:
        """Weights by role, the memory of a rank, the KV cache by layout, and rates."""
        yield from (_roles(self), _memory(self), _kv(self), _rates(self))

    def answer(self) -> Line:
        """Whether it fits, and how many requests."""
        where = f"{self.gpus} x {self.gpu}, TP {self.tp}"
        if self.pool_bytes < 0:
            return Line(f"does not fit on {where}: each rank lacks {gib(-self.pool_bytes)} GiB", Style.BAD)
        chosen = next(kv for kv in self.kv if kv.chosen)
        requests = f"{chosen.requests:,} requests of {self.context:,} tokens with {chosen.layout} pages"
        return Line(f"fits on {where}: {requests}", Style.GOOD if chosen.requests else Style.WARNING)


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure beside our own.

    published, own  in `unit`
    layout          what our own is: the layout, unit or sum that explains the published one
    comes_out       whether both are equal to the digits that were published
    """

    model: str
    what: str
    published: str
    own: str
    unit: str
    layout: str
    comes_out: bool


@dataclass(frozen=True)
class PublishedFigures(Report):
    """All published figures, and those that do not come out are said to be so."""

    figures: tuple[PublishedFigure, ...]

    def tables(self) -> Iterator[TextTable]:
        """One table."""
        yield _published(self)

    def answer(self) -> Line:
        """How many come out."""
        return Line(f"{sum(figure.comes_out for figure in self.figures)} of {len(self.figures)} figures come out")


def _roles(report: CapacityReport) -> TextTable:
    rows = [
        (
            role_name(role.role, role.mtp),
            role.format,
            *_sizes(role.checkpoint_bytes),
            *(_sizes(role.rank_bytes) if role.loaded else ("", "")),
            "not loaded" if not role.loaded else "on every rank" if role.whole else "shared out",
        )
        for role in report.roles
    ]
    total = ("all", "", *_sizes(report.checkpoint_bytes), *_sizes(report.rank_bytes), "")
    headings = ("role", "format:", "checkpoint GB", "GiB", "one rank GB", "GiB", "placement:")
    by = f"by {report.recipe}" if report.recipe else "as published"
    title = (
        f"{report.model}: {report.model_type}, {by}: {report.checkpoint_bytes:,} bytes, {report.num_tensors:,} "
        f"tensors, {report.parameters / 1e9:,.2f} B parameters, "
        f"{report.active_parameters / 1e9:.2f} B active"
    )
    return TextTable(title, headings, (*rows, total))


def _memory(report: CapacityReport) -> TextTable:
    usable = int(report.memory_bytes * report.utilization)
    rows = (
        ("memory that the engine takes", *_sizes(usable), f"{report.utilization:.0%} of {report.gpu}"),
        ("weights", *_sizes(report.rank_bytes), f"of which {gib(report.rank_whole_bytes)} GiB are on every rank"),
        ("reserve", *_sizes(report.reserve_bytes), "activations, graphs, the engine"),
        ("left for the KV cache", *_sizes(report.pool_bytes), ""),
    )
    how = "".join(text for text, on in ((", EP", report.ep), (", DP attention", report.dp_attention)) if on)
    title = f"{report.gpus} x {report.gpu}, TP {report.tp}{how}: one rank"
    return TextTable(title, ("", "GB", "GiB", "note:"), rows)


def _kv(report: CapacityReport) -> TextTable:
    where = {"": "", "indexers": "layers with an indexer (vLLM)", "all": "all layers (SGLang)"}
    rows = tuple(
        (
            f"{kv.layout} *" if kv.chosen else kv.layout,
            where[kv.index_cache],
            f"{kv.bytes_per_token:,}",
            f"{kv.tokens:,}",
            f"{kv.requests:,}",
        )
        for kv in report.kv
    )
    headings = ("layout", "index cache:", "bytes per token", "tokens, all GPUs", f"requests of {report.context:,}")
    return TextTable("KV cache (* is the one that the rates are for)", headings, rows)


def _rates(report: CapacityReport) -> TextTable:
    rows = [
        (
            f"decode, {rate.requests} requests of {report.context:,} tokens",
            f"{rate.experts_touched:.1f}",
            f"{rate.weight_bytes / 1e9:,.2f}",
            f"{rate.rank_weight_bytes / 1e9:,.2f}",
            f"{rate.rank_kv_bytes / 1e9:,.2f}",
            f"{rate.milliseconds:,.2f}",
            rate.bound,
            f"{rate.tokens_per_second:,.0f}",
            _dollars(rate.dollars_per_million),
        )
        for rate in report.decode
    ]
    prefill = report.prefill
    speed = (f"{prefill.milliseconds:,.2f}", prefill.bound, f"{prefill.tokens_per_second:,.0f}")
    dollars = _dollars(prefill.dollars_per_million)
    rows.append((f"prefill of {prefill.tokens:,} tokens", "", "", "", "", *speed, dollars))
    headings = (
        f"step of one replica ({report.gpus // report.tp})",
        "experts",
        "weights read GB",
        "one rank GB",
        "its KV GB",
        "ms",
        "bound by:",
        "tokens/s, all GPUs",
        "$ per million",
    )
    return TextTable("roofline: no engine is faster, and none is as fast", headings, tuple(rows))


def _published(report: PublishedFigures) -> TextTable:
    rows = tuple(
        (
            figure.model,
            figure.what,
            figure.published,
            figure.own,
            figure.unit,
            "yes" if figure.comes_out else "NO",
            figure.layout,
        )
        for figure in report.figures
    )
    headings = ("model", "figure:", "published", "own", "unit:", "comes out:", "layout:")
    return TextTable("published figures", headings, rows)


def _sizes(nbytes: int) -> tuple[str, str]:
    return f"{nbytes / 1e9:,.2f}", gib(nbytes)


def gib(nbytes: int) -> str:
    """Bytes in GiB, for a table."""
    return f"{nbytes / _GIB:,.2f}"


def _dollars(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}"

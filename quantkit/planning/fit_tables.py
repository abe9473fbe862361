"""Capacity reports as tables of text, which `console` prints."""

from collections.abc import Iterator

from quantkit.planning.report import CapacityReport, PublishedFigures
from quantkit.records import TextTable

_GIB = 1 << 30


def tables(report: CapacityReport | PublishedFigures) -> Iterator[TextTable]:
    """The tables of a report, in the order to be read."""
    if isinstance(report, PublishedFigures):
        yield _published(report)
    else:
        yield from (_roles(report), _memory(report), _kv(report), *_rates(report))


def _roles(report: CapacityReport) -> TextTable:
    rows = [
        (
            f"{role.role} (MTP)" if role.mtp else role.role,
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
        ("weights", *_sizes(report.rank_bytes), f"of which {_gib(report.rank_whole_bytes)} GiB are on every rank"),
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


def _rates(report: CapacityReport) -> Iterator[TextTable]:
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
    yield TextTable("roofline: no engine is faster, and none is as fast", headings, tuple(rows))


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
    return f"{nbytes / 1e9:,.2f}", _gib(nbytes)


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.2f}"


def _dollars(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}"

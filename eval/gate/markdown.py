"""An accuracy report in Markdown, as model cards and the gate's own report hold it."""

from collections.abc import Mapping

from quantkit.eval.gate.report import AccuracyReport, Comparison, DistributionReport
from quantkit.tables import TextTable, markdown


def gate_table(report: AccuracyReport) -> str:
    """An accuracy report in Markdown: a row for each task and for all items, the verdict, and the distributions.

    Accuracies in %, differences (candidate minus baseline) and their bounds in percentage points.
    """
    headings = ("task", "metric:", "n", "baseline", "candidate", "difference", "lower", "upper", "lost / gained", "p")
    rows = [_comparison(entry) for entry in report.tasks]
    if report.pooled and len(report.tasks) > 1:
        rows.append(_comparison(report.pooled))
    parts = [markdown([TextTable("", headings, tuple(rows))])] if rows else []
    parts.append(_verdict(report))
    if rows:
        parts.append(
            "Accuracies in %; differences are candidate minus baseline, in points, with one-sided 95 % bounds each; "
            "`lost` and `gained` are the items that only the baseline, or only the candidate, has right; p is of "
            "McNemar's exact test, by Holm over the tasks."
        )
    parts += [_distribution(report.distribution)] if report.distribution else []
    parts += [_pages(report.pages)] if report.pages else []
    parts += [f"Note: {warning}." for warning in report.warnings]
    return "\n\n".join(parts)


def _comparison(entry: Comparison) -> tuple[str, ...]:
    return (
        entry.task,
        f"{entry.metric} ({entry.filter})" if entry.filter else entry.metric,
        f"{entry.items:,}",
        f"{entry.baseline_correct / entry.items:.2%}".rstrip("%"),
        f"{entry.candidate_correct / entry.items:.2%}".rstrip("%"),
        f"{entry.difference * 100:+.2f}",
        f"{entry.lower * 100:+.2f}",
        f"{entry.upper * 100:+.2f}",
        f"{entry.lost} / {entry.gained}",
        f"{entry.adjusted_p_value:.3f}",
    )


def _verdict(report: AccuracyReport) -> str:
    allowed = f"allowed drop {report.max_drop * 100:.2g} points, rule `{report.rule}`, suite `{report.suite}`"
    needed = f" About {report.needed_items:,} items would decide." if report.needed_items else ""
    reasons = "".join(f"\n- {reason}" for reason in report.reasons)
    return f"Verdict: **{report.verdict}** ({allowed}).{needed}" + (f"\n{reasons}" if reasons else "")


def _distribution(report: DistributionReport) -> str:
    return (
        f"On {report.scored_tokens:,} tokens of `{shown_name(report.text)}`: "
        f"KL divergence {report.kl_divergence:.5f} nats per token, the same first token {report.top1_agreement:.2%}, "
        f"flips {report.flips:.2%}, bits per byte {report.baseline_bits_per_byte:.4f} before and "
        f"{report.candidate_bits_per_byte:.4f} after."
    )


def _pages(pages: Mapping[str, Mapping[str, str]]) -> str:
    kept = {
        arm: ", ".join(f"{key} `{shown_name(value)}`" for key, value in each.items()) for arm, each in pages.items()
    }
    arms = "; ".join(f"{arm}: {what}" for arm, what in kept.items())
    return f"Run by quantkit's paged runtime in float32, on weights as they are stored, and pages of {arms}."


def shown_name(name: str) -> str:
    """A Hub id or an alias as it is; of a path the last part: the rest is nobody's business."""
    parts = name.rstrip("/").split("/")
    return name if len(parts) <= 2 and parts[0] not in ("", ".", "..", "~") else parts[-1]

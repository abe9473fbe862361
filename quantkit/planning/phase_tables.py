"""Phase plans and drift as tables of text, which `console` prints."""

from collections.abc import Iterator

from quantkit.planning.deployment import Candidate, DriftReport, PhasePlan, Pool
from quantkit.planning.report import CapacityReport
from quantkit.planning.weighing import PHASES, rates
from quantkit.records import TextTable

_GIB = 1 << 30


def phase_tables(plan: PhasePlan) -> Iterator[TextTable]:
    """What was weighed against what, and the pools."""
    yield _weighed(plan)
    yield _pools(plan)


def launch_texts(plan: PhasePlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each engine's name with its command lines and notes, or with its refusal."""
    for launch in plan.deployment.launches:
        if launch.refusal:
            yield launch.engine, (launch.refusal + (f" [{launch.source}]" if launch.source else ""),)
        else:
            commands = [f"{what}:\n{command}" for what, command in launch.commands.items()]
            yield launch.engine, (*commands, *launch.notes)


def drift_table(report: DriftReport) -> TextTable:
    """The pools with the checkpoints that were found for them."""
    title = f"{report.manifest}: {'no drift' if report.passed else 'DRIFT'}"
    return TextTable(title, ("pool", "checkpoint:"), tuple(report.checkpoints.items()))


def _weighed(plan: PhasePlan) -> TextTable:
    by_phase = {phase: [rates(entry, phase) for entry in plan.candidates] for phase in PHASES}
    rows = []
    for phase, found in by_phase.items():
        for setting in max(found, key=len):
            cells = (_rate(plan.candidates[index], phase, setting, entry) for index, entry in enumerate(found))
            lead = plan.leads.get(setting)
            rows.append((setting, *cells, "" if lead is None else f"{lead:+.1%}"))
    names = (f"{entry.name}, tokens/s" for entry in plan.candidates)
    report = plan.candidates[0].decode
    title = f"rooflines of each pool, requests of {report.context:,} tokens: no engine reaches them"
    return TextTable(title, ("phase", *names, "lead"), tuple(rows))


def _rate(candidate: Candidate, phase: str, setting: str, found: dict[str, float]) -> str:
    report: CapacityReport = getattr(candidate, phase)
    if not found:
        return "does not fit"
    if setting not in found:
        return "too many"
    most = f" ({report.decode[-1].requests})" if setting.endswith("fit") else ""
    return f"{found[setting]:,.0f}{most}"


def _pools(plan: PhasePlan) -> TextTable:
    rows = tuple(_pool(pool) for pool in plan.deployment.pools)
    headings = ("pool", "checkpoint:", "GB", "GPUs:", "one rank GiB", "KV:", "KV tokens", "requests", "kv_space_id:")
    return TextTable("pools", (*headings, "weights:"), rows)


def _pool(pool: Pool) -> tuple[str, ...]:
    how = f"TP {pool.tp}" + ", EP" * pool.ep + ", DP attention" * pool.dp_attention
    formats = ", ".join(dict.fromkeys(pool.formats.values()))
    space = pool.kv_space_id[:12] if pool.kv_space_id else "not known yet"
    size, rank = f"{pool.checkpoint_bytes / 1e9:,.2f}", f"{pool.rank_bytes / _GIB:,.2f}"
    cache = (pool.kv_layout, f"{pool.kv_tokens:,}", f"{pool.requests:,}", space)
    return pool.phase, pool.checkpoint, size, f"{pool.gpus} x {pool.gpu}, {how}", rank, *cache, formats

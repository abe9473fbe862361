"""What `plan --phases` and `plan --check` return."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.planning.deployment import Candidate, DeploymentManifest, Launch, Pool
from quantkit.planning.report import CapacityReport, gib
from quantkit.planning.weighing import PHASES, rates
from quantkit.records import Report
from quantkit.tables import Line, Style, TextTable


@dataclass(frozen=True)
class PhasePlan(Report):
    """Which format serves which phase by the roofline, why, and the deployment that follows.

    leads  how much faster, as a share, the phase's better format is than the other: `prefill`, `decode, N requests`,
           `decode, all that fit`. Negative where the format that is better over all is slower
    """

    candidates: tuple[Candidate, ...]
    leads: dict[str, float]
    reasons: tuple[str, ...]
    deployment: DeploymentManifest
    warnings: tuple[str, ...] = ()

    def tables(self) -> Iterator[TextTable]:
        """What was weighed against what, and the pools."""
        yield _weighed(self)
        yield _pools(self)

    def lines(self) -> Iterator[Line]:
        """Why."""
        yield from map(Line, self.reasons)

    def verbatim(self) -> str:
        """Each engine's command lines and notes, or its refusal."""
        return "\n".join(map(_launch, self.deployment.launches))

    def answer(self) -> Line:
        """Which checkpoint serves which phase."""
        return Line("; ".join(f"{pool.phase}: {pool.checkpoint}" for pool in self.deployment.pools))


@dataclass(frozen=True)
class Drift:
    """One thing in which a checkpoint is not what its pool says, or two checkpoints do not go together."""

    pool: str
    field: str
    expected: str
    found: str


@dataclass(frozen=True)
class DriftReport(Report):
    """What `plan --check` found: `checkpoints` by the pool that they serve; `unchecked` could not be compared."""

    manifest: str
    passed: bool
    checkpoints: dict[str, str]
    drifts: tuple[Drift, ...]
    unchecked: tuple[str, ...]

    def tables(self) -> Iterator[TextTable]:
        """The pools with the checkpoints that were found for them."""
        yield TextTable(self.manifest, ("pool", "checkpoint:"), tuple(self.checkpoints.items()))

    def lines(self) -> Iterator[Line]:
        """What has drifted, and what could not be compared."""
        for drift in self.drifts:
            what = f"{drift.pool}, {drift.field}: expected {drift.expected}, found {drift.found}"
            yield Line(what, Style.BAD, "drift")
        yield from (Line(text, label="not checked") for text in self.unchecked)

    def answer(self) -> Line:
        """Whether anything has drifted."""
        if self.passed:
            return Line(f"{self.manifest}: no drift", Style.GOOD)
        return Line(f"{self.manifest}: DRIFT in {len(self.drifts)} fields", Style.BAD)


def _launch(launch: Launch) -> str:
    if launch.refusal:
        return f"{launch.engine}\n{launch.refusal}" + (f" [{launch.source}]\n" if launch.source else "\n")
    commands = (f"{what}:\n{command}" for what, command in launch.commands.items())
    return "\n".join((launch.engine, *commands, *launch.notes, ""))


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
    size, rank = f"{pool.checkpoint_bytes / 1e9:,.2f}", gib(pool.rank_bytes)
    cache = (pool.kv_layout, f"{pool.kv_tokens:,}", f"{pool.requests:,}", space)
    return pool.phase, pool.checkpoint, size, f"{pool.gpus} x {pool.gpu}, {how}", rank, *cache, formats

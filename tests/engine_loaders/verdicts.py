"""What happened to a checkpoint in an engine, and what the rule book says of it. Runs in the project's interpreter."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from engine_loaders.jobs import Job
from engine_loaders.running import Reports
from quantkit.engines.check import check_compatibility
from quantkit.errors import QuantkitError


class Verdict(StrEnum):
    """What becomes of a checkpoint in an engine."""

    LOADS = "loads"  # and every parameter is what the files say
    FLAG = "needs a flag"  # wrong as it is, and right with the flag that leaves shared experts alone
    BROKEN = "broken"  # does not load, or a parameter is wrong, unwritten or not taken


NOT_SEEN = {  # (engine, rule) that loading on a CPU does not show, and what it is about
    ("SGLang", "int4-tiles"): "the tiles of a kernel, and no kernel is run",
    ("SGLang", "kv-scales"): "the attention backends that heed a scale; loading it goes well",
}
_OF_STATUS = {"not ok": Verdict.BROKEN, "needs a flag": Verdict.FLAG}


class Disagreement(NamedTuple):
    """Where the rule book says something else than what happened."""

    case: str
    engine: str
    said: str
    happened: str

    def __str__(self) -> str:
        return f"{self.case}, {self.engine}: said {self.said}; happened {self.happened}"


def happened(reports: Reports, jobs: Iterable[Job]) -> tuple[Verdict, str]:
    """What the engine made of all models of a checkpoint, and the first fault without a flag."""
    asked = list(jobs)
    plain = [(job, reports[job]) for job in asked if job.fusion]
    fault = next((f"{_words(job)}: {report.fault}" for job, report in plain if not report.right), "")
    if not fault:
        return Verdict.LOADS, ""
    alone = [reports[job] for job in asked if not job.fusion]
    flag = bool(alone) and all(report.right for report in alone)
    return (Verdict.FLAG if flag else Verdict.BROKEN), fault


def said(folder: Path, engine: str, ranks: int = 1) -> tuple[Verdict, str]:
    """What `quantkit engines --tp RANKS` says by all rules but those `NOT_SEEN`, and which of them say so."""
    try:
        results = check_compatibility(folder, tp=ranks).results
    except QuantkitError as error:  # it is refused as a whole
        return Verdict.BROKEN, f"{type(error).__name__}: {error}"
    ours = [result for result in results if result.engine == engine and (engine, result.rule) not in NOT_SEEN]
    found = [(result.rule, _OF_STATUS[result.status]) for result in ours if result.status in _OF_STATUS]
    worst = max((verdict for _, verdict in found), key=list(Verdict).index, default=Verdict.LOADS)
    return worst, ", ".join(sorted({rule for rule, verdict in found if verdict is worst}))


def disagreements(
    case: str, folder: Path, asked: Iterable[tuple[str, Reports, list[Job]]], ranks: int = 1
) -> Iterator[Disagreement]:
    """Where rule book and engines differ over a checkpoint; `asked` are engines, their reports, and the jobs."""
    for engine, reports, jobs in asked:
        (verdict, rules), (fate, fault) = said(folder, engine, ranks), happened(reports, jobs)
        if verdict is not fate:
            yield Disagreement(case, engine, f"{verdict} ({rules})" if rules else str(verdict), f"{fate} ({fault})")


def _words(job: Job) -> str:
    """Which of a checkpoint's models a job builds."""
    model = "draft" if job.mtp else "main"
    return (
        f"{model}{', class of CUDA' if job.cuda else ''}{f', rank {job.rank} of {job.ranks}' if job.ranks > 1 else ''}"
    )

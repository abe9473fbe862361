"""Tensor parallelism: the first and the last of 2 and of 8 ranks have their part of every weight."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.jobs import Job
from engines.outputs import NARROW, WIDE, Outputs, cases, sglang_jobs, vllm_jobs
from engines.running import Reports, load_all
from engines.verdicts import disagreements

RANKS = (2, 8)
SHARED, CUT = cases(WIDE), cases(NARROW)
ENGINES: dict[str, Callable[[Path, int, int], Iterator[Job]]] = {"vLLM": vllm_jobs, "SGLang": sglang_jobs}
EXCEPTIONS = {("deepseek-v3-4-experts--bf16 on 8 ranks", "SGLang"): "no rule yet: no fewer experts than ranks"}


@dataclass(frozen=True)
class Shared:
    """All cases, and what each engine's first and last ranks made of them."""

    folders: dict[tuple[str, str], Path]
    reports: dict[str, Reports]

    def jobs(self, case: tuple[str, str], engine: str, ranks: int) -> list[Job]:
        """The models that the first and the last rank build of a case."""
        return [job for rank in (0, ranks - 1) for job in ENGINES[engine](self.folders[case], ranks, rank)]


@pytest.fixture(scope="module")
def shared(outputs: Outputs) -> Shared:
    """Every case in both engines."""
    written = {case: outputs.output(*case) for case in (*SHARED, *CUT)}
    made = Shared({case: folder for case, folder in written.items() if folder is not None}, {})
    asked = {e: [job for case in made.folders for ranks in RANKS for job in made.jobs(case, e, ranks)] for e in ENGINES}
    return Shared(made.folders, load_all(asked))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", SHARED, ids="--".join)
def test_each_rank_has_its_part(shared: Shared, case: tuple[str, str], ranks: int, engine: str) -> None:
    """Sizes that eight ranks can share: INT4 in groups of 32, 64, 128, NVFP4 in both dialects, FP8 and BF16 rests."""
    reports = [shared.reports[engine][job] for job in shared.jobs(case, engine, ranks)]

    assert [report.fault for report in reports if not report.right] == []
    assert sum(report.modules for report in reports) >= 30


@pytest.mark.parametrize("ranks", RANKS)
def test_the_rule_book_agrees(shared: Shared, ranks: int) -> None:
    """`quantkit engines --tp N` says of each case what happens, or the exception stands in the table."""
    found = [
        row
        for case, folder in shared.folders.items()
        for row in disagreements(
            f"{'--'.join(case)} on {ranks} ranks",
            folder,
            [(engine, shared.reports[engine], shared.jobs(case, engine, ranks)) for engine in ENGINES],
            ranks,
        )
    ]

    known = {key for key in EXCEPTIONS if key[0].endswith(f" {ranks} ranks")}
    assert {row[:2] for row in found} == known, "\n".join(map(str, found))

"""Tensor parallelism: the first and the last of 2 and of 8 ranks have their part of every weight."""

import pytest

from engine_loaders.outputs import JOBS, NARROW, WIDE, Loaded, Outputs, cases
from engine_loaders.running import Engines
from engine_loaders.verdicts import disagreements

Case = tuple[str, str]
RANKS = (2, 8)
SHARED, CUT = cases(WIDE), cases(NARROW)
EXCEPTIONS: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="module")
def shared(engines: Engines, outputs: Outputs) -> Loaded[Case]:
    """Every case in both engines."""
    written = {case: outputs.output(*case) for case in (*SHARED, *CUT)}
    return Loaded.of(engines, {case: folder for case, folder in written.items() if folder is not None}, RANKS)


@pytest.mark.parametrize("engine", JOBS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", SHARED, ids="--".join)
def test_each_rank_has_its_part(shared: Loaded[Case], case: tuple[str, str], ranks: int, engine: str) -> None:
    """Sizes that eight ranks can share: INT4 in groups of 32, 64, 128, NVFP4 in both dialects, FP8 and BF16 rests."""
    reports = [shared.reports[engine][job] for job in shared.jobs(case, engine, ranks)]

    assert [report.fault for report in reports if not report.right] == []
    assert sum(report.modules for report in reports) >= 30


@pytest.mark.parametrize("ranks", RANKS)
def test_the_rule_book_agrees(shared: Loaded[Case], ranks: int) -> None:
    """`quantkit engines --tp N` says of each case what happens, or the exception stands in the table."""
    found = [
        row
        for case, folder in shared.folders.items()
        for row in disagreements(
            f"{'--'.join(case)} on {ranks} ranks",
            folder,
            [shared.asked(case, engine, ranks) for engine in JOBS],
            ranks,
        )
    ]

    known = {key for key in EXCEPTIONS if key[0].endswith(f" {ranks} ranks")}
    assert {row[:2] for row in found} == known, "\n".join(map(str, found))

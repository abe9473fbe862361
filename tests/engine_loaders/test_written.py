"""What quantkit writes loads in vLLM and SGLang, and every parameter is what the files say; the rule book agrees."""

from collections.abc import Callable

import pytest

from engine_loaders.jobs import Job
from engine_loaders.outputs import JOBS, MANY_EXPERTS, SOURCE, TOYS, UNUSUAL, Loaded, Outputs, cases
from engine_loaders.running import Engines
from engine_loaders.verdicts import Verdict, disagreements, happened

Case = tuple[str, str]
CASES = cases({**TOYS, **MANY_EXPERTS, **UNUSUAL})
REFUSED = {  # their experts are INT4 already
    (toy, way) for toy in ("kimi-k2-thinking-int4", "kimi-k2.5-int4") for way in ("int4", "int4-signed", "int4-bf16")
}
UNREAD = {("glm-5.2-fp8_block_u8", SOURCE)}  # by SGLang, fusion or not
EXCEPTIONS: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="module")
def loaded(engines: Engines, outputs: Outputs) -> Loaded[Case]:
    """Every case in both engines."""
    written = {case: outputs.output(*case) for case in CASES}
    folders = {case: folder for case, folder in written.items() if folder is not None}
    return Loaded.of(engines, folders)


def test_what_is_refused_is_known(loaded: Loaded[Case]) -> None:
    """Everything is written but what is INT4 already."""
    assert set(CASES) - set(loaded.folders) == REFUSED


def needs_flag(case: tuple[str, str], engine: str) -> bool:
    """Whether SGLang fuses shared experts whatever their format is, and they have another one than the routed ones."""
    return engine == "SGLang" and case[0].startswith("glm-4") and case[1] == "modelopt"


@pytest.mark.parametrize("engine", JOBS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED and case[1] != SOURCE], ids="--".join)
def test_an_output_loads(loaded: Loaded[Case], case: tuple[str, str], engine: str) -> None:
    """Main model, draft model, and vLLM's classes of CUDA; without a flag, but for ModelOpt's format of GLM-4.x."""
    verdict, fault = happened(loaded.reports[engine], loaded.jobs(case, engine))

    assert verdict == (Verdict.FLAG if needs_flag(case, engine) else Verdict.LOADS), fault


def stops_without_fusion(case: tuple[str, str]) -> bool:
    """Whether shared experts have no `weight`, being 4-bit, and SGLang's glm4_moe.py asks for it."""
    return case[0].startswith("glm-4.5") and case[1] not in (SOURCE, "bf16", "modelopt")


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED | UNREAD], ids="--".join)
def test_without_fusion(loaded: Loaded[Case], case: tuple[str, str]) -> None:
    """With --disable-shared-experts-fusion, all loads in SGLang but 4-bit shared experts of GLM-4.5 and 4.6."""
    jobs = [job for job in loaded.jobs(case, "SGLang") if not job.fusion]
    reports = [loaded.reports["SGLang"][job] for job in jobs]

    if stops_without_fusion(case):
        assert "srt/models/glm4_moe.py" in reports[0].stopped  # the main model
    else:
        assert [report.fault for report in reports if not report.right] == []


def test_the_rule_book_agrees(loaded: Loaded[Case]) -> None:
    """`quantkit engines` says of each case what happens, sources included, or the exception stands in the table."""
    found = [
        row
        for case, folder in loaded.folders.items()
        for row in disagreements("--".join(case), folder, [loaded.asked(case, engine) for engine in JOBS])
    ]

    assert {row[:2] for row in found} == set(EXCEPTIONS), "\n".join(map(str, found))


COUNTED: dict[str, tuple[str, Callable[[Job], bool], int]] = {
    "main models of vLLM": ("vLLM", lambda job: not job.mtp and not job.cuda, 100),
    "draft models of vLLM": ("vLLM", lambda job: job.mtp, 50),
    "classes of CUDA": ("vLLM", lambda job: job.cuda, 25),
    "main models of SGLang": ("SGLang", lambda job: not job.mtp and job.fusion, 100),
    "draft models of SGLang": ("SGLang", lambda job: job.mtp and job.fusion, 50),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_enough_is_compared(loaded: Loaded[Case], kind: str) -> None:
    """No part of the cases is empty: so many models of a kind, of fourteen modules (a tied Llama) and more each."""
    engine, chosen, least = COUNTED[kind]
    compared = [report for job, report in loaded.reports[engine].items() if chosen(job) and report.right]

    assert len(compared) >= least
    assert min(report.modules for report in compared) >= 14

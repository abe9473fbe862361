"""`eval/gpu_check.py` on a machine without a GPU: its cases are made and checked at a small size in the interpreter,
and its judgement is tested with figures that are made up."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from quantkit.eval import gpu_check
from quantkit.eval.gpu.cases import FAR, Case, Problem, Sizes, Wanted
from quantkit.eval.gpu.timing import Limits
from quantkit.eval.gpu_check import Outcome
from quantkit.kernels.gpu.compiled import Compiled
from support.paths import ROOT
from support.tiers import quick_if

TINY = Sizes(requests=2, tokens=70, topk=20, written=64, rows=64, columns=256, experts=2, expert_rows=64, gemm_rows=24)
CASES = {case.name: case for case in gpu_check.cases()}
KERNEL_FILES = ROOT / "kernels" / "gpu"
HELD = {"bits", "compiled", "launching", "paged_attention", "w4a16"}  # what the others need, or choose between

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]


QUICK = ("FP8 block to BF16", "kv_write MLA e4m3", "MLA e4m3 8 heads", "page_check", "GEMV int4 g=32")


@pytest.mark.parametrize("name", quick_if(QUICK.__contains__, (name for name in CASES if "128 heads" not in name)))
def test_cases_are_right_in_the_interpreter(name: str) -> None:
    """Each case's kernel is within its bound of its exact result; its bytes are counted."""
    torch.manual_seed(3)
    problem = CASES[name].make(torch.device("cpu"), TINY)

    assert gpu_check.check(problem, problem.launch, problem.exact()) <= CASES[name].bound
    assert problem.nbytes > sum(result.numel() for result in problem.results)
    assert (CASES[name].wanted.speedup == 0) or problem.peer
    assert (CASES[name].wanted.tflops == 0) or problem.flops


@pytest.mark.parametrize("name", ["kv_write MLA e4m3", "MLA e4m3 8 heads", "page_check", "GEMV int4 g=32"])
def test_a_kernel_that_writes_nothing_is_wrong(name: str) -> None:
    """Poisoned results that nobody overwrites are beyond any bound."""
    problem = CASES[name].make(torch.device("cpu"), TINY)
    error = gpu_check.check(problem, lambda: None, problem.exact())

    assert not Outcome(name, CASES[name].bound, error).right


def test_every_kernel_file_has_a_case() -> None:
    """A kernel that is added to kernels/gpu is added here."""
    modules = set()
    for case in CASES.values():
        launch = getattr(case.make(torch.device("cpu"), TINY).launch, "func", None)
        modules.add(getattr(launch, "__module__", "").rpartition(".")[2])

    assert {path.stem for path in KERNEL_FILES.glob("*.py")} - HELD == modules


def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is exit code 2 and a sentence, and nothing that looks like a result; the cases can be listed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert gpu_check.main(["--quick"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no CUDA device: nothing was checked\n")
    assert gpu_check.main(["--list", "--only", "page_"]) == 0
    assert capsys.readouterr().out == "page_check\npage_digest\n"


def figures(wanted: Wanted, error: float = 0.0) -> Outcome:
    """8 GB in about 2 ms where a copy does 5000 GB/s, 1 TFLOP, and a peer that takes 5 ms."""
    problem = Problem(lambda: None, (), lambda: (), 8_000_000_000, 10**12)
    case = Case("made up", lambda device, sizes: problem, 1e-3, wanted)
    return gpu_check.rate(case, problem, error, [2.0, 1.9, 2.1, 2.0], [5.0, 5.0, 6.0], Limits(5000.0, 700.0))


def test_figures() -> None:
    """Bandwidth, its share of the copy's, TFLOP/s, speed against the peer, from medians."""
    outcome = figures(Wanted())

    assert (outcome.milliseconds, outcome.gb_s, outcome.copy_share) == (2.0, 4000.0, 0.8)
    assert (outcome.tflops, outcome.speedup, outcome.met) == (500.0, 2.5, None)
    assert outcome.spread == pytest.approx(0.0375)


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        (Wanted(copy_share=0.8), True),
        (Wanted(copy_share=0.81), False),
        (Wanted(tflops=501), False),
        (Wanted(speedup=2.2), True),
        (Wanted(speedup=2.6), False),
        (Wanted(copy_share=0.5, tflops=501), False),
    ],
)
def test_what_is_wanted_is_judged(wanted: Wanted, met: bool) -> None:
    """All that is wanted has to be reached."""
    assert figures(wanted).met is met


@pytest.mark.parametrize("error", [2e-3, float("nan"), float("inf")])
def test_wrong_is_marked(error: float) -> None:
    """An error beyond the bound, or none that is a number, is WRONG in the table, however fast it was."""
    outcome = figures(Wanted(), error)
    line = list(gpu_check.as_table([outcome]))[-1]

    assert not outcome.right
    assert "WRONG" in line


def test_nan_anywhere_is_the_error() -> None:
    """Of several results, one with NaN decides."""
    ones = torch.ones(4)
    error = gpu_check.error_of((ones, ones * torch.nan, ones), (ones, ones, ones * 2))

    assert error != error
    assert gpu_check.error_of((ones, torch.arange(4)), (ones, torch.tensor([0, 1, 2, 4]))) == 0.25
    assert gpu_check.error_of((ones,), (ones * 0,)) == 2.0


def broken(device: torch.device, sizes: Sizes) -> Problem:
    """A kernel that does not build."""
    raise RuntimeError("no such instruction")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the GPU: everything takes a millisecond, and what would be built is there already."""
    monkeypatch.setattr(gpu_check, "measure", lambda launch, repeats, flush: [1.0] * repeats)
    monkeypatch.setattr(gpu_check, "captured", lambda launch: launch)
    monkeypatch.setattr(gpu_check, "measure_limits", lambda flush, repeats: Limits(4000.0, 700.0))
    monkeypatch.setattr(gpu_check, "build", lambda names, arches, quick: iter(()))
    monkeypatch.setattr(gpu_check, "QUICK", TINY)
    monkeypatch.setattr(gpu_check, "FAR", TINY)
    monkeypatch.setattr(gpu_check, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made-up GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def not_this_tile(**changes: object) -> None:
    """A launcher that takes no other tile."""
    if changes:
        raise RuntimeError("out of shared memory")


@pytest.mark.usefixtures("no_gpu")
def test_a_run_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: one right, at both sizes and with its tiles; one that does not build, one with a tile that does
    not fit; tables, a JSON file, exit code 3."""
    good = replace(CASES["GEMV int4 g=32"], far=True, choices=CASES["GEMV int4 g=32"].choices[:2])
    fits = Problem(not_this_tile, (torch.zeros(1),), lambda: (torch.full((1,), torch.nan),), 1)
    odd = Case("odd", lambda device, sizes: replace(fits, launch=not_this_tile), torch.inf, choices=("wide",))
    monkeypatch.setattr(gpu_check, "cases", lambda: [good, Case("broken", broken, 0.0), odd])
    path = tmp_path / "out.json"

    assert gpu_check.main(["--quick", "--output", str(path)]) == 3
    written = json.loads(path.read_text())
    tiles = [f"GEMV int4 g=32, {tile}" for tile in good.choices]
    names = ["GEMV int4 g=32", "broken", "odd", "GEMV int4 g=32, beyond 2^31", *tiles, "odd, wide"]
    assert [kernel["name"] for kernel in written["kernels"]] == names
    assert {kernel["name"] for kernel in written["kernels"] if kernel["failure"]} == {"broken", "odd, wide"}
    assert written["kernels"][1]["failure"] == "RuntimeError: no such instruction"
    assert written["device"].startswith("made-up GPU")
    said = capsys.readouterr().out
    assert "| broken | RuntimeError: no such instruction |" in said
    assert f"| GEMV int4 g=32 | 1.0000 | 1.0000 | {good.choices[0]} |" in said


@pytest.mark.usefixtures("no_gpu")
def test_what_does_not_fit_into_the_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond ten minutes the rest is not run, and is not right; no tiles are tried."""
    monkeypatch.setattr(gpu_check, "BUDGET_SECONDS", -1)
    _, outcomes = gpu_check.run_all([CASES["GEMV nvfp4"]], TINY, 1, time.monotonic())

    assert [(outcome.failure, outcome.right) for outcome in outcomes] == [("not run: no time left", False)]


@pytest.mark.usefixtures("no_gpu")
def test_a_launch_that_only_a_graph_gets_wrong_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replayed graph leaves is compared, too."""
    monkeypatch.setattr(gpu_check, "captured", lambda launch: lambda: None)
    outcome = gpu_check.run_case(CASES["page_check"], TINY, Limits(1.0, 1.0), torch.zeros(1), 2)

    assert not outcome.right
    assert outcome.failure is None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.far])
def test_far_sizes_are_beyond_32_bits(name: str) -> None:
    """Something that the kernel reads or writes has more than 2^31 elements."""
    problem = CASES[name].make(torch.device("meta"), FAR)
    assert isinstance(problem.launch, partial)
    given = [*problem.launch.args, *problem.launch.keywords.values(), *problem.results]

    assert max(value.numel() for value in given if isinstance(value, torch.Tensor)) > 2**31


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("300000 bytes of shared memory, not 232448", 3)])
def test_compiling_only(
    fault: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU every launch of that name is compiled for both architectures; a fault is named, and is code 3."""
    asked: list[tuple[list[str], tuple[int, ...]]] = []

    def build(names: list[str], arches: tuple[int, ...], quick: bool) -> list[Compiled]:
        asked.append((names, arches))
        return [Compiled(name, "_check", arch, 4, 38, 16, 0, fault) for name in names for arch in arches]

    monkeypatch.setattr(gpu_check, "build", build)
    assert gpu_check.main(["--compile-only", "--only", "page_check"]) == code
    assert asked == [(["page_check", "page_check, one", "page_check, no pages"], (90, 100))]
    said = capsys.readouterr().out
    assert "| page_check, one | _check | 100 | 4 | 38 | 16 | 0 |" in said
    assert ("page_check, one, _check, sm_100: 300000 bytes of shared memory, not 232448" in said) == bool(fault)

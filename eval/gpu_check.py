"""`python -m quantkit.eval.gpu_check`: build, check and time every Triton kernel on the GPU of this machine.

Each kernel runs on fresh random inputs with poisoned results and must be within its bound of the exact result, by
relative Frobenius error (whole numbers: by the share that differs). Then it is timed: the median of launches that each
find the L2 cache overwritten. Limits are measured in the same run: the bandwidth of a copy and BF16 cuBLAS. One table
goes to standard output, everything to a JSON file. Exit code 0 if all are right, 3 if one is wrong, 2 without CUDA.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quantkit.eval.gpu_cases import FULL, QUICK, Case, Problem, Sizes, page_cases
from quantkit.eval.gpu_weight_cases import weight_cases

NO_CUDA, WRONG = 2, 3
BUDGET_SECONDS = 440  # of 8 minutes; what does not fit is named
DEVICE = "cuda"
_FLUSH_BYTES = 256 << 20
_HEADINGS = ("kernel", "error", "bound", "ms", "spread", "GB/s", "of copy", "TFLOP/s", "x cuBLAS", "wanted")


@dataclass(frozen=True)
class Limits:
    """What this GPU does at best: copying, in bytes read and written a second, and BF16 products."""

    copy_gb_s: float
    bf16_tflops: float


@dataclass(frozen=True)
class Outcome:
    """What a kernel did; times in milliseconds, `spread` is half the range between quartiles, relative to the median.

    `met` says whether what is wanted on an H200 was reached; None where nothing is wanted or measured. `failure` is the
    error that stopped it.
    """

    name: str
    bound: float
    error: float | None = None
    milliseconds: float | None = None
    spread: float | None = None
    gb_s: float | None = None
    copy_share: float | None = None
    tflops: float | None = None
    speedup: float | None = None
    met: bool | None = None
    failure: str | None = None

    @property
    def right(self) -> bool:
        """It ran and is within its bound; a NaN is not."""
        return self.failure is None and self.error is not None and self.error <= self.bound


def cases() -> list[Case]:
    """Every kernel that is checked; the page kernels come first."""
    return page_cases() + weight_cases()


def poison(result: torch.Tensor) -> None:
    """Fill a result with what no kernel leaves there: NaN, or 0x5A in every byte of whole numbers."""
    if result.is_floating_point():
        result.fill_(torch.nan)
    else:
        result.view(torch.uint8).fill_(0x5A)


def error_of(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest relative Frobenius error of the results; of whole numbers, the share that differs."""
    errors = []
    for result, truth in zip(results, exact, strict=True):
        if not result.is_floating_point():
            errors.append(float((result != truth).double().mean()))
            continue
        norm = truth.double().norm()
        errors.append(float((result.double() - truth.double()).norm() / torch.where(norm > 0, norm, 1)))
    return max(errors, key=lambda error: (error != error, error))


def check(problem: Problem) -> float:
    """Run once with poisoned results; the error."""
    for result in problem.results:
        poison(result)
    problem.launch()
    return error_of(problem.results, problem.exact())


def measure(launch: Callable[[], object], repeats: int, flush: torch.Tensor) -> list[float]:
    """Milliseconds of `repeats` launches by CUDA events, the L2 cache overwritten before each."""
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in spans:
        flush.zero_()
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in spans]


def measure_limits(flush: torch.Tensor, repeats: int) -> Limits:
    """Copy 2 GiB, and multiply 8192 x 8192 matrices."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = min(measure(lambda: target.copy_(source), repeats, flush))
    square = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    multiplied = min(measure(lambda: square @ square, repeats, flush))
    return Limits(2 * source.numel() / copied / 1e6, 2 * 8192**3 / multiplied / 1e9)


def run_case(case: Case, sizes: Sizes, limits: Limits, flush: torch.Tensor, repeats: int) -> Outcome:
    """Check and time one kernel; what goes wrong in it is its outcome."""
    try:
        problem = case.make(torch.device(DEVICE), sizes)
        error = check(problem)
        times = measure(problem.launch, repeats, flush)
        peer = measure(problem.peer, repeats, flush) if problem.peer else []
    except Exception as fault:  # a kernel that does not build or run must not hide the others
        return Outcome(case.name, case.bound, failure=f"{type(fault).__name__}: {fault}"[:500])
    return rate(case, problem, error, times, peer, limits)


def rate(
    case: Case, problem: Problem, error: float, times: Sequence[float], peer: Sequence[float], limits: Limits
) -> Outcome:
    """The figures of a kernel from its times and those of its peer in milliseconds."""
    middle = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    gb_s = problem.nbytes / middle / 1e6
    tflops = problem.flops / middle / 1e9 if problem.flops else None
    speedup = statistics.median(peer) / middle if peer else None
    wanted = case.wanted
    pairs = [(wanted.copy_share, gb_s / limits.copy_gb_s), (wanted.tflops, tflops), (wanted.speedup, speedup)]
    verdicts = [got is not None and got >= want for want, got in pairs if want]
    return Outcome(
        case.name,
        case.bound,
        error,
        middle,
        (quartiles[2] - quartiles[0]) / 2 / middle,
        gb_s,
        gb_s / limits.copy_gb_s,
        tflops,
        speedup,
        all(verdicts) if verdicts else None,
    )


def run_all(chosen: Sequence[Case], sizes: Sizes, repeats: int) -> tuple[Limits, list[Outcome]]:
    """All cases, until the budget of time is used up."""
    begin = time.monotonic()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    limits = measure_limits(flush, repeats)
    outcomes = []
    for case in chosen:
        if time.monotonic() - begin > BUDGET_SECONDS:
            outcomes.append(Outcome(case.name, case.bound, failure="not run: no time left"))
            continue
        outcomes.append(run_case(case, sizes, limits, flush, repeats))
        torch.cuda.empty_cache()
        sys.stderr.write(f"{case.name}: {outcomes[-1].failure or outcomes[-1].error}\n")
    return limits, outcomes


def as_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Markdown, one line for each kernel."""
    yield f"| {' | '.join(_HEADINGS)} |"
    yield "|---" * len(_HEADINGS) + "|"
    for outcome in outcomes:
        numbers = (
            (outcome.milliseconds, "{:.4f}"),
            (outcome.spread, "{:.1%}"),
            (outcome.gb_s, "{:.0f}"),
            (outcome.copy_share, "{:.0%}"),
            (outcome.tflops, "{:.1f}"),
            (outcome.speedup, "{:.2f}"),
        )
        verdict = {None: "", True: "met", False: "missed"}[outcome.met]
        error = outcome.failure or f"{outcome.error:.1e}{'' if outcome.right else ' WRONG'}"
        cells = [outcome.name, error, f"{outcome.bound:.0e}"]
        cells += ["" if number is None else form.format(number) for number, form in numbers]
        yield f"| {' | '.join([*cells, verdict])} |"


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="smaller shapes and fewer launches: checks more than times"
    )
    parser.add_argument("--only", default="", help="only kernels with this in their name")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if options.only in case.name]
    if options.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in chosen))
        return 0
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: nothing was checked\n")
        return NO_CUDA
    seed = torch.seed()
    limits, outcomes = run_all(chosen, QUICK if options.quick else FULL, 7 if options.quick else 30)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    facts = {"device": device, "seed": seed, "quick": options.quick, "limits": asdict(limits)}
    results = [asdict(outcome) | {"right": outcome.right} for outcome in outcomes]
    options.output.write_text(json.dumps(facts | {"kernels": results}, indent=1))
    sys.stdout.write(f"{device}: copy {limits.copy_gb_s:.0f} GB/s, BF16 cuBLAS {limits.bf16_tflops:.0f} TFLOP/s\n\n")
    sys.stdout.write("".join(f"{line}\n" for line in as_table(outcomes)))
    return 0 if all(outcome.right for outcome in outcomes) else WRONG


if __name__ == "__main__":
    sys.exit(main())

"""`python -m quantkit.eval.gpu_check`: build, check and time every Triton kernel on the GPU of this machine.

Each kernel runs on fresh random inputs with poisoned results and must be within its bound of the exact result, by
relative Frobenius error (whole numbers: by the share that differs); once as it is launched, once as a CUDA graph. The
graph is timed: the median of runs that each find the L2 cache overwritten. Then come sizes beyond 2^31, and the tiles
that could be chosen instead. Limits are measured in the same run: the bandwidth of a copy and BF16 cuBLAS. Tables go to
standard output, everything to a JSON file. Exit code 0 if all are right, 3 if one is wrong, 2 without CUDA.

`--compile-only` needs no GPU: it compiles every branch and tile for sm_90 and sm_100, prints what the binaries take,
and exits with 3 if one cannot be launched or spills heavily.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from quantkit.eval.gpu.build import all_launches, build
from quantkit.eval.gpu.cases import FAR, FULL, QUICK, Case, Problem, Sizes, Wanted, page_cases
from quantkit.eval.gpu.timing import DEVICE, FLUSH_BYTES, Limits, captured, measure, measure_limits
from quantkit.eval.gpu.weight_cases import weight_cases
from quantkit.kernels.gpu.compiled import ARCHES
from quantkit.kernels.gpu.compiled import as_table as as_compiled_table

NO_CUDA, WRONG = 2, 3
BUDGET_SECONDS, BUILD_SECONDS = 540, 240  # of 10 minutes; what does not fit is named
BEYOND = ", beyond 2^31"
_HEADINGS = ("kernel", "error", "bound", "ms", "spread", "GB/s", "of copy", "TFLOP/s", "x cuBLAS", "wanted")


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
            errors.append(int((result != truth).count_nonzero()) / max(1, result.numel()))
            continue
        norm = truth.double().norm()
        errors.append(float((result.double() - truth.double()).norm() / torch.where(norm > 0, norm, 1)))
    return worst(errors)


def worst(errors: Sequence[float]) -> float:
    """The largest; NaN, if there is one."""
    return max(errors, key=lambda error: (error != error, error))


def check(problem: Problem, launch: Callable[[], object], exact: Sequence[torch.Tensor]) -> float:
    """Run once with poisoned results; the error."""
    for result in problem.results:
        poison(result)
    launch()
    return error_of(problem.results, exact)


def run_case(case: Case, sizes: Sizes, limits: Limits, flush: torch.Tensor, repeats: int) -> Outcome:
    """Check and time one kernel; what goes wrong in it is its outcome."""
    try:
        problem = case.make(torch.device(DEVICE), sizes)
        exact = problem.exact()
        error = check(problem, problem.launch, exact)
        replay = captured(problem.launch)
        error = worst([error, check(problem, replay, exact)])
        times = measure(replay, repeats, flush)
        peer = measure(captured(problem.peer), repeats, flush) if problem.peer else []
    except Exception as fault:  # a kernel that does not build or run must not hide the others
        return failed(case, fault)
    return rate(case, problem, error, times, peer, limits)


def failed(case: Case, fault: Exception) -> Outcome:
    """What a kernel did not do."""
    return Outcome(case.name, case.bound, failure=f"{type(fault).__name__}: {fault}"[:500])


def try_choices(case: Case, sizes: Sizes, limits: Limits, flush: torch.Tensor, repeats: int) -> Iterator[Outcome]:
    """The same problem with each choice of a tile, checked and timed."""
    problem = case.make(torch.device(DEVICE), sizes)
    exact = problem.exact()
    for name, changes in case.variants().items():
        if not changes:
            continue
        one = replace(case, name=name, wanted=Wanted())
        try:
            launch = partial(problem.launch, **changes)
            error = check(problem, launch, exact)
            yield rate(one, problem, error, measure(captured(launch), repeats, flush), [], limits)
        except Exception as fault:  # nor must a tile that does not fit
            yield failed(one, fault)


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


def run_all(chosen: Sequence[Case], sizes: Sizes, repeats: int, begin: float) -> tuple[Limits, list[Outcome]]:
    """All cases, those that are `far` with sizes beyond 2^31, and the choices of tiles, until the budget of time since
    `begin` is used up."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    limits = measure_limits(flush, repeats)
    far = [replace(case, name=case.name + BEYOND, wanted=Wanted()) for case in chosen if case.far]
    outcomes: list[Outcome] = []
    for case, size in [*((case, sizes) for case in chosen), *((case, FAR) for case in far)]:
        if time.monotonic() - begin > BUDGET_SECONDS:
            outcomes.append(Outcome(case.name, case.bound, failure="not run: no time left"))
            continue
        outcomes.append(run_case(case, size, limits, flush, 3 if size is FAR else repeats))
        torch.cuda.empty_cache()
        sys.stderr.write(f"{case.name}: {outcomes[-1].failure or outcomes[-1].error}\n")
    for case in chosen:
        if case.choices and time.monotonic() - begin < BUDGET_SECONDS:
            outcomes += try_choices(case, sizes, limits, flush, min(repeats, 10))
            torch.cuda.empty_cache()
            sys.stderr.write(f"{case.name}: {len(case.choices)} tiles\n")
    return limits, outcomes


def best_tiles(chosen: Sequence[Case], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Markdown: for each case the time with the tile that is chosen, and the best of all that are right."""
    yield "| kernel | ms | best ms | with |\n|---|---|---|---|"
    times = {outcome.name: outcome.milliseconds for outcome in outcomes if outcome.right}
    for case in chosen:
        tried = [(times.get(name) or float("inf"), name) for name, changes in case.variants().items() if changes]
        usual, best = times.get(case.name), min(tried, default=None)
        if usual and best:
            yield f"| {case.name} | {usual:.4f} | {best[0]:.4f} | {best[1].removeprefix(f'{case.name}, ')} |"


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


def compile_only(part: str, quick: bool) -> int:
    """Compile the launches with `part` in their name for GPUs that need not be here; returns the exit code."""
    names = [name for name in all_launches(quick) if part in name]
    rows = sorted(build(names, ARCHES, quick), key=lambda row: (row.launch, row.arch))
    sys.stdout.write(as_compiled_table(rows))
    return WRONG if any(row.fault for row in rows) else 0


def prepare(chosen: Sequence[Case], quick: bool, begin: float) -> None:
    """Compile for this GPU with all processors what will be launched; what cannot be is told, and fails later. What
    takes too long is compiled when it is launched."""
    major, minor = torch.cuda.get_device_capability()
    names = [case.name for case in chosen]
    names += [name for case in chosen for name, changes in case.variants().items() if changes]
    for row in build(names, [10 * major + minor], quick):
        if row.fault:
            sys.stderr.write(f"{row.launch}, {row.kernel}: {row.fault}\n")
        if time.monotonic() - begin > BUILD_SECONDS:
            break


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller shapes, fewer launches: checks more than times")
    parser.add_argument("--compile-only", action="store_true", help="compile for sm_90 and sm_100, without a GPU")
    parser.add_argument("--only", default="", help="only kernels with this in their name")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if options.only in case.name]
    if options.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in chosen))
        return 0
    if options.compile_only:
        return compile_only(options.only, options.quick)
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: nothing was checked\n")
        return NO_CUDA
    begin, seed = time.monotonic(), torch.seed()
    prepare(chosen, options.quick, begin)
    limits, outcomes = run_all(chosen, QUICK if options.quick else FULL, 7 if options.quick else 30, begin)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    facts = {"device": device, "seed": seed, "quick": options.quick, "limits": asdict(limits)}
    results = [asdict(outcome) | {"right": outcome.right} for outcome in outcomes]
    options.output.write_text(json.dumps(facts | {"kernels": results}, indent=1))
    sys.stdout.write(f"{device}: copy {limits.copy_gb_s:.0f} GB/s, BF16 cuBLAS {limits.bf16_tflops:.0f} TFLOP/s\n\n")
    tiles = {name for case in chosen for name in case.variants()} - {case.name for case in chosen}
    shown = [outcome for outcome in outcomes if outcome.name not in tiles or not outcome.right]
    sys.stdout.write("".join(f"{line}\n" for line in (*as_table(shown), "", *best_tiles(chosen, outcomes))))
    return 0 if all(outcome.right for outcome in outcomes) else WRONG


if __name__ == "__main__":
    sys.exit(main())

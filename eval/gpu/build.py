"""Building the Triton kernels, in as many processes as there are CPUs, for GPUs that are here or not.

Binaries land in Triton's cache on disk, where a run on the GPU finds them.
"""

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from quantkit.eval.gpu.cases import FULL, QUICK, Case, Sizes, page_cases
from quantkit.eval.gpu.page_launches import page_branches, page_launches
from quantkit.eval.gpu.weight_cases import weight_cases
from quantkit.eval.gpu.weight_launches import weight_branches, weight_launches
from quantkit.kernels.gpu.compiled import Compiled, compile_launches

META = torch.device("meta")
Launches = dict[str, Callable[[], object]]


def case_launches(sizes: Sizes) -> Launches:
    """What `gpu_check.py` runs, and every tile that it tries, with shapes but without memory."""
    launches: Launches = {}
    for case in page_cases() + weight_cases():
        for name, changes in case.variants().items():
            launches[name] = functools.partial(_launch, case, sizes, changes)
    return launches


def _launch(case: Case, sizes: Sizes, changes: dict[str, object]) -> None:
    case.make(META, sizes).launch(**changes)


@functools.cache
def all_launches(quick: bool) -> Launches:
    """Those, and every branch of every kernel."""
    makers = page_launches, page_branches, weight_launches, weight_branches
    branches = {name: launch for make in makers for name, launch in make(META).items()}
    return branches | case_launches(QUICK if quick else FULL)


def build(names: Sequence[str], arches: Sequence[int], quick: bool = False) -> Iterator[Compiled]:
    """Compile these launches for `arches`; a row for each kernel, as they are finished."""
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))  # a fork would inherit CUDA
    try:
        tasks = [pool.submit(_build, name, arch, quick) for name, arch in itertools.product(names, arches)]
        for task in as_completed(tasks):
            yield from task.result()
    finally:
        pool.shutdown(cancel_futures=True)  # whoever stops listening does not wait for the rest


def _build(name: str, arch: int, quick: bool) -> list[Compiled]:
    return compile_launches({name: all_launches(quick)[name]}, [arch])

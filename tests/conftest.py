"""What holds for all tests; their fixtures are in `support`."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from support.numba_cache import use_cache

use_cache()
os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when triton is imported, which is later
gc.set_threshold(100_000, 50, 50)  # the headers of published models are half a million objects, and hold no garbage

# a module comes before those that import it
_FIXTURES = ("core_seconds", "program", "toys", "trained", "runnable", "folds", "generating", "phase_plans", "harness")
pytest_plugins = [f"support.{module}" for module in (*_FIXTURES, "hub.pushing", "hub.pulling")]

hypothesis.settings.register_profile("all", deadline=None)  # a busy machine is no fault
hypothesis.settings.register_profile(
    "quick", deadline=None, derandomize=True, database=None, max_examples=15, stateful_step_count=30
)
hypothesis.settings.load_profile("all")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch in one thread: in tiny models, threads that wait for each other on a busy machine take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

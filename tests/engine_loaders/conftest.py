"""What the tests of this folder share: the engines' environment, and what quantkit writes."""

import os
import shutil
from collections.abc import Iterator

import pytest

from engine_loaders.outputs import Outputs
from engine_loaders.running import PYTHON, Engines


@pytest.fixture(scope="session", autouse=True)
def engines_environment() -> None:
    """The engines' interpreter is there; else a test is skipped, or fails under QUANTKIT_ENGINES=required."""
    if not PYTHON.exists():
        if os.environ.get("QUANTKIT_ENGINES") == "required":
            pytest.fail(f"{PYTHON} is missing: make engines-env")
        pytest.skip("make engines-env")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Both loaders; importing an engine takes ten seconds, so that all files ask the same two processes."""
    running = Engines(tmp_path_factory.mktemp("printed"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outputs]:
    """Checkpoints, written when they are asked for; not to be changed."""
    folder = tmp_path_factory.mktemp("engines")
    yield Outputs(folder)
    shutil.rmtree(folder)  # pytest would keep the last three

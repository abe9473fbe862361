"""What the tests of this folder share: the engines' environment, and what quantkit writes."""

import os

import pytest

from engines.outputs import Outputs
from engines.running import PYTHON


@pytest.fixture(scope="session", autouse=True)
def engines_environment() -> None:
    """The engines' interpreter is there; else a test is skipped, or fails under QUANTKIT_ENGINES=required."""
    if not PYTHON.exists():
        if os.environ.get("QUANTKIT_ENGINES") == "required":
            pytest.fail(f"{PYTHON} is missing: make engines-env")
        pytest.skip("make engines-env")


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Checkpoints, written when they are asked for; not to be changed."""
    return Outputs(tmp_path_factory.mktemp("engines"))

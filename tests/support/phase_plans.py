"""What tests of `plan --phases` share: a plan of the trained checkpoint, and a folder to write into."""

from pathlib import Path

import pytest

from quantkit.choices import KvLayout
from quantkit.planning.fit import Deployment
from quantkit.planning.phase_report import PhasePlan
from quantkit.planning.phases import Target, plan_phases

FP8 = Deployment(kv=KvLayout.FP8)
NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"


@pytest.fixture
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may write into the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tiny_plan(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> PhasePlan:
    """The trained checkpoint for prefill and its INT4 conversion for decode."""
    return plan_phases(glm_tiny, glm_tiny_converted["glm-5.2-int4"], Target(FP8, FP8))

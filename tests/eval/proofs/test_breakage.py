"""Conversions that are broken on purpose: each breaks what it says and nothing else, and `verify` finds it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.eval.proofs.breakage import BREAKAGES, break_checkpoint

CAUGHT_BY = {
    "one expert's scales doubled": {"codes"},
    "one layer's nibbles swapped": {"codes"},
    "one layer's experts rotated": {"codes"},
    "router bias in BF16": {"copies", "index"},
}
CHANGED = {  # tensors: of a gated projection there are three
    "one expert's scales doubled": 3,
    "one layer's nibbles swapped": 3 * 16,
    "one layer's experts rotated": 2 * 3 * 16,
    "router bias in BF16": 4,
}


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("how", BREAKAGES)
def test_breakage_is_found(how: str, glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """What should be broken is, and it is a check against the source that finds it, not the manifest."""
    break_checkpoint(glm_tiny_converted["glm-5.2-int4"], tmp_path / "broken", how)

    before, after = load(glm_tiny_converted["glm-5.2-int4"]), load(tmp_path / "broken")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name].double(), after[name].double())]
    assert len(changed) == CHANGED[how]
    result = quantkit.verify(tmp_path / "broken", glm_tiny)
    assert {check.name for check in result.checks if check.problems} == CAUGHT_BY[how]


def test_every_breakage_is_expected() -> None:
    """Each way of breaking has its line above."""
    assert BREAKAGES.keys() == CAUGHT_BY.keys() == CHANGED.keys()

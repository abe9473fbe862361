"""What tests of `fold` share: tiny checkpoints, KV scales for them, and one folded copy."""

import hashlib
import shutil
from pathlib import Path

import pytest

from quantkit import folding
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.source import open_source
from quantkit.planning.fingerprint import fingerprint
from quantkit.runtime.scales import Numbers
from support.runnable import Checkpoint

HEADS, NOPE, ROPE, VALUE, RANK = 2, 48, 32, 64, 128  # of the tiny models with MLA
PARTS: dict[str, Numbers] = {"latent_scale": 4.0, "rope_scale": 0.5}
NAME = "glm-5.2-fp8_block"


def named(name: str, layers: int = 2, **scales: Numbers) -> dict[str, Numbers]:
    """Scales of each layer under the names of a file."""
    prefix = "language_model." if name.startswith("kimi-k2.") else ""
    numbers: dict[str, Numbers] = {"k_scale": 2.0, "v_scale": 2.0} | scales
    return {
        f"{prefix}model.layers.{layer}.self_attn.{scale}": number
        for layer in range(layers)
        for scale, number in numbers.items()
    }


SCALES = named(NAME, **PARTS)


@pytest.fixture(scope="session")
def tiny_fp8(checkpoint: Checkpoint) -> Path:
    """A tiny FP8 checkpoint; not to be changed."""
    return checkpoint(NAME)


@pytest.fixture(scope="session")
def tiny_folded(tiny_fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folded copy; not to be changed."""
    folder = tmp_path_factory.mktemp("folded") / "folded"
    folding.fold(tiny_fp8, SCALES, folder)
    return folder


@pytest.fixture
def own_fp8(tiny_fp8: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return shutil.copytree(tiny_fp8, tmp_path / "own")


def content(folder: Path) -> dict[str, str]:
    """The sha256 of every file, hidden ones left out, and the manifest, which holds names."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file() and path.name != "quantkit.json"
    }


def manifest(folder: Path) -> Manifest:
    return Manifest.from_json((folder / "quantkit.json").read_text())


def space(folder: Path) -> str | None:
    """What two caches must have in common to mean the same."""
    return fingerprint(open_source(folder)).kv_space_id

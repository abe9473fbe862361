"""Which model a checkpoint holds: the same in every form of it, and another for another model of the same shape."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.manifest import ModelIdentity
from quantkit.checkpoint.source import open_source
from quantkit.choices import KvDtype, Mtp
from quantkit.errors import CacheError, SourceError
from quantkit.families.inventory import inventory
from quantkit.folding import fold
from quantkit.folding.report import Way
from quantkit.models import load
from quantkit.runtime.cache_options import CacheOptions, cache_scales
from quantkit.runtime.scales import KvScaleFile
from quantkit.weights.identity import identify

LAYERS = 4  # of the trained checkpoint
SCALES = {f"model.layers.{layer}.self_attn.k_scale": 2.0 for layer in range(LAYERS)}


def weights(folder: Path) -> str:
    return identify(open_source(folder)).weights_sha256


@pytest.fixture(scope="module")
def other(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape: its last norm is another."""
    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    shutil.copytree(glm_tiny, folder)
    name = "model.norm.weight"
    shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name] *= 2
    save_file(tensors, shard, metadata={"format": "pt"})
    return folder


@pytest.fixture
def scales(glm_tiny: Path, tmp_path: Path) -> Path:
    """A file of scales for the trained checkpoint, as `calibrate` writes it."""
    path = tmp_path / "kv_scales.json"
    path.write_text(KvScaleFile(dict(SCALES), identify(open_source(glm_tiny))).to_json())
    return path


def test_every_form_of_a_model_has_its_identity(
    glm_tiny: Path, glm_tiny_converted: dict[str, Path], scales: Path, tmp_path: Path
) -> None:
    """FP8, INT4, NVFP4 in both dialects, BF16, without MTP layers, and with KV scales folded in."""
    quantkit.convert(glm_tiny, tmp_path / "main", "bf16", options=quantkit.Options(mtp=Mtp.DROP))
    fold(glm_tiny_converted["glm-5.2-int4"], scales, tmp_path / "folded")

    forms = [*glm_tiny_converted.values(), tmp_path / "main", tmp_path / "folded"]
    assert {weights(folder) for folder in forms} == {weights(glm_tiny)}


def test_floats_of_another_width_are_the_same_model(glm_tiny: Path, tmp_path: Path) -> None:
    """Plain weights stored in float32 hold the same numbers."""
    quantkit.convert(glm_tiny, tmp_path / "bf16", "bf16")
    for shard in (tmp_path / "bf16").glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(shard).items()}, shard)

    assert weights(tmp_path / "bf16") == weights(glm_tiny)


def test_another_model_has_another(glm_tiny: Path, other: Path) -> None:
    """One norm that differs is enough; the prefix of a model with vision is not."""
    assert weights(other) != weights(glm_tiny)
    source = open_source(glm_tiny)
    prefixed = replace(source, tensors={f"language_model.{name}": tensor for name, tensor in source.tensors.items()})
    assert identify(prefixed) == identify(source)


def test_a_config_alone_has_none(glm_tiny: Path) -> None:
    """It has no weights."""
    with pytest.raises(SourceError, match="no weights to tell its model by"):
        identify(inventory("glm", (glm_tiny / "config.json").read_text()))


@pytest.mark.parametrize("way", [Way.COPY, Way.EMBED, Way.PATCH, Way.DRY_RUN, Way.IN_PLACE])
def test_scales_of_another_model_are_not_folded(scales: Path, glm_tiny: Path, other: Path, way: Way) -> None:
    """Both models are named with their hashes, and nothing is written."""
    output = scales.parent / "out" if way in (Way.COPY, Way.EMBED, Way.PATCH) else None
    before = sorted(other.iterdir())
    with pytest.raises(CacheError, match="KV scales of another model") as caught:
        fold(other, scales, output, way=way)

    assert all(f"weights {weights(folder)}" in str(caught.value) for folder in (glm_tiny, other))
    assert caught.value.hint is not None
    assert "take `model` out of the file" in caught.value.hint
    assert sorted(other.iterdir()) == before
    assert [path.name for path in scales.parent.iterdir()] == [scales.name]


def test_scales_of_another_model_are_not_used(scales: Path, other: Path) -> None:
    """Neither does the runtime take them for FP8 pages."""
    with pytest.raises(CacheError, match="KV scales of another model"):
        cache_scales(load(other), CacheOptions(KvDtype.FP8, scale_file=scales))


def test_a_file_that_names_no_model_fits_any(other: Path, tmp_path: Path) -> None:
    """Such as one that was written by hand."""
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"schema_version": 1, "kind": "KvScaleFile", "scales": SCALES}))

    assert fold(other, path, way=Way.DRY_RUN).digest


def test_a_config_alone_is_told_by_its_model_type(tmp_path: Path) -> None:
    """A dry run on an alias has nothing else to go by."""
    path = tmp_path / "scales.json"
    path.write_text(KvScaleFile({}, ModelIdentity("mine", "llama", "0" * 64)).to_json())
    with pytest.raises(CacheError, match=r"mine has the model type llama, and glm-5\.2 glm_moe_dsa"):
        fold("glm-5.2", path, way=Way.DRY_RUN)

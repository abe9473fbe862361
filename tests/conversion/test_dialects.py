"""NVFP4 from one dialect to the other: the same numbers, and back to the same bytes; what cannot is listed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit.checkpoint.manifest import Manifest
from quantkit.choices import Dialect, Mtp, Rest, ScaleMethod, Scheme
from quantkit.conversion import Options, convert
from quantkit.errors import PlanError
from quantkit.naming import Role
from quantkit.recipe import Recipe, Rule, Treatment
from support.families import write_family
from support.truth import read_tensors, truth

TO_MODELOPT, TO_COMPRESSED = (Options(dialect=dialect) for dialect in (Dialect.MODELOPT, Dialect.COMPRESSED_TENSORS))


def only(name: str, *roles: Role) -> Recipe:
    """A recipe that both dialects can hold: NVFP4 for `roles`, else BF16, also in MTP layers."""
    nvfp4 = Rule(Treatment(Scheme.NVFP4, scale=ScaleMethod.SEARCH), frozenset(roles))
    return Recipe(name, "", (nvfp4, Rule(Treatment(Scheme.BF16))), mtp=Mtp.KEEP)


EXPERTS, DENSE = only("experts", Role.ROUTED_EXPERT), only("dense", Role.ATTENTION, Role.DENSE_MLP)


def assert_same_model(actual: Path, expected: Path) -> None:
    """Shards, index and config are the same byte for byte."""
    names = {path.name for path in expected.iterdir()} - {"quantkit.json"}
    assert {path.name for path in actual.iterdir()} - {"quantkit.json"} == names
    for name in names:
        assert (actual / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("name", ["glm-5.2-fp8_block", "glm-4.5-bf16", "deepseek-v3-fp8_block", "llama-bf16"])
def test_dialects_are_exchanged_exactly(name: str, tmp_path: Path) -> None:
    """What is restated is what the recipe makes in the other dialect, from the first byte to the last, both ways."""
    recipe = DENSE if name.startswith("llama") else EXPERTS
    source = write_family(tmp_path / "source", name)
    compressed, modelopt = tmp_path / "compressed", tmp_path / "modelopt"
    convert(source, compressed, recipe)
    convert(source, modelopt, replace(recipe, dialect=Dialect.MODELOPT))

    there = convert(compressed, tmp_path / "there", options=TO_MODELOPT)
    back = convert(tmp_path / "there", tmp_path / "back", options=TO_COMPRESSED)

    assert_same_model(tmp_path / "there", modelopt)
    assert_same_model(tmp_path / "back", compressed)
    assert there.rounded_scales == back.rounded_scales == ()


@pytest.mark.exhaustive
def test_trained_modelopt_checkpoint_becomes_loadable(
    glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path
) -> None:
    """The built-in ModelOpt conversion, restated, holds the numbers of a compressed-tensors one, and verifies."""
    convert(glm_tiny_converted["glm-5.2-nvfp4-modelopt"], tmp_path / "restated", options=TO_COMPRESSED)
    convert(glm_tiny, tmp_path / "direct", EXPERTS)

    assert_same_model(tmp_path / "restated", tmp_path / "direct")
    assert quantkit.verify(tmp_path / "restated", glm_tiny).passed


def test_the_default_conversion_is_respelled_with_a_bf16_rest(
    glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path
) -> None:
    """Its FP8 rest is in the way, then its MTP layer; with both decoded the same codes are ModelOpt's."""
    source, rest = glm_tiny_converted["glm-5.2-nvfp4"], replace(TO_MODELOPT, rest=Rest.BF16)
    with pytest.raises(PlanError, match=r"would stay fp8 128x128"):
        convert(source, tmp_path / "output", options=TO_MODELOPT)
    with pytest.raises(PlanError, match="rule modelopt-mtp"):
        convert(source, tmp_path / "output", options=rest)

    convert(source, tmp_path / "output", options=replace(rest, mtp=Mtp.KEEP))

    before, after = read_tensors(source), read_tensors(tmp_path / "output")
    codes = {name: data for name, (dtype, data) in after.items() if dtype == "U8"}
    assert len(codes) == 3 * (16 + 1) * 3  # three layers of experts, and the shared ones
    for name, data in codes.items():
        assert np.array_equal(data, before[f"{name}_packed"][1])
    assert quantkit.verify(tmp_path / "output", source).passed


@pytest.mark.parametrize(
    "name",
    ["llama-nvfp4", "llama-nvfp4_w4a4", "llama-nvfp4_modelopt", "llama-nvfp4_modelopt_w4a16", "glm-4.5-nvfp4_modelopt"],
)
def test_scales_that_do_not_invert_are_listed(name: str, tmp_path: Path) -> None:
    """Each of the source's global scales that is no power of two is named, and off by 2^-24 at most."""
    source = write_family(tmp_path / "source", name)
    options = TO_COMPRESSED if "modelopt" in name else TO_MODELOPT

    manifest = convert(source, tmp_path / "output", options=options)

    after = read_tensors(tmp_path / "output")
    globals_ = {name for name in after if name.endswith(("global_scale", "weight_scale_2", "input_scale"))}
    assert set(manifest.rounded_scales) == {name for name in globals_ if np.frexp(after[name][1].item())[0] != 0.5}
    assert len(manifest.rounded_scales) > 0.9 * len(globals_) > 0
    assert any(
        f"{len(manifest.rounded_scales)} global scales are no powers of two" in text for text in manifest.warnings
    )
    assert Manifest.from_json((tmp_path / "output" / "quantkit.json").read_text()) == manifest
    decoded = truth(tmp_path / "output")
    for name, values in truth(source).items():
        np.testing.assert_allclose(decoded[name], values, rtol=2.0**-24, atol=0)


def test_list_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is gone on with lists the scales of the shards that were finished before, too."""
    source = write_family(tmp_path / "source", "llama-nvfp4")
    whole = convert(source, tmp_path / "whole", options=TO_MODELOPT)
    publish = quantkit.checkpoint.writer.OutputFolder.publish

    def interrupt(self: quantkit.checkpoint.writer.OutputFolder, shard: str) -> None:
        if shard.startswith("model-00003"):
            raise KeyboardInterrupt
        publish(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(quantkit.checkpoint.writer.OutputFolder, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "output", options=TO_MODELOPT)
    lines = (tmp_path / "output" / ".quantkit" / "journal.jsonl").read_text().splitlines()
    assert sum(bool(json.loads(line).get("rounded")) for line in lines) == 2

    resumed = convert(source, tmp_path / "output", options=TO_MODELOPT, resume=True)
    again = convert(source, tmp_path / "output", options=TO_MODELOPT, resume=True)

    assert len(resumed.rounded_scales) >= 14
    assert resumed.rounded_scales == whole.rounded_scales == again.rounded_scales

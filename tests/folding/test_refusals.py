"""`fold` refuses by name what cannot be folded exactly, and scales that are none."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import folding
from quantkit.errors import CacheError, FoldError
from quantkit.runtime.scales import KvScaleFile, LayerScales, Numbers
from support.folds import PARTS, RANK, ROPE, named
from support.runnable import Checkpoint, write_runnable

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("scale", ["k_scale", "latent_scale", "rope_scale"])
def test_unsound_scales_are_refused_everywhere(
    checkpoint: Checkpoint, scale: str, wrong: float, tmp_path: Path
) -> None:
    """In a file, as a mapping, in a list, and in the dataclass that the runtime takes."""
    scales = named("glm-5.2", **{**PARTS, scale: wrong})
    file = tmp_path / "scales.json"
    file.write_text(KvScaleFile(scales).to_json())
    for given in (scales, file):
        with pytest.raises(CacheError, match=f"{scale} is {wrong}, not a (positive )?finite number"):
            folding.fold(checkpoint("glm-5.2-bf16"), given, tmp_path / "folded")
    with pytest.raises(CacheError, match=f"is {wrong}, not a positive finite number"):
        LayerScales(*{"k_scale": (wrong, 1.0), "latent_scale": (1.0, 1.0, (wrong,), (1.0,))}.get(scale, (1.0, wrong)))
    if scale != "k_scale":
        many = {**PARTS, scale: [wrong] * (RANK if scale == "latent_scale" else ROPE // 2)}
        with pytest.raises(CacheError, match=f"{scale} is {wrong}, not a positive"):
            folding.fold(checkpoint("glm-5.2-bf16"), named("glm-5.2", **many), tmp_path / "folded")
    assert not (tmp_path / "folded").exists()


@pytest.mark.parametrize(
    ("scales", "error", "words"),
    [
        ({"latent_scale": 3.0, "rope_scale": 1.0}, CacheError, "latent_scale has 3, which is no power of two"),
        ({"latent_scale": [1.0] * 127 + [3.0], "rope_scale": 1.0}, CacheError, "latent_scale has 3"),
        ({"latent_scale": [1.0] * 4, "rope_scale": 1.0}, CacheError, "latent_scale has 4 numbers; .* a list of 128"),
        ({"latent_scale": 1.0, "rope_scale": [1.0] * ROPE}, CacheError, "rope_scale has 32 numbers; .* a list of 16"),
        ({"latent_scale": 2.0}, CacheError, "layer 0 has one of latent_scale and rope_scale"),
        ({"k_scale": [2.0, 2.0]}, CacheError, "k_scale is a list"),
        ({"v_scale": 4.0}, CacheError, "MLA keeps one row for both"),
        ({"k_scale": 0.3, "v_scale": 0.3}, FoldError, "layer 0: k_scale is 0.3, and only powers of two"),
    ],
)
def test_scales_that_cannot_be_folded_are_refused(
    checkpoint: Checkpoint, scales: dict[str, Numbers], error: type[Exception], words: str, tmp_path: Path
) -> None:
    """Parts are powers of two, as many as the row has channels or pairs; a common scale must be one to be folded."""
    with pytest.raises(error, match=words):
        folding.fold(checkpoint("glm-5.2-bf16"), named("glm-5.2", **scales), tmp_path / "folded")


def test_parts_are_for_mla(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A GQA cache has no latent; its k_scale and v_scale may differ."""
    with pytest.raises(CacheError, match="latent_scale is the scale of no layer's cache"):
        folding.fold(checkpoint("llama-bf16"), named("llama", **PARTS), tmp_path / "folded")


def test_a_layer_without_scales_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every main layer has its scales, and every scale its layer."""
    for layers, words in ((1, "layer 1 has no k_scale"), (4, "layers.3.self_attn.k_scale is the scale of no layer")):
        with pytest.raises(CacheError, match=words):
            folding.fold(checkpoint("glm-5.2-bf16"), named("glm-5.2", layers), tmp_path / "folded")


def test_folding_twice_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The manifest says that scales are folded in, these or others."""
    first, name = tmp_path / "first", "glm-5.2"
    folding.fold(checkpoint("glm-5.2-bf16"), named(name, **PARTS), first)

    for scales, which in ((PARTS, "these"), ({}, "other")):
        with pytest.raises(FoldError, match=f"has {which} KV scales folded in already"):
            folding.fold(first, named(name, **scales), tmp_path / "second")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(("number", "refused"), [(1.0, False), (0.5, True)])
def test_stored_scales_would_count_twice(tmp_path: Path, number: float, refused: bool) -> None:
    """A checkpoint that holds scales other than 1 is not folded into."""
    folder = write_runnable(tmp_path / "c", "glm-5.2-bf16")
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path) | {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor([number])}
    save_file(tensors, path)
    if not refused:
        folding.fold(folder, named("glm-5.2", **PARTS), tmp_path / "folded")
        return
    with pytest.raises(FoldError, match=r"holds model.layers.0.self_attn.k_proj.k_scale: its cache is scaled already"):
        folding.fold(folder, named("glm-5.2", **PARTS), tmp_path / "folded")

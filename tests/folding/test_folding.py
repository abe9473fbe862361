"""`fold`: every family in every storage keeps its function exactly, or is refused by name."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.errors import FoldError
from quantkit.folding.report import FoldReport
from quantkit.models import PlainCache, load
from quantkit.runtime.scales import Numbers
from quantkit.verification import verify
from support.families import FAMILIES, NAMES, PUBLISHED
from support.folds import HEADS, NOPE, PARTS, RANK, ROPE, VALUE, named
from support.runnable import Checkpoint, edit_config, write_runnable
from support.tiers import quick_if
from support.truth import Array, truth

pytestmark = pytest.mark.usefixtures("one_thread")
LATENTS = [2.0 ** (channel % 4 - 1) for channel in range(RANK)]
PAIRS = [2.0 ** -(pair % 3) for pair in range(ROPE // 2)]


def is_mla(name: str) -> bool:
    return not name.startswith(("llama", "glm-4.5"))


@pytest.fixture
def without_q_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose queries have no latent, as DeepSeek-V2-Lite's."""
    small = FAMILIES["kimi-k2-instruct"]
    changed = replace(small, changes={**small.changes, "q_lora_rank": None})
    monkeypatch.setitem(FAMILIES, "lite", changed)


def attention(weights: dict[str, Array], layer: int) -> dict[str, Array]:
    """A layer's attention weights by what follows `self_attn.`."""
    marker = f"layers.{layer}.self_attn."
    return {name.partition(marker)[2]: weight for name, weight in weights.items() if marker in name}


def check_mla(before: dict[str, Array], after: dict[str, Array], latent: Numbers, rope: Numbers, halves: bool) -> None:
    """The cache holds less by c and r; scores and outputs are the same. Sums times powers of two are exact."""
    c, pairs = np.broadcast_to(latent, RANK), np.broadcast_to(rope, ROPE // 2)
    r = np.concatenate([pairs, pairs]) if halves else pairs.repeat(2)
    norm, kv_a = "kv_a_layernorm.weight", "kv_a_proj_with_mqa.weight"
    assert np.array_equal(after[norm] * c, before[norm])
    assert np.array_equal(after[kv_a][:RANK], before[kv_a][:RANK])
    assert np.array_equal(after[kv_a][RANK:] * r[:, None], before[kv_a][RANK:])
    parts = []
    for weights in (before, after):
        query = weights["q_b_proj.weight" if "q_b_proj.weight" in weights else "q_proj.weight"]
        query, up = query.reshape(HEADS, NOPE + ROPE, -1), weights["kv_b_proj.weight"].reshape(HEADS, -1, RANK)
        output = weights["o_proj.weight"].reshape(-1, HEADS, VALUE).transpose(1, 0, 2)
        parts.append((up[:, :NOPE].transpose(0, 2, 1) @ query[:, :NOPE], query[:, NOPE:], output @ up[:, NOPE:]))
    (scores, roped, outputs), (new_scores, new_roped, new_outputs) = parts
    assert np.array_equal(new_scores, scores * c[:, None])
    assert np.array_equal(new_roped, roped * r[:, None])
    assert np.array_equal(new_outputs, outputs * c)


def check_gqa(before: dict[str, Array], after: dict[str, Array], key: float, value: float) -> None:
    """What goes into the cache is less by `key` and `value`; the query and the output make up for it."""
    normed = "k_norm.weight" in before
    for letter, factor in (("k", 1 / key), ("q", key), ("v", 1 / value)):
        for leaf in ("weight", "bias"):
            own = f"{letter}_proj.{leaf}"
            if own in before:
                assert np.array_equal(after[own], before[own] * (1 if normed and letter != "v" else factor))
        if normed and letter != "v":
            assert np.array_equal(after[f"{letter}_norm.weight"], before[f"{letter}_norm.weight"] * factor)
    assert np.array_equal(after["o_proj.weight"], before["o_proj.weight"] * value)


def check_fold(folder: Path, folded: Path, name: str, scales: dict[str, Numbers], report: FoldReport) -> None:
    """All tensors but the folded layers' attention are the same, and that is the same function."""
    before, after = truth(folder), truth(folded)
    assert before.keys() == after.keys()
    edited = {entry.layer for entry in report.layers if entry.nbytes}
    for weight, numbers in before.items():
        if not any(f"layers.{layer}.self_attn." in weight for layer in edited):
            assert np.array_equal(after[weight], numbers, equal_nan=True), weight
    halves = json.loads((folder / "config.json").read_text()).get("rope_interleave") is False
    for layer in edited:
        ours = attention(before, layer), attention(after, layer)
        if is_mla(name):
            common = scales.get("k_scale", 2.0)
            check_mla(*ours, scales.get("latent_scale", common), scales.get("rope_scale", common), halves)
        else:
            check_gqa(*ours, 2.0, float(str(scales.get("v_scale", 2.0))))


COARSE = ("glm-5.2-fp8_tensor", "glm-5.2-autofp8", "glm-5.2-modelopt_fp8", "glm-5.2-fp8_tensor_static")
REFUSED = (*COARSE, "glm-5.2-autofp8_static", "glm-5.2-f16", "llama-f16")
ALIKE = ("bf16", "fp8_block_ue8m0", "fp8_block_u8", "fp8_block_ct", "fp8_block_ct_bf16", "fp8_channel_f32")
KEPT = ("glm-5.2-", "glm-4.5-", "glm-4.5-air-", "glm-4.7", "llama-bf16")  # families tried in these storages, too
EXACT = [name for name in NAMES if name not in REFUSED and (name.startswith(KEPT) or not name.endswith(ALIKE))]


@pytest.mark.parametrize("name", quick_if(PUBLISHED[::2].__contains__, EXACT))
def test_the_model_stays_the_same_function(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    """Two parts for MLA, keys and values for GQA, in every family and storage; `verify` knows what was multiplied."""
    folder, scales = checkpoint(name), PARTS if is_mla(name) else {"v_scale": 0.25}
    report = folding.fold(folder, named(name, **scales), tmp_path / "folded")

    check_fold(folder, tmp_path / "folded", name, scales, report)
    assert {entry.layer for entry in report.layers if entry.nbytes} == {0, 1}
    assert "the same bits in BF16 and float32: attention of 2 folded layers" in report.proof
    found = {check.name: check for check in verify(tmp_path / "folded", folder).checks}
    assert not [check for name, check in found.items() if check.problems and name not in ("config", "engines")]
    assert "times powers of two, exactly" in found["fold"].note


@pytest.mark.parametrize("name", [*REFUSED])
def test_a_storage_too_coarse_is_refused(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    """One scale for all of kv_a cannot serve for its rope rows; F16 has no room below. The tensor is named."""
    with pytest.raises(FoldError, match=r"model\.layers\.0\.self_attn\.k\w*_proj\w*\.weight"):
        folding.fold(checkpoint(name), named(name, **PARTS if is_mla(name) else {}), tmp_path / "folded")

    assert not (tmp_path / "folded").exists()


@pytest.mark.parametrize("name", COARSE)
def test_the_latent_alone_is_folded_into_one_scale(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    """With rope scale 1 kv_a is not edited; kv_b is as a whole, and so is the static scale of its input."""
    scales: dict[str, Numbers] = {"latent_scale": 0.125, "rope_scale": 1.0}
    report = folding.fold(checkpoint(name), named(name, **scales), tmp_path / "folded")

    check_fold(checkpoint(name), tmp_path / "folded", name, scales, report)
    assert verify(tmp_path / "folded", checkpoint(name)).passed
    inputs = [open_source(folder).tensors for folder in (checkpoint(name), tmp_path / "folded")]
    for static in (name for name in inputs[0] if name.endswith("kv_b_proj.input_scale")):
        old, new = (load_one(folder, static) for folder in (checkpoint(name), tmp_path / "folded"))
        assert torch.equal(new * 0.125, old) == (not static.startswith("model.layers.2."))


def load_one(folder: Path, name: str) -> torch.Tensor:
    tensor: torch.Tensor = load_file(folder / open_source(folder).tensors[name].shard)[name]
    return tensor


LISTED = ("glm-5.2-bf16", "glm-5.2-f32", "deepseek-v3-bf16", "kimi-k2.5-int4")


@pytest.mark.parametrize(
    ("name", "halves"),
    quick_if(lambda name, halves: halves == (name == "deepseek-v3-bf16"), itertools.product(LISTED, [False, True])),
)
def test_lists_go_to_their_channels_and_pairs(name: str, halves: bool, tmp_path: Path) -> None:
    """A number for each latent channel and each rotated pair, for pairs of neighbours and of halves."""
    folder = write_runnable(tmp_path / "c", name)
    if halves:
        edit_config(folder, lambda config: config.get("text_config", config).update(rope_interleave=False))
        edit_config(folder, lambda config: config.update(rope_interleave=False))
    scales: dict[str, Numbers] = {"latent_scale": LATENTS, "rope_scale": PAIRS}
    report = folding.fold(folder, named(name, **scales), tmp_path / "folded")

    check_fold(folder, tmp_path / "folded", name, scales, report)
    assert report.layers[0].scales == "latent 0.5 to 4 by channel, rope 0.25 to 1 by channel"


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"latent_scale": LATENTS, "rope_scale": 1.0}, r"kv_b_proj.weight \(fp8 128x128\), row 0 on"),
        ({"latent_scale": 1.0, "rope_scale": PAIRS}, r"kv_a_proj_with_mqa.weight \(fp8 128x128\), row 128 on"),
    ],
)
def test_lists_within_a_block_are_refused(
    checkpoint: Checkpoint, scales: dict[str, Numbers], words: str, tmp_path: Path
) -> None:
    """Channels that share an FP8 scale cannot take several powers of two, unless their codes happen to hold them."""
    with pytest.raises(FoldError, match=words) as caught:
        folding.fold(checkpoint("glm-5.2-fp8_block"), named("glm-5.2", **scales), tmp_path / "folded")
    assert "Give one number for the whole part, or convert this weight to BF16" in str(caught.value.hint)


@pytest.mark.parametrize("storage", ["bf16", "fp8_block", "fp8_channel"])
@pytest.mark.usefixtures("without_q_latent")
def test_queries_without_a_latent(storage: str, tmp_path: Path) -> None:
    """Where there is no q_b_proj, q_proj takes what it would take."""
    folder = write_runnable(tmp_path / "c", f"lite-{storage}")
    report = folding.fold(folder, named("lite", **PARTS), tmp_path / "folded")

    check_fold(folder, tmp_path / "folded", "lite", PARTS, report)
    assert "q_proj.weight" in report.layers[0].weights


def test_a_bias_of_kv_a_goes_along(tmp_path: Path) -> None:
    """With `attention_bias` the rope rows of kv_a's bias are divided like those of its weight."""
    folder = write_runnable(tmp_path / "c", "deepseek-v3-bf16")
    edit_config(folder, lambda config: config.update(attention_bias=True))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(("q_a_proj.weight", "mqa.weight", "o_proj.weight"))]:
            rows = len(tensors[name])
            tensors[name.removesuffix("weight") + "bias"] = torch.randn(rows).bfloat16()
        save_file(tensors, path)
    rewrite_index(folder)
    report = folding.fold(folder, named("deepseek-v3", **PARTS), tmp_path / "folded")

    assert "kv_a_proj_with_mqa.bias" in report.layers[0].weights
    for layer in range(2):
        before, after = (attention(truth(path), layer) for path in (folder, tmp_path / "folded"))
        bias = "kv_a_proj_with_mqa.bias"
        assert np.array_equal(after[bias][:RANK], before[bias][:RANK])
        assert np.array_equal(after[bias][RANK:] / 2, before[bias][RANK:])
        check_mla(before, after, 4.0, 0.5, halves=False)


def rewrite_index(folder: Path) -> None:
    weight_map = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_scale_for_the_row_edits_scales_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """k_scale without parts is both: in FP8 blocks norm, kv_a's last row of scales, q_b and o_proj, and not kv_b."""
    report = folding.fold(checkpoint("glm-5.2-fp8_block"), named("glm-5.2"), tmp_path / "folded")

    check_fold(checkpoint("glm-5.2-fp8_block"), tmp_path / "folded", "glm-5.2", {}, report)
    modules = [weight.removesuffix(".weight") for weight in report.layers[0].weights]
    assert modules == ["kv_a_layernorm", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"]
    assert report.layers[0].nbytes == 2 * RANK + 4 * (1 + 2 + 1)


def test_logits_are_the_same_bits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What the proof says, seen from outside: whole models, both dtypes, a cache that is not FP8."""
    tokens, positions = torch.randint(3, 100, (20,)), torch.arange(20)
    for name in ("glm-5.2-fp8_block", "kimi-k2.5-int4", "glm-4.5-fp8_channel"):
        folding.fold(checkpoint(name), named(name, **PARTS if is_mla(name) else {}), tmp_path / name)
        for dtype in (torch.float32, torch.bfloat16):
            models = (load(folder, dtype) for folder in (checkpoint(name), tmp_path / name))
            first, second = (model.logits(model.forward(tokens, positions, PlainCache())) for model in models)
            assert torch.equal(first, second)


def test_mtp_layers_are_folded_with_their_scales_or_left(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Layer 2 is the MTP layer: without scales it is left alone, and it is said."""
    folder, name = checkpoint("glm-5.2-fp8_block"), "glm-5.2"
    left = folding.fold(folder, named(name, **PARTS), tmp_path / "left")
    assert (left.left, [entry.layer for entry in left.layers]) == ((2,), [0, 1])

    folded = folding.fold(folder, named(name, 3, **PARTS), tmp_path / "folded")
    assert (folded.left, [entry.mtp for entry in folded.layers]) == ((), [False, False, True])
    check_fold(folder, tmp_path / "folded", name, PARTS, folded)
    assert folded.digest != left.digest

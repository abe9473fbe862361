"""`fold`: every family in every storage keeps its function exactly; what cannot be exact is refused by name."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, NAMES
from model_reference import edit_config, write_runnable
from safetensors.torch import load_file, save_file
from truth import Array, truth

import quantkit
from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.errors import CacheError, FoldError, SourceError
from quantkit.folding.report import FoldReport, Way
from quantkit.models import PlainCache, load
from quantkit.models.folding import LayerFold, fold_digest
from quantkit.report import Manifest
from quantkit.runtime.scales import KvScaleFile, LayerScales, Numbers
from quantkit.serving.fingerprint import fingerprint
from quantkit.verification import verify

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, NOPE, ROPE, VALUE, RANK = 2, 48, 32, 64, 128  # of the tiny models with MLA
KV_HEADS, GROUP, HEAD_DIM = 2, 2, 32  # of those with GQA
LATENTS = [2.0 ** (channel % 4 - 1) for channel in range(RANK)]
PAIRS = [2.0 ** -(pair % 3) for pair in range(ROPE // 2)]
Checkpoint = Callable[[str], Path]


def is_mla(name: str) -> bool:
    return not name.startswith(("llama", "glm-4.5"))


def named(name: str, layers: int = 2, **scales: Numbers) -> dict[str, Numbers]:
    """Scales of each layer under the names of a file."""
    prefix = "language_model." if name.startswith("kimi-k2.5") else ""
    numbers: dict[str, Numbers] = {"k_scale": 2.0, "v_scale": 2.0} | scales
    return {
        f"{prefix}model.layers.{layer}.self_attn.{scale}": number
        for layer in range(layers)
        for scale, number in numbers.items()
    }


PARTS: dict[str, Numbers] = {"latent_scale": 4.0, "rope_scale": 0.5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of a tiny checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        return folder / name if (folder / name).exists() else write_runnable(folder / name, name)

    return make


@pytest.fixture
def without_q_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose queries have no latent, as DeepSeek-V2-Lite's."""
    small = FAMILIES["kimi-k2-instruct"]
    changed = replace(small, changes={**small.changes, "q_lora_rank": None})
    monkeypatch.setitem(FAMILIES, "lite", changed)


# --- the same function


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


@pytest.mark.parametrize("name", EXACT)
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


@pytest.mark.parametrize("name", ["glm-5.2-bf16", "glm-5.2-f32", "deepseek-v3-bf16", "kimi-k2.5-int4"])
@pytest.mark.parametrize("halves", [False, True])
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


# --- what is refused


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
        with pytest.raises(CacheError, match=f"{scale} is {wrong}, not a positive finite number"):
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


def test_nothing_to_fold_is_a_copy(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Scales of 1 edit nothing, which is said; the cache means what it meant."""
    folder, ones = checkpoint("glm-5.2-fp8_block"), named("glm-5.2", k_scale=1.0, v_scale=1.0)
    report = folding.fold(folder, ones, tmp_path / "copy")

    assert (report.edited_bytes, report.digest) == (0, None)
    assert "every scale is 1" in report.proof
    assert all(path.read_bytes() == (tmp_path / "copy" / path.name).read_bytes() for path in folder.glob("model*"))
    assert space(tmp_path / "copy") == space(folder)


# --- what the cache means


def space(folder: Path) -> str | None:
    return fingerprint(open_source(folder)).kv_space_id


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An FP8 checkpoint and its INT4 conversion."""
    folder = checkpoint("glm-5.2-fp8_block")
    converted = tmp_path_factory.mktemp("pair") / "int4"
    quantkit.convert(folder, converted)
    return folder, converted


def test_one_set_on_two_formats_is_one_kv_space(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same scales on FP8 and INT4 give the same id, though other weights were edited; converting a folded one, too.

    Unfolded checkpoints, and such with other scales, are of other ids. `verify` holds each against the unfolded FP8.
    """
    fp8, int4 = pair
    for name, folder, scales in (("a", fp8, PARTS), ("b", int4, PARTS), ("c", int4, {**PARTS, "rope_scale": 0.25})):
        folding.fold(folder, named("glm-5.2", **scales), tmp_path / name)
        assert verify(tmp_path / name, fp8).passed
    quantkit.convert(tmp_path / "a", tmp_path / "d")
    assert verify(tmp_path / "d", tmp_path / "a").passed
    assert verify(tmp_path / "d", fp8).passed

    edited = [Manifest.from_json((tmp_path / name / "quantkit.json").read_text()).fold for name in "ab"]
    assert edited[0]
    assert edited[1]
    assert edited[0]["layers"]["0"]["output"] != edited[1]["layers"]["0"]["output"]
    assert space(tmp_path / "a") == space(tmp_path / "b") == space(tmp_path / "d")
    assert space(fp8) == space(int4)
    assert len({space(folder) for folder in (fp8, tmp_path / "a", tmp_path / "c")}) == 3
    with pytest.raises(FoldError, match="these KV scales folded in already"):
        folding.fold(tmp_path / "d", named("glm-5.2", **PARTS), tmp_path / "e")


def test_plan_check_takes_equal_folds_only(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Prefill in FP8 and decode in INT4 with one set of scales pass; with an unfolded peer they do not."""
    for name, folder in zip(("fp8", "int4"), pair, strict=True):
        folding.fold(folder, named("glm-5.2", **PARTS), tmp_path / name)
    target = quantkit.Target(*[quantkit.Deployment("1xH200")] * 2)
    planned = quantkit.plan_phases(tmp_path / "fp8", tmp_path / "int4", target)
    (tmp_path / "plan.json").write_text(planned.deployment.to_json())

    assert quantkit.check_drift(tmp_path / "plan.json", [tmp_path / "fp8", tmp_path / "int4"]).passed
    drifts = quantkit.check_drift(tmp_path / "plan.json", [tmp_path / "fp8", pair[1]]).drifts
    assert {drift.pool for drift in drifts if drift.field == "kv_space_id"} == {"decode", "prefill and decode"}


def test_a_digest_is_of_what_the_cache_is_divided_by() -> None:
    """Free exponents, equal numbers given as lists and layers divided by 1 do not count; all else does."""
    fold = LayerFold((2,), (-1,))
    same = [
        {0: fold},
        {0: replace(fold, query=3, output=1)},
        {0: LayerFold((2,) * 8, (-1,) * 4)},
        {0: fold, 1: LayerFold()},
    ]
    other = [{1: fold}, {0: LayerFold((2,), (1,))}, {0: LayerFold((2, 1) * 4, (-1,))}, {0: LayerFold(key=1)}]

    assert len({fold_digest(folds) for folds in same}) == 1
    assert len({fold_digest(folds) for folds in (same[0], *other)}) == 5
    assert fold_digest({0: LayerFold()}) is None


# --- verify


@pytest.fixture
def folded(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    folding.fold(checkpoint("glm-5.2-bf16"), named("glm-5.2", **PARTS), tmp_path / "folded")
    return tmp_path / "folded"


def problems(folder: Path, against: Path) -> Iterator[str]:
    found = verify(folder, against)
    assert not found.passed
    return (f"{check.name}: {example}" for check in found.checks for example in check.examples)


def change_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "quantkit.json").read_text())
    change(content["fold"])
    (folder / "quantkit.json").write_text(json.dumps(content))


def test_verify_finds_a_weight_that_was_not_multiplied(folded: Path, checkpoint: Checkpoint) -> None:
    """One number of an edited weight as it was before is a problem, named with the tensor."""
    name = "model.layers.1.self_attn.q_b_proj.weight"
    path = folded / open_source(folded).tensors[name].shard
    tensors = load_file(path)
    tensors[name][NOPE, 0] *= 2
    save_file(tensors, path, metadata={"format": "pt"})

    assert any(name in text and text.startswith("fold:") for text in problems(folded, checkpoint("glm-5.2-bf16")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fold: fold.update(digest="0" * 64), "another digest than it says"),
        (lambda fold: fold["layers"]["0"].pop("rope"), "does not say what was folded"),
        (lambda fold: fold["layers"]["0"].update(output=1), "is not the source's times the powers of two of the fold"),
    ],
)
def test_verify_reads_the_record(
    folded: Path, checkpoint: Checkpoint, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """A record that does not fit its digest or the weights is a problem."""
    change_record(folded, change)

    assert any(words in text for text in problems(folded, checkpoint("glm-5.2-bf16")))


def test_verify_without_the_record_finds_other_weights(folded: Path, checkpoint: Checkpoint) -> None:
    """A folded checkpoint whose manifest is lost is not the source."""
    (folded / "quantkit.json").unlink()

    assert any(text.startswith("copies:") for text in problems(folded, checkpoint("glm-5.2-bf16")))


def test_a_damaged_manifest_or_shard_is_refused(folded: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A checkpoint that is not what its manifest says is not folded into."""
    quantkit.convert(checkpoint("glm-5.2-fp8_block"), tmp_path / "int4")
    shard = min((tmp_path / "int4").glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SourceError, match=f"{shard.name} has another sha256 than quantkit.json says"):
        folding.fold(tmp_path / "int4", named("glm-5.2", **PARTS), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()

    (tmp_path / "int4" / "quantkit.json").write_text("{")
    with pytest.raises(SourceError, match=r"quantkit.json cannot be read"):
        folding.fold(tmp_path / "int4", named("glm-5.2", **PARTS), tmp_path / "other", way=Way.COPY)

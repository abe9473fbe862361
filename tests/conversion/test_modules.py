"""Modules that other tools lost, treated by the wrong rule or described wrongly, as users reported: the smallest input
of each, and what must come out of it."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quantkit
from quantkit.choices import Mtp
from quantkit.conversion import Options
from quantkit.errors import PlanError, QuantkitError, SourceError
from quantkit.recipe import Recipe
from support.checkpoints import DOWN, FP8, MLP, config_of, fp8_codes, normal, write
from support.plans import custom, int4
from support.toys import Tensors, ToyMaker
from support.truth import read_tensors, truth

LEAVES = {
    None: {"weight"},
    "pack-quantized": {"weight_packed", "weight_scale", "weight_shape"},
    "float-quantized": {"weight", "weight_scale"},
    "nvfp4-pack-quantized": {"weight_packed", "weight_scale", "weight_global_scale"},
}


def format_of(module: str, quantization: dict[str, Any]) -> str | None:
    """The format that compressed-tensors gives a Linear called `module`, which must be one; None for a plain one."""

    def matches(target: str) -> bool:
        return re.match(target.removeprefix("re:"), module) is not None if "re:" in target else target == module

    if any(map(matches, quantization["ignore"])):
        return None
    groups = quantization["config_groups"].values()
    named = [group["format"] for group in groups if any(map(matches, group["targets"]))]
    by_class = [group["format"] for group in groups if "Linear" in group["targets"]]
    return next(iter((*named, *by_class)))


def assert_config_predicts(folder: Path) -> None:
    """config.json alone says which tensors stand for each matrix, and no FP8 tensor is without its scale."""
    stored, leaves = read_tensors(folder), defaultdict(set)
    for module, _, leaf in (name.rpartition(".") for name in stored):
        leaves[module].add(leaf)
    quantization = config_of(folder)["quantization_config"]
    for module in (module for module in leaves if module.endswith("_proj")):
        assert leaves[module] == LEAVES[format_of(module, quantization)], module
    assert {name for name, (dtype, _) in stored.items() if dtype == "F8_E4M3" and name.endswith(".weight")} <= {
        name.removesuffix("_scale") for name in stored
    }


def refusal(source: Path, output: Path, recipe: str | Recipe) -> QuantkitError:
    """The error of a conversion that is refused before anything is written."""
    with pytest.raises(QuantkitError) as caught:
        quantkit.convert(source, output, recipe)
    assert not output.exists()
    return caught.value


# --- which modules a recipe and a config are about


@pytest.mark.parametrize("mtp", [Mtp.QUANTIZE, Mtp.KEEP])
def test_config_predicts_each_module(make_toy: ToyMaker, tmp_path: Path, mtp: Mtp) -> None:
    """An ignore list is applied at one place and not at another, or a layer is in two groups (compressed-tensors#712).
    A layer that is left out keeps FP8 bytes whose scales are gone (kekzl/imp#1450)."""

    def dense_mtp_expert(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.3." in name and name.endswith(".weight_scale_inv")]:
            del tensors[name]
            tensors[name.removesuffix("_scale_inv")] = normal(*tensors[name.removesuffix("_scale_inv")].shape)

    source = make_toy(dense_mtp_expert if mtp is Mtp.KEEP else lambda tensors: None)
    recipe = custom(
        "{roles: [routed_expert], scheme: int4, group_size: 32, scale: search}",
        "{roles: [dense_mlp, shared_expert], layers: '0', scheme: int4, group_size: 32, scale: search}",
        "{roles: [kv_b], scheme: bf16}",
    )
    quantkit.convert(source, tmp_path / "out", replace(recipe, mtp=mtp))

    assert_config_predicts(tmp_path / "out")
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    kept = [name for name in before if name in after and ".kv_b_proj" not in name]
    assert len(kept) > 40
    assert all(after[name][1].tobytes() == before[name][1].tobytes() for name in kept)
    assert quantkit.verify(tmp_path / "out", source).passed


MTP = "model.layers.4"


def mtp_model(folder: Path, count: Any) -> Path:
    """Four layers and an MTP layer, each with an expert, as a config with this `num_nextn_predict_layers`."""
    layers = [f"model.layers.{number}" for number in range(5)]
    tensors = {f"{MTP}.{name}.weight": normal(128) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {f"{MTP}.eh_proj.weight": normal(128, 256), f"{MTP}.shared_head.head.weight": normal(128, 128)}
    for layer in layers:
        tensors |= {f"{layer}.mlp.experts.0.{part}_proj.weight": normal(128, 128) for part in ("gate", "up", "down")}
        tensors[f"{layer}.self_attn.kv_b_proj.weight"] = normal(128, 128)
    said = {} if count is ... else {"num_nextn_predict_layers": count}
    return write(folder, tensors, model_type="glm_moe_dsa", num_hidden_layers=4, **said)


@pytest.mark.parametrize("count", [1, None, ...], ids=["1", "null", "missing"])
@pytest.mark.parametrize("mtp", Mtp)
@pytest.mark.parametrize("recipe", ["glm-5.2-int4", "bf16"])
def test_mtp_layer(tmp_path: Path, count: Any, mtp: Mtp, recipe: str) -> None:
    """The layer after the last vanishes, or is there and not in the ignore list (NVIDIA/Model-Optimizer#750)."""
    source = mtp_model(tmp_path / "source", count)
    quantkit.convert(source, tmp_path / "out", recipe, options=Options(mtp=mtp))

    before, after = truth(source), truth(tmp_path / "out")
    assert after.keys() == {name for name in before if mtp is not Mtp.DROP or not name.startswith(MTP)}
    packed = {name.split(".mlp.")[0] for name in read_tensors(tmp_path / "out") if name.endswith("weight_packed")}
    quantized = {f"model.layers.{number}" for number in range(5 if mtp is Mtp.QUANTIZE else 4)}
    assert packed == (quantized if recipe == "glm-5.2-int4" else set())
    if recipe == "glm-5.2-int4":
        assert_config_predicts(tmp_path / "out")
    assert not config_of(tmp_path / "out").get("num_nextn_predict_layers") or mtp is not Mtp.DROP
    assert quantkit.verify(tmp_path / "out", source).passed


NAMES = ("mlp.gate", "mlp.gate_proj", "mlp.experts.0.gate_proj", "self_attn.indexer.weights_proj")


@pytest.mark.parametrize("condition", ["roles: [dense_mlp, routed_expert]", r"modules: '.*mlp\.(ex.*)?gate_proj'"])
def test_router_and_modules_that_are_called_alike(tmp_path: Path, condition: str) -> None:
    """A pattern for the router takes gate_proj along, or one for experts the router (compressed-tensors#733); a list
    of exceptions names a module by another name, and a BF16 tensor is read as FP8 (ROCm/ATOM#451)."""
    listed = ["mlp.gate_proj", "self_attn.indexers_proj"]
    quantization = FP8 | {"modules_to_not_convert": [f"model.layers.0.{name}" for name in listed]}
    tensors = {f"model.layers.0.{name}.weight": normal(128, 128) for name in NAMES}
    source = write(tmp_path / "source", tensors, model_type="glm_moe_dsa", quantization_config=quantization)
    recipe = custom(f"{{{condition}, scheme: int4, group_size: 32, scale: minmax}}")
    quantkit.convert(source, tmp_path / "out", recipe)

    stored, quantization = read_tensors(tmp_path / "out"), config_of(tmp_path / "out")["quantization_config"]
    for name in NAMES:
        module, quantized = f"model.layers.0.{name}", name.endswith("gate_proj")
        assert format_of(module, quantization) == ("pack-quantized" if quantized else None)
        assert stored[f"{module}.weight_packed" if quantized else f"{module}.weight"][0] == (
            "I32" if quantized else "BF16"
        )
    dead = custom(int4("routed_expert"), "{modules: .*indexers_proj, scheme: keep}")
    assert "rule 2 (modules: .*indexers_proj) fits no weight" in str(refusal(source, tmp_path / "dead", dead))


EXPERTS = ("shared_experts", *(f"experts.{number}" for number in range(8)))
FUSED = {
    r".*shared_experts\.gate_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    r".*\.experts\.[0-6]\..*": ("mlp.experts.7.down_proj (and 2 more)", "mlp.experts.0.down_proj"),
    r".*self_attn\.[qk]_proj": ("self_attn.v_proj", "self_attn.k_proj"),
}


@pytest.mark.parametrize(("modules", "named"), FUSED.items(), ids=["up left out", "one of 8 experts", "v left out"])
def test_part_of_a_fused_module_left_out(tmp_path: Path, modules: str, named: tuple[str, str]) -> None:
    """One member of a fused module in another format stops the engine, or loads wrongly (vllm-project/vllm#11354)."""
    names = [f"mlp.{expert}.{part}_proj" for expert in EXPERTS for part in ("gate", "up", "down")]
    names += [f"self_attn.{part}_proj" for part in "qkvo"]
    tensors = {f"model.layers.0.{name}.weight": normal(128, 128) for name in names}
    source = write(tmp_path / "source", tensors, model_type="glm4_moe")
    recipe = custom(f"{{modules: '{modules}', scheme: int4, group_size: 32, scale: minmax}}")
    error = refusal(source, tmp_path / "out", recipe)

    assert isinstance(error, PlanError)
    assert "fused-partners" in str(error)
    assert all(f"model.layers.0.{name} (" in str(error) for name in named)


@pytest.mark.parametrize(("rows", "columns"), [(128, 192), (4, 32)])
def test_group_that_does_not_divide(tmp_path: Path, rows: int, columns: int) -> None:
    """Found only when the checkpoint is saved, or served (vllm-project/compressed-tensors#447)."""
    source = write(tmp_path / "source", {f"{DOWN}.weight": normal(rows, columns)})
    error = refusal(source, tmp_path / "out", custom(int4("dense_mlp", group_size=128)))

    assert f"{DOWN}.weight: the group size 128 does not divide the {columns} columns" in str(error)
    assert error.hint


# --- what is not converted, and experts in one tensor


@pytest.mark.parametrize("recipe", ["glm-5.2-int4", "glm-5.2-int4-bf16rest", "glm-5.2-nvfp4-modelopt", "bf16"])
def test_router_bias_and_norms_in_fp32(tmp_path: Path, recipe: str) -> None:
    """Cast to BF16, 238 values from 6.82 to 7.06 become about 8, and other experts are chosen (sglang#31213)."""
    kept = {
        f"{MLP}.gate.e_score_correction_bias": torch.linspace(6.82, 7.06, 238),
        "model.layers.0.input_layernorm.weight": torch.linspace(0.9, 1.1, 128),
    }
    modules = [f"{MLP}.experts.0.{part}_proj" for part in ("gate", "up", "down")] + [
        "model.layers.0.self_attn.kv_b_proj"
    ]
    fp8 = {f"{module}.weight": fp8_codes(128, 128) for module in modules}
    scales = {f"{module}.weight_scale_inv": torch.full((1, 1), 2.0**-12) for module in modules}
    source = write(tmp_path / "source", kept | fp8 | scales, model_type="glm_moe_dsa", quantization_config=FP8)
    quantkit.convert(source, tmp_path / "out", recipe)

    stored = read_tensors(tmp_path / "out")
    for name, tensor in kept.items():
        assert stored[name][0] == "F32"
        assert stored[name][1].tobytes() == tensor.numpy().tobytes()


def fused_experts(transposed: bool, hidden: int, width: int) -> tuple[Tensors, Tensors]:
    """The two tensors of four experts, as transformers has them or with rows for columns."""
    gate_up, down = normal(4, 2 * width, hidden), normal(4, hidden, width, seed=1)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return {f"{MLP}.experts.gate_up_proj": gate_up}, {f"{MLP}.experts.down_proj": down}


@pytest.mark.parametrize(("transposed", "hidden", "width"), [(False, 128, 96), (True, 96, 64)])
@pytest.mark.parametrize("scheme", ["int4, group_size: 32", "nvfp4"])
def test_experts_in_one_tensor(tmp_path: Path, transposed: bool, hidden: int, width: int, scheme: str) -> None:
    """Experts whose names do not end in `weight` are skipped: 4-bit output of 94 % of the size (lattice#878). Where
    down_proj is alone in its shard, a transposed one is cut along the wrong axis (llm-compressor#3078)."""
    config = {"model_type": "glm_moe_dsa", "hidden_size": hidden, "moe_intermediate_size": width}
    source = write(tmp_path / "source", *fused_experts(transposed, hidden, width), **config)
    chosen = custom(f"{{roles: [routed_expert], scheme: {scheme}, scale: minmax}}")
    planned = quantkit.preview(source, chosen)
    manifest = quantkit.convert(source, tmp_path / "out", chosen)

    before, after = truth(source), truth(tmp_path / "out")
    assert len(before) == 12
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.abs(after[name] - values).mean() < 0.15 * np.abs(values).mean()
    assert planned.total_bytes == manifest.total_bytes < 0.3 * manifest.source.total_bytes


def test_experts_whose_orientation_cannot_be_told(tmp_path: Path) -> None:
    """Guessed from a neighbour, the orientation of a square tensor comes out wrong (llm-compressor#3028)."""
    config = {"model_type": "glm_moe_dsa", "hidden_size": 128, "moe_intermediate_size": 64}
    source = write(tmp_path / "source", *fused_experts(False, 128, 64), **config)

    error = refusal(source, tmp_path / "out", custom(int4("routed_expert")))
    assert f"{MLP}.experts.gate_up_proj [4, 128, 128]" in str(error)


# --- tied embeddings, and scales of the KV cache


@pytest.mark.parametrize("stored", [True, False], ids=["lm_head stored", "lm_head left out"])
@pytest.mark.parametrize("recipe", ["int4", "nvfp4", "bf16"])
def test_tied_embeddings(tmp_path: Path, stored: bool, recipe: str) -> None:
    """A second lm_head appears, or the one there is goes away, or one of the two is quantized (llm-compressor#2798)."""
    embedding = normal(128, 128)
    head = {"lm_head.weight": embedding.clone()} if stored else {}
    tensors = {"model.embed_tokens.weight": embedding, f"{DOWN}.weight": normal(128, 128)} | head
    source = write(tmp_path / "source", tensors, tie_word_embeddings=True)
    quantkit.convert(source, tmp_path / "out", recipe)

    after = read_tensors(tmp_path / "out")
    assert {name for name in after if DOWN not in name} == {"model.embed_tokens.weight", *head}
    for name in after.keys() - {name for name in after if DOWN in name}:
        assert after[name][1].tobytes() == embedding.view(torch.uint8).numpy().tobytes()
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    if stored and recipe == "int4":
        alone = custom("{roles: [lm_head, dense_mlp], scheme: int4, group_size: 32, scale: minmax}")
        assert "lm_head" in str(refusal(source, tmp_path / "alone", alone))


KV_SCALES = {
    "attention": [f"model.layers.0.self_attn.{part}_scale" for part in "kv"],
    "projection": [f"model.layers.0.self_attn.{part}_proj.{part}_scale" for part in "kv"],
}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize("names", [*KV_SCALES.values(), []], ids=[*KV_SCALES, "none"])
@pytest.mark.parametrize("recipe", ["int4", "nvfp4-modelopt", "bf16"])
def test_scales_of_a_kv_cache(tmp_path: Path, names: list[str], recipe: str) -> None:
    """Scales that are stored, of which the config says nothing, are never used (vllm-project/vllm#54623)."""
    tensors = {f"{DOWN}.weight": normal(128, 128)} | {name: torch.tensor(0.25) for name in names}
    manifest = quantkit.convert(write(tmp_path / "source", tensors), tmp_path / "out", recipe)

    stored = read_tensors(tmp_path / "out")
    assert [stored[name][1].item() for name in names] == [0.25] * len(names)
    if recipe == "bf16":
        assert [warning.startswith(names[0]) for warning in manifest.warnings] == [True] * bool(names)
        return
    assert config_of(tmp_path / "out")["quantization_config"]["kv_cache_scheme"] == (CACHE if names else None)
    if recipe == "nvfp4-modelopt":
        written = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert written["quantization"]["kv_cache_quant_algo"] == ("FP8" if names else None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [1.0, 1.0]])
def test_unsound_scale_of_a_kv_cache(tmp_path: Path, value: float | list[float]) -> None:
    """Zero, negative, NaN and infinite scales are let in by one reader or another (onnxruntime/mobius#447)."""
    name = KV_SCALES["attention"][0]
    source = write(tmp_path / "source", {f"{DOWN}.weight": normal(128, 128), name: torch.tensor(value)})

    with pytest.raises(SourceError, match=name):
        quantkit.convert(source, tmp_path / "out", "int4")
    assert not (tmp_path / "out" / "config.json").exists()

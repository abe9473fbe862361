"""A plan says to the byte what comes out, loses no tensor, and describes it in a config."""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import safetensors
from compressed_tensors.quantization import QuantizationArgs

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import Rest
from quantkit.conversion.plan import make_plan
from quantkit.errors import PlanError, SourceError
from quantkit.families.inventory import inventory
from quantkit.naming import TensorName
from quantkit.recipe import load_recipe
from support.plans import (
    BF16,
    BF16_REST,
    INT4,
    LAYER,
    Outputs,
    count_labels,
    custom,
    experts,
    fp8,
    int4,
    make_source,
    outputs_below,
    packed,
    plain,
)
from support.toys import TOY, toy_headers


def coded(rows: int, words: int, groups: int) -> Outputs:
    """What an INT4 weight comes out as."""
    return {
        "weight_packed": ("I32", (rows, words)),
        "weight_scale": ("BF16", (rows, groups)),
        "weight_shape": ("I64", (2,)),
    }


def scaled(shape: tuple[int, int], grid: tuple[int, int]) -> Outputs:
    """What an FP8 weight comes out as."""
    return {"weight": ("F8_E4M3", shape), "weight_scale": ("F32", grid)}


ROUTER: Outputs = {"weight": ("BF16", (4, 256)), "e_score_correction_bias": ("F32", (4,))}


@pytest.mark.parametrize(
    ("recipe", "module", "expected"),
    [
        (INT4, "model.layers.1.mlp.experts.3.gate_proj", coded(128, 32, 8)),
        (INT4, "model.layers.3.mlp.experts.0.down_proj", coded(256, 16, 4)),
        (INT4, "model.layers.0.self_attn.kv_a_proj_with_mqa", scaled((144, 256), (2, 2))),
        (INT4, "model.layers.0.self_attn.indexer.wk", scaled((64, 256), (1, 2))),
        (INT4, "model.layers.1.mlp.shared_experts.up_proj", scaled((128, 256), (1, 2))),
        (INT4, "model.layers.0.mlp.down_proj", scaled((256, 512), (2, 4))),
        (INT4, "model.layers.0.self_attn.kv_b_proj", {"weight": ("BF16", (256, 128))}),
        (INT4, "model.layers.1.mlp.gate", ROUTER),
        (INT4, "model.layers.3.eh_proj", {"weight": ("BF16", (256, 512))}),
        (BF16_REST, "model.layers.2.mlp.experts.3.up_proj", coded(128, 32, 8)),
        (BF16_REST, "model.layers.0.self_attn.kv_a_proj_with_mqa", {"weight": ("BF16", (144, 256))}),
        (BF16_REST, "model.layers.2.mlp.gate", ROUTER),
        (BF16, "model.layers.3.mlp.experts.0.up_proj", {"weight": ("BF16", (128, 256))}),
        (BF16, "model.layers.3.mlp.gate", ROUTER),
        (BF16, "model.layers.0.self_attn.indexer.k_norm", {"weight": ("BF16", (64,)), "bias": ("BF16", (64,))}),
    ],
)
def test_a_module_comes_out_as_its_recipe_says(recipe: str, module: str, expected: Outputs) -> None:
    """Names, dtypes and shapes of what comes out; what is not converted keeps its own, the router's FP32 bias too."""
    assert outputs_below(make_plan(toy_headers(), load_recipe(recipe)), module) == expected


@pytest.mark.parametrize(("group_size", "groups"), [(32, 8), (64, 4), (128, 2)])
def test_the_group_size_is_the_recipes(group_size: int, groups: int) -> None:
    """The number of scales and the config follow the group size."""
    plan = make_plan(toy_headers(), load_recipe(INT4).with_quantized(group_size=group_size))

    assert outputs_below(plan, "model.layers.1.mlp.experts.0.gate_proj")["weight_scale"] == ("BF16", (128, groups))
    assert plan.quantization_config is not None
    assert plan.quantization_config["config_groups"]["group_0"]["weights"]["group_size"] == group_size
    assert count_labels(plan.steps)[f"int4 g={group_size}"] == 3 * 4 * 3


@pytest.mark.parametrize("recipe", [INT4, BF16_REST, BF16])
def test_no_tensor_is_lost(recipe: str) -> None:
    """Every source tensor is in exactly one step, the MTP layer's included, and what stays plain keeps its spec."""
    source = toy_headers()
    plan = make_plan(source, load_recipe(recipe))

    used = Counter(tensor.spec.name for step in plan.steps for tensor in step.weight.tensors)
    assert used == Counter(source.tensors.keys())
    outputs = {spec.name: spec for step in plan.steps for spec in step.outputs}
    kept = [tensor.spec for tensor in source.tensors.values() if tensor.spec.dtype == "BF16"]
    assert [outputs[spec.name] for spec in kept] == kept
    assert any(name.startswith("model.layers.3.mlp.experts.") for name in outputs)


@pytest.mark.parametrize("recipe", [INT4, BF16_REST, BF16])
def test_the_librarys_reader_takes_every_job(recipe: str) -> None:
    """Header and as many bytes as the plan says are a safetensors file with the steps' outputs, to the last byte."""
    plan = make_plan(toy_headers(), load_recipe(recipe))

    for job in plan.jobs:
        file = job.header + bytes(job.file_bytes - len(job.header))
        read = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in safetensors.deserialize(file)}
        assert read == {spec.name: (spec.dtype, spec.shape) for step in job.steps for spec in step.outputs}
        assert {name: (place.spec.dtype, place.spec.shape) for name, place in job.places.items()} == read
        assert {place.shard for place in job.places.values()} == {job.shard}
    assert plan.file_bytes == plan.nbytes + sum(len(job.header) for job in plan.jobs)


def test_a_job_reads_its_shard_from_begin_to_end() -> None:
    """The steps of a job are in the order of their data in the source."""
    for job in make_plan(toy_headers(), load_recipe(INT4)).jobs:
        offsets = [step.weight.data.offset for step in job.steps]
        assert offsets == sorted(offsets)
        assert {step.weight.data.shard for step in job.steps} == {job.shard}


def test_the_index_names_every_output_and_its_shard() -> None:
    """The index is the union of the jobs' headers, sorted, and its total_size is the sum of the tensors' bytes."""
    plan = make_plan(toy_headers(), load_recipe(INT4))
    index = json.loads(plan.index_text)

    files = {job.shard: job.header + bytes(job.file_bytes - len(job.header)) for job in plan.jobs}
    held = {shard: dict(safetensors.deserialize(file)) for shard, file in files.items()}
    total = sum(len(tensor["data"]) for tensors in held.values() for tensor in tensors.values())
    assert index["weight_map"] == {name: shard for shard, tensors in held.items() for name in tensors}
    assert index["metadata"] == {"total_size": total}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert plan.index_text.endswith("}\n")


PLACEMENTS = {
    "one shard": {"1": ("weight", "weight_scale_inv"), "2": ()},
    "scale later": {"1": ("weight",), "2": ("weight_scale_inv",)},
    "scale earlier": {"2": ("weight",), "1": ("weight_scale_inv",)},
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("recipe", [INT4, BF16_REST, BF16])
def test_a_foreign_scale_is_read_and_moves_to_its_weight(recipe: str, placement: Mapping[str, Sequence[str]]) -> None:
    """A job reads the shards of its weights' scales; outputs lie in the weight's shard and do not depend on where
    the scales were."""
    modules = [f"{LAYER}.mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")] + [f"{LAYER}.self_attn.o_proj"]
    modules += [f"{LAYER}.self_attn.kv_b_proj"]
    specs = [spec for module in modules for spec in fp8(module, 128, 128)]
    shards = {
        shard: [spec for spec in specs if TensorName.parse(spec.name).leaf in leaves]
        for shard, leaves in placement.items()
    }
    plan = make_plan(make_source(shards), load_recipe(recipe))

    home = next(shard for shard, leaves in placement.items() if "weight" in leaves)
    (job,) = plan.jobs
    assert job.shard == home
    assert job.reads == tuple(sorted(shard for shard, leaves in placement.items() if leaves))
    together = make_plan(make_source({"1": specs}), load_recipe(recipe))
    assert {name: place.spec for name, place in job.places.items()} == {
        name: place.spec for name, place in together.jobs[0].places.items()
    }


def test_only_the_foreign_shards_that_are_needed_are_read() -> None:
    """A job does not open shards that hold nothing of its weights."""
    specs = experts(0)
    shards: dict[str, list[TensorSpec]] = {
        "1": [spec for spec in specs if spec.dtype == "F8_E4M3"],
        "2": plain("model.norm", 128),
        "3": [spec for spec in specs if spec.dtype == "F32"],
    }
    plan = make_plan(make_source(shards), custom(int4("routed_expert")))

    assert {job.shard: job.reads for job in plan.jobs} == {"1": ("1", "3"), "2": ("2",)}


TEXT = json.dumps(TOY, indent=1)
BEGIN, END = TEXT.index('"quantization_config": ') + len('"quantization_config": '), len(TEXT) - 2


@pytest.mark.parametrize("recipe", [INT4, BF16_REST])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_configs_other_bytes_stay(recipe: str, newline: str) -> None:
    """Only the value of `quantization_config` is another; keys that are not understood and odd spacing stay."""
    odd = TEXT[:BEGIN].replace('"vocab_size"', '"index_topk_pattern": null,  "odd\\u0021":1e-05,\n"vocab_size"')
    before, old, after = odd.replace("\n", newline), TEXT[BEGIN:END], "\n}\n".replace("\n", newline)
    plan = make_plan(inventory("toy", before + old + after), load_recipe(recipe))

    assert plan.config_text.startswith(before)
    assert plan.config_text.endswith(after)
    assert json.loads(plan.config_text)["quantization_config"] == plan.quantization_config


@pytest.mark.parametrize(
    ("recipe", "groups"),
    [(INT4, [("int", "group"), ("float", "block"), ("int", "block")]), (BF16_REST, [("int", "group")])],
    ids=["fp8 rest", "bf16 rest"],
)
def test_an_int4_plan_has_a_compressed_tensors_config(recipe: str, groups: list[tuple[str, str]]) -> None:
    """The config names compressed-tensors with `pack-quantized`, and FP8 blocks only where they are kept."""
    config = make_plan(toy_headers(), load_recipe(recipe)).quantization_config

    assert config is not None
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    written = [group["weights"] for group in config["config_groups"].values()]
    assert [(weights["type"], weights["strategy"]) for weights in written] == groups


@pytest.mark.parametrize(
    ("recipe", "kind"), [(INT4, ("int", 4)), ("glm-5.2-nvfp4", ("float", 8))], ids=["int4", "nvfp4"]
)
def test_the_class_linear_tells_sglang_the_block_of_the_rest(recipe: str, kind: tuple[str, int]) -> None:
    """Its group has no other target; INT4 says INT4 in these blocks, NVFP4 gives the class to the FP8 blocks."""
    config = make_plan(toy_headers(), load_recipe(recipe)).quantization_config

    assert config is not None
    (group,) = (group for group in config["config_groups"].values() if "Linear" in group["targets"])
    assert group["targets"] == ["Linear"]
    assert (group["weights"]["type"], group["weights"]["num_bits"]) == kind
    assert group["weights"]["block_structure"] == [128, 128]
    assert QuantizationArgs.model_validate(group["weights"]).strategy == "block"


def test_the_configs_fp8_block_is_the_sources() -> None:
    """Blocks that are not 128 x 128 are written as they are."""
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    recipe = custom(int4("routed_expert"), "{roles: [kv_b, indexer], scheme: bf16}")
    config = make_plan(toy_headers(quantization_config=quantization), recipe).quantization_config

    assert config is not None
    assert config["config_groups"]["group_1"]["weights"]["block_structure"] == [64, 32]


def test_a_bf16_plan_has_no_quantization_config() -> None:
    """Decoded to BF16, a checkpoint says nothing of quantization, and every weight is one BF16 or FP32 tensor."""
    plan = make_plan(toy_headers(), load_recipe(BF16))

    assert plan.quantization_config is None
    assert json.loads(plan.config_text) == {key: value for key, value in TOY.items() if key != "quantization_config"}
    assert {spec.dtype for step in plan.steps for spec in step.outputs} == {"BF16", "F32"}
    assert plan.num_tensors == len(toy_headers(quantization_config=...).tensors)


@pytest.mark.parametrize("recipe", [INT4, BF16])
def test_no_old_quantization_config_survives_in_a_nested_config(recipe: str) -> None:
    """A second `quantization_config` inside text_config would still say FP8: it goes, or the plan is refused."""
    config = {**TOY, "text_config": {"quantization_config": TOY["quantization_config"]}}
    source = Source("toy", None, json.dumps(config), toy_headers().tensors)
    plan = None
    with contextlib.suppress(PlanError, SourceError):
        plan = make_plan(source, load_recipe(recipe))

    assert plan is None or plan.config_text.count("quantization_config") == (0 if recipe == BF16 else 1)


def test_a_source_in_bf16_gets_the_config_of_a_bf16_rest() -> None:
    """The BF16 release converts too: its experts become INT4, and the config describes a BF16 rest."""
    plan = make_plan(toy_headers(quantization_config=...), load_recipe(INT4))

    assert plan.quantization_config is not None
    assert list(plan.quantization_config["config_groups"]) == ["group_0"]
    assert outputs_below(plan, "model.layers.1.mlp.experts.0.down_proj").keys() == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }


def test_a_converted_source_can_be_decoded() -> None:
    """`bf16` makes one BF16 matrix of packed codes, scale and shape."""
    module = f"{LAYER}.mlp.experts.0.gate_proj"
    plan = make_plan(make_source({"1": packed(module)}), load_recipe(BF16))

    assert outputs_below(plan, module) == {"weight": ("BF16", (128, 128))}
    assert plan.quantization_config is None


def test_a_recipe_for_any_model_takes_any_model() -> None:
    """`bf16` names no model type."""
    assert make_plan(make_source({"1": experts(0)}, model_type="deepseek_v3"), load_recipe(BF16)).num_tensors == 3


@pytest.mark.parametrize(
    ("rest", "parent", "parts"),
    [(Rest.BF16, f"{LAYER}.self_attn", "qkv"), (Rest.FP8, f"{LAYER}.mlp", ("gate", "up"))],
    ids=["bf16 rest", "fp8 rest"],
)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_bias_is_kept_and_decides_nothing(rest: Rest, parent: str, parts: Sequence[str], dtype: str) -> None:
    """A projection's bias is copied in its dtype; neither fused partners nor the config are compared with it."""
    modules = [f"{parent}.{part}_proj" for part in parts]
    biases = [TensorSpec(f"{module}.bias", dtype, (128,)) for module in modules]
    specs = [*experts(0), *biases, *(spec for module in modules for spec in fp8(module, 128, 128))]
    plan = make_plan(make_source({"1": specs}), custom(int4("routed_expert")).with_rest(rest))

    outputs = [spec for step in plan.steps for spec in step.outputs]
    assert [spec for spec in outputs if spec.name.endswith(".bias")] == sorted(biases, key=lambda spec: spec.name)

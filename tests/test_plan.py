"""A plan says to the byte what comes out, loses no tensor, and refuses by name what no engine could load."""

import contextlib
import copy
import gc
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import safetensors

from quantkit.checkpoint.header import TensorSpec, lay_out
from quantkit.checkpoint.inventory import inventory
from quantkit.checkpoint.source import Source
from quantkit.errors import PlanError, QuantkitError, SourceError
from quantkit.naming import Role, TensorName
from quantkit.plan import Plan, Step, check_config, make_plan
from quantkit.publish.preflight import LARGEST_FILE
from quantkit.recipe import Recipe, Rest, find_alias, load_recipe, parse_recipe

# one dense layer, two sparse ones and the MTP layer; every width is a multiple of 128, kv_a_proj_with_mqa has 144 rows
TOY: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "vocab_size": 512,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
INT4, BF16_REST, BF16 = "glm-5.2-int4", "glm-5.2-int4-bf16rest", "bf16"
LAYER = "model.layers.0"
Outputs = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by the leaf of the name


def toy(**changes: Any) -> Source:
    """The toy's headers with some keys changed; a key set to `...` is left out."""
    config = {key: value for key, value in {**TOY, **changes}.items() if value is not ...}
    return inventory("toy", json.dumps(config))


def make_source(shards: Mapping[str, Iterable[TensorSpec]], **config: Any) -> Source:
    """The headers of a checkpoint with the given tensors in each shard."""
    tensors = {place.spec.name: place for shard, specs in shards.items() for place in lay_out(specs, shard)[1]}
    config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 1, **config}
    return Source("toy", None, json.dumps(config), tensors)


def fp8(module: str, rows: int, columns: int) -> list[TensorSpec]:
    """An FP8 weight and its scale as published, blocks counted by hand for sizes up to 256."""
    grid = (2 if rows > 128 else 1, 2 if columns > 128 else 1)
    return [
        TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns)),
        TensorSpec(f"{module}.weight_scale_inv", "F32", grid),
    ]


def plain(module: str, *shape: int, dtype: str = "BF16") -> list[TensorSpec]:
    return [TensorSpec(f"{module}.weight", dtype, shape)]


def experts(*numbers: int, parts: Sequence[str] = ("gate", "up", "down")) -> list[TensorSpec]:
    """Square FP8 experts of layer 0."""
    modules = [f"{LAYER}.mlp.experts.{number}.{part}_proj" for number in numbers for part in parts]
    return [spec for module in modules for spec in fp8(module, 128, 128)]


def custom(*rules: str) -> Recipe:
    """A recipe for any model; its last rule keeps all."""
    return parse_recipe(
        "mine", "rules:\n" + "".join(f"  - {rule}\n" for rule in (*rules, "{roles: all, scheme: keep}"))
    )


def int4(*roles: str, group_size: int = 32) -> str:
    return f"{{roles: [{', '.join(roles)}], scheme: int4, group_size: {group_size}, scale: minmax}}"


def refusal(source: Source, recipe: Recipe) -> PlanError:
    """The error with which the plan is refused."""
    with pytest.raises(PlanError) as caught:
        make_plan(source, recipe)
    return caught.value


def count_labels(steps: Iterable[Step]) -> Counter[str]:
    """How many weights come out in each format."""
    return Counter(step.label for step in steps)


def outputs_below(plan: Plan, module: str) -> Outputs:
    """Dtype and shape of every output tensor below `module`, by the rest of its name."""
    specs = (spec for step in plan.steps for spec in step.outputs if spec.name.startswith(f"{module}."))
    return {spec.name.removeprefix(f"{module}."): (spec.dtype, spec.shape) for spec in specs}


@pytest.fixture(scope="module")
def published_plans() -> Iterator[dict[str, Plan]]:
    """The plans of the two INT4 recipes for GLM-5.2. They take seconds, and fewer without looking for garbage in the
    million objects that they are made of."""
    alias = find_alias("glm-5.2")
    assert alias is not None
    gc.disable()
    try:
        source = inventory("glm-5.2", alias.config_text)
        yield {name: make_plan(source, load_recipe(name)) for name in (INT4, BF16_REST)}
    finally:
        gc.enable()


# An expert's matrix has 2048 x 6144 numbers: FP8 with 16 x 48 scales, INT4 with a BF16 scale for 32 and the shape.
EXPERTS = 76 * 256 * 3
EXPERT_FP8 = 2048 * 6144 + 16 * 48 * 4
EXPERT_INT4 = 2048 * 6144 // 2 + 2048 * (6144 // 32) * 2 + 16
KV_B = 79
KV_B_FP8 = 28672 * 512 + 224 * 4 * 4
KV_B_BF16 = 28672 * 512 * 2


def test_glm_5_2_int4_has_the_size_worked_out_by_hand(published_plans: dict[str, Plan]) -> None:
    """435,280,968,896 bytes: the published ones, with 58,368 experts' matrices in INT4 and 79 kv_b_proj in BF16."""
    by_hand = 755_617_140_416 + EXPERTS * (EXPERT_INT4 - EXPERT_FP8) + KV_B * (KV_B_BF16 - KV_B_FP8)

    assert published_plans[INT4].nbytes == by_hand == 435_280_968_896
    assert published_plans[INT4].num_tensors == 118_629 + EXPERTS - KV_B == 176_918


def test_glm_5_2_with_a_bf16_rest_has_the_size_worked_out_by_hand(published_plans: dict[str, Plan]) -> None:
    """The BF16 release's 59,585 tensors and 1,506.66 GB, with the experts' matrices in INT4."""
    by_hand = 1_506_659_919_872 - EXPERTS * (2048 * 6144 * 2 - EXPERT_INT4)

    assert published_plans[BF16_REST].nbytes == by_hand == 450_904_205_312
    assert published_plans[BF16_REST].num_tensors == 59_585 + EXPERTS * 2


def test_no_shard_of_glm_5_2_is_too_large_for_the_hub(published_plans: dict[str, Plan]) -> None:
    """The Hub takes no file over 50 GB: a whole layer is less, even decoded to twice its bytes."""
    layers: Counter[str] = Counter()
    for tensor in published_plans[INT4].source.tensors.values():
        layers[tensor.shard] += tensor.spec.nbytes

    assert max(layers.values()) * 2 < LARGEST_FILE
    assert all(job.file_bytes < LARGEST_FILE for plan in published_plans.values() for job in plan.jobs)


def test_glm_5_2s_weights_come_out_in_these_formats(published_plans: dict[str, Plan]) -> None:
    """Of 59,044 FP8 weights the experts become INT4 and kv_b_proj BF16; 465 BF16 tensors and 76 FP32 biases stay."""
    assert count_labels(published_plans[INT4].steps) == {
        "int4 g=32": 58_368,
        "fp8 128x128": 59_044 - 58_368 - 79,
        "bf16": 465 + 79,
        "f32": 76,
    }
    assert count_labels(published_plans[BF16_REST].steps) == {
        "int4 g=32": 58_368,
        "bf16": 465 + 59_044 - 58_368,
        "f32": 76,
    }


@pytest.mark.parametrize("name", [INT4, BF16_REST])
def test_no_tensor_of_glm_5_2_is_lost(name: str, published_plans: dict[str, Plan]) -> None:
    """Every one of the 118,629 source tensors is in exactly one step, and no two outputs have one name."""
    plan = published_plans[name]
    used = Counter(tensor.spec.name for step in plan.steps for tensor in step.weight.tensors)

    assert used.keys() == plan.source.tensors.keys()
    assert len(used) == used.total() == 118_629
    outputs = [name for job in plan.jobs for name in job.places]
    assert len(outputs) == len(set(outputs)) == plan.num_tensors


def test_glm_5_2_has_an_output_shard_for_each_source_shard(published_plans: dict[str, Plan]) -> None:
    """Shards keep their names and order, and each job reads its own shard alone when no scale strays."""
    plan = published_plans[INT4]

    assert tuple(job.shard for job in plan.jobs) == plan.source.shards
    assert all(job.reads == (job.shard,) for job in plan.jobs)


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
        (INT4, "model.layers.0.mlp.down_proj", scaled((256, 384), (2, 3))),
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
    assert outputs_below(make_plan(toy(), load_recipe(recipe)), module) == expected


@pytest.mark.parametrize(("group_size", "groups"), [(32, 8), (64, 4), (128, 2)])
def test_the_group_size_is_the_recipes(group_size: int, groups: int) -> None:
    """The number of scales and the config follow the group size."""
    plan = make_plan(toy(), load_recipe(INT4).with_int4(group_size=group_size))

    assert outputs_below(plan, "model.layers.1.mlp.experts.0.gate_proj")["weight_scale"] == ("BF16", (128, groups))
    assert plan.quantization_config is not None
    assert plan.quantization_config["config_groups"]["group_0"]["weights"]["group_size"] == group_size
    assert count_labels(plan.steps)[f"int4 g={group_size}"] == 3 * 4 * 3


@pytest.mark.parametrize("recipe", [INT4, BF16_REST, BF16])
def test_no_tensor_is_lost(recipe: str) -> None:
    """Every source tensor is in exactly one step, the MTP layer's included, and what stays plain keeps its spec."""
    source = toy()
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
    plan = make_plan(toy(), load_recipe(recipe))

    for job in plan.jobs:
        file = job.header + bytes(job.file_bytes - len(job.header))
        read = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in safetensors.deserialize(file)}
        assert read == {spec.name: (spec.dtype, spec.shape) for step in job.steps for spec in step.outputs}
        assert {name: (place.spec.dtype, place.spec.shape) for name, place in job.places.items()} == read
        assert {place.shard for place in job.places.values()} == {job.shard}
    assert plan.file_bytes == plan.nbytes + sum(len(job.header) for job in plan.jobs)


def test_a_job_reads_its_shard_from_begin_to_end() -> None:
    """The steps of a job are in the order of their data in the source."""
    for job in make_plan(toy(), load_recipe(INT4)).jobs:
        offsets = [step.weight.data.offset for step in job.steps]
        assert offsets == sorted(offsets)
        assert {step.weight.data.shard for step in job.steps} == {job.shard}


def test_the_index_names_every_output_and_its_shard() -> None:
    """The index is the union of the jobs' headers, sorted, and its total_size is the sum of the tensors' bytes."""
    plan = make_plan(toy(), load_recipe(INT4))
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
    shards = {
        "1": [spec for spec in specs if spec.dtype == "F8_E4M3"],
        "2": plain("model.norm", 128),
        "3": [spec for spec in specs if spec.dtype == "F32"],
    }
    plan = make_plan(make_source(shards), load_recipe(INT4))

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
    ("recipe", "groups"), [(INT4, {"group_0", "group_1"}), (BF16_REST, {"group_0"})], ids=["fp8 rest", "bf16 rest"]
)
def test_an_int4_plan_has_a_compressed_tensors_config(recipe: str, groups: set[str]) -> None:
    """The config names compressed-tensors with `pack-quantized`, and FP8 only where FP8 is kept."""
    config = make_plan(toy(), load_recipe(recipe)).quantization_config

    assert config is not None
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["config_groups"].keys() == groups


def test_the_configs_fp8_block_is_the_sources() -> None:
    """Blocks that are not 128 x 128 are written as they are."""
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    config = make_plan(toy(quantization_config=quantization), load_recipe(INT4)).quantization_config

    assert config is not None
    assert config["config_groups"]["group_1"]["weights"]["block_structure"] == [64, 32]


def test_a_bf16_plan_has_no_quantization_config() -> None:
    """Decoded to BF16, a checkpoint says nothing of quantization, and every weight is one BF16 or FP32 tensor."""
    plan = make_plan(toy(), load_recipe(BF16))

    assert plan.quantization_config is None
    assert json.loads(plan.config_text) == {key: value for key, value in TOY.items() if key != "quantization_config"}
    assert {spec.dtype for step in plan.steps for spec in step.outputs} == {"BF16", "F32"}
    assert plan.num_tensors == len(toy(quantization_config=...).tensors)


@pytest.mark.parametrize("recipe", [INT4, BF16])
def test_no_old_quantization_config_survives_in_a_nested_config(recipe: str) -> None:
    """A second `quantization_config` inside text_config would still say FP8: it goes, or the plan is refused."""
    config = {**TOY, "text_config": {"quantization_config": TOY["quantization_config"]}}
    source = Source("toy", None, json.dumps(config), toy().tensors)
    plan = None
    with contextlib.suppress(PlanError, SourceError):
        plan = make_plan(source, load_recipe(recipe))

    assert plan is None or plan.config_text.count("quantization_config") == (0 if recipe == BF16 else 1)


@pytest.mark.parametrize(
    ("changes", "group_size", "named", "what"),
    [
        ({"moe_intermediate_size": 192}, 128, "experts.0.down_proj.weight", "the 192 columns"),
        ({"moe_intermediate_size": 96}, 64, "experts.0.down_proj.weight", "the 96 columns"),
        ({"hidden_size": 32}, 64, "experts.0.gate_proj.weight", "the 32 columns"),
    ],
)
def test_a_group_size_that_does_not_divide_is_refused(
    changes: dict[str, Any], group_size: int, named: str, what: str
) -> None:
    """A group that would reach over the end of a row is refused by tensor and size."""
    error = refusal(toy(**changes), load_recipe(INT4).with_int4(group_size=group_size))

    assert f"model.layers.1.mlp.{named}: the group size {group_size} does not divide {what}" in str(error)
    assert error.hint is not None
    assert "--group-size" in error.hint


def test_a_source_in_bf16_gets_the_config_of_a_bf16_rest() -> None:
    """The BF16 release converts too: its experts become INT4, and the config describes a BF16 rest."""
    plan = make_plan(toy(quantization_config=...), load_recipe(INT4))

    assert plan.quantization_config is not None
    assert list(plan.quantization_config["config_groups"]) == ["group_0"]
    assert outputs_below(plan, "model.layers.1.mlp.experts.0.down_proj").keys() == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }


@pytest.mark.parametrize(("dtype", "shape"), [("I32", (128, 128)), ("F64", (128, 128)), ("BF16", (2, 128, 128))])
def test_int4_from_what_is_no_float_matrix_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """Integers, doubles and stacks are refused by name, dtype and shape."""
    name = f"{LAYER}.mlp.experts.0.up_proj"
    error = refusal(make_source({"1": plain(name, *shape, dtype=dtype)}), load_recipe(INT4))

    assert f"{name}.weight is {dtype.lower()} {list(shape)}" in str(error)
    assert error.hint is not None


@pytest.mark.parametrize("recipe", [INT4, BF16_REST, BF16])
def test_a_converted_source_is_refused(recipe: str) -> None:
    """A checkpoint that holds an INT4 weight is refused by its module, with what to give instead."""
    module = f"{LAYER}.mlp.experts.0.gate_proj"
    packed = [
        TensorSpec(f"{module}.weight_packed", "I32", (128, 16)),
        TensorSpec(f"{module}.weight_scale", "BF16", (128, 4)),
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]
    error = refusal(make_source({"1": [*packed, *plain("model.norm", 128)]}), load_recipe(recipe))

    assert f"toy is already converted: {module}" in str(error)
    assert error.hint is not None
    assert "as published" in error.hint


@pytest.mark.parametrize("model_type", ["glm4_moe", "kimi_k2"])
def test_a_recipe_for_another_model_type_is_refused(model_type: str) -> None:
    """The message holds the source's type, the recipe and the type that it is made for."""
    error = refusal(make_source({"1": experts(0)}, model_type=model_type), load_recipe(INT4))

    assert all(part in str(error) for part in ("toy", repr(model_type), INT4, "glm_moe_dsa"))


def test_a_recipe_for_any_model_takes_any_model() -> None:
    """`bf16` names no model type."""
    assert make_plan(make_source({"1": experts(0)}, model_type="deepseek_v3"), load_recipe(BF16)).num_tensors == 3


PARTNERS = {
    "gate and up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    "shared expert": (f"{LAYER}.mlp.shared_experts.gate_proj", f"{LAYER}.mlp.shared_experts.up_proj"),
    "q_a and kv_a": (f"{LAYER}.self_attn.q_a_proj", f"{LAYER}.self_attn.kv_a_proj_with_mqa"),
}


@pytest.mark.parametrize(("one", "other"), PARTNERS.values(), ids=PARTNERS.keys())
@pytest.mark.parametrize("swap", [False, True])
def test_fused_partners_in_two_formats_are_refused(one: str, other: str, swap: bool) -> None:
    """A pair of which only one is FP8 is refused by both names and formats before anything is written."""
    one, other = (other, one) if swap else (one, other)
    source = make_source({"1": [*fp8(one, 128, 128), *plain(other, 128, 128), *experts(0)]})
    error = refusal(source, load_recipe(INT4))

    assert f"{one} (fp8 128x128)" in str(error)
    assert f"{other} (bf16)" in str(error)


@pytest.mark.parametrize(("one", "other"), PARTNERS.values(), ids=PARTNERS.keys())
def test_fused_partners_that_come_out_alike_are_taken(one: str, other: str) -> None:
    """The same pair decoded to BF16 is one format."""
    source = make_source({"1": [*fp8(one, 128, 128), *plain(other, 128, 128), *experts(0)]})

    assert count_labels(make_plan(source, load_recipe(BF16_REST)).steps) == {"bf16": 2, "int4 g=32": 3}


def test_a_partner_in_another_dtype_is_refused() -> None:
    """FP32 is not BF16: decoded beside an FP32 partner a weight would be fused with it."""
    gate, up = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"
    error = refusal(make_source({"1": [*fp8(gate, 128, 128), *plain(up, 128, 128, dtype="F32")]}), load_recipe(BF16))

    assert f"{gate} (bf16)" in str(error)
    assert f"{up} (f32)" in str(error)


def test_an_expert_in_another_format_is_refused() -> None:
    """All experts of a layer are one module: a recipe that leaves one in BF16 has no config."""
    stray = f"{LAYER}.mlp.experts.1.up_proj"
    source = make_source({"1": [*experts(0), *experts(1, parts=("gate", "down")), *plain(stray, 128, 128)]})

    error = refusal(source, custom("{roles: [kv_b], scheme: bf16}"))
    assert f"{stray} (bf16)" in str(error)
    assert f"{LAYER}.mlp.experts.0." in str(error)


def test_partners_of_two_layers_are_no_partners() -> None:
    """A dense MLP in BF16 in one layer and in FP8 in another may both be decoded or kept apart."""
    other = "model.layers.1.mlp"
    pairs = [*fp8(f"{LAYER}.mlp.gate_proj", 128, 128), *fp8(f"{LAYER}.mlp.up_proj", 128, 128)]
    pairs += [*plain(f"{other}.gate_proj", 128, 128, dtype="F32"), *plain(f"{other}.up_proj", 128, 128, dtype="F32")]

    assert count_labels(make_plan(make_source({"1": pairs}), load_recipe(BF16)).steps) == {"bf16": 2, "f32": 2}


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


def test_a_module_that_the_config_would_describe_wrongly_is_refused() -> None:
    """A shared expert in BF16, where the config says FP8 for all of them, is refused by module and engine."""
    module = f"{LAYER}.mlp.shared_experts.down_proj"
    specs = [*experts(0), *fp8(f"{LAYER}.self_attn.o_proj", 128, 128), *plain(module, 128, 128)]
    error = refusal(make_source({"1": specs}), load_recipe(INT4))

    assert f"{module} would hold weight, but vLLM would look for weight, weight_scale" in str(error)
    assert error.hint is not None


@pytest.mark.parametrize("role", ["shared_expert", "dense_mlp", "attention", "indexer", "kv_b"])
@pytest.mark.parametrize("rest", Rest)
def test_int4_where_no_config_describes_it_is_refused(role: str, rest: Rest) -> None:
    """INT4 for another role than the routed experts has no config that is known to load, whatever the rest is."""
    recipe = custom(int4("routed_expert", role), "{roles: [kv_b], scheme: bf16}").with_rest(rest)
    error = refusal(toy(), recipe)

    assert "would hold weight_packed, weight_scale, weight_shape" in str(error)
    assert TensorName.parse(str(error).split(" ")[0] + ".weight").role == role
    assert error.hint is not None
    assert "built-in" in error.hint


@pytest.mark.parametrize(
    ("columns", "group_size", "ranks"),
    [(1536, 128, 8), (768, 128, 4), (1536, 64, None), (2048, 128, None), (512, 128, None)],
)
def test_groups_that_ranks_would_cut_are_a_warning(columns: int, group_size: int, ranks: int | None) -> None:
    """1536 columns in groups of 128 leave 192 to each of eight ranks: named once, and not refused."""
    modules = [f"{LAYER}.mlp.experts.{number}.down_proj" for number in range(2)]
    source = make_source({"1": [spec for module in modules for spec in plain(module, 128, columns)]})
    warnings = make_plan(source, load_recipe(INT4).with_int4(group_size=group_size)).warnings

    assert len(warnings) == (0 if ranks is None else 1)
    for warning in warnings:
        assert f"over {ranks} ranks" in warning
        assert f"groups of {group_size} in {modules[0]} ({columns} columns)" in warning


def test_two_group_sizes_are_refused() -> None:
    """Engines take one group size; the message holds both."""
    error = refusal(toy(), custom(int4("routed_expert"), int4("shared_expert", group_size=64)))

    assert "mine mixes the group sizes [32, 64]" in str(error)


def test_a_recipe_that_converts_nothing_is_refused() -> None:
    """A recipe under which no weight becomes INT4 is refused: the message names recipe and source."""
    error = refusal(toy(), custom("{roles: [norm], scheme: keep}"))

    assert "the recipe mine finds no weight in toy to make INT4" in str(error)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        plain("model.norm", 128),
        [TensorSpec(f"{LAYER}.mlp.experts.gate_up_proj", "BF16", (4, 256, 128))],
    ],
    ids=["no tensor", "no expert", "fused experts"],
)
def test_an_int4_recipe_that_quantizes_nothing_is_refused(specs: list[TensorSpec]) -> None:
    """A plan for INT4 that makes no INT4 weight, because no name is a routed expert's, is not a plain copy."""
    error = refusal(make_source({"1": specs}), load_recipe(INT4))

    assert "toy" in str(error)
    assert INT4 in str(error)


def test_the_number_of_layers_is_needed() -> None:
    """Without `num_hidden_layers` nobody can say which layer is the MTP layer; the key is named."""
    with pytest.raises(SourceError, match="num_hidden_layers"):
        make_plan(make_source({"1": experts(0)}, num_hidden_layers=None), load_recipe(INT4))


MLP = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"


@pytest.mark.parametrize(
    ("recipe", "old", "new", "engine", "module"),
    [
        (BF16_REST, MLP, r"re:.*mlp\.(gate|up|down)_proj.*", "SGLang", "model.layers.0.mlp.gate_proj"),
        (BF16_REST, "re:.*self_attn.*", r"re:.*layers\.\d+\.self_attn.*", "SGLang", "model.layers.3.self_attn."),
        (BF16_REST, "lm_head", "head", "vLLM", "lm_head"),
        (BF16_REST, "re:.*eh_proj$", "eh_proj", "vLLM", "model.layers.3.eh_proj"),
        (INT4, "re:.*kv_b_proj$", "re:kv_b_proj$", "vLLM", ".self_attn.kv_b_proj"),
        (INT4, "re:.*weights_proj$", "indexers_proj", "vLLM", ".self_attn.indexer.weights_proj"),
    ],
)
def test_a_config_that_an_engine_reads_otherwise_is_caught(
    recipe: str, old: str, new: str, engine: str, module: str
) -> None:
    """With one entry of `ignore` less exact, the check names the engine and the first module it gets wrong."""
    source = toy()
    plan = make_plan(source, load_recipe(recipe))
    config = copy.deepcopy(plan.quantization_config)
    assert config is not None
    check_config(plan.steps, config, source.num_hidden_layers)
    config["ignore"][config["ignore"].index(old)] = new

    with pytest.raises(PlanError) as caught:
        check_config(plan.steps, config, source.num_hidden_layers)

    assert module in str(caught.value).split(" ")[0]
    assert f"but {engine} would look for" in str(caught.value)


@pytest.mark.parametrize("part", ["gate", "up"])
def test_a_config_that_ignores_one_of_two_partners_is_caught(part: str) -> None:
    """`ignore` with only one member of a fused module in it is refused, naming the engine and the fused module."""
    source = toy()
    plan = make_plan(source, load_recipe(INT4))
    config = copy.deepcopy(plan.quantization_config)
    assert config is not None
    config["ignore"].append(f"{LAYER}.mlp.{part}_proj")

    with pytest.raises(QuantkitError, match=rf"vLLM.* {LAYER}\.mlp\.gate_up_proj"):
        check_config(plan.steps, config, source.num_hidden_layers)


def test_a_router_is_not_asked_for_a_group() -> None:
    """Engines never take a router's or an embedding's scheme from the config, so an ignore entry less is no error."""
    source = toy()
    plan = make_plan(source, load_recipe(BF16_REST))
    config = copy.deepcopy(plan.quantization_config)
    assert config is not None
    config["ignore"].remove(r"re:.*mlp\.gate$")
    config["ignore"].remove(r"re:.*embed_tokens$")

    check_config(plan.steps, config, source.num_hidden_layers)
    assert {Role.ROUTER, Role.EMBEDDING} <= {step.weight.name.role for step in plan.steps}

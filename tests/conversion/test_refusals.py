"""A plan refuses, by name, what cannot be made and what an engine could not load, and warns of the rest."""

import copy
from typing import Any

import pytest

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import Rest
from quantkit.conversion.engine_check import check_engines, planned_facts
from quantkit.conversion.plan import Plan, make_plan
from quantkit.errors import PlanError, SourceError
from quantkit.naming import Role
from quantkit.recipe import Recipe, load_recipe
from support.plans import (
    BF16,
    BF16_REST,
    INT4,
    KV_B,
    LAYER,
    count_labels,
    custom,
    experts,
    fp8,
    int4,
    make_source,
    packed,
    plain,
    refusal,
)
from support.toys import toy_headers


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
    error = refusal(toy_headers(**changes), load_recipe(INT4).with_quantized(group_size=group_size))

    assert f"model.layers.1.mlp.{named}: the group size {group_size} does not divide {what}" in str(error)
    assert error.hint is not None
    assert "--group-size" in error.hint


@pytest.mark.parametrize(("dtype", "shape"), [("I32", (128, 128)), ("F64", (128, 128)), ("BF16", (2, 128, 128))])
def test_int4_from_what_is_no_float_matrix_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """Integers, doubles and stacks are refused by name, dtype and shape."""
    name = f"{LAYER}.mlp.experts.0.up_proj"
    error = refusal(make_source({"1": plain(name, *shape, dtype=dtype)}), load_recipe(INT4))

    assert f"{name}.weight is {dtype.lower()} {list(shape)}" in str(error)
    assert error.hint is not None


@pytest.mark.parametrize("recipe", [INT4, BF16_REST])
def test_a_converted_source_is_refused(recipe: str) -> None:
    """A checkpoint of which the recipe would change nothing is refused, with what to give instead."""
    source = make_source({"1": [*packed(f"{LAYER}.mlp.experts.0.gate_proj"), *KV_B, *plain("model.norm", 128)]})
    error = refusal(source, load_recipe(recipe))

    assert "toy is already converted" in str(error)
    assert error.hint is not None
    assert "made from" in error.hint


def test_rounding_twice_is_refused() -> None:
    """INT4 in groups of 32 does not become INT4 in groups of 64; the message names the weight."""
    module = f"{LAYER}.mlp.experts.0.gate_proj"
    source = make_source({"1": [*packed(module), *KV_B]})
    error = refusal(source, load_recipe(INT4).with_quantized(group_size=64))

    assert f"{module}.weight_packed is int4 g=32" in str(error)
    assert error.hint is not None
    assert "FP8 or BF16 release" in error.hint


@pytest.mark.parametrize("model_type", ["glm4_moe", "kimi_k2"])
def test_a_recipe_for_another_model_type_is_refused(model_type: str) -> None:
    """The message holds the source's type, the recipe and the type that it is made for."""
    error = refusal(make_source({"1": experts(0)}, model_type=model_type), load_recipe(INT4))

    assert all(part in str(error) for part in ("toy", repr(model_type), INT4, "glm_moe_dsa"))


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
    source = make_source({"1": [*fp8(one, 128, 128), *plain(other, 128, 128), *experts(0), *KV_B]})
    error = refusal(source, load_recipe(INT4))

    assert all(part in str(error) for part in ("vLLM", "fused-partners", one, other, "(fp8 128x128)", "(bf16)"))
    assert error.hint is not None


@pytest.mark.parametrize(("one", "other"), PARTNERS.values(), ids=PARTNERS.keys())
def test_fused_partners_that_come_out_alike_are_taken(one: str, other: str) -> None:
    """The same pair decoded to BF16 is one format."""
    source = make_source({"1": [*fp8(one, 128, 128), *plain(other, 128, 128), *experts(0)]})

    recipe = custom(int4("routed_expert")).with_rest(Rest.BF16)
    assert count_labels(make_plan(source, recipe).steps) == {"bf16": 2, "int4 g=32": 3}


def test_a_partner_in_another_dtype_is_refused() -> None:
    """FP32 is not BF16: decoded beside an FP32 partner a weight would be fused with it."""
    gate, up = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"
    error = refusal(make_source({"1": [*fp8(gate, 128, 128), *plain(up, 128, 128, dtype="F32")]}), load_recipe(BF16))

    assert f"{gate} (bf16)" in str(error)
    assert f"{up} (f32)" in str(error)


def test_an_expert_in_another_format_is_refused() -> None:
    """All experts of a layer are one module: a recipe that leaves one of them in FP8 is refused by both."""
    rule = "{modules: '.*experts\\.0\\..*', scheme: int4, group_size: 32, scale: minmax}"
    error = refusal(make_source({"1": experts(0, 1)}), custom(rule))

    assert f"{LAYER}.mlp.experts.1." in str(error)
    assert f"{LAYER}.mlp.experts.0." in str(error)
    assert "(int4 g=32)" in str(error)
    assert "(fp8 128x128)" in str(error)


def test_partners_of_two_layers_are_no_partners() -> None:
    """A dense MLP in BF16 in one layer and in FP8 in another may both be decoded or kept apart."""
    other = "model.layers.1.mlp"
    pairs = [*fp8(f"{LAYER}.mlp.gate_proj", 128, 128), *fp8(f"{LAYER}.mlp.up_proj", 128, 128)]
    pairs += [*plain(f"{other}.gate_proj", 128, 128, dtype="F32"), *plain(f"{other}.up_proj", 128, 128, dtype="F32")]

    assert count_labels(make_plan(make_source({"1": pairs}), load_recipe(BF16)).steps) == {"bf16": 2, "f32": 2}


def int4_for(role: str, modules: str, rest: Rest) -> Recipe:
    """INT4 for the routed experts, and for the modules of a role that match; kv_b_proj is BF16 if it is not it."""
    rule = f"{{roles: [{role}], modules: '{modules}', scheme: int4, group_size: 32, scale: minmax}}"
    kv_b = [] if role == "kv_b" else ["{roles: [kv_b], scheme: bf16}"]
    return custom(int4("routed_expert"), rule, *kv_b).with_rest(rest)


@pytest.mark.parametrize(
    ("role", "modules"),
    [
        ("shared_expert", ".*"),
        ("dense_mlp", ".*"),
        ("attention", r".*\.o_proj"),
        ("attention", r".*\.(o_proj|q_b_proj)"),
        ("indexer", r".*\.wq_b"),
    ],
)
@pytest.mark.parametrize("rest", Rest)
def test_int4_that_every_engine_loads_is_planned(role: str, modules: str, rest: Rest) -> None:
    """Shared experts, dense MLPs, o_proj, q_b_proj and wq_b may be INT4 beside the experts, in the same group."""
    plan = make_plan(toy_headers(), int4_for(role, modules, rest))

    assert plan.quantization_config is not None
    groups = plan.quantization_config["config_groups"].values()
    assert [(group["weights"]["type"], group["weights"]["strategy"]) for group in groups].count(("int", "group")) == 1
    made = {step.weight.name.role for step in plan.steps if step.label == "int4 g=32"}
    assert made == {Role.ROUTED_EXPERT, Role(role)}


@pytest.mark.parametrize(
    ("role", "modules", "engine", "rule", "named"),
    [
        ("kv_b", ".*", "SGLang", "kv-b", "self_attn.kv_b_proj"),
        ("attention", r".*\.(q_a_proj|kv_a_proj_with_mqa)", "SGLang", "qkv-a", "kv_a_proj_with_mqa"),
        ("attention", ".*", "SGLang", "qkv-a", "kv_a_proj_with_mqa"),
        ("attention", r".*\.q_a_proj", "vLLM", "fused-partners", "q_a_proj"),
        ("indexer", ".*", "vLLM", "indexer", "indexer.wk"),
        ("indexer_weights", ".*", "vLLM", "indexer", "indexer.weights_proj"),
        ("router", ".*gate", "vLLM", "plain-modules", "mlp.gate"),
        ("embedding", ".*", "vLLM", "plain-modules", "embed_tokens"),
        ("mtp_projection", ".*", "vLLM", "plain-modules", "eh_proj"),
        ("lm_head", ".*", "vLLM", "modules-described", "lm_head"),
    ],
)
@pytest.mark.parametrize("rest", Rest)
def test_int4_that_an_engine_cannot_load_is_refused(
    role: str, modules: str, engine: str, rule: str, named: str, rest: Rest
) -> None:
    """The message names engine, rule and module, the hint what fixes it."""
    error = refusal(toy_headers(), int4_for(role, modules, rest))

    assert str(error).startswith(f"{engine} could not load this: ")
    assert f"(rule {rule}: " in str(error)
    assert named in str(error)
    assert error.hint


@pytest.mark.parametrize("config", [{"n_routed_experts": 4}, {"n_routed_experts": 256}])
def test_what_a_flag_mends_is_a_warning(config: dict[str, Any]) -> None:
    """NVFP4 experts beside BF16 shared ones: SGLang fuses them in models of 256 experts, unless it is told not to."""
    rule = "{roles: [routed_expert], scheme: nvfp4, scale: minmax}"
    recipe = custom(rule).with_rest(Rest.BF16)
    plan = make_plan(toy_headers(num_nextn_predict_layers=0, num_hidden_layers=2, **config), recipe)

    warnings = [warning for warning in plan.warnings if warning.startswith("SGLang")]
    assert len(warnings) == (1 if config["n_routed_experts"] == 256 else 0)
    for warning in warnings:
        assert warning.startswith("SGLang: model.layers.1.mlp.shared_experts.")
        assert "--disable-shared-experts-fusion" in warning


@pytest.mark.parametrize(
    ("columns", "group_size", "ranks"),
    [(1536, 128, 8), (768, 128, 4), (1536, 64, None), (2048, 128, None), (512, 128, None)],
)
def test_groups_that_ranks_would_cut_are_a_warning(columns: int, group_size: int, ranks: int | None) -> None:
    """1536 columns in groups of 128 leave 192 to each of eight ranks: named once, and not refused."""
    modules = [f"{LAYER}.mlp.experts.{number}.down_proj" for number in range(2)]
    source = make_source({"1": [spec for module in modules for spec in plain(module, 128, columns)]})
    plan = make_plan(source, custom(int4("routed_expert", group_size=group_size)))

    warnings = [warning for warning in plan.warnings if "tensor parallelism" in warning]
    assert len(warnings) == (0 if ranks is None else 1)
    for warning in warnings:
        assert warning.startswith(f"vLLM, SGLang: {modules[0]} (and 1 more) has {columns} columns: over {ranks} ranks")
        assert f"groups of {group_size}" in warning


def test_two_group_sizes_are_refused() -> None:
    """Engines take one 4-bit format, and groups of another size are another one."""
    error = refusal(toy_headers(), custom(int4("routed_expert"), int4("shared_expert", group_size=64)))

    assert "would mix int4" in str(error)
    assert error.hint is not None


def test_a_recipe_that_converts_nothing_is_refused() -> None:
    """A recipe under which no weight becomes INT4 is refused: the message names recipe and source."""
    error = refusal(toy_headers(), custom("{roles: [norm], scheme: keep}"))

    assert "the recipe mine finds no weight in toy to make INT4" in str(error)


@pytest.mark.parametrize("specs", [[], plain("model.norm", 128), KV_B], ids=["no tensor", "a norm", "no expert"])
def test_an_int4_recipe_that_quantizes_nothing_is_refused(specs: list[TensorSpec]) -> None:
    """A rule that fits no weight is named: no name is a routed expert's, so nothing would become INT4."""
    error = refusal(make_source({"1": specs}), load_recipe(INT4))

    assert f"recipe {INT4}: rule 1 (roles: routed_expert) fits no weight" in str(error)
    assert error.hint is not None


def test_the_number_of_layers_is_needed() -> None:
    """Without `num_hidden_layers` nobody can say which layer is the MTP layer; the key is named."""
    with pytest.raises(SourceError, match="num_hidden_layers"):
        make_plan(make_source({"1": experts(0)}, num_hidden_layers=None), load_recipe(INT4))


@pytest.mark.parametrize(
    ("recipe", "old", "new", "engine", "module"),
    [
        (BF16_REST, r"re:.*mlp\.(gate|up|gate_up)_proj$", r"re:.*mlp\.(gate|up)_proj$", "SGLang", "0.mlp.gate_proj"),
        (BF16_REST, r"re:.*self_attn\.o_proj$", r"re:.*layers\.\d+\.self_attn.o_proj$", "SGLang", "3.self_attn.o_proj"),
        (BF16_REST, r"re:.*lm_head$", "head", "transformers", "lm_head"),
        (INT4, r"re:.*self_attn\.kv_b_proj$", "re:kv_b_proj$", "vLLM", "0.self_attn.kv_b_proj"),
        (INT4, r"re:.*self_attn\.indexer\.weights_proj$", "indexers_proj", "vLLM", "0.self_attn.indexer.weights_proj"),
    ],
)
def test_a_config_that_an_engine_reads_otherwise_is_caught(
    recipe: str, old: str, new: str, engine: str, module: str
) -> None:
    """With one entry of `ignore` less exact, the engine and the first module it gets wrong are named."""
    source, plan, config = planned(recipe)
    check_engines(planned_facts(source, plan.recipe, plan.steps, config))
    config["ignore"][config["ignore"].index(old)] = new

    with pytest.raises(PlanError) as caught:
        check_engines(planned_facts(source, plan.recipe, plan.steps, config))

    assert str(caught.value).startswith(f"{engine} could not load this: ")
    assert f"{module} " in str(caught.value)


def planned(recipe: str) -> tuple[Source, Plan, dict[str, Any]]:
    """The toy, its plan, and a copy of the config to spoil."""
    source = toy_headers()
    plan = make_plan(source, load_recipe(recipe))
    assert plan.quantization_config is not None
    return source, plan, copy.deepcopy(plan.quantization_config)


@pytest.mark.parametrize("part", ["gate", "up"])
def test_a_config_that_ignores_one_of_two_partners_is_caught(part: str) -> None:
    """`ignore` with only one member of a fused module in it is refused, naming the engine and the fused module."""
    source, plan, config = planned(INT4)
    config["ignore"].append(f"{LAYER}.mlp.{part}_proj")

    with pytest.raises(PlanError, match=rf"vLLM refuses {LAYER}\.mlp\.gate_up_proj"):
        check_engines(planned_facts(source, plan.recipe, plan.steps, config))


def test_what_is_always_plain_is_not_asked_for_a_group() -> None:
    """Engines never take the scheme of a router, an embedding or eh_proj from the config: an entry less is no error."""
    source, plan, config = planned(BF16_REST)
    for entry in (r"re:.*mlp\.gate$", r"re:.*embed_tokens$", r"re:.*eh_proj$"):
        config["ignore"].remove(entry)

    check_engines(planned_facts(source, plan.recipe, plan.steps, config))
    roles = {step.weight.name.role for step in plan.steps}
    assert {Role.ROUTER, Role.EMBEDDING, Role.MTP_PROJECTION} <= roles

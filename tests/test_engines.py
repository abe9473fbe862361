"""Each engine's rules give every module of a GLM the group that its tensors are written for."""

import copy
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quantkit.checkpoint.engines import ENGINES, LINEAR_ROLES, ConfigMatcher, Engine, matchers
from quantkit.checkpoint.inventory import inventory
from quantkit.errors import EngineError
from quantkit.naming import Role, TensorName
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

VLLM, SGLANG, TRANSFORMERS = ENGINES
NUM_LAYERS = 2  # a dense layer 0, a sparse layer 1, and the MTP layer 2

TOY = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": NUM_LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 2,
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
}


def config_of(recipe: str) -> dict[str, Any]:
    """What a plan by `recipe` says of the toy, published in FP8 blocks."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = inventory("toy", json.dumps({**TOY, "quantization_config": quantization}))
    config = make_plan(source, load_recipe(recipe)).quantization_config
    assert config is not None
    return config


BF16_REST, FP8_REST = config_of("glm-5.2-int4-bf16rest"), config_of("glm-5.2-int4")
Groups = dict[str, tuple[str | None, str | None]]  # module -> its group with a BF16 rest, and with an FP8 rest
ATTENTION: Groups = {
    "self_attn.q_a_proj": (None, "group_1"),
    "self_attn.q_b_proj": (None, "group_1"),
    "self_attn.kv_a_proj_with_mqa": (None, "group_1"),
    "self_attn.kv_b_proj": (None, None),
    "self_attn.o_proj": (None, "group_1"),
    "self_attn.indexer.wq_b": (None, "group_1"),
    "self_attn.indexer.wk": (None, "group_1"),
    "self_attn.indexer.weights_proj": (None, None),
}
DENSE: Groups = {**ATTENTION, **{f"mlp.{part}_proj": (None, "group_1") for part in ("gate", "up", "down")}}
SPARSE: Groups = {
    **ATTENTION,
    **{f"mlp.shared_experts.{part}_proj": (None, "group_1") for part in ("gate", "up", "down")},
    **{
        f"mlp.experts.{expert}.{part}_proj": ("group_0", "group_0")
        for expert in (0, 1)
        for part in ("gate", "up", "down")
    },
}
GROUPS: Groups = {
    "lm_head": (None, None),
    **{
        f"model.layers.{layer}.{local}": groups
        for layer, modules in enumerate((DENSE, SPARSE, SPARSE))
        for local, groups in modules.items()
    },
}


def module_name(module: str) -> TensorName:
    return TensorName(module, "weight")


def groups_by(engine: Engine, config: dict[str, Any]) -> dict[str, str | None]:
    """The group of every module of the toy GLM."""
    matcher = ConfigMatcher(config, engine, NUM_LAYERS)
    return {module: matcher.group(module_name(module)) for module in GROUPS}


def config_with(targets: dict[str, list[str]], ignore: list[str]) -> dict[str, Any]:
    """A config with these groups; the first is INT4 and all others are FP8."""
    kinds = ["int"] + ["float"] * (len(targets) - 1)
    return {
        "config_groups": {
            key: {"targets": entries, "weights": {"type": kind}}
            for (key, entries), kind in zip(targets.items(), kinds, strict=True)
        },
        "ignore": ignore,
    }


@pytest.fixture(scope="module")
def ct_match() -> ModuleType:
    """compressed-tensors' own `utils/match.py`, imported without the package round it, which takes ten seconds."""
    found = importlib.util.find_spec("compressed_tensors")
    if found is None or found.origin is None:
        pytest.skip("compressed-tensors is not installed")
    name = "compressed_tensors.utils.match"
    if name in sys.modules:
        return sys.modules[name]
    root, before = Path(found.origin).parent, set(sys.modules)
    for package, folder in (("compressed_tensors", root), ("compressed_tensors.utils", root / "utils")):
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]
    try:
        return importlib.import_module(name)
    finally:
        for module in set(sys.modules) - before:
            if module.startswith("compressed_tensors"):
                del sys.modules[module]


def test_the_table_names_every_linear_module() -> None:
    """The modules below are all that the toy's headers hold with a role that engines build as a Linear."""
    names = [TensorName.parse(name) for name in inventory("toy", json.dumps({**TOY})).tensors]

    assert {name.module for name in names if name.role in LINEAR_ROLES} == GROUPS.keys()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_with_a_bf16_rest_only_routed_experts_are_quantized(engine: Engine) -> None:
    """Every engine finds INT4 for the routed experts, the MTP layer's included, and nothing for any other module."""
    assert groups_by(engine, BF16_REST) == {module: group for module, (group, _) in GROUPS.items()}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_with_an_fp8_rest_every_module_has_its_group(engine: Engine) -> None:
    """Every engine finds INT4 for routed experts, FP8 for attention, shared experts and dense MLPs, else nothing."""
    assert groups_by(engine, FP8_REST) == {module: group for module, (_, group) in GROUPS.items()}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_group_means_tensors_on_disk(engine: Engine) -> None:
    """INT4 is codes, scale and shape; FP8 is weight and scale; a module without a group is a plain weight."""
    matcher = ConfigMatcher(FP8_REST, engine, NUM_LAYERS)

    leaves = {
        module: matcher.leaves(module_name(f"model.layers.1.{module}"))
        for module in ("mlp.experts.1.up_proj", "self_attn.o_proj", "self_attn.kv_b_proj")
    }
    assert leaves == {
        "mlp.experts.1.up_proj": {"weight_packed", "weight_scale", "weight_shape"},
        "self_attn.o_proj": {"weight", "weight_scale"},
        "self_attn.kv_b_proj": {"weight"},
    }


@pytest.mark.parametrize("module", ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"])
def test_a_config_without_the_fused_name_is_caught_for_sglang(module: str) -> None:
    """SGLang looks for `gate_up_proj` alone: a list of the checkpoint's own names would make it build INT4."""
    config = copy.deepcopy(BF16_REST)
    fused = r"re:.*mlp\.(gate|up|gate_up)_proj$"
    config["ignore"][config["ignore"].index(fused)] = r"re:.*mlp\.(gate|up)_proj$"

    assert ConfigMatcher(config, VLLM, NUM_LAYERS).group(module_name(module)) is None
    assert ConfigMatcher(config, TRANSFORMERS, NUM_LAYERS).group(module_name(module)) is None
    assert ConfigMatcher(config, SGLANG, NUM_LAYERS).group(module_name(module)) == "group_0"


@pytest.mark.parametrize(
    ("fused", "missed"), [("fused_qkv_a_proj", VLLM), ("fused_qkv_a_proj_with_mqa", SGLANG)], ids=["vLLM", "SGLang"]
)
def test_each_engine_has_its_own_fused_name(fused: str, missed: Engine) -> None:
    """The target that names one engine's fused attention module serves that engine only."""
    config = config_with({"int": [r"re:.*experts\..*"], "fp8": [rf"re:.*self_attn\.{fused}$"]}, [])
    name = module_name("model.layers.0.self_attn.q_a_proj")

    assert {engine.name for engine in ENGINES if ConfigMatcher(config, engine, 2).group(name) == "fp8"} == {missed.name}


GATE, UP, GATE_UP = (f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "gate_up"))
Q_A, KV_A = (f"model.layers.1.self_attn.{part}" for part in ("q_a_proj", "kv_a_proj_with_mqa"))
VLLM_QKV_A, SGLANG_QKV_A = (
    f"model.layers.1.self_attn.{part}" for part in ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")
)


@pytest.mark.parametrize(
    ("engine", "ignore", "modules", "group"),
    [
        (VLLM, [GATE, UP], [GATE, UP], None),
        (VLLM, [GATE_UP], [GATE, UP], None),
        (VLLM, [GATE_UP, GATE], [GATE, UP], None),
        (VLLM, [Q_A, KV_A], [Q_A, KV_A], None),
        (VLLM, [VLLM_QKV_A], [Q_A, KV_A], None),
        (VLLM, [r"re:.*fused_qkv_a_proj$"], [Q_A, KV_A], None),
        (VLLM, [SGLANG_QKV_A], [Q_A, KV_A], "int"),
        (SGLANG, [GATE], [GATE, UP], "int"),
        (SGLANG, [GATE, UP], [GATE, UP], "int"),
        (SGLANG, [GATE_UP], [GATE, UP], None),
        (SGLANG, ["gate_up_proj"], [GATE, UP], None),
        (SGLANG, [Q_A, KV_A], [Q_A, KV_A], None),
        (SGLANG, ["self_attn.q_a_proj", "kv_a_proj_with_mqa"], [Q_A, KV_A], None),
        (SGLANG, [r"re:.*fused_qkv_a_proj_with_mqa$"], [Q_A, KV_A], "int"),
        (SGLANG, [VLLM_QKV_A], [Q_A, KV_A], "int"),
        (SGLANG, [SGLANG_QKV_A], [Q_A, KV_A], None),
        (SGLANG, [SGLANG_QKV_A, Q_A], [Q_A, KV_A], None),
        (TRANSFORMERS, [GATE], [GATE], None),
        (TRANSFORMERS, [GATE], [UP], "int"),
        (TRANSFORMERS, [GATE_UP], [GATE, UP], "int"),
    ],
    ids=lambda value: value.name if isinstance(value, Engine) else None,
)
def test_a_fused_module_is_ignored_by_its_name_or_its_members(
    engine: Engine, ignore: list[str], modules: list[str], group: str | None
) -> None:
    """vLLM takes either; SGLang knows gate_up_proj by its name, and the attention's by members or the exact name."""
    matcher = ConfigMatcher(config_with({"int": ["Linear"]}, ignore), engine, NUM_LAYERS)

    assert [matcher.group(module_name(module)) for module in modules] == [group] * len(modules)


@pytest.mark.parametrize(
    ("engine", "ignored", "other", "fused"),
    [
        (VLLM, GATE, UP, GATE_UP),
        (VLLM, UP, GATE, GATE_UP),
        (VLLM, KV_A, Q_A, VLLM_QKV_A),
        (SGLANG, Q_A, KV_A, SGLANG_QKV_A),
        (SGLANG, "kv_a_proj_with_mqa", Q_A, SGLANG_QKV_A),
    ],
    ids=lambda value: value.name if isinstance(value, Engine) else None,
)
def test_a_fused_module_of_which_one_member_is_ignored_is_refused(
    engine: Engine, ignored: str, other: str, fused: str
) -> None:
    """Engines raise on a mix, whichever member is asked about; the error names the engine and the fused module."""
    matcher = ConfigMatcher(config_with({"int": ["Linear"]}, [ignored]), engine, NUM_LAYERS)

    with pytest.raises(EngineError, match=f"{engine.name} refuses {fused}"):
        matcher.group(module_name(other))


@pytest.mark.parametrize(
    ("targets", "groups"),
    [
        ([Q_A, KV_A], {"vLLM": "fp8", "SGLang": "int", "transformers": "fp8"}),
        ([Q_A], {"vLLM": "int", "SGLang": "int", "transformers": "fp8"}),
        ([VLLM_QKV_A], {"vLLM": "fp8", "SGLang": "int", "transformers": "int"}),
        ([SGLANG_QKV_A], {"vLLM": "int", "SGLang": "fp8", "transformers": "int"}),
        (["q_a_proj", "kv_a_proj_with_mqa"], {"vLLM": "int", "SGLang": "int", "transformers": "int"}),
    ],
    ids=["members", "one member", "vLLM's name", "SGLang's name", "suffixes"],
)
def test_a_fused_module_is_targeted_by_name_class_and_members(targets: list[str], groups: dict[str, str]) -> None:
    """The built name counts first; vLLM takes all members before the class `Linear`, SGLang after it; no suffixes."""
    config = config_with({"int": ["Linear"], "fp8": targets}, [])

    found = {engine.name: ConfigMatcher(config, engine, NUM_LAYERS).group(module_name(Q_A)) for engine in ENGINES}
    assert found == groups


@pytest.mark.parametrize(
    ("entry", "module", "ignoring"),
    [
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj", {"vLLM", "SGLang", "transformers"}),
        ("self_attn.o_proj", "model.layers.1.self_attn.o_proj", {"SGLang"}),
        ("o_proj", "model.layers.1.self_attn.o_proj", {"SGLang"}),
        ("_proj", "model.layers.1.self_attn.o_proj", set()),
        ("kv_b_proj", "model.layers.1.self_attn.kv_b_proj", {"SGLang"}),
        ("model.layers.1.mlp.down_proj", "language_model.model.layers.1.mlp.down_proj", {"SGLang"}),
        ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj", set()),
        ("model.layers.1", "model.layers.10.self_attn.o_proj", set()),
        ("model-layers-1-self_attn-o_proj", "model.layers.1.self_attn.o_proj", set()),
        ("model.layers.1.self_attn.o.proj", "model.layers.1.self_attn.o_proj", set()),
        ("re:.*o_proj$", "model.layers.1.self_attn.o_proj", {"vLLM", "SGLang", "transformers"}),
        ("re:o_proj$", "model.layers.1.self_attn.o_proj", set()),
        ("re:model.layers.1", "model.layers.10.self_attn.o_proj", {"vLLM", "SGLang", "transformers"}),
    ],
)
def test_only_sglang_ignores_by_suffix(entry: str, module: str, ignoring: set[str]) -> None:
    """A plain entry is an exact name, in SGLang also a dotted suffix; a regex matches from the beginning."""
    config = config_with({"int": ["Linear"]}, [entry])
    found = {engine.name for engine in ENGINES if ConfigMatcher(config, engine, 20).group(module_name(module)) is None}

    assert found == ignoring


def test_the_mtp_layer_has_another_prefix_in_sglang() -> None:
    """A pattern with the MTP layer's number misses it in SGLang, one with `model.decoder` in the other engines."""
    name = module_name("model.layers.2.mlp.experts.0.up_proj")

    def ignoring(entry: str) -> set[str]:
        found = [ConfigMatcher(config_with({"int": ["Linear"]}, [entry]), engine, NUM_LAYERS) for engine in ENGINES]
        return {matcher.engine.name for matcher in found if matcher.group(name) is None}

    assert ignoring(r"re:.*layers\.2\..*") == {"vLLM", "transformers"}
    assert ignoring(r"re:model\.decoder\.mlp\.experts\..*") == {"SGLang"}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_names_are_matched_before_classes_and_groups_in_order(engine: Engine) -> None:
    """The experts' regex in the first group keeps them from a later group's; the class `Linear` alone does not."""
    name = module_name("model.layers.1.mlp.experts.0.up_proj")
    fp8 = [r"re:.*experts\..*_proj$"]

    def group(targets: list[str]) -> str | None:
        return ConfigMatcher(config_with({"int": targets, "fp8": fp8}, []), engine, NUM_LAYERS).group(name)

    assert group(["Linear"]) == "fp8"
    assert group(["Linear", r"re:.*mlp\.experts\..*"]) == "int"
    assert group([r"re:.*nothing"]) == "fp8"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_without_target_and_ignore_a_module_is_unquantized(engine: Engine) -> None:
    """Ignoring comes before any target, and a config without `ignore` is a config."""
    name = module_name("model.layers.1.mlp.experts.0.up_proj")
    targeted = config_with({"int": [r"re:.*experts.*"]}, [r"re:.*up_proj"])
    elsewhere = {"config_groups": {"int": {"targets": [r"re:.*attn.*"], "weights": {"type": "int"}}}}

    assert ConfigMatcher(targeted, engine, NUM_LAYERS).group(name) is None
    assert ConfigMatcher(elsewhere, engine, NUM_LAYERS).group(name) is None


def test_the_head_is_linear_and_a_router_or_an_mtp_projection_is_not() -> None:
    """What no engine gives a scheme from the config is not asked for one."""
    never = {Role.ROUTER, Role.ROUTER_BIAS, Role.NORM, Role.EMBEDDING, Role.MTP_PROJECTION, Role.VISION, Role.OTHER}
    assert LINEAR_ROLES.isdisjoint(never)
    assert {Role.LM_HEAD, Role.INDEXER_WEIGHTS, Role.ROUTED_EXPERT} <= LINEAR_ROLES


def test_the_head_is_quantized_by_its_name_only() -> None:
    """The class `Linear` is the head's in transformers alone; a target with its name serves all engines."""
    by_class, by_name = config_with({"int": ["Linear"]}, []), config_with({"int": [r"re:.*lm_head$"]}, [])

    def quantizing(config: dict[str, Any]) -> set[str]:
        found = [ConfigMatcher(config, engine, NUM_LAYERS) for engine in ENGINES]
        return {matcher.engine.name for matcher in found if matcher.group(module_name("lm_head")) == "int"}

    assert quantizing(by_class) == {"transformers"}
    assert quantizing(by_name) == {"vLLM", "SGLang", "transformers"}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_sglang_alone_refuses_a_module_without_target(engine: Engine) -> None:
    """A module that nothing ignores and nothing targets is an error in SGLang, but not the head."""
    config = config_with({"int": [r"re:.*experts.*"]}, [r"re:.*o_proj$"])
    modules = ("model.layers.1.self_attn.q_b_proj", "model.layers.1.self_attn.o_proj", "lm_head")
    matcher = ConfigMatcher(config, engine, NUM_LAYERS)

    homeless = [module for module in modules if matcher.is_homeless(module_name(module))]
    assert homeless == (["model.layers.1.self_attn.q_b_proj"] if engine is SGLANG else [])


MODELOPT_CASES = [
    (["model.layers.7"], "model.layers.70.self_attn.o_proj", {"vLLM"}),
    (["model.layers.7"], "model.layers.7.self_attn.o_proj", {"vLLM"}),
    (["model.layers.7.*"], "model.layers.70.self_attn.o_proj", set()),
    (["model.layers.1*"], "model.layers.17.self_attn.o_proj", {"vLLM", "SGLang"}),
    (["model.layers.1.*"], "model.layers.17.self_attn.o_proj", set()),
    (["self_attn"], "model.layers.3.self_attn.o_proj", {"vLLM", "SGLang"}),
    (["layers.3.self_attn"], "model.layers.3.self_attn.o_proj", {"vLLM"}),
    (["*o_proj"], "model.layers.3.self_attn.o_proj", {"vLLM", "SGLang"}),
    (["model.layers.3.self_attn.q_b_proj"], "model.layers.4.self_attn.q_b_proj", {"SGLang"}),
    (["model.layers.3.mlp.experts"], "model.layers.3.mlp.experts.7.up_proj", {"vLLM", "SGLang"}),
    (["model.layers.3.mlp.experts*"], "model.layers.30.mlp.experts.7.up_proj", set()),
    (["model.layers.3.*"], "language_model.model.layers.3.self_attn.o_proj", {"SGLang"}),
    (["model.layers.3."], "language_model.model.layers.3.self_attn.o_proj", {"vLLM"}),
    (["lm_head"], "lm_head", {"vLLM", "SGLang"}),
]


@pytest.mark.parametrize(("excluded", "module", "engines"), MODELOPT_CASES)
def test_modelopts_list_is_read_as_each_engine_does(excluded: list[str], module: str, engines: set[str]) -> None:
    """vLLM takes any part of a name, SGLang a whole part between dots, both shell patterns of the whole name."""
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": excluded}
    found = {matcher.engine.name for matcher in matchers(config, 78) if not leaves_are_nvfp4(matcher.leaves, module)}

    assert found == engines


def leaves_are_nvfp4(leaves: Callable[[TensorName], frozenset[str]], module: str) -> bool:
    return leaves(module_name(module)) == {"weight", "weight_scale", "weight_scale_2"}


FOREIGN = {
    "bf16 rest": BF16_REST,
    "fp8 rest": FP8_REST,
    "exact names": config_with(
        {"a": ["model.layers.0.self_attn.o_proj", "lm_head"], "b": ["Linear"]}, ["model.layers.1.self_attn.o_proj"]
    ),
    "classes only": config_with({"a": ["Linear"]}, ["lm_head"]),
    "no target": config_with({"a": ["Embedding"]}, []),
    "regexes": config_with({"a": [r"re:.*self_attn.*"], "b": [r"re:model\.layers\.[12]\.mlp"]}, [r"re:.*kv_b_proj$"]),
    "anchors": config_with({"a": [r"re:^model\.layers\.\d+\.mlp\.(gate|up)_proj$"], "b": ["Linear"]}, [r"re:lm_head"]),
    "alternatives": config_with({"a": [r"re:.*o_proj|.*eh_proj"], "b": [r"re:.*down_proj|lm_head"]}, [r"re:x|y"]),
    "flags": config_with({"a": [r"re:.*O_PROJ$", r"re:(?i).*Q_B_PROJ$"]}, [r"re:.*WK$", r"re:(?i).*WQ_B$"]),
    "back references": config_with({"a": [r"re:(x)", r"re:.*(e)xp\1rts"]}, [r"re:(x)", r"re:.*(_)a_proj\1with"]),
}


@pytest.mark.parametrize("config", FOREIGN.values(), ids=FOREIGN.keys())
def test_transformers_rules_are_those_of_compressed_tensors(config: dict[str, Any], ct_match: ModuleType) -> None:
    """For ours and other configs, every module's group is the one that compressed-tensors' own matcher finds."""
    group_of = {target: key for key, group in config["config_groups"].items() for target in group["targets"]}
    linear = torch.nn.Linear(1, 1, device="meta")

    def theirs(module: str) -> str | None:
        if not ct_match.is_match(module, linear, group_of, config["ignore"]):
            return None
        found: str = ct_match.match_targets(module, linear, group_of)[0]
        return group_of[found]

    assert groups_by(TRANSFORMERS, config) == {module: theirs(module) for module in GROUPS}

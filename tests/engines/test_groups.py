"""Each engine's rules give every module of a GLM the group that its tensors are written for."""

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quantkit.checkpoint.source import Source
from quantkit.conversion.plan import make_plan
from quantkit.engines import ENGINES, LINEAR_ROLES, ConfigMatcher, Engine
from quantkit.naming import Role, TensorName
from quantkit.recipe import load_recipe
from support.engine_cases import config_with, module_name
from support.toys import toy_headers

VLLM, SGLANG, TRANSFORMERS = ENGINES
NUM_LAYERS = 2


def small(**changes: Any) -> Source:
    """The toy with a dense layer 0, a sparse layer 1, and the MTP layer 2."""
    return toy_headers(num_hidden_layers=NUM_LAYERS, n_routed_experts=2, **changes)


def config_of(recipe: str) -> dict[str, Any]:
    """What a plan by `recipe` says of the toy, published in FP8 blocks."""
    config = make_plan(small(), load_recipe(recipe)).quantization_config
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


def groups_by(engine: Engine, config: dict[str, Any]) -> dict[str, str | None]:
    """The group of every module of the toy GLM."""
    matcher = ConfigMatcher(config, engine, NUM_LAYERS)
    return {module: matcher.group(module_name(module)) for module in GROUPS}


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
    names = [TensorName.parse(name) for name in small(quantization_config=...).tensors]

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


def test_the_head_is_linear_and_a_router_or_an_mtp_projection_is_not() -> None:
    """What no engine gives a scheme from the config is not asked for one."""
    never = {Role.ROUTER, Role.ROUTER_BIAS, Role.NORM, Role.EMBEDDING, Role.MTP_PROJECTION, Role.VISION, Role.OTHER}
    assert LINEAR_ROLES.isdisjoint(never)
    assert {Role.LM_HEAD, Role.INDEXER_WEIGHTS, Role.ROUTED_EXPERT} <= LINEAR_ROLES


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

"""Which entries of a config each engine takes for a module: by name, suffix, pattern, class and fused name."""

from collections.abc import Callable
from typing import Any

import pytest

from quantkit.engines import ENGINES, ConfigMatcher, Engine, matchers
from quantkit.errors import EngineError
from quantkit.naming import TensorName
from support.engine_cases import config_with, module_name

VLLM, SGLANG, TRANSFORMERS = ENGINES
NUM_LAYERS = 2  # a dense layer 0, a sparse layer 1, and the MTP layer 2


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

    unmatched = [module for module in modules if matcher.is_unmatched(module_name(module))]
    assert unmatched == (["model.layers.1.self_attn.q_b_proj"] if engine is SGLANG else [])


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

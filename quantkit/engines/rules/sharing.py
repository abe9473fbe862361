"""What SGLang makes of shared experts: one more routed expert, or a module of its own."""

from quantkit.engines import ModeloptMatcher, is_linear
from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import Rule, Status
from quantkit.naming import Role
from quantkit.weights.encodings import INT4

_FUSING_256 = ("deepseek_v3", "glm_moe_dsa", "kimi_k2")  # SGLang fuses one shared expert with 256 routed ones, no other
_FUSING_ALL = ("glm4_moe", "glm4_moe_lite")


def _linear_target(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    if module.format == facts.routed[module.name.layer] or _linear_is_int4(facts):
        return None
    return f"is {module.label}, and the config's INT4 group has not the target Linear: it is taken for a routed expert"


def _linear_is_int4(facts: Facts) -> bool:
    return any(weights.get("type") == "int" and weights.get("num_bits") == 4 for weights in facts.linear)


def _meets_four_bits(facts: Facts, module: Module) -> bool:
    """Whether it is a shared expert beside routed ones that are 4-bit."""
    routed = facts.routed.get(module.name.layer)
    return module.name.role is Role.SHARED_EXPERT and is_linear(module) and bool(routed and routed.encoding.is_main)


def _fuses_256(facts: Facts) -> bool:
    sizes = facts.config.get("n_routed_experts"), facts.config.get("n_shared_experts")
    return facts.model_type in _FUSING_256 and sizes == (256, 1)


def _stops_at_int4(facts: Facts, module: Module) -> bool:
    """Whether SGLang looks at the target `Linear` to see that the shared expert stays alone."""
    routed = facts.routed.get(module.name.layer)
    return _fuses_256(facts) and _meets_four_bits(facts, module) and routed is not None and routed.encoding is INT4


def _may_be_fused(facts: Facts, module: Module) -> bool:
    fuses = _fuses_256(facts) or (facts.model_type in _FUSING_ALL and facts.config.get("n_shared_experts") == 1)
    return fuses and _meets_four_bits(facts, module) and not _stops_at_int4(facts, module)


def _shared_experts(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    routed = facts.routed[module.name.layer]
    if module.format == routed or (_fuses_256(facts) and _excludes_shared_experts(facts, engine)):
        return None
    return (
        f"is {module.label}; SGLang takes it for one more of the routed experts, which are {routed and routed.encoding}"
    )


def _packed_apart(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    packed = "weight_packed" in module.leaves
    return (
        f"is {module.label}, packed: {engine} loads it only where it is fused with routed experts" if packed else None
    )


def _excludes_shared_experts(facts: Facts, engine: str) -> bool:
    """Whether an entry of ModelOpt's list tells SGLang that shared experts are not 4-bit."""
    matcher = facts.matchers.get(engine)
    excluded = matcher.excluded if isinstance(matcher, ModeloptMatcher) else ()
    return any("shared_expert" in entry and "shared_expert_gate" not in entry for entry in excluded)


RULES = (
    Rule(
        id="linear-target",
        demand="the INT4 group has the literal target Linear, where shared experts are not INT4",
        why="by that word alone it is seen that the shared expert cannot be fused with INT4 experts",
        sources={"SGLang": "srt/models/deepseek_common/utils.py: is_wint4afp8_or_wint4a16_config"},
        fix="Give SGLang --disable-shared-experts-fusion, or the INT4 group the target Linear.",
        concerns=_stops_at_int4,
        problem=_linear_target,
        severity=Status.FLAG,
    ),
    Rule(
        id="shared-experts",
        demand="a shared expert that is fused with 4-bit routed experts has their format",
        why="it is renamed to one more routed expert and finds no parameter: GLM-4.x stops, others leave it out "
        "silently",
        sources={
            "SGLang": "srt/models/deepseek_v2.py, glm4_moe.py, glm4_moe_lite.py: shared_experts_fusion_disable_reason; "
            "srt/layers/quantization/modelopt_quant.py: can_fuse_shared_expert"
        },
        fix="Give SGLang --disable-shared-experts-fusion, or the role shared_expert the routed experts' scheme.",
        concerns=_may_be_fused,
        problem=_shared_experts,
        severity=Status.FLAG,
    ),
    Rule(
        id="shared-experts-apart",
        demand="a shared expert of GLM-4.5 to 4.7 that is not fused has a tensor called weight",
        why="its dtype is looked at where experts are not fused, and the load stops: with "
        "--disable-shared-experts-fusion, expert parallelism or DeepEP",
        sources={"SGLang": "srt/models/glm4_moe.py: Glm4MoeSparseMoeBlock"},
        fix="Serve it with tensor parallelism and without that flag, or give the role shared_expert the scheme bf16.",
        concerns=lambda facts, module: (
            facts.model_type == "glm4_moe" and module.name.role is Role.SHARED_EXPERT and is_linear(module)
        ),
        problem=_packed_apart,
        severity=Status.WARNING,
    ),
)

"""How the tensors lie there: global scales, dtypes of scales, experts in one tensor, tensors that are too many."""

from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import BOTH, Rule, Status
from quantkit.families.inventory import is_scheduled
from quantkit.naming import Role
from quantkit.weights.encodings import NVFP4
from quantkit.weights.weight import KV_SCALES

_DSV2_LOADER = "srt/models/deepseek_common/deepseek_weight_loader.py"
_VLLM_CT = "model_executor/layers/quantization/compressed_tensors"
_DSA = ("glm_moe_dsa", "deepseek_v32")  # for which vLLM has classes of its own on CUDA
_TAKE_FUSED = {  # experts.gate_up_proj [E, 2I, H] and experts.down_proj [E, H, I]
    "vLLM": ("glm4_moe",),
    "SGLang": ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"),
}


def _surplus_indexer(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    layer = module.name.layer
    if layer is None or facts.is_mtp(module):
        return None
    skipped = not is_scheduled(facts.config, layer)
    return "is an indexer's, in a layer where vLLM builds none" if skipped else None


def _unequal_globals(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    values = facts.unequal(module)
    return f"and its partners have the global scales {values}" if values else None


def _bytes_of_scales(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    if module.scales != "U8":
        return None
    return f"has scales in U8; {engine} {'takes their bytes for numbers' if engine == 'vLLM' else 'stops at them'}"


def _within(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    if not module.within:
        return None
    if facts.model_type in _TAKE_FUSED[engine] and not module.within.endswith(".weight") and not module.turned:
        return None
    result = "stops" if engine == "vLLM" else "stops, or leaves the experts unwritten"
    return f"lies in {module.within}{', transposed' if module.turned else ''}: {engine} {result}"


def _mtp_kv_scale(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return f"has a {module.name.leaf}, in an MTP layer" if module.name.leaf in KV_SCALES else None


def _router_bias(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return None if module.label == "f32" else f"is {module.label}, too coarse to tell experts apart"


RULES = (
    Rule(
        id="surplus-indexer",
        demand="layers that share another's indexer carry none",
        why="the CUDA loader finds no parameter for such a tensor and stops",
        sources={"vLLM": "models/deepseek_v32/nvidia/model.py: load_weights; models/deepseek_v32/attention.py"},
        fix="Take these tensors out of the source.",
        concerns=lambda facts, module: facts.model_type in _DSA and ".indexer." in module.name.module,
        problem=_surplus_indexer,
    ),
    Rule(
        id="shared-globals",
        demand="NVFP4 weights that are fused have one global scale",
        why="of two, an engine takes one for both: the other weight is wrong by their ratio",
        sources={
            "vLLM": f"{_VLLM_CT}/schemes/compressed_tensors_w4a4_nvfp4.py and "
            "compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py: process_weights_after_loading",
            "SGLang": "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4_moe.py: "
            "process_weights_after_loading",
        },
        fix="Convert the model from its source with quantkit.",
        concerns=lambda facts, module: (
            facts.unequal_globals is not None and module.encoding is NVFP4 and module.name.fused_projection is not None
        ),
        problem=_unequal_globals,
    ),
    Rule(
        id="block-scales",
        demand="scales of FP8 are numbers, not the bytes of E8M0 in U8",
        why="no parameter for scales has that dtype",
        sources={
            "vLLM": "model_executor/layers/quantization/utils/fp8_utils.py: create_fp8_scale_parameter",
            "SGLang": "srt/layers/quantization/fp8.py: Fp8LinearMethod.create_weights",
        },
        fix="Convert it with quantkit, which writes such scales in FP32.",
        concerns=lambda facts, module: module.scales is not None,
        problem=_bytes_of_scales,
    ),
    Rule(
        id="experts-apart",
        demand="experts are stored one by one, or in the two tensors of a layer that the engine knows for the model",
        why="those of all experts are taken as experts.gate_up_proj and experts.down_proj, untransposed, by a "
        "few classes",
        sources={
            "vLLM": "model_executor/models/deepseek_v2.py, glm4_moe.py: load_weights",
            "SGLang": f"{_DSV2_LOADER}: _load_fused_expert_tensor; srt/models/glm4_moe.py: load_weights",
        },
        fix="Convert it with quantkit, which writes experts one by one; --bf16 changes no number of a BF16 checkpoint.",
        concerns=lambda facts, module: module.name.role is Role.ROUTED_EXPERT,
        problem=_within,
    ),
    Rule(
        id="mtp-kv-scales",
        demand="no scale of a KV cache is in an MTP layer of GLM-5.x, GLM-4.5 to 4.7 or DeepSeek-V3.2",
        why="the class of the draft model (of GLM-5.x and DeepSeek-V3.2, on CUDA) has no parameter for it, and stops",
        sources={"vLLM": "models/deepseek_v32/nvidia/mtp.py, model_executor/models/glm4_moe_mtp.py: load_weights"},
        fix="Take these tensors out, or convert with --mtp drop.",
        concerns=lambda facts, module: (
            facts.model_type in (*_DSA, "glm4_moe")
            and facts.is_mtp(module)
            and (module.name.leaf in KV_SCALES or module.projection in ("kv_a_proj_with_mqa", "k_proj"))
        ),
        problem=_mtp_kv_scale,
    ),
    Rule(
        id="router-bias",
        demand="the router's correction bias is FP32",
        why="in BF16, GLM-5.2's values fall together and other experts are chosen",
        sources=dict(
            zip(BOTH, ("models/deepseek_v32/nvidia/model.py: MoE", "srt/models/deepseek_v2.py: MoEGate"), strict=True)
        ),
        fix="Convert from a source that holds it in FP32.",
        concerns=lambda facts, module: module.name.role is Role.ROUTER_BIAS,
        problem=_router_bias,
        severity=Status.WARNING,
    ),
)

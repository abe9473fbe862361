"""What loads, and is slow, less exact or not proved; and what engines do with scales of the KV cache."""

from quantkit.engines import is_linear
from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import Rule, Status
from quantkit.naming import Role
from quantkit.weights.encodings import INT4, NVFP4
from quantkit.weights.weight import KV_SCALES

_CT = "srt/layers/quantization/compressed_tensors"
_DSV2_LOADER = "srt/models/deepseek_common/deepseek_weight_loader.py"
_CACHED = ("kv_a_proj_with_mqa", "k_proj", "v_proj")  # what goes into a KV cache comes from them


def _is_int4(facts: Facts, module: Module) -> bool:
    return module.encoding is INT4 and is_linear(module)


def _is_int4_expert(facts: Facts, module: Module) -> bool:
    return module.encoding is INT4 and module.name.role is Role.ROUTED_EXPERT


def _group_size(module: Module) -> int:
    assert module.format is not None
    assert module.format.block is not None
    return module.format.block[1]


def _marlin(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    size = _group_size(module)
    return (
        None
        if size in INT4.group_sizes
        else f"has groups of {size}; Marlin takes {', '.join(map(str, INT4.group_sizes))}"
    )


def _blackwell(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    size = _group_size(module)
    return (
        None if size in (32, 128) else f"has groups of {size}; on Blackwell, Triton takes 32 and 128, Marlin the rest"
    )


def _flashinfer(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    size = _group_size(module)
    return None if size == 32 else f"has groups of {size}; the FlashInfer kernel for Blackwell takes 32"


def _w4a4(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return "has a scale of its activations: W4A4 from SM100 on, weight-only below" if _activations(module) else None


def _activations(module: Module) -> bool:
    return module.format is not None and module.format.activations


def _kv_scale(facts: Facts, module: Module) -> bool:
    return module.name.leaf in KV_SCALES and facts.config.get("kv_lora_rank") is not None


def _ignored(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return f"has a {module.name.leaf}, which {engine} loads for no MLA model: its KV scale stays 1.0"


def _by_backend(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    if module.projection not in ("k_proj", "v_proj", "attn_mqa"):
        return f"has a {module.name.leaf}, which {engine} looks for under k_proj, v_proj or attn_mqa only"
    return (
        f"has a {module.name.leaf}: the backend triton honours it, fa3, flashinfer and flashmla_kv ignore it, "
        "trtllm_mla, cutedsl_mla, flashmla and the sparse trtllm compute wrongly unless it is 1.0"
    )


RULES = (
    Rule(
        id="int4-group-size",
        demand=f"INT4 groups are of {', '.join(map(str, INT4.group_sizes))} columns",
        why="the Marlin kernels take no other",
        sources={
            "vLLM": "model_executor/layers/quantization/utils/marlin_utils.py: check_moe_marlin_supports_config",
            "SGLang": "srt/layers/quantization/marlin_utils.py: check_moe_marlin_supports_layer",
        },
        fix="Convert with --group-size 32.",
        concerns=_is_int4,
        problem=_marlin,
        severity=Status.WARNING,
    ),
    Rule(
        id="int4-blackwell",
        demand="INT4 experts for Blackwell have groups of 32 or 128",
        why="the Triton kernel that is chosen there takes no other; Marlin is second choice",
        sources={"SGLang": f"{_CT}/compressed_tensors.py: get_moe_scheme, _is_wna16_triton_moe_supported"},
        fix="Convert with --group-size 32.",
        concerns=_is_int4_expert,
        problem=_blackwell,
        severity=Status.WARNING,
    ),
    Rule(
        id="int4-flashinfer",
        demand="INT4 experts for the FlashInfer TRT-LLM kernel have groups of 32",
        why="the fastest kernel on Blackwell takes no other",
        sources={
            "vLLM": "model_executor/layers/fused_moe/experts/trtllm_mxint4_moe.py: _supports_quant_scheme",
            "SGLang": f"{_CT}/schemes/compressed_tensors_w4a4_mxint4_moe.py",
        },
        fix="Convert with --group-size 32.",
        concerns=_is_int4_expert,
        problem=_flashinfer,
        severity=Status.WARNING,
    ),
    Rule(
        id="signed-scales",
        demand="INT4 scales are not negative",
        why="some paths take the largest scale for the largest magnitude; others are not proved",
        sources={
            "vLLM": "model_executor/layers/quantization/utils/marlin_utils.py: marlin_act_int8_process_scales",
            "SGLang": "srt/layers/quantization/marlin_utils.py: no test of it was found",
        },
        fix="Convert with --scale search.",
        concerns=lambda facts, module: _is_int4(facts, module) and facts.signed,
        problem=lambda facts, module, engine, ranks: f"may have negative scales, which are not proved in {engine}",
        severity=Status.WARNING,
    ),
    Rule(
        id="w4a4",
        demand="NVFP4 with scaled activations runs on SM100 or later",
        why="below, both engines serve the weights alone",
        sources={
            "vLLM": "model_executor/layers/fused_moe/oracle/nvfp4.py; model_executor/kernels/linear/nvfp4/marlin.py",
            "SGLang": f"{_CT}/compressed_tensors.py: _get_scheme_from_parts, get_moe_scheme",
        },
        fix="On Hopper, a weight-only checkpoint says what is served.",
        concerns=lambda facts, module: module.encoding is NVFP4 and is_linear(module),
        problem=_w4a4,
        severity=Status.WARNING,
    ),
    Rule(
        id="nvfp4-experts",
        demand="no routed expert is NVFP4",
        why="the global scales of experts are left out (huggingface/transformers issue 48371)",
        sources={"transformers": "integrations/compressed_tensors.py: DecompressExperts"},
        fix="Serve it with vLLM or SGLang, or divide the experts by their global scales once they are loaded.",
        concerns=lambda facts, module: (
            module.encoding is NVFP4 and module.name.role is Role.ROUTED_EXPERT and facts.method == "compressed-tensors"
        ),
        problem=lambda facts, module, engine, ranks: (
            f"is {module.label}; {engine} loads it multiplied by its global scale"
        ),
        severity=Status.WARNING,
    ),
    Rule(
        id="kv-scales",
        demand="an MLA checkpoint for vLLM needs no scale of its KV cache",
        why="two name mappers in a row leave a name that no parameter has",
        sources={
            "vLLM": "model_executor/layers/quantization/base_config.py: get_cache_scale_mapper; "
            "model_executor/model_loader/weight_utils.py: maybe_remap_kv_scale_name"
        },
        fix="Serve with the scale 1.0, or leave --kv-cache-dtype auto.",
        concerns=_kv_scale,
        problem=_ignored,
        severity=Status.WARNING,
    ),
    Rule(
        id="kv-scales",
        demand="an MLA checkpoint with scales of its KV cache is served with --attention-backend triton",
        why="backends write the cache unscaled, and some of them scale what they read",
        sources={
            "SGLang": "srt/mem_cache/memory_pool.py: MLATokenToKVPool; srt/layers/attention/triton_backend.py, "
            f"trtllm_mla_backend.py, flashmla_backend.py, flashattention_backend.py; {_DSV2_LOADER}: do_load_weights"
        },
        fix="Give SGLang --attention-backend triton.",
        concerns=_kv_scale,
        problem=_by_backend,
        severity=Status.FLAG,
    ),
    Rule(
        id="folded-kv-scales",
        demand="where KV scales are folded into the weights, no others are stored",
        why="the engine's own scale must be 1.0, as it is where none is stored: else the cache is divided twice",
        sources={
            "vLLM": "model_executor/layers/quantization/kv_cache.py: BaseKVCacheMethod.process_weights_after_loading",
            "SGLang": f"{_DSV2_LOADER}: do_load_weights",
        },
        fix="Take the stored scales out, unless they are 1.0.",
        concerns=lambda facts, module: facts.folded and (module.name.leaf in KV_SCALES or module.projection in _CACHED),
        problem=lambda facts, module, engine, ranks: (
            f"has a {module.name.leaf} beside folded scales" if module.name.leaf in KV_SCALES else None
        ),
        severity=Status.WARNING,
    ),
)

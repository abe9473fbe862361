"""Which module may have which format."""

from quantkit.engines import is_linear
from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import Rule
from quantkit.naming import Role
from quantkit.weights.encodings import INT4, NVFP4
from quantkit.weights.weight import Strategy

_DSV2_LOADER = "srt/models/deepseek_common/deepseek_weight_loader.py"
_VLLM_CT = "model_executor/layers/quantization/compressed_tensors"
_NEVER = frozenset({Role.ROUTER, Role.EMBEDDING, Role.MTP_PROJECTION, Role.NORM})
_INDEXER = frozenset({Role.INDEXER, Role.INDEXER_WEIGHTS})
_FUSED_BLOCK = (128, 128)  # of indexer.wk in SGLang, where the class Linear is not in FP8 blocks


def _is_fused(facts: Facts, module: Module) -> bool:
    return module.name.fused_module is not None and is_linear(module)


def _other_format(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    first = facts.partners[module.name.fused_module or ""][0]
    if first.label == module.label:
        return None
    return f"({module.label}) is fused with {first.name.module} ({first.label}) into one module, which needs one format"


def _not_plain(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return f"is {module.label}" if module.format else None


def _kv_b(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """SGLang takes an FP8 kv_b_proj apart by the block of the class `Linear`, else as one scale for each row."""
    if module.encoding.is_main:
        return f"is {module.label}; SGLang reads its `weight`, and decodes only FP8"
    if module.format and module.format.strategy == "block" and facts.method == "compressed-tensors":
        block = _linear_block(facts)
        return None if block == module.format.block else f"is {module.label}, and the config's Linear is not"
    return None


def _linear_block(facts: Facts) -> tuple[int, int] | None:
    """The FP8 block of the group whose target is the class `Linear`."""
    block = next((weights.get("block_structure") for weights in facts.linear), None)
    return (block[0], block[1]) if block else None


def _qkv_a(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    if module.encoding is INT4:
        return "is INT4; SGLang joins its weight_shape with its partner's, and the result fits no parameter"
    if module.encoding is NVFP4 and "weight_packed" in module.leaves:
        return "is NVFP4; SGLang joins its global scale with its partner's, and the result fits no parameter"
    return None


def _indexer(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    if module.encoding.is_main:
        return f"is {module.label}; {engine} loads it into a BF16 parameter"
    if module.format is None:
        return None
    if engine == "vLLM":
        decoded = module.projection == "wk" and module.format.strategy != "tensor"
        return None if decoded else f"is {module.label}; vLLM decodes indexer.wk alone, by rows or blocks"
    block = _linear_block(facts) or _FUSED_BLOCK
    return (
        None if module.format.block == block else f"is {module.label}; SGLang decodes blocks of {block[0]}x{block[1]}"
    )


def _mtp_of_modelopt(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return (
        f"is {module.label}; SGLang builds the MTP layer of a ModelOpt checkpoint unquantized"
        if module.format
        else None
    )


def _merged_blocks(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    assert module.format is not None
    block = _linear_block(facts)
    if block == module.format.block:
        return None
    said = f"blocks of {block[0]}x{block[1]}" if block else "no blocks"
    return f"is {module.label} and merged with its partner; for the class Linear, the config says {said}"


RULES = (
    Rule(
        id="fused-partners",
        demand="modules that are fused into one have one format",
        why="a fused module has one scheme and one set of parameters: vLLM stops, SGLang may leave the others "
        "unwritten",
        sources={
            "vLLM": f"{_VLLM_CT}/utils.py: should_ignore_layer",
            "SGLang": "srt/layers/quantization/compressed_tensors/utils.py: should_ignore_layer",
        },
        fix="Give gate and up, q_a and kv_a, q, k and v, and all experts of a layer one scheme.",
        concerns=_is_fused,
        problem=_other_format,
    ),
    Rule(
        id="plain-modules",
        demand="router, embedding, eh_proj and norms are plain",
        why="they are built without a quantization config: packed ones stop vLLM, and SGLang leaves their weight "
        "unwritten",
        sources={
            "vLLM": "models/deepseek_v32/nvidia/mtp.py: DeepseekV32MultiTokenPredictorLayer; "
            "model_executor/models/deepseek_mtp.py: DeepSeekMultiTokenPredictorLayer",
            "SGLang": "srt/models/deepseek_nextn.py: DeepseekModelNextN; srt/models/deepseek_v2.py: MoEGate",
        },
        fix="Give their roles the scheme keep or bf16.",
        concerns=lambda facts, module: module.name.role in _NEVER,
        problem=_not_plain,
    ),
    Rule(
        id="kv-b",
        demand="kv_b_proj is plain, or FP8 of a kind that SGLang decodes",
        why="its `weight` is taken apart when it is loaded; vLLM multiplies any format with an identity matrix",
        sources={"SGLang": f"{_DSV2_LOADER}: post_load_weights, _resolve_layer_weight_block_size"},
        fix="Give the role kv_b the scheme bf16.",
        concerns=lambda facts, module: module.name.role is Role.KV_B and is_linear(module),
        problem=_kv_b,
    ),
    Rule(
        id="qkv-a",
        demand="q_a_proj and kv_a_proj_with_mqa are neither INT4 nor compressed-tensors' NVFP4",
        why="the loader joins all tensors of the two row by row, shapes and global scales, too",
        sources={"SGLang": f"{_DSV2_LOADER}: do_load_weights; srt/layers/linear.py: ReplicatedLinear.weight_loader"},
        fix="Narrow the rule for the role attention by modules: .*(q_b|o)_proj (of ModelOpt, NVFP4 is loaded).",
        concerns=lambda facts, module: module.projection in ("q_a_proj", "kv_a_proj_with_mqa") and is_linear(module),
        problem=_qkv_a,
    ),
    Rule(
        id="indexer",
        demand="indexer.wk and weights_proj are plain; wk may be in FP8 blocks",
        why="both are loaded into one BF16 parameter, wk_weights_proj",
        sources={
            "vLLM": "models/deepseek_v32/attention.py: Indexer; "
            "model_executor/models/deepseek_v2.py: _try_load_fp8_indexer_wk",
            "SGLang": f"srt/layers/attention/dsa/dsa_indexer.py: Indexer; {_DSV2_LOADER}: _load_fused_indexer_wk",
        },
        fix="Give the roles indexer and indexer_weights the scheme keep or bf16.",
        concerns=lambda facts, module: (
            module.name.role in _INDEXER and module.projection in ("wk", "weights_proj") and is_linear(module)
        ),
        problem=_indexer,
    ),
    Rule(
        id="modelopt-mtp",
        demand="the MTP layer of a ModelOpt checkpoint is plain",
        why="the draft model is built without the quantization config",
        sources={"SGLang": "srt/models/deepseek_nextn.py: DeepseekModelNextN; srt/models/glm4_moe_nextn.py"},
        fix="Give --mtp keep --rest bf16, or --format compressed-tensors.",
        concerns=lambda facts, module: facts.method == "modelopt" and facts.is_mtp(module) and is_linear(module),
        problem=_mtp_of_modelopt,
    ),
    Rule(
        id="merged-blocks",
        demand="for FP8 blocks that are merged with others, the class Linear has the same block in the config",
        why="their scales are cut by that block, whatever group they belong to; without one, the load stops",
        sources={
            "SGLang": "srt/layers/linear.py: MergedColumnParallelLinear, QKVParallelLinear (weight_loader_v2); "
            "srt/layers/quantization/compressed_tensors/compressed_tensors.py: weight_block_size"
        },
        fix="Respell a checkpoint of quantkit with quantkit convert --respell; else give these roles the scheme bf16.",
        concerns=lambda facts, module: (
            facts.method == "compressed-tensors"
            and is_linear(module)
            and module.format is not None
            and module.format.strategy == Strategy.BLOCK
            and module.name.role is not Role.ROUTED_EXPERT
            and module.projection in ("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj")
        ),
        problem=_merged_blocks,
    ),
)

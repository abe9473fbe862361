"""What tensor parallelism asks of shapes: a rank's part of a matrix is whole groups, blocks and tiles.

by columns    o_proj, down_proj
by rows       q_b_proj, kv_b_proj, q/k/v, gate, up
not at all    q_a_proj, kv_a_proj_with_mqa, the indexer's, eh_proj
"""

from quantkit.engines import is_linear
from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import Rule
from quantkit.naming import Role
from quantkit.weights.encodings import FP8, INT4, NVFP4, Encoding

_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_BY_ROWS = frozenset({"q_b_proj", "kv_b_proj", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_LAST_MERGED = frozenset({"up_proj", "v_proj", "kv_a_proj_with_mqa"})  # their last block of rows may be a part of one
_TILE_ROWS, _TILE_COLUMNS = 64, 128  # of Marlin
_FEWER_RANKS = "Serve it on fewer ranks, or its experts whole on each (expert parallelism)."
_FP8_UTILS = {
    "vLLM": "model_executor/layers/quantization/utils/fp8_utils.py: validate_fp8_block_shape",
    "SGLang": "srt/layers/quantization/fp8_utils.py: validate_fp8_block_shape",
}


def _columns(facts: Facts, module: Module) -> int:
    return module.shape[1]


def _shared(facts: Facts, module: Module) -> int:
    """The size that ranks share; for what every rank holds, one that no number of ranks makes small."""
    if module.projection in _BY_COLUMNS:
        return module.shape[1]
    return module.shape[0] if module.projection in _BY_ROWS else 1 << 30


def _part(facts: Facts, module: Module, ranks: int) -> tuple[int, int]:
    """Rows and columns of a rank's part; a key or value head is on several ranks where there are fewer of them."""
    rows, columns = module.shape
    if module.projection in _BY_COLUMNS:
        return rows, columns // ranks
    if module.projection in ("k_proj", "v_proj"):
        ranks = min(ranks, facts.config.get("num_key_value_heads") or ranks)
    return (rows // ranks if module.projection in _BY_ROWS else rows), columns


def _on(ranks: int) -> str:
    return "on one rank" if ranks == 1 else f"over {ranks} ranks"


def _groups(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    assert module.format is not None
    assert module.format.block is not None
    columns, size = module.shape[1], module.format.block[1]
    if columns % (ranks * size) == 0:
        return None
    return f"has {columns} columns: {_on(ranks)}, tensor parallelism would cut its groups of {size}"


def _is_split_by_groups(facts: Facts, module: Module, encoding: Encoding) -> bool:
    return module.encoding is encoding and module.projection in _BY_COLUMNS


def _tiles(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """Fused modules are one matrix: their rows count together."""
    rows, columns = _part(facts, module, ranks)
    if fused := module.name.fused_projection:
        rows = sum(_part(facts, part, ranks)[0] for part in facts.partners[fused])
    if rows % _TILE_ROWS == 0 and columns % _TILE_COLUMNS == 0:
        return None
    return f"is {rows} x {columns} {_on(ranks)}; the kernel's tiles are {_TILE_ROWS} x {_TILE_COLUMNS}"


def _merged_rows(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    assert module.format is not None
    assert module.format.block is not None
    rows, block = module.shape[0], module.format.block[0]
    return f"has {rows} rows and a partner below it; FP8 blocks have {block}" if rows % block else None


def _blocks(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """With one rank, nothing is split."""
    assert module.format is not None
    assert module.format.block is not None
    if ranks == 1:
        return None
    rows, columns = _part(facts, module, ranks)
    by_columns = module.projection in _BY_COLUMNS
    size, block = (columns, module.format.block[1]) if by_columns else (rows, module.format.block[0])
    if size % block == 0:
        return None
    return f"has {size} {'columns' if by_columns else 'rows'} {_on(ranks)}; FP8 blocks have {block}"


def _is_fp8_block(module: Module) -> bool:
    return module.encoding is FP8 and module.format is not None and module.format.strategy == "block"


def _heads(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """Of the cached heads of GQA, ranks get whole ones each, or share one."""
    heads = int(facts.config.get("num_attention_heads") or 1)
    if heads % ranks:
        return f"has {heads} heads, which {ranks} ranks do not share"
    cached = 1 if facts.config.get("kv_lora_rank") else int(facts.config.get("num_key_value_heads") or heads)
    if max(cached, ranks) % min(cached, ranks):
        return f"comes with {cached} heads in the KV cache, which {ranks} ranks do not share"
    return None


def _experts(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    experts = int(facts.config.get("n_routed_experts") or ranks)
    return f"is one of {experts} experts, which are fewer than {ranks} ranks" if experts < ranks else None


RULES = (
    Rule(
        id="experts",
        demand="there are no fewer routed experts than ranks",
        why="tensor parallelism over more ranks is refused, though it cuts each expert and shares out none",
        sources={"SGLang": "srt/models/deepseek_v2.py, glm4_moe.py: DeepseekV2MoE, Glm4MoeSparseMoeBlock"},
        fix="Serve it on fewer ranks.",
        concerns=lambda facts, module: module.name.role is Role.ROUTED_EXPERT and is_linear(module),
        problem=_experts,
        shared=_shared,
    ),
    Rule(
        id="heads",
        demand="ranks divide the attention heads, and cached heads divide the ranks or the other way round",
        why="a head is on one rank",
        sources={
            "vLLM": "config/model.py: verify_with_parallel_config; model_executor/models/llama.py: LlamaAttention",
            "SGLang": "srt/models/llama.py: LlamaAttention; srt/models/deepseek_v2.py: DeepseekV2AttentionMLA",
        },
        fix="Serve it on a number of ranks that divides the heads (in SGLang, also with --enable-dp-attention).",
        concerns=lambda facts, module: (
            module.name.role is Role.ATTENTION and module.projection in ("q_proj", "q_b_proj") and is_linear(module)
        ),
        problem=_heads,
        shared=_shared,
    ),
    Rule(
        id="fp8-merged",
        demand="of FP8 blocks in a fused module, only the last part's rows may be no whole number of blocks",
        why="the scales of the parts are stacked",
        sources=_FP8_UTILS,
        fix="Give these roles the scheme bf16.",
        concerns=lambda facts, module: (
            _is_fp8_block(module)
            and is_linear(module)
            and module.name.fused_projection is not None
            and module.projection not in _LAST_MERGED
        ),
        problem=_merged_rows,
    ),
    Rule(
        id="int4-groups",
        demand="a rank's columns of an INT4 weight are whole groups",
        why="SGLang cuts the last group of experts off without a word; vLLM stops",
        sources={
            "vLLM": "model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/"
            "compressed_tensors_moe_wna16.py and schemes/compressed_tensors_wNa16.py: create_weights",
            "SGLang": "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py and "
            "compressed_tensors_wNa16.py: create_weights",
        },
        fix=f"{_FEWER_RANKS} Or convert with a smaller --group-size.",
        concerns=lambda facts, module: _is_split_by_groups(facts, module, INT4),
        problem=_groups,
        shared=_columns,
    ),
    Rule(
        id="nvfp4-groups",
        demand="a rank's columns of an NVFP4 weight are whole groups of 16",
        why="scales are shared out with the columns",
        sources={
            "vLLM": "model_executor/layers/quantization/modelopt.py: KNvfp4Static.create_weights",
            "SGLang": "srt/layers/quantization/modelopt_quant.py: ModelOptFp4LinearMethod.create_weights",
        },
        fix=_FEWER_RANKS,
        concerns=lambda facts, module: _is_split_by_groups(facts, module, NVFP4),
        problem=_groups,
        shared=_columns,
    ),
    Rule(
        id="int4-tiles",
        demand=f"a rank's part of a dense INT4 weight has rows by {_TILE_ROWS} and columns by {_TILE_COLUMNS}",
        why="the Marlin kernel has no smaller tile, and SGLang does not heed its own check; vLLM pads with zeros",
        sources={
            "SGLang": "srt/layers/quantization/marlin_utils.py: verify_marlin_supports_shape; "
            "compressed_tensors/schemes/compressed_tensors_wNa16.py: process_weights_after_loading"
        },
        fix="Serve it on fewer ranks, or give its role the scheme keep or bf16.",
        concerns=lambda facts, module: (
            module.encoding is INT4 and module.name.role is not Role.ROUTED_EXPERT and is_linear(module)
        ),
        problem=_tiles,
        shared=_shared,
    ),
    Rule(
        id="fp8-blocks",
        demand="a rank's part of an FP8 block weight is whole blocks",
        why="a block's scale cannot be shared by two ranks",
        sources=_FP8_UTILS,
        fix="Serve it on fewer ranks, or convert with --rest bf16.",
        concerns=lambda facts, module: _is_fp8_block(module) and module.projection in _BY_COLUMNS | _BY_ROWS,
        problem=_blocks,
        shared=_shared,
    ),
)

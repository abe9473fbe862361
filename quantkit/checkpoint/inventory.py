"""The tensor headers of a published GLM-5.x model, made from its config alone, so that a plan needs no weights.

Shapes: `configuration_glm_moe_dsa.py` and `modeling_glm_moe_dsa.py` of transformers 5.17; checked against the published
index of GLM-5.2-FP8 (118,629 tensors, 755,617,140,416 bytes).
"""

from collections.abc import Iterator
from typing import Any

from quantkit.checkpoint.header import TensorSpec, lay_out
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import fp8_block_specs
from quantkit.errors import SourceError

_MODEL_TYPES = ("glm_moe_dsa",)


def inventory(name: str, config_text: str) -> Source:
    """A source without weights, one shard for each layer, from the text of a config.json.

    Raises SourceError for a model type that is not known and for a config that lacks a key, naming it.
    """
    config = Source(name, None, config_text, {}).config
    if config.get("model_type") not in _MODEL_TYPES:
        raise SourceError(
            f"{name}: the tensors of model type {config.get('model_type')!r} cannot be told from its config",
            hint=f"Known: {', '.join(_MODEL_TYPES)}. Give a folder with the weights instead.",
        )
    try:
        model = _Glm(config)
        num_layers = config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)
        shards = {"model-top.safetensors": tuple(model.top())}
        for layer in range(num_layers):
            shards[f"model-layer-{layer:03}.safetensors"] = tuple(model.layer(layer))
    except KeyError as error:
        raise SourceError(f"{name}: its config has no {error.args[0]}, which its tensors' shapes need") from None
    except (TypeError, ValueError, IndexError) as error:
        raise SourceError(f"{name}: its config holds a value that makes no shape: {error}") from None
    tensors = {tensor.spec.name: tensor for shard, specs in shards.items() for tensor in lay_out(specs, shard)[1]}
    return Source(name, None, config_text, tensors)


class _Glm:
    """The tensors of GlmMoeDsaForCausalLM as published: FP8 blocks where the config says so, else BF16."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.hidden: int = config["hidden_size"]
        quantization = config.get("quantization_config") or {}
        block = tuple(quantization.get("weight_block_size") or (128, 128))
        self.block = block if quantization.get("quant_method") == "fp8" else None

    def top(self) -> Iterator[TensorSpec]:
        vocabulary = (self.config["vocab_size"], self.hidden)
        yield self._plain("model.embed_tokens.weight", *vocabulary)
        yield self._plain("model.norm.weight", self.hidden)
        yield self._plain("lm_head.weight", *vocabulary)

    def layer(self, layer: int) -> Iterator[TensorSpec]:
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._plain(f"{prefix}.{norm}.weight", self.hidden)
        yield from self._attention(f"{prefix}.self_attn")
        if self._has_indexer(layer):
            yield from self._indexer(f"{prefix}.self_attn.indexer")
        if layer < self.config["first_k_dense_replace"]:
            yield from self._mlp(f"{prefix}.mlp", self.config["intermediate_size"])
        else:
            yield from self._experts(f"{prefix}.mlp")
        if layer >= self.config["num_hidden_layers"]:
            yield from self._mtp(prefix)

    def _attention(self, prefix: str) -> Iterator[TensorSpec]:
        heads, q_rank, kv_rank, rope, nope, value = (
            self.config[key]
            for key in (
                "num_attention_heads",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_rope_head_dim",
                "qk_nope_head_dim",
                "v_head_dim",
            )
        )
        yield from self._linear(f"{prefix}.q_a_proj", q_rank, self.hidden)
        yield self._plain(f"{prefix}.q_a_layernorm.weight", q_rank)
        yield from self._linear(f"{prefix}.q_b_proj", heads * (nope + rope), q_rank)
        yield from self._linear(f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, self.hidden)
        yield self._plain(f"{prefix}.kv_a_layernorm.weight", kv_rank)
        yield from self._linear(f"{prefix}.kv_b_proj", heads * (nope + value), kv_rank)
        yield from self._linear(f"{prefix}.o_proj", self.hidden, heads * value)

    def _indexer(self, prefix: str) -> Iterator[TensorSpec]:
        heads, head_dim = self.config["index_n_heads"], self.config["index_head_dim"]
        yield from self._linear(f"{prefix}.wq_b", heads * head_dim, self.config["q_lora_rank"])
        yield from self._linear(f"{prefix}.wk", head_dim, self.hidden)
        yield self._plain(f"{prefix}.weights_proj.weight", heads, self.hidden)
        yield self._plain(f"{prefix}.k_norm.weight", head_dim)
        yield self._plain(f"{prefix}.k_norm.bias", head_dim)

    def _experts(self, prefix: str) -> Iterator[TensorSpec]:
        intermediate = self.config["moe_intermediate_size"]
        yield self._plain(f"{prefix}.gate.weight", self.config["n_routed_experts"], self.hidden)
        yield TensorSpec(f"{prefix}.gate.e_score_correction_bias", "F32", (self.config["n_routed_experts"],))
        yield from self._mlp(f"{prefix}.shared_experts", intermediate * self.config["n_shared_experts"])
        for expert in range(self.config["n_routed_experts"]):
            yield from self._mlp(f"{prefix}.experts.{expert}", intermediate)

    def _mlp(self, prefix: str, intermediate: int) -> Iterator[TensorSpec]:
        yield from self._linear(f"{prefix}.gate_proj", intermediate, self.hidden)
        yield from self._linear(f"{prefix}.up_proj", intermediate, self.hidden)
        yield from self._linear(f"{prefix}.down_proj", self.hidden, intermediate)

    def _mtp(self, prefix: str) -> Iterator[TensorSpec]:
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield self._plain(f"{prefix}.{norm}.weight", self.hidden)
        yield self._plain(f"{prefix}.eh_proj.weight", self.hidden, 2 * self.hidden)

    def _has_indexer(self, layer: int) -> bool:
        """IndexShare: full layers carry an indexer, shared ones use the last full one's; MTP has its own."""
        types = self.config.get("indexer_types")
        if layer >= self.config["num_hidden_layers"]:
            return True
        if types:
            return bool(types[layer] == "full")
        frequency = self.config.get("index_topk_freq") or 1
        return max(layer - (self.config.get("index_skip_topk_offset") or 0) + 1, 0) % frequency == 0

    def _linear(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        plain = self._plain(f"{module}.weight", rows, columns)
        if self.block:
            yield from fp8_block_specs(module, (rows, columns), self.block, "weight_scale_inv")
        else:
            yield plain

    def _plain(self, name: str, *shape: int) -> TensorSpec:
        if min(shape) < 1:
            raise ValueError(f"{name} would have the shape {list(shape)}")
        return TensorSpec(name, "BF16", shape)

"""The tensor headers of a published model, made from its config alone, so that a plan needs no weights.

Shapes: the sources of `family`; MTP layers: `deepseek_mtp.py` and `glm4_moe_mtp.py` of vLLM 0.33. Checked against
published totals: GLM-5.2-FP8 (118,629 tensors, 755,617,140,416 bytes), nvidia/GLM-5.2-NVFP4 (232,385 tensors,
464,795,267,072 bytes), Kimi K2.6 (208,550 tensors, 595,148,192,736 bytes) and, in GB, GLM-4.5 (716.7); DeepSeek-V3's
671 B parameters and 11.5 B more for MTP.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.header import StoredTensor, TensorSpec, in_file_order
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.families.family import DSA_KEYS, MLA_KEYS, Family, family_of
from quantkit.families.storage import storage
from quantkit.families.vision import vision_tower

_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def inventory(name: str, config_text: str) -> Source:
    """A source without weights, one shard for each layer, from the text of a config.json.

    Raises SourceError for a model type or a quantization that is not known, and for a config that lacks keys, naming
    them.
    """
    source = Source(name, None, config_text, {})
    untold = f"the tensors of model type {source.config.get('model_type')!r} cannot be told from its config"
    family = family_of(source, untold, "Give a folder with the weights instead.")
    config = source.text_config
    if missing := [key for key in (*_KEYS, *family.keys) if key not in config]:
        raise SourceError(f"{name}: its config has no {', '.join(missing)}, which its tensors' shapes need")
    try:
        shards = dict(_shards(_Model(name, config, family), source.config))
    except KeyError as error:
        raise SourceError(f"{name}: its config has no {error.args[0]}, which its tensors' shapes need") from None
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise SourceError(f"{name}: its config holds a value that makes no shape: {error}") from None
    tensors = {tensor.spec.name: tensor for shard, specs in shards.items() for tensor in _placed(specs, shard)}
    return Source(name, None, config_text, tensors)


def _placed(specs: tuple[TensorSpec, ...], shard: str) -> Iterator[StoredTensor]:
    """Tensors in the order of a file that holds them, without its header: there is no file to read."""
    offset = 0
    for spec in in_file_order(specs):
        yield StoredTensor(spec, shard, offset)
        offset += spec.nbytes


def has_indexer(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer of a model with sparse attention has an indexer; `config` is the language model's.

    IndexShare: full layers carry an indexer, shared ones use the last full one's; an MTP layer has its own.
    """
    types = config.get("indexer_types")
    if layer >= config["num_hidden_layers"]:
        return True
    return bool(types[layer] == "full") if types else is_scheduled(config, layer)


def is_scheduled(config: Mapping[str, Any], layer: int) -> bool:
    """The same of a main layer by the schedule alone, which is all that vLLM reads: a pattern of F and S, or a
    frequency. Defaults: `configuration_glm_moe_dsa.py` of transformers 5.17, `deepseek_v2.py` of vLLM 0.33."""
    if pattern := config.get("index_topk_pattern"):
        return layer >= len(pattern) or pattern[layer] != "S"
    frequency, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    return max(layer - (2 if offset is None else offset) + 1, 0) % frequency == 0


def _shards(model: "_Model", config: dict[str, Any]) -> Iterator[tuple[str, tuple[TensorSpec, ...]]]:
    parts = {"model-top": model.top()}
    num_layers = model.config["num_hidden_layers"] + (model.config.get("num_nextn_predict_layers") or 0)
    parts |= {f"model-layer-{layer:03}": model.layer(layer) for layer in range(num_layers)}
    if model.family.vision:
        parts["model-vision"] = vision_tower(config["vision_config"])
    named = (part.get(key) for part in (model.config, config) for key in ("dtype", "torch_dtype"))
    dtype = _DTYPES.get(str(next(filter(None, named), None)), "BF16")
    for shard, specs in parts.items():
        in_dtype = (replace(spec, dtype=dtype) if spec.dtype == "BF16" else spec for spec in specs)
        yield f"{shard}.safetensors", tuple(specs if dtype == "BF16" else in_dtype)


class _Model:
    """The tensors of one language model; `config` is its own, not that of a model with vision round it.

    A dtype of BF16 stands for the model's own, whatever that is.
    """

    def __init__(self, name: str, config: dict[str, Any], family: Family) -> None:
        self.config, self.family = config, family
        self.hidden: int = config["hidden_size"]
        quantization = config.get("quantization_config") or {}
        self.storage = storage(name, quantization, family.shape_dtype)
        self.attention_bias = bool(config.get("attention_bias"))
        self.mlp_bias = family.biases and bool(config.get("mlp_bias"))

    def top(self) -> Iterator[TensorSpec]:
        prefix = self.family.prefix
        yield from self._embedding(f"{prefix}model.embed_tokens")
        yield self._plain(f"{prefix}model.norm.weight", self.hidden)
        if not self.config.get("tie_word_embeddings"):
            yield from self._embedding(f"{prefix}lm_head")

    def layer(self, layer: int) -> Iterator[TensorSpec]:
        prefix = f"{self.family.prefix}model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._plain(f"{prefix}.{norm}.weight", self.hidden)
        yield from (self._mla if self.family.mla else self._gqa)(f"{prefix}.self_attn")
        if self.family.indexer and has_indexer(self.config, layer):
            yield from self._indexer(f"{prefix}.self_attn.indexer")
        if self._is_sparse(layer):
            yield from self._experts(f"{prefix}.mlp")
        else:
            yield from self._mlp(f"{prefix}.mlp", self.config["intermediate_size"])
        if layer >= self.config["num_hidden_layers"]:
            yield from self._mtp(prefix)

    def _is_sparse(self, layer: int) -> bool:
        if not self.family.moe:
            return False
        frequency: int = self.config.get("moe_layer_freq") or 1
        return bool(layer >= self.config["first_k_dense_replace"]) and layer % frequency == 0

    def _mla(self, prefix: str) -> Iterator[TensorSpec]:
        q_rank, kv_rank, nope, rope, value = (self.config[key] for key in MLA_KEYS)
        heads, bias = self.config["num_attention_heads"], self.attention_bias
        if q_rank is None:
            yield from self._linear(f"{prefix}.q_proj", heads * (nope + rope), self.hidden)
        else:
            yield from self._linear(f"{prefix}.q_a_proj", q_rank, self.hidden, bias)
            yield self._plain(f"{prefix}.q_a_layernorm.weight", q_rank)
            yield from self._linear(f"{prefix}.q_b_proj", heads * (nope + rope), q_rank)
        yield from self._linear(f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, self.hidden, bias)
        yield self._plain(f"{prefix}.kv_a_layernorm.weight", kv_rank)
        yield from self._linear(f"{prefix}.kv_b_proj", heads * (nope + value), kv_rank)
        yield from self._linear(f"{prefix}.o_proj", self.hidden, heads * value, bias)

    def _gqa(self, prefix: str) -> Iterator[TensorSpec]:
        heads, bias = self.config["num_attention_heads"], self.attention_bias
        kv_heads = self.config.get("num_key_value_heads") or heads
        head_dim = self.config.get("head_dim") or self.hidden // heads
        for projection, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            yield from self._linear(f"{prefix}.{projection}_proj", rows, self.hidden, bias)
        yield from self._linear(f"{prefix}.o_proj", self.hidden, heads * head_dim, bias and self.family.biases)
        if self.config.get("use_qk_norm"):
            yield self._plain(f"{prefix}.q_norm.weight", head_dim)
            yield self._plain(f"{prefix}.k_norm.weight", head_dim)

    def _indexer(self, prefix: str) -> Iterator[TensorSpec]:
        heads, head_dim = (self.config[key] for key in DSA_KEYS)
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
        yield from self._linear(f"{prefix}.gate_proj", intermediate, self.hidden, self.mlp_bias)
        yield from self._linear(f"{prefix}.up_proj", intermediate, self.hidden, self.mlp_bias)
        yield from self._linear(f"{prefix}.down_proj", self.hidden, intermediate, self.mlp_bias)

    def _mtp(self, prefix: str) -> Iterator[TensorSpec]:
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield self._plain(f"{prefix}.{norm}.weight", self.hidden)
        yield self._plain(f"{prefix}.eh_proj.weight", self.hidden, 2 * self.hidden)
        if self.family.own_mtp_head:
            yield from self._embedding(f"{prefix}.embed_tokens")
            yield from self._embedding(f"{prefix}.shared_head.head")

    def _embedding(self, module: str) -> Iterator[TensorSpec]:
        yield self._plain(f"{module}.weight", self.config["vocab_size"], self.hidden)

    def _linear(self, module: str, rows: int, columns: int, bias: bool = False) -> Iterator[TensorSpec]:
        self._plain(f"{module}.weight", rows, columns)  # refuses what is no shape
        yield from self.storage(module, rows, columns)
        if bias:
            yield self._plain(f"{module}.bias", rows)

    def _plain(self, name: str, *shape: int) -> TensorSpec:
        if min(shape) < 1:
            raise ValueError(f"{name} would have the shape {list(shape)}")
        return TensorSpec(name, "BF16", shape)

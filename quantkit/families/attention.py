"""What a model keeps of every token, and what it reads and computes of it later: MLA, DSA and GQA.

    MLA, BF16     (kv_lora_rank + rope) x 2 bytes per layer                        1152 for GLM-5.x and Kimi K2.x
    MLA, FP8      (kv_lora_rank + rope) x 1                                         576
    fp8_ds_mla    kv_lora_rank FP8 + an FP32 scale for each 128 + rope in BF16      656
    DSA           index_head_dim FP8 + an FP32 scale, for each layer's index cache  132
    GQA           2 x KV heads x head_dim x (2 or 1)                               4096 for GLM-4.x in BF16

Sources: vLLM 0.33, `v1/attention/backends/mla/` (fp8_ds_mla, indexer) and SGLang 0.5.23, `mem_cache/memory_pool.py`
(MLATokenToKVPool). MLA and index caches are whole on every rank; KV heads are shared out, one at least for each rank.
"""

from dataclasses import dataclass

from quantkit.checkpoint.source import Source
from quantkit.choices import IndexCache, KvLayout
from quantkit.errors import UsageError
from quantkit.families.inventory import has_indexer
from quantkit.families.keys import ConfigKeys

_SCALE_BYTES = 4
_SCALE_SPAN = 128  # values that share a scale in fp8_ds_mla


@dataclass(frozen=True)
class Attention:
    """The sizes of a model's attention.

    layers       with a KV cache: the main ones, and the MTP layers if they are loaded
    heads        query heads
    latent       kv_lora_rank of MLA; 0 for GQA
    rope         rotated values beside the latent
    head_dims    what a head multiplies without absorption: query-key dimension + value dimension
    kv_heads     of GQA; 0 for MLA
    head_dim     of GQA
    indexers     layers with an indexer
    index_heads, index_dim, topk   of the indexer; topk tokens are attended to. None: all are
    """

    layers: int
    heads: int
    latent: int = 0
    rope: int = 0
    head_dims: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    indexers: int = 0
    index_heads: int = 0
    index_dim: int = 0
    topk: int | None = None

    @classmethod
    def of(cls, source: Source, *, mtp: bool = False) -> "Attention":
        """From a config; `mtp` counts the MTP layers too. SourceError names a key that is missing."""
        keys = ConfigKeys(source, "which the KV cache needs")
        layers = keys.number("num_hidden_layers") + (keys.get("num_nextn_predict_layers", 0) if mtp else 0)
        heads = keys.number("num_attention_heads")
        if keys.get("kv_lora_rank") is None:
            head_dim = keys.get("head_dim") or keys.number("hidden_size") // heads
            return cls(layers, heads, kv_heads=keys.number("num_key_value_heads", heads), head_dim=head_dim)
        rope = keys.number("qk_rope_head_dim")
        dims = keys.number("qk_nope_head_dim") + rope + keys.number("v_head_dim")
        return cls(layers, heads, keys.number("kv_lora_rank"), rope, dims, **_indexer(keys, layers))

    def layer_bytes(self, layout: KvLayout, ranks: int = 1) -> int:
        """Bytes that one rank keeps of one token in one layer, the index cache left out."""
        width = 2 if layout is KvLayout.BF16 else 1
        if not self.latent:
            if layout is KvLayout.FP8_DS_MLA:
                raise UsageError("--kv fp8_ds_mla is a layout of MLA; this model has KV heads", hint="Give --kv fp8.")
            return 2 * -(-self.kv_heads // min(ranks, self.kv_heads)) * self.head_dim * width
        if layout is KvLayout.FP8_DS_MLA:
            return self.latent + self.latent // _SCALE_SPAN * _SCALE_BYTES + 2 * self.rope
        return (self.latent + self.rope) * width

    @property
    def index_bytes(self) -> int:
        """Bytes of one token in one index cache: FP8 values and an FP32 scale for each 128."""
        return self.index_dim + -(-self.index_dim // _SCALE_SPAN) * _SCALE_BYTES

    def index_caches(self, index_cache: IndexCache) -> int:
        """The number of layers that keep an index cache."""
        return self.layers if self.indexers and index_cache is IndexCache.ALL else self.indexers

    def bytes_per_token(
        self, layout: KvLayout, index_cache: IndexCache = IndexCache.INDEXERS, *, ranks: int = 1
    ) -> int:
        """Bytes that one of `ranks` tensor-parallel ranks keeps of one token in all layers, index caches included."""
        return self.layers * self.layer_bytes(layout, ranks) + self.index_caches(index_cache) * self.index_bytes

    def read_bytes(self, layout: KvLayout, context: int, *, ranks: int = 1) -> int:
        """Bytes that a rank reads to decode one token after `context` others.

        Sparse attention reads `topk` of them, and the index cache of all.
        """
        caches = context * self.indexers * self.index_bytes
        return self.attended(context) * self.layers * self.layer_bytes(layout, ranks) + caches

    def attended(self, context: int) -> int:
        """How many of `context` tokens a layer attends to."""
        return min(context, self.topk or context)

    def mean_attended(self, tokens: int) -> float:
        """The mean of `attended` over the tokens of a prompt, each after those before it."""
        most = self.attended(tokens)
        return most - most**2 / (2 * tokens)

    def flops(self, attended: float, *, absorbed: bool) -> float:
        """FLOPs of scores and values of one token that attends to `attended` others, over all heads and layers.

        absorbed  MLA on the latent itself (decode, and sparse prefill), else on keys and values unpacked from it
        """
        dims = self.head_dims if self.latent else 2 * self.head_dim
        if self.latent and absorbed:
            dims = 2 * self.latent + self.rope
        return 2.0 * self.layers * self.heads * dims * attended

    def index_flops(self, context: float) -> float:
        """FLOPs of the indexers' scores of one token after `context` others."""
        return 2.0 * self.indexers * self.index_heads * self.index_dim * context


def _indexer(keys: ConfigKeys, layers: int) -> dict[str, int]:
    if keys.get("index_n_heads") is None:
        return {}
    return {
        "indexers": sum(has_indexer(keys.config, layer) for layer in range(layers)),
        "index_heads": keys.number("index_n_heads"),
        "index_dim": keys.number("index_head_dim"),
        "topk": keys.number("index_topk"),
    }

"""What of a config.json decides the computation. A key that is missing is an error, unless its default is the family's.

Where publishers and engines disagree:

    head_dim           of MLA models is wrong in GLM-5.2's config and not read: qk_rope_head_dim is what is rotated
    norms in MLA       have an epsilon of 1e-6 (transformers 5.17), whatever `rms_norm_eps` says
    indexer            rotates neighbouring channels in GLM-5.x, halves in DeepSeek-V3.2
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.errors import SourceError
from quantkit.families.family import Family, family_of
from quantkit.families.inventory import has_indexer
from quantkit.families.keys import ConfigKeys


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions.

    width        channels that are rotated
    kind         default, llama3, yarn or linear
    parameters   `rope_theta` and what the kind needs
    interleaved  whether a pair is two neighbours, else channel i and i + width / 2
    """

    width: int
    kind: str
    parameters: Mapping[str, float]
    interleaved: bool


@dataclass(frozen=True)
class GqaConfig:
    """Grouped-query attention; `bias` is that of q, k and v, `output_bias` that of o."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    output_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: ranks of the latents and channels of a head; `q_rank` None: queries have none."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    bias: bool


@dataclass(frozen=True)
class DsaConfig:
    """Sparse attention: each query attends to its `top_k` tokens; `full` says which layers have an indexer."""

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    full: tuple[bool, ...]


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts, chosen from the best `top_groups` of `groups`; `sparse` says which layers have them."""

    experts: int
    shared: int
    intermediate: int
    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    scale: float
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's numbers.

    prefix       of the language model's tensors
    mtp_layers   layers for multi-token prediction, which come after the others
    max_length   tokens of a sequence by the config, or None where it does not say
    """

    model_type: str
    prefix: str
    layers: int
    mtp_layers: int
    hidden: int
    intermediate: int
    vocab: int
    eps: float
    tied: bool
    mlp_bias: bool
    max_length: int | None
    rope: RopeConfig
    attention: GqaConfig | MlaConfig
    dsa: DsaConfig | None = None
    moe: MoeConfig | None = None


def read_config(source: Source) -> ModelConfig:
    """What the config of `source` says. SourceError names a key that is missing or says what cannot be computed."""
    family = family_of(source, f"model type {source.model_type!r} cannot be run")
    keys = ConfigKeys(source, "without which the model cannot be run")
    keys.only("hidden_act", "silu")
    attention = _mla(keys) if family.mla else _gqa(keys, family)
    head_dim = attention.rope if isinstance(attention, MlaConfig) else attention.head_dim
    return ModelConfig(
        model_type=source.model_type,
        prefix=family.prefix,
        layers=keys.number("num_hidden_layers"),
        mtp_layers=keys.get("num_nextn_predict_layers", 0),
        hidden=keys.number("hidden_size"),
        intermediate=keys.number("intermediate_size"),
        vocab=keys.number("vocab_size"),
        eps=float(keys.need("rms_norm_eps")),
        tied=bool(keys.get("tie_word_embeddings", False)),
        mlp_bias=family.biases and bool(keys.get("mlp_bias", False)),
        max_length=keys.get("max_position_embeddings"),
        rope=_rope(keys, family, head_dim),
        attention=attention,
        dsa=_dsa(keys, family) if family.indexer else None,
        moe=_moe(keys) if family.moe else None,
    )


def _rope(keys: ConfigKeys, family: Family, head_dim: int) -> RopeConfig:
    """`rope_scaling` or the newer `rope_parameters`; `rope_theta` and the rotated share may lie beside them."""
    parameters = dict(keys.get("rope_scaling") or keys.get("rope_parameters") or {})
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    parameters.setdefault("rope_theta", keys.get("rope_theta"))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise SourceError(f"{keys.name}: rope type {kind!r} cannot be run; known: {', '.join(needed)}")
    if missing := [key for key in ("rope_theta", *needed[kind]) if parameters.get(key) is None]:
        raise SourceError(f"{keys.name}: {CONFIG_FILE} has no {missing[0]}, which rotary positions need")
    width = head_dim
    if family.partial_rotary:
        width = int(head_dim * (parameters.get("partial_rotary_factor") or keys.need("partial_rotary_factor")))
    numbers = {key: value for key, value in parameters.items() if isinstance(value, int | float)}
    return RopeConfig(width, kind, numbers, family.interleaved and bool(keys.get("rope_interleave", True)))


def _gqa(keys: ConfigKeys, family: Family) -> GqaConfig:
    heads = keys.number("num_attention_heads")
    bias = bool(keys.get("attention_bias", False))
    return GqaConfig(
        heads=heads,
        kv_heads=keys.number("num_key_value_heads", heads),
        head_dim=keys.number("head_dim", keys.number("hidden_size") // heads),
        bias=bias,
        output_bias=bias and family.biases,
        qk_norm=bool(keys.get("use_qk_norm", False)),
    )


def _mla(keys: ConfigKeys) -> MlaConfig:
    return MlaConfig(
        heads=keys.number("num_attention_heads"),
        q_rank=keys.get("q_lora_rank"),
        kv_rank=keys.number("kv_lora_rank"),
        nope=keys.number("qk_nope_head_dim"),
        rope=keys.number("qk_rope_head_dim"),
        value=keys.number("v_head_dim"),
        bias=bool(keys.get("attention_bias", False)),
    )


def _dsa(keys: ConfigKeys, family: Family) -> DsaConfig:
    full = tuple(has_indexer(keys.config, layer) for layer in range(keys.number("num_hidden_layers")))
    if not full[0]:
        raise SourceError(f"{keys.name}: the first layer has no indexer, and there is none before it to share")
    return DsaConfig(
        heads=keys.number("index_n_heads"),
        head_dim=keys.number("index_head_dim"),
        top_k=keys.number("index_topk"),
        interleaved=bool(keys.get("indexer_rope_interleave", family.index_interleaved)),
        full=full,
    )


def _moe(keys: ConfigKeys) -> MoeConfig:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    layers = range(keys.number("num_hidden_layers"))
    if types := keys.get("mlp_layer_types"):
        sparse = tuple(types[layer] == "sparse" for layer in layers)
    else:
        first, frequency = keys.need("first_k_dense_replace"), keys.get("moe_layer_freq", 1)
        sparse = tuple(layer >= first and layer % frequency == 0 for layer in layers)
    return MoeConfig(
        experts=keys.number("n_routed_experts"),
        shared=keys.number("n_shared_experts"),
        intermediate=keys.number("moe_intermediate_size"),
        top_k=keys.number("num_experts_per_tok"),
        groups=keys.number("n_group"),
        top_groups=keys.number("topk_group"),
        normalize=bool(keys.need("norm_topk_prob")),
        scale=float(keys.need("routed_scaling_factor")),
        sparse=sparse,
    )

"""The families of models that quantkit knows, and what the models of each have in common.

Sources: `modeling_glm_moe_dsa.py`, `modeling_glm4_moe.py`, `modeling_glm4_moe_lite.py`, `modeling_deepseek_v3.py`,
`modeling_deepseek_v32.py` and `modeling_llama.py` of transformers 5.17, `modeling_kimi_k25.py` of the Hub.
"""

from dataclasses import dataclass

from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError

_MOE_KEYS = ("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DSA_KEYS = ("index_n_heads", "index_head_dim")
_GQA_KEYS = ("num_key_value_heads", "head_dim", "attention_bias", "use_qk_norm")


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` have in common.

    mla                multi-head latent attention, else grouped-query attention
    moe                all but the first layers have routed and shared experts
    indexer            DeepSeek sparse attention: some layers have an indexer
    own_mtp_head       the MTP layer has an embedding and a head of its own
    biases             `attention_bias` and `mlp_bias` give one to every projection, o_proj included
    needed             keys of a config besides those of its attention and experts, on which tensors depend
    prefix             of the language model's tensors
    vision             a vision tower and its projector come along
    shape_dtype        of INT4's `weight_shape`
    interleaved        rotary positions turn neighbouring channels, else channel i and i + width / 2
    index_interleaved  the same in the indexer
    partial_rotary     only a part of a head is rotated, and the config must say which
    """

    mla: bool = True
    moe: bool = True
    indexer: bool = False
    own_mtp_head: bool = True
    biases: bool = False
    needed: tuple[str, ...] = ()
    prefix: str = ""
    vision: bool = False
    shape_dtype: str = "I64"
    interleaved: bool = True
    index_interleaved: bool = False
    partial_rotary: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """What the language model's config must hold besides what all need."""
        parts = ((self.moe, _MOE_KEYS), (self.mla, MLA_KEYS), (self.indexer, DSA_KEYS))
        return (*(key for has, keys in parts if has for key in keys), *self.needed)


FAMILIES = {
    "glm_moe_dsa": Family(indexer=True, own_mtp_head=False, index_interleaved=True),
    "glm4_moe": Family(mla=False, needed=_GQA_KEYS, interleaved=False, partial_rotary=True),
    "glm4_moe_lite": Family(),
    "deepseek_v3": Family(),
    "deepseek_v32": Family(indexer=True),
    "kimi_k2": Family(shape_dtype="I32"),
    "kimi_k25": Family(prefix="language_model.", vision=True, shape_dtype="I32"),
    "llama": Family(mla=False, moe=False, biases=True, interleaved=False),
}


def family_of(source: Source, what: str, hint: str = "") -> Family:
    """The family of a model. Raises SourceError that its `what` cannot be told from a config, with the known ones."""
    family = FAMILIES.get(source.model_type)
    if family is None:
        known = f"Known: {', '.join(FAMILIES)}."
        raise SourceError(f"{source.name}: {what}", hint=f"{known} {hint}".strip())
    return family

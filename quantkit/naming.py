"""From a tensor's name to what it is: layer, expert, role and the modules that engines fuse it with.

Covers GLM-5.x and DeepSeek/Kimi (MLA, indexer), GLM-4.x and Llama (GQA), under any prefix (`language_model.` and the
like). Adding a model family is adding lines to `_ROLES`.

    model.layers.3.mlp.experts.17.gate_proj.weight_scale_inv
    └──────────────── module ──────────────┘ └─── leaf ────┘    layer 3, expert 17, routed_expert, fuses to gate_up_proj
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache


class Role(StrEnum):
    """What a module does in the model; recipes choose by it and reports group by it."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION = "attention"  # every attention projection but kv_b_proj and the indexer's
    KV_B = "kv_b"
    INDEXER = "indexer"  # wq_b and wk
    INDEXER_WEIGHTS = "indexer_weights"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    DENSE_MLP = "dense_mlp"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERT = "routed_expert"
    MTP_PROJECTION = "mtp_projection"
    VISION = "vision"
    OTHER = "other"


_ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"mlp\.experts\.(\d+\.(gate|up|down)_proj|gate_up_proj|down_proj)", Role.ROUTED_EXPERT),
        (r"mlp\.shared_experts?\.(gate|up|down)_proj", Role.SHARED_EXPERT),
        (r"mlp\.(gate|up|down)_proj", Role.DENSE_MLP),
        (r"mlp\.gate", Role.ROUTER),
        (r"self_attn\.kv_b_proj", Role.KV_B),
        (r"self_attn\.indexer\.(wq_b|wk)", Role.INDEXER),
        (r"self_attn\.indexer\.weights_proj", Role.INDEXER_WEIGHTS),
        (r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|q_proj|k_proj|v_proj|o_proj)", Role.ATTENTION),
        (r"(self_attn\.(indexer\.)?)?\w*norm|shared_head\.norm", Role.NORM),
        (r"eh_proj", Role.MTP_PROJECTION),
        (r"embed_tokens", Role.EMBEDDING),
        (r"lm_head|shared_head\.head", Role.LM_HEAD),
    )
)
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_AT_TOP = re.compile(r"(?:.*\.)?(embed_tokens|norm|lm_head)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_VISION = re.compile(r"(.*\.)?(vision_tower|visual|mm_projector)\.")
FUSED_PARTS = {  # a projection that engines build -> those of a checkpoint that they fuse into it
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
_FUSED = {part: fused for fused, parts in FUSED_PARTS.items() for part in parts}


@lru_cache(4096)
def _role(local: str) -> Role:
    """The role of a module by its name within the layer, which the layers of a model share."""
    return next((role for pattern, role in _ROLES if pattern.fullmatch(local)), Role.OTHER)


@dataclass(frozen=True)
class TensorName:
    """A tensor's name, taken apart."""

    module: str
    leaf: str

    @classmethod
    def parse(cls, name: str) -> "TensorName":
        """Split `name` at its last dot; any string is a valid name, an unknown one has the role `other`."""
        module, _, leaf = name.rpartition(".")
        return cls(module, leaf)

    def __str__(self) -> str:
        return self.sibling(self.leaf)

    def sibling(self, leaf: str) -> str:
        """The full name of another tensor of the same module."""
        return f"{self.module}.{leaf}" if self.module else leaf

    @cached_property
    def _in_layer(self) -> re.Match[str] | None:
        """The number of the layer and the rest of the name."""
        return _IN_LAYER.fullmatch(self.module)

    @cached_property
    def layer(self) -> int | None:
        """The number in `layers.N`; the MTP layer's is the config's `num_hidden_layers` or more."""
        return int(self._in_layer[1]) if self._in_layer else None

    @cached_property
    def expert(self) -> int | None:
        """The number in `experts.E` of a routed expert; None for all experts of a layer in one tensor."""
        match = _EXPERT.search(self.module)
        return int(match[1]) if match else None

    @cached_property
    def role(self) -> Role:
        """What the module does; the router's correction bias has a role of its own, because it must stay FP32."""
        if _VISION.match(self.module):
            return Role.VISION
        if self._in_layer:
            local = self._in_layer[2]
            if local.endswith("mlp.experts"):  # whose tensors are parameters, not weights of modules
                local = f"{local}.{self.leaf}"
        else:
            top = _AT_TOP.fullmatch(self.module)
            local = top[1] if top else ""
        role = _role(local)
        return Role.ROUTER_BIAS if role is Role.ROUTER and self.leaf.endswith("bias") else role

    def is_mtp(self, num_hidden_layers: int) -> bool:
        """Whether the module belongs to a multi-token-prediction layer, which come after the main layers."""
        return self.layer is not None and self.layer >= num_hidden_layers and self.role is not Role.VISION

    @property
    def fused_module(self) -> str | None:
        """The module that the engines load this one into together with its partners, or None.

        All experts of a layer and all their projections are partners: engines hold them in one module.
        """
        if self.expert is not None or self.role is Role.ROUTED_EXPERT:
            return self.module.partition(".experts")[0] + ".experts"
        return self.fused_projection

    @property
    def fused_projection(self) -> str | None:
        """The projection that the module is a part of once fused, of one expert only; its parts share scales."""
        parent, _, last = self.module.rpartition(".")
        return f"{parent}.{_FUSED[last]}" if last in _FUSED else None

    @property
    def partners(self) -> tuple[str, ...]:
        """The modules that are fused into `fused_projection`, this one among them; none where it is not fused."""
        parent, _, last = self.module.rpartition(".")
        return tuple(f"{parent}.{part}" for part in FUSED_PARTS[_FUSED[last]]) if last in _FUSED else ()

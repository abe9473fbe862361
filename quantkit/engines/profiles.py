"""The engines and how they build modules: names, fusions, prefixes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quantkit.naming import Role, TensorName

# What every engine builds as a quantizable Linear; routers, embeddings and eh_proj never take a scheme from the config.
LINEAR_ROLES = frozenset(
    {
        Role.ATTENTION,
        Role.KV_B,
        Role.INDEXER,
        Role.INDEXER_WEIGHTS,
        Role.DENSE_MLP,
        Role.SHARED_EXPERT,
        Role.ROUTED_EXPERT,
        Role.LM_HEAD,
    }
)


class Named(Protocol):
    """Anything that has a tensor's name."""

    @property
    def name(self) -> TensorName:
        """The name."""


def is_linear(weight: Named) -> bool:
    """Whether the config decides how an engine builds the module that `weight` belongs to, unlike its bias, say."""
    return weight.name.role in LINEAR_ROLES and weight.name.leaf in ("weight", "weight_packed")


@dataclass(frozen=True)
class Engine:
    """How one engine builds and names modules.

    fused                 checkpoint fusion -> the name that the engine builds; a fusion not listed is not fused
    expanded              the built names that are also looked up by their members
    ignores_members_only  whether `ignore` is tested against an expanded module's members and not against its own name
    class_before_members  whether the class `Linear` is tested before the members
    ignores_suffix        whether a plain `ignore` entry matches a dotted suffix of the name
    needs_target          whether a module that is neither ignored nor targeted is an error
    head_is_linear        whether the head is of the class `Linear`; else it is quantized only by its name
    mtp_prefix            what stands for `model.layers.N` in the MTP layer
    reads_modelopt        whether it loads ModelOpt checkpoints
    excludes_substrings   whether an entry of ModelOpt's list excludes every name that it is a part of
    """

    name: str
    fused: Mapping[str, str] = field(default_factory=dict)
    expanded: frozenset[str] = frozenset()
    ignores_members_only: bool = False
    class_before_members: bool = False
    ignores_suffix: bool = False
    needs_target: bool = False
    head_is_linear: bool = False
    mtp_prefix: str | None = None
    reads_modelopt: bool = False
    excludes_substrings: bool = False

    def built(self, name: TensorName, num_hidden_layers: int) -> str:
        """The name of the module that the engine builds for the module of `name`."""
        module = name.module
        if self.mtp_prefix and name.is_mtp(num_hidden_layers):
            module = re.sub(r"^.*?layers\.\d+", self.mtp_prefix, module)
        fusion = (name.fused_module or "").rpartition(".")[2]
        return f"{module.rpartition('.')[0]}.{self.fused[fusion]}" if fusion in self.fused else module


ENGINES = (
    Engine(
        "vLLM",
        fused={name: name for name in ("gate_up_proj", "fused_qkv_a_proj", "qkv_proj")},
        expanded=frozenset({"gate_up_proj", "fused_qkv_a_proj", "qkv_proj"}),
        reads_modelopt=True,
        excludes_substrings=True,
    ),
    Engine(
        "SGLang",
        fused={
            "gate_up_proj": "gate_up_proj",
            "fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa",
            "qkv_proj": "qkv_proj",
        },
        expanded=frozenset({"fused_qkv_a_proj_with_mqa"}),
        ignores_members_only=True,
        class_before_members=True,
        ignores_suffix=True,
        needs_target=True,
        mtp_prefix="model.decoder",
        reads_modelopt=True,
    ),
    Engine("transformers", head_is_linear=True),
)

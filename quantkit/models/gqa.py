"""Grouped-query attention: `heads` queries share `kv_heads` keys and values (Llama, GLM-4.x).

Source of the order of operations: `modeling_llama.py` and `modeling_glm4_moe.py` of transformers 5.17.
"""

from dataclasses import dataclass

import torch

from quantkit.families.config import GqaConfig, ModelConfig
from quantkit.models.cache import Attended, Step
from quantkit.models.linear import Linear
from quantkit.models.norm import RmsNorm
from quantkit.models.rope import rotate_front
from quantkit.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class Gqa:
    """One layer's attention; `q_norm` and `k_norm` act on each head."""

    config: GqaConfig
    layer: int
    interleaved: bool
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None

    def attend(self, x: torch.Tensor, step: Step, selected: torch.Tensor | None) -> Attended:
        """[T, hidden] to [T, hidden]."""
        head_dim = self.config.head_dim
        query, key, value = (
            projection(x).view(len(x), -1, head_dim) for projection in (self.query, self.key, self.value)
        )
        if self.q_norm and self.k_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate_front(heads, step.rotation, self.interleaved) for heads in (query, key))
        step.cache.append_heads(self.layer, step.positions, key, value)
        attended = step.cache.attend_heads(self.layer, step.positions, query, head_dim**-0.5)
        return Attended(self.output(attended.flatten(1)), selected)


def take_gqa(loader: WeightLoader, prefix: str, layer: int, config: ModelConfig) -> Gqa:
    """The attention whose tensors' names begin with `prefix`."""
    gqa = config.attention
    assert isinstance(gqa, GqaConfig)
    widths = gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim
    norms = [
        RmsNorm(loader.vector(f"{prefix}.{name}.weight", gqa.head_dim), config.eps) if gqa.qk_norm else None
        for name in ("q_norm", "k_norm")
    ]
    return Gqa(
        config=gqa,
        layer=layer,
        interleaved=config.rope.interleaved,
        query=loader.linear(f"{prefix}.q_proj", widths[0], config.hidden, gqa.bias),
        key=loader.linear(f"{prefix}.k_proj", widths[1], config.hidden, gqa.bias),
        value=loader.linear(f"{prefix}.v_proj", widths[1], config.hidden, gqa.bias),
        output=loader.linear(f"{prefix}.o_proj", config.hidden, widths[0], gqa.output_bias),
        q_norm=norms[0],
        k_norm=norms[1],
    )

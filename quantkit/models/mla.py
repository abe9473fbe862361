"""Multi-head latent attention (DeepSeek-V3, Kimi K2.x, GLM-5.x), absorbed: only latents are kept and attended to.

    latent, key  kv_a(x): `kv_rank` channels, normed, and `rope` channels, rotated; one row for all heads
    K[h], V[h]   the rows of kv_b for head h: [nope, kv_rank] and [value, kv_rank]
    scores       q_nope . (K latent) + q_rope . key = (K^T q_nope) . latent + q_rope . key
    output       sum of softmax * (V latent) = V (sum of softmax * latent)

kv_b is decoded when the model is loaded, since both halves are multiplied the other way round: in GLM-5.2 0.15 % of all
weights. Source of the order of operations: `modeling_deepseek_v3.py` of transformers 5.17, which does not absorb.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.models.cache import Attended, Step
from quantkit.models.dsa import Indexer, take_indexer
from quantkit.models.linear import Linear
from quantkit.models.norm import RmsNorm
from quantkit.models.rope import rotate, score_factor
from quantkit.models.weight_loader import WeightLoader
from quantkit.ops.linear import heads, ready_plain

if TYPE_CHECKING:
    from quantkit.kernels.cpu.linear import Weights

_EPS = 1e-6


@dataclass(frozen=True)
class Mla:
    """One layer's attention.

    q_a, q_norm  to the queries' latent, or None where queries have none
    key_up       [heads, kv_rank, nope]
    value_up     [heads, value, kv_rank]
    indexer      of layers that select the tokens for themselves
    """

    config: MlaConfig
    layer: int
    interleaved: bool
    scale: float
    q_a: Linear | None
    q_norm: RmsNorm | None
    q_b: Linear
    kv_a: Linear
    kv_norm: RmsNorm
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Linear
    indexer: Indexer | None

    @cached_property
    def _key_up(self) -> "Weights | None":
        return ready_plain(self.key_up)

    @cached_property
    def _value_up(self) -> "Weights | None":
        return ready_plain(self.value_up)

    def attend(self, x: torch.Tensor, step: Step, selected: torch.Tensor | None) -> Attended:
        """[T, hidden] to [T, hidden], over the tokens of `selected` where the layer has no indexer of its own."""
        config = self.config
        q_latent = self.q_norm(self.q_a(x)) if self.q_a and self.q_norm else x
        query = self.q_b(q_latent).view(len(x), config.heads, -1)
        q_nope, q_rope = query[..., : config.nope], query[..., config.nope :]
        row = self.kv_a(x)
        latent, key = self.kv_norm(row[:, : config.kv_rank]), row[:, config.kv_rank :]
        q_rope, key = (rotate(part, step.rotation, self.interleaved) for part in (q_rope, key))
        step.cache.append_latent(self.layer, step.positions, latent, key)
        if self.indexer:
            selected = self.indexer.select(x, q_latent, step)
        absorbed = heads(q_nope, self.key_up, self._key_up)
        attended = step.cache.attend_latent(self.layer, step.positions, absorbed, q_rope, self.scale, selected)
        values = heads(attended, self.value_up, self._value_up)
        return Attended(self.output(values.flatten(1)), selected)


def take_mla(loader: WeightLoader, prefix: str, layer: int, config: ModelConfig) -> Mla:
    """The attention whose tensors' names begin with `prefix`."""
    mla, hidden = config.attention, config.hidden
    assert isinstance(mla, MlaConfig)
    width = mla.nope + mla.rope
    if has_latent := mla.q_rank is not None:
        q_a = loader.linear(f"{prefix}.q_a_proj", mla.q_rank, hidden, mla.bias)
        q_norm = RmsNorm(loader.vector(f"{prefix}.q_a_layernorm.weight", mla.q_rank), _EPS)
    kv_b = loader.linear(f"{prefix}.kv_b_proj", mla.heads * (mla.nope + mla.value), mla.kv_rank)
    by_head = kv_b.weight.decode(loader.dtype).view(mla.heads, -1, mla.kv_rank)
    return Mla(
        config=mla,
        layer=layer,
        interleaved=config.rope.interleaved,
        scale=width**-0.5 * score_factor(config.rope),
        q_a=q_a if has_latent else None,
        q_norm=q_norm if has_latent else None,
        q_b=loader.linear(
            f"{prefix}.q_b_proj" if has_latent else f"{prefix}.q_proj", mla.heads * width, mla.q_rank or hidden
        ),
        kv_a=loader.linear(f"{prefix}.kv_a_proj_with_mqa", mla.kv_rank + mla.rope, hidden, mla.bias),
        kv_norm=RmsNorm(loader.vector(f"{prefix}.kv_a_layernorm.weight", mla.kv_rank), _EPS),
        key_up=by_head[:, : mla.nope].mT.contiguous(),
        value_up=by_head[:, mla.nope :].contiguous(),
        output=loader.linear(f"{prefix}.o_proj", hidden, mla.heads * mla.value, mla.bias),
        indexer=take_indexer(loader, f"{prefix}.indexer", layer, config)
        if config.dsa and config.dsa.full[layer]
        else None,
    )

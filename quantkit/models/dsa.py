"""The indexer of sparse attention: it scores how much a query needs each earlier token, and attention reads the best.

    query    wq_b(q_latent): heads of `head_dim`, the first `rope` channels rotated
    key      k_norm(wk(x)): one for all heads, rotated likewise; kept for every token
    weights  weights_proj(x) * heads^-1/2, float32
    score    sum over heads of weights * relu(query . key * head_dim^-1/2)

Layers without an indexer reuse the selection of the last layer with one. Publishers also turn query and key by a
Hadamard matrix and round them to FP8; the turn changes no product and is left out with the rounding. Source:
`GlmMoeDsaIndexer` of transformers 5.17.
"""

from dataclasses import dataclass

import torch

from quantkit.families.config import DsaConfig, MlaConfig, ModelConfig
from quantkit.models.cache import Step
from quantkit.models.linear import Linear
from quantkit.models.norm import LayerNorm
from quantkit.models.rope import rotate_front
from quantkit.models.weight_loader import WeightLoader

_EPS = 1e-6


@dataclass(frozen=True)
class Indexer:
    """One layer's indexer."""

    config: DsaConfig
    layer: int
    query: Linear
    key: Linear
    norm: LayerNorm
    weights: Linear

    def select(self, x: torch.Tensor, q_latent: torch.Tensor, step: Step) -> torch.Tensor:
        """Positions to attend to, int32 [T, at most top_k], -1 where there are fewer.

        x         [T, hidden], after the layer's norm
        q_latent  [T, q_rank], after its norm
        """
        config = self.config
        query = self.query(q_latent).view(len(x), config.heads, config.head_dim)
        query = rotate_front(query, step.rotation, config.interleaved)
        key = rotate_front(self.norm(self.key(x)), step.rotation, config.interleaved)
        weights = self.weights(x.float()) * (config.heads * config.head_dim) ** -0.5
        step.cache.append_index(self.layer, step.positions, key)
        return step.cache.select(self.layer, step.positions, query, weights, config.top_k)


def take_indexer(loader: WeightLoader, prefix: str, layer: int, config: ModelConfig) -> Indexer:
    """The indexer whose tensors' names begin with `prefix`."""
    dsa, mla = config.dsa, config.attention
    assert dsa is not None
    assert isinstance(mla, MlaConfig)
    assert mla.q_rank is not None
    return Indexer(
        config=dsa,
        layer=layer,
        query=loader.linear(f"{prefix}.wq_b", dsa.heads * dsa.head_dim, mla.q_rank),
        key=loader.linear(f"{prefix}.wk", dsa.head_dim, config.hidden),
        norm=LayerNorm(
            loader.vector(f"{prefix}.k_norm.weight", dsa.head_dim),
            loader.vector(f"{prefix}.k_norm.bias", dsa.head_dim),
            _EPS,
        ),
        weights=loader.linear(f"{prefix}.weights_proj", dsa.heads, config.hidden),
    )

"""The one place that multiplies with a stored weight: x @ W^T for each encoding, dense and for routed experts.

The reference decodes a weight, then calls torch. Activations stay in their dtype: nothing here quantizes them, also
where a checkpoint's config would have an engine do so (W8A8, W4A4).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from quantkit.models.packed import Packed, decode


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times a weight [N, K]: [T, N] of x's dtype."""
    return F.linear(x, decode(weight, x.dtype), None if bias is None else bias.to(x.dtype))


@dataclass(frozen=True)
class Linear:
    """A projection: a weight [N, K] and its bias [N], if it has one."""

    weight: Packed
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N]."""
        return linear(x, self.weight, self.bias)


def expert_linear(x: torch.Tensor, weight: Packed, ids: torch.Tensor) -> torch.Tensor:
    """x times the weights of the experts `ids` [T, choices]: [T * choices, N] of x's dtype.

    x  [T, K], of which a row serves all its token's choices, or [T * choices, K], a row for each choice

    weight  stacked [E, N, K]; only experts that are chosen are read
    """
    chosen = ids.flatten()
    rows = torch.arange(len(chosen), device=x.device) // (len(chosen) // len(x))
    out = x.new_empty(len(chosen), weight.shape[0])
    for expert in sorted(set(chosen.tolist())):
        pairs = (chosen == expert).nonzero().squeeze(1)
        out[pairs] = linear(x[rows[pairs]], weight.expert(expert))
    return out

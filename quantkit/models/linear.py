"""The one place that multiplies with a stored weight: x @ W^T for each encoding, dense and for routed experts.

`quantkit.ops.linear` chooses the kernel. Activations stay in their dtype: nothing here quantizes them, also where a
checkpoint's config would have an engine do so (W8A8, W4A4).
"""

from dataclasses import dataclass

import torch

from quantkit.ops import linear as ops
from quantkit.weights.packed import Packed


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times a weight [N, K]: [T, N] of x's dtype."""
    product = _multiply(x, weight, None)
    return product if bias is None else product + bias.to(x.dtype)


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
    return _multiply(x, weight, ids)


def _multiply(x: torch.Tensor, weight: Packed, ids: torch.Tensor | None) -> torch.Tensor:
    if ops.meets_loops(x, weight.codes) and weight.compiled is not None:
        return ops.compiled(x, weight.compiled, ids)
    return weight.encoding.product(x, weight, ids)

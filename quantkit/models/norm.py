"""RMS norm and layer norm, in float32 whatever the dtype of the tokens."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the quotient is rounded to x's dtype first."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] to [..., C]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] to [..., C]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

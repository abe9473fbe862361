"""Gated MLPs, and routed experts with a shared one.

    scores   sigmoid(x . router), float32 throughout, whatever the dtype of x
    choice   top_k of scores + bias (FP32, as stored), within the groups whose two best sum highest
    weights  the chosen scores without bias, divided by their sum, times `scale`

The bias must not pass through BF16: 238 values between 6.82 and 7.06 become 8, and most tokens change experts. Of equal
scores the lower expert is chosen. Source: `GlmMoeDsaTopkRouter` and `DeepseekV3TopkRouter` of transformers 5.17.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from quantkit.families.config import ModelConfig, MoeConfig
from quantkit.models.linear import Linear, expert_linear
from quantkit.models.weight_loader import WeightLoader
from quantkit.weights.packed import Packed


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Routing(NamedTuple):
    """A token's experts, in ascending order, and their weights: int64 and float32 [T, top_k]."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Router:
    """Chooses experts; `bias` is float32 [experts]."""

    config: MoeConfig
    weight: Linear
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> Routing:
        """The experts of each token of x [T, hidden]."""
        scores = self.weight(x.float()).sigmoid()
        biased = scores + self.bias
        if self.config.groups > 1:
            grouped = biased.view(len(x), self.config.groups, -1)
            best = _top(grouped.topk(2, dim=-1).values.sum(-1), self.config.top_groups)
            allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
            biased = grouped.masked_fill(~allowed.unsqueeze(2), -torch.inf).flatten(1)
        ids = _top(biased, self.config.top_k).sort(dim=-1).values
        weights = scores.gather(1, ids)
        if self.config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(ids, weights * self.config.scale)


@dataclass(frozen=True)
class Moe:
    """Routed experts, stacked [E, ...], plus the shared one."""

    router: Router
    gate: Packed
    up: Packed
    down: Packed
    shared: Mlp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]; a token's experts are added in float32, in ascending order."""
        ids, weights = self.router(x)
        inner = F.silu(expert_linear(x, self.gate, ids)) * expert_linear(x, self.up, ids)
        outputs = expert_linear(inner, self.down, ids).view(*ids.shape, -1)
        routed = (outputs.float() * weights.unsqueeze(2)).sum(1)
        return routed.to(x.dtype) + self.shared(x)


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest of each row, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def take_mlp(loader: WeightLoader, prefix: str, intermediate: int, config: ModelConfig) -> Mlp:
    """The MLP whose tensors' names begin with `prefix`."""
    hidden, bias = config.hidden, config.mlp_bias
    return Mlp(
        loader.linear(f"{prefix}.gate_proj", intermediate, hidden, bias),
        loader.linear(f"{prefix}.up_proj", intermediate, hidden, bias),
        loader.linear(f"{prefix}.down_proj", hidden, intermediate, bias),
    )


def take_moe(loader: WeightLoader, prefix: str, config: ModelConfig) -> Moe:
    """The experts whose tensors' names begin with `prefix`."""
    moe, hidden = config.moe, config.hidden
    assert moe is not None
    inward, outward = (moe.intermediate, hidden), (hidden, moe.intermediate)
    return Moe(
        router=Router(
            config=moe,
            weight=loader.linear(f"{prefix}.gate", moe.experts, hidden),
            bias=loader.vector(f"{prefix}.gate.e_score_correction_bias", moe.experts, torch.float32),
        ),
        gate=loader.experts(f"{prefix}.experts", "gate_proj", moe.experts, inward),
        up=loader.experts(f"{prefix}.experts", "up_proj", moe.experts, inward),
        down=loader.experts(f"{prefix}.experts", "down_proj", moe.experts, outward),
        shared=take_mlp(loader, f"{prefix}.shared_experts", moe.intermediate * moe.shared, config),
    )

"""Rotary positions: frequencies of each kind, and the rotation of pairs of channels.

Frequencies and angles are float32, as models are trained with. Sources: the papers of YaRN (arXiv 2309.00071) and
Llama 3 (arXiv 2407.21783); `modeling_rope_utils.py` of transformers 5.17.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quantkit.families.config import RopeConfig


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles: float32 [T, width / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


def make_rotation(config: RopeConfig, positions: torch.Tensor) -> Rotation:
    """The rotation of tokens at `positions`, int64 [T]."""
    angles = positions.float()[:, None] * frequencies(config).to(positions.device)
    factor = amplitude(config)
    return Rotation(angles.cos() * factor, angles.sin() * factor)


def rotate(x: torch.Tensor, rotation: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, ..., width] by its token's angles; channels keep their places.

    interleaved  pairs are channels 2i and 2i + 1, else i and i + width / 2
    """
    shape = (len(x), *[1] * (x.dim() - 2), -1)
    cos, sin = (part.to(x.dtype).view(shape) for part in rotation)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def spread_pairs(values: Sequence[float], interleaved: bool) -> tuple[float, ...]:
    """The value of each pair for both of its channels, in the order of the channels."""
    return tuple(value for value in values for _ in range(2)) if interleaved else (*values, *values)


def rotate_front(x: torch.Tensor, rotation: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate the first channels of x [T, ..., C], as many as the rotation has; the others stay."""
    width = 2 * rotation.cos.shape[1]
    return torch.cat((rotate(x[..., :width], rotation, interleaved), x[..., width:]), dim=-1)


def frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians by which a position turns each pair: float32 [width / 2]."""
    parameters = config.parameters
    exponents = torch.arange(0, config.width, 2).float() / config.width
    plain = torch.pow(parameters["rope_theta"], exponents).reciprocal()
    if config.kind == "linear":
        return plain / parameters["factor"]
    if config.kind == "llama3":
        return _llama3(plain, config)
    return _yarn(plain, config) if config.kind == "yarn" else plain


def amplitude(config: RopeConfig) -> float:
    """What YaRN multiplies cosine and sine with; 1 for the other kinds."""
    parameters = config.parameters
    if config.kind != "yarn":
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dims:
        return _mscale(parameters["factor"], mscale) / _mscale(parameters["factor"], all_dims)
    return _mscale(parameters["factor"], 1.0)


def score_factor(config: RopeConfig) -> float:
    """What MLA multiplies its softmax scale with: the square of YaRN's mscale for all dimensions."""
    all_dims = config.parameters.get("mscale_all_dim")
    return _mscale(config.parameters["factor"], all_dims) ** 2 if config.kind == "yarn" and all_dims else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between mixed."""
    factor, low, high, length = (
        config.parameters[key]
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = length * plain / (2 * math.pi)  # in the context of training
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def _yarn(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Pairs that turn `beta_fast` times in the context of training are kept, those of `beta_slow` stretched."""
    parameters, width = config.parameters, config.width
    theta, length = parameters["rope_theta"], parameters["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = (torch.arange(width // 2).float() - low) / (high - low or 0.001)
    share = stretched.clamp(0, 1)
    return plain / parameters["factor"] * share + plain * (1 - share)

"""What the parameters of a loaded module mean, by their names, dtypes and shapes. Runs in the engines' interpreter.

Both engines use the same names, so that one decoder serves both; codes and tables are those of `truth.py`. A size of
groups is that of the parameters' shapes, which an engine makes by the config: if it reads another one, the shapes
disagree with the files before the numbers do.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from support.truth import E2M1, E4M3, Array

Parameters = Mapping[str, torch.Tensor]
Block = tuple[int, int]


class Decoded(NamedTuple):
    """A weight as float64, of experts with their number in front, and the form that it had."""

    form: str
    weight: Array


def numbers(tensor: torch.Tensor) -> Array:
    """The numbers of a plain or FP8 tensor as float64."""
    if tensor.dtype == torch.float8_e4m3fn:
        return E4M3[tensor.detach().view(torch.uint8).numpy()]
    return tensor.detach().double().numpy()


def decode(parameters: Parameters, block: Block, prefix: str = "") -> Decoded:
    """The weight of a module, or of its experts under a `prefix` like `w13_`; `block` is that of FP8 blocks."""
    packed, weight = parameters.get(f"{prefix}weight_packed"), parameters.get(f"{prefix}weight")
    scale = parameters.get(f"{prefix}weight_scale_inv", parameters.get(f"{prefix}weight_scale"))
    if packed is not None and scale is not None:
        if packed.dtype == torch.int32:
            return _int4(packed, scale)
        factor = 1 / _one_for_all(parameters[f"{prefix}weight_global_scale"], largest=not prefix)
        return Decoded("nvfp4", _nvfp4(packed, scale, factor))
    assert weight is not None
    if scale is None:
        return Decoded("plain", numbers(weight))
    if f"{prefix}weight_scale_2" in parameters:
        factor = _one_for_all(parameters[f"{prefix}weight_scale_2"], largest=not prefix)
        return Decoded("modelopt nvfp4", _nvfp4(weight, scale, factor))
    return _fp8(weight, scale, block)


def _int4(packed: torch.Tensor, scale: torch.Tensor) -> Decoded:
    """Codes in int32 along the last dimension, one scale for each group of it."""
    words = packed.detach().numpy()
    codes = np.stack([words >> 4 * place & 15 for place in range(8)], -1).reshape(*words.shape[:-1], -1) - 8
    group = codes.shape[-1] // scale.shape[-1]
    return Decoded(f"int4 g={group}", codes * numbers(scale).repeat(group, -1))


def _nvfp4(packed: torch.Tensor, scale: torch.Tensor, factor: Array) -> Array:
    codes = packed.detach().view(torch.uint8).numpy()
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)]
    return values * numbers(scale).repeat(16, -1) * factor


def _one_for_all(scales: torch.Tensor, *, largest: bool) -> Array:
    """The global scale that engines take for all parts of a fused module: the largest; of experts, `gate`'s."""
    values = numbers(scales)
    return np.array(values.max()) if largest else values.reshape(len(values), -1)[:, :1, None]


def _fp8(weight: torch.Tensor, scale: torch.Tensor, block: Block) -> Decoded:
    """One scale for each row, or one for each block."""
    if scale.shape == (*weight.shape[:-1], 1):
        return Decoded("fp8 channel", numbers(weight) * numbers(scale))
    rows, columns = weight.shape[-2:]
    grid = numbers(scale).repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]
    return Decoded(f"fp8 {block[0]}x{block[1]}", numbers(weight) * grid)

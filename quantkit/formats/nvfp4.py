"""NVFP4: E2M1 codes, one E4M3 scale for each 16 weights of a row, one global scale for a tensor.

    codes   [N, K]        uint8 in 0..15: sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6
    scale   [N, K / 16]   float8_e4m3fn, 2^-6..448: positive and normal
    global  2^exponent    a power of two, so that it and its reciprocal, which some checkpoints store, are both exact
    packed  [N, K / 2]    uint8; byte j of a row holds codes 2j and 2j+1, the first in the low nibble
    value   code's number * scale * 2^exponent

    numbers  0.5  -6   0   3        codes  1  f  0  5        bytes  0xf1 0x50

What rounds to zero has the code 0, whatever its sign: there is no code 8, minus zero.

Why no subnormal scale: the engines' weight-only kernel, Marlin, cannot hold one and takes it for zero (vLLM 0.33 and
SGLang 0.5.23, `marlin_utils_fp4.py`).

Layout: compressed-tensors 0.19, `compressors/nvfp4/helpers.py`.
"""

from typing import NamedTuple

import torch

GROUP_SIZE = 16
CANDIDATES = range(-1, 7)  # the scales that a search tries, as E4M3 neighbours of the plain one
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SMALLEST, _LARGEST = 0x08, 0x7E  # the bytes of 2^-6 and 448


class GroupCounts(NamedTuple):
    """Groups of 16 weights, not all zero, that the range of the block scales does not serve.

    clamped  the largest magnitude is above 6 * 448 * 2^exponent: the scale is 448 and the codes saturate
    raised   the scale nearest to the largest magnitude / 6 would be subnormal or zero; it is 2^-6 instead
    flushed  every code is zero
    """

    clamped: int
    raised: int
    flushed: int


def quantize(weight: torch.Tensor, exponent: int, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `weight` [N, K] under the global scale 2^exponent to codes uint8 [N, K] and scale E4M3 [N, K / 16].

    The plain scale of a group is the E4M3 number nearest to its largest magnitude / (6 * 2^exponent), ties to even, not
    below 2^-6 or above 448. A search also tries its neighbours (`CANDIDATES`) and takes the smallest squared error, of
    equal ones the smallest scale; the errors are added in float64 from the group's first weight to its last.

    A code is the nearest one under the stored scale, ties to even codes, saturated at 6. The arithmetic is float64,
    whose comparisons of a weight with a midpoint, seven bits wide, are exact.
    """
    rows, columns = weight.shape
    groups = _groups(weight, exponent)
    magnitudes = groups.abs()
    scale = _plain_scale(magnitudes.amax(dim=2))
    if search:
        candidates = torch.stack([scale + offset for offset in CANDIDATES])
        errors = torch.stack([_squared_error(magnitudes, candidate) for candidate in candidates])
        errors[(candidates < _SMALLEST) | (candidates > _LARGEST)] = torch.inf
        scale = candidates.gather(0, errors.argmin(dim=0, keepdim=True)).squeeze(0)
    indices = _nearest(magnitudes, scale)
    codes = torch.where((groups < 0) & (indices > 0), indices + 8, indices)
    return codes.to(torch.uint8).reshape(rows, columns), scale.to(torch.uint8).view(torch.float8_e4m3fn)


def count(weight: torch.Tensor, exponent: int, codes: torch.Tensor) -> GroupCounts:
    """Count the groups of `weight` [N, K], quantized to `codes` [N, K], that are out of the block scales' range."""
    amax = _groups(weight, exponent).abs().amax(dim=2)
    ends = _scale_values()[[_SMALLEST - 1, _SMALLEST, _LARGEST]]
    raised = (amax > 0) & (amax < 3 * (ends[0] + ends[1]))
    flushed = (amax > 0) & ~codes.reshape(*amax.shape, GROUP_SIZE).any(dim=2)
    return GroupCounts(int((amax > 6 * ends[2]).sum()), int(raised.sum()), int(flushed.sum()))


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, exponent: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Decode codes [N, K] with scale [N, K / 16] to `dtype` [N, K]; a product has six significant bits."""
    signed = _NUMBERS + tuple(-number for number in _NUMBERS)
    numbers = torch.tensor(signed, dtype=torch.float64, device=codes.device)
    step = scale.double().repeat_interleave(GROUP_SIZE, dim=1) * 2.0**exponent
    return (numbers[codes.long()] * step).to(dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [N, K] into bytes uint8 [N, K / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes uint8 [N, K / 2] into codes uint8 [N, K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=2).reshape(packed.shape[0], -1)


def _groups(weight: torch.Tensor, exponent: int) -> torch.Tensor:
    """Weights / 2^exponent, float64 [N, K / 16, 16]."""
    return (weight.double() * 2.0**-exponent).reshape(weight.shape[0], -1, GROUP_SIZE)


def _scale_values() -> torch.Tensor:
    return torch.arange(_LARGEST + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def _plain_scale(amax: torch.Tensor) -> torch.Tensor:
    """The bytes, int64, of the plain scales: how many halfway points, times 6, lie below the largest magnitudes."""
    values = _scale_values()
    halfway = 3 * (values[:-1] + values[1:])  # [126]: between byte i and i + 1
    byte = torch.searchsorted(halfway, amax)
    tied = amax == halfway[byte.clamp(max=_LARGEST - 1)]
    return (byte + (tied & (byte % 2 == 1))).clamp(_SMALLEST, _LARGEST)


def _nearest(magnitudes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Indices, int64 [N, groups, 16], of the numbers nearest to magnitudes under scale bytes [N, groups]."""
    step = _scale_values()[scale.clamp(max=_LARGEST)].unsqueeze(2)
    indices = torch.zeros(magnitudes.shape, dtype=torch.int64)
    for below, midpoint in enumerate(_MIDPOINTS):
        indices += magnitudes >= midpoint * step if below % 2 else magnitudes > midpoint * step
    return indices


def _squared_error(magnitudes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The sums, float64 [N, groups], of (magnitude - nearest number * scale)^2, in the order of the weights."""
    numbers = torch.tensor(_NUMBERS, dtype=torch.float64)[_nearest(magnitudes, scale)]
    squares = (magnitudes - numbers * _scale_values()[scale.clamp(max=_LARGEST)].unsqueeze(2)).square()
    total = squares[..., 0]
    for square in squares.unbind(dim=2)[1:]:
        total = total + square
    return total

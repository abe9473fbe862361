"""Symmetric INT4 with one scale for each group of a row (compressed-tensors `pack-quantized`, W4A16).

    codes   [N, K]            int8 in -8..7; value = code * scale of the group
    scale   [N, K / g]        bfloat16, a normal number, positive unless signed scales were asked for
    packed  [N, K / 8]        int32; word j of a row holds codes 8j..8j+7, code + 8 in four bits, the first lowest

    codes    -8   7   0   1   -1   2   3  -3
    nibbles   0   f   8   9    7   a   b   5      word = 0x5ba798f0

Layout: compressed-tensors 0.19, `compressors/pack_quantized/helpers.py`.
"""

import torch

Divisors = tuple[tuple[int, int], ...]
CODES_PER_WORD = 8
SMALLEST_SCALE = 2.0**-126  # the smallest normal bfloat16: the scale of a group of zeros


def quantize(
    weight: torch.Tensor, group_size: int, divisors: Divisors = ((15, 2),), signed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `weight` [N, K] to codes int8 [N, K] and scale bfloat16 [N, K / group_size].

    divisors  candidates (numerator, denominator) for a group's scale = largest magnitude / divisor; the one with the
              smallest squared error is taken, of equal ones the first
    signed    whether the scale is negative where that maps the first weight of the largest magnitude to -8

    The scale is rounded to float32 and then to bfloat16. A code is the nearest one under that rounded scale, ties to
    even, clamped to -8..7. The arithmetic is float64 throughout, so that float64 weights (an FP8 number times a float32
    scale is exact there) are quantized without a second rounding. Errors of candidates are compared under the scale
    before rounding, in whole numbers (`_errors`): their sum does not depend on its order.
    """
    rows, columns = weight.shape
    groups = weight.double().reshape(rows, columns // group_size, group_size)
    amax, first = groups.abs().max(dim=2, keepdim=True)
    sign = torch.where((groups.gather(2, first) > 0) & signed, -1.0, 1.0)
    groups = groups * sign
    ratio = groups / torch.where(amax > 0, amax, 1.0)
    errors = torch.stack([_errors(ratio, top / bottom) for top, bottom in divisors])
    fractions = torch.tensor(divisors, dtype=torch.float64)[errors.argmin(dim=0)]  # [N, groups, 2]
    ideal = amax.squeeze(2) * fractions[..., 1] / fractions[..., 0]
    scale = ideal.float().to(torch.bfloat16).clamp(min=SMALLEST_SCALE)
    codes = (groups / scale.double().unsqueeze(2)).round().clamp(-8, 7)
    return codes.to(torch.int8).reshape(rows, columns), scale * sign.squeeze(2).to(torch.bfloat16)


def _errors(ratio: torch.Tensor, divisor: float) -> torch.Tensor:
    """The squared errors, int64 [N, groups], of weights / largest magnitude [N, groups, g] under one candidate.

    A ratio is rounded to 2^-14; its place among the codes is cut to 2^-9; the divisor, rounded to 2^-11 for the place,
    scales the sum of squared distances from the nearest codes back by 1 / divisor^2, rounded to 2^-20.
    """
    ratios = (ratio * 2**14).round().to(torch.int64)
    places = (ratios * round(divisor * 2**11)) >> 16
    codes = ((places + 2**8) >> 9).clamp(-8, 7)
    return (places - (codes << 9)).square().sum(dim=2) * round(2**20 / divisor**2)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode codes [N, K] with scale [N, K / g] to `dtype` [N, K]; the product is exact in float32."""
    group_size = codes.shape[1] // scale.shape[1]
    return (codes.float() * scale.float().repeat_interleave(group_size, dim=1)).to(dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes int8 [N, K] in -8..7 into int32 [N, K / 8]."""
    rows, columns = codes.shape
    nibbles = (codes.to(torch.int64) + 8).reshape(rows, columns // CODES_PER_WORD, CODES_PER_WORD)
    words = (nibbles << _shifts(codes.device)).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [N, K / 8] into codes int8 [N, K]."""
    nibbles = (packed.to(torch.int64).unsqueeze(2) >> _shifts(packed.device)) & 0xF
    return (nibbles - 8).to(torch.int8).reshape(packed.shape[0], -1)


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int64, device=device)

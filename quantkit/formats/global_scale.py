"""The global scale of NVFP4 weights, 2^exponent. Apart from `nvfp4`, because a conversion needs it and not torch."""

import math

from quantkit.errors import SourceError


def nvfp4_exponent(amax: float, name: str) -> int:
    """The exponent for the NVFP4 weight, or the fused partners, `name`.

    amax  no magnitude of theirs is above it; the exponent is the smallest with amax / (6 * 2^exponent) <= 448

    Fused partners share the exponent of the largest `amax`. Zero gives zero. Raises SourceError where 2^exponent or its
    reciprocal, which some checkpoints store, would not be a normal float32.
    """
    if amax == 0:
        return 0
    fraction, exponent = math.frexp(amax)  # amax = fraction * 2^exponent; 6 * 448 = 0.65625 * 2^12
    exponent -= 12 if fraction <= 0.65625 else 11
    if not (math.isfinite(amax) and -126 <= exponent <= 126):
        raise SourceError(
            f"{name}: the largest magnitude is up to {amax:g}, for which NVFP4 has no global scale",
            hint="keep this weight as it is with a rule of the recipe",
        )
    return exponent

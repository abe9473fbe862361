"""The numbers of FP8 E4M3 as tables, and rounding to BF16: what the compiled loops share.

    byte  s eeee mmm    value = (-1)^s * 2^(e-7) * (1 + m/8), or (-1)^s * 2^-6 * m/8 when e = 0; 0x7F and 0xFF are NaN

Byte order is number order among the 127 magnitudes, so a group's largest magnitude is an integer maximum.
"""

import numba
import numpy as np
import numpy.typing as npt

NAN_BYTE = 0x7F
LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126  # below it a BF16 scale would be subnormal
LARGEST_SCALE = 2.0**119  # above it 448 * scale overflows float32


def _values() -> npt.NDArray[np.float64]:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 0xF, (byte & 7) / 8
    magnitude = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    magnitude[[NAN_BYTE, NAN_BYTE | 0x80]] = np.nan
    return np.where(byte < 0x80, magnitude, -magnitude)


VALUES = _values()  # [256] float64


@numba.njit(inline="always")
def bf16_bits(bits: np.uint32) -> np.uint16:
    """The BF16 nearest to the finite float32 with the pattern `bits`, ties to even, as its 16 bits."""
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

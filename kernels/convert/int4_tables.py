"""Tables of INT4 codes in the FP8 byte domain.

All weights of a group lie in one FP8 block and share its scale b. With m the group's largest magnitude byte, T the E4M3
numbers and d a divisor, the group's ideal scale is T[m] * b / d, and the code of a byte k is the integer nearest to

    T[k] * b / stored scale,    about    T[k] * d / T[m] :    b cancels.

The stored scale is the ideal one rounded to float32 and to BF16, which moves it by at most 1/257 and a hair. No
quotient of a safe divisor comes that close to a half step, except those exactly on one, and these go up, to even or
down as the stored scale is below, at or above the ideal. So three tables [m, k] hold the exact nearest codes.

A divisor is a fraction (numerator, denominator), so that all comparisons here are between exact integers.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.int4_search import Divisor
from quantkit.kernels.e4m3 import NAN_BYTE, VALUES

_MAGNITUDES = np.rint(VALUES[:NAN_BYTE] * 512).astype(np.int64)  # in units of the smallest, 2^-9


@cache
def code_tables(divisors: tuple[Divisor, ...]) -> npt.NDArray[np.uint8]:
    """Nibbles (code + 8) [divisor, 3, 127, 256] by the stored scale's side (BELOW, AT, ABOVE), group maximum, and byte.

    Raises ValueError for a divisor that is not safe.
    """
    return np.stack([_nibbles(divisor) for divisor in divisors])


def _nibbles(divisor: Divisor) -> npt.NDArray[np.uint8]:
    numerator, denominator = divisor
    twice = 2 * numerator * _MAGNITUDES[None, :]  # [1, k]: twice the quotient times denominator and T[m]
    below, at, above = (np.zeros((NAN_BYTE, NAN_BYTE), np.int64) for _ in range(3))
    for step in range(8):
        half = (2 * step + 1) * denominator * _MAGNITUDES[:, None]  # [m, 1]
        real = half > 0
        exact = (twice == half) & real
        near = (2569 * np.abs(twice - half) <= 10 * half) & ~exact & real  # 1/256.9 covers 1/257 and the hair
        if (near & np.tri(NAN_BYTE, dtype=bool)).any():
            raise ValueError(f"divisor {numerator}/{denominator} is not safe: rounding its scale can move a code")
        below += (twice >= half) & real
        at += ((twice > half) & real) | (exact & (step % 2 == 1))
        above += (twice > half) & real
    magnitude = np.stack([below, at, above])  # [3, m, k]
    nibbles = np.full((3, NAN_BYTE, 256), 8, np.uint8)
    nibbles[:, :, :NAN_BYTE] = 8 + np.minimum(magnitude, 7)
    nibbles[:, :, 0x80 : 0x80 + NAN_BYTE] = 8 - magnitude
    return nibbles

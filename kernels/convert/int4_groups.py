"""What the INT4 loops share: a group's stored scale, and packing codes into words."""

import numba
import numpy as np

from quantkit.kernels.e4m3 import SMALLEST_SCALE, bf16_bits

BELOW, AT, ABOVE, RAISED = 0, 1, 2, 3  # where the stored scale lies beside the ideal one; raised to the smallest one
CODES_PER_WORD = 8


@numba.njit(nogil=True, cache=True)
def store_scale(amax, numerator, denominator):  # type: ignore[no-untyped-def]
    """The BF16 bits of amax / (numerator / denominator), rounded to float32 first, and on which side of it they are."""
    ideal = np.empty(1, np.float32)
    rounded_bits = np.empty(1, np.uint32)
    rounded = rounded_bits.view(np.float32)
    ideal[0] = amax * denominator / numerator
    rounded_bits[0] = np.uint32(bf16_bits(ideal.view(np.uint32)[0])) << np.uint32(16)
    left, right = np.float64(rounded[0]) * numerator, amax * denominator
    side = BELOW if left < right else AT if left == right else ABOVE
    if rounded[0] < SMALLEST_SCALE:
        rounded[0] = SMALLEST_SCALE
        side = RAISED
    return np.uint16(rounded_bits[0] >> np.uint32(16)), side


@numba.njit(nogil=True, cache=True)
def pack(nibbles, words):  # type: ignore[no-untyped-def]
    """Pack `nibbles` uint8 [8 n] (code + 8) into `words` uint32 [n], the first code lowest."""
    eights = nibbles.view(np.uint64)
    for index in range(np.uint64(words.size)):
        bits = eights[index]
        bits = (bits | bits >> np.uint64(4)) & np.uint64(0x00FF00FF00FF00FF)
        bits = (bits | bits >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
        words[index] = np.uint32((bits | bits >> np.uint64(16)) & np.uint64(0xFFFFFFFF))

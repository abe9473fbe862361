"""What the INT4 loops share for one group: the stored scale, and the candidate with the smallest error."""

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
def first_smallest(sums):  # type: ignore[no-untyped-def]
    """The candidate of the smallest error, of equal ones the first; each of `sums` holds two, 32 bits each."""
    choice, smallest = 0, np.uint64(1) << np.uint64(32)
    for pair, both in enumerate(sums):
        for half in range(2):
            error = (both >> np.uint64(32 * half)) & np.uint64(0xFFFFFFFF)
            if error < smallest:
                choice, smallest = 2 * pair + half, error
    return choice

"""Float weights to packed INT4, for sources that are not FP8 blocks and for groups that do not lie in one.

The result is that of `quantkit.formats.int4.quantize` on the same numbers, byte for byte: candidates are compared by
the same whole units of squared error, and the code is the nearest integer to weight / stored scale.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.int4_groups import CODES_PER_WORD, store_scale
from quantkit.kernels.int4_tables import ERROR_UNIT, Divisor


def float_to_int4(
    weight: npt.NDArray[np.float32] | npt.NDArray[np.float64],
    group_size: int,
    divisors: tuple[Divisor, ...],
    signed: bool,
    packed: npt.NDArray[np.uint32],
    out_scale: npt.NDArray[np.uint16],
) -> int:
    """Quantize `weight` float32 or float64 [N, K] into words `packed` [N, K / 8] and `out_scale` [N, K / group_size].

    `divisors` and `signed` as in `fp8_block_to_int4`. `group_size` divides K. Returns -1, or the flat position of the
    first group with a NaN, an infinity, or a magnitude whose scale would overflow; the arrays are then incomplete.
    """
    fractions = np.array(divisors, np.float64)
    return int(_quantize(weight, group_size, fractions, signed, packed, out_scale))


@numba.njit(nogil=True, cache=True)
def _quantize(weight, group_size, divisors, signed, packed, out_scale):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    group = np.empty(group_size, np.float64)
    for row in range(rows):
        for number in range(columns // group_size):
            begin = number * group_size
            amax, first = 0.0, 0.0
            for position in range(group_size):
                value = np.float64(weight[row, begin + position])
                if not abs(value) <= 2.0**127:
                    return row * columns + begin
                group[position] = value
                if abs(value) > amax:
                    amax, first = abs(value), value
            sign = -1.0 if signed and first > 0 else 1.0
            group *= sign
            choice = _choose(group, amax, divisors) if len(divisors) > 1 and amax > 0 else 0
            bits, _ = store_scale(amax, divisors[choice, 0], divisors[choice, 1])
            out_scale[row, number] = bits | (np.uint16(0x8000) if sign < 0 else np.uint16(0))
            target = packed[row, begin // CODES_PER_WORD : (begin + group_size) // CODES_PER_WORD]
            _write(group, _value(bits), target)
    return -1


@numba.njit(nogil=True, cache=True)
def _choose(group, amax, divisors):  # type: ignore[no-untyped-def]
    """The candidate of the smallest error under the scale before rounding; of equal ones the first."""
    choice, smallest = 0, np.inf
    for candidate in range(len(divisors)):
        divisor = divisors[candidate, 0] / divisors[candidate, 1]
        error = 0.0  # a sum of integers below 2^31: exact
        for value in group:
            ratio = value / amax
            code = min(max(np.rint(ratio * divisor), -8.0), 7.0)
            difference = ratio - code / divisor
            error += np.rint(min(difference * difference / ERROR_UNIT, 2.0**24))
        if error < smallest:
            choice, smallest = candidate, error
    return choice


@numba.njit(nogil=True, cache=True)
def _value(bits):  # type: ignore[no-untyped-def]
    pattern = np.empty(1, np.uint32)
    pattern[0] = np.uint32(bits) << np.uint32(16)
    return np.float64(pattern.view(np.float32)[0])


@numba.njit(nogil=True, cache=True)
def _write(group, scale, target):  # type: ignore[no-untyped-def]
    for word in range(target.size):
        value = np.uint32(0)
        for position in range(CODES_PER_WORD):
            code = min(max(np.rint(group[word * CODES_PER_WORD + position] / scale), -8.0), 7.0)
            value |= np.uint32(np.int64(code) + 8) << np.uint32(4 * position)
        target[word] = value

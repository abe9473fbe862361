"""Float weights to packed INT4, for sources that are not FP8 blocks and for groups that do not lie in one.

The result is that of `quantkit.formats.int4.quantize` on the same numbers, byte for byte: candidates are compared by
the same whole numbers, and the code is the nearest integer to weight / stored scale.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.int4_groups import pack, store_scale
from quantkit.kernels.convert.int4_search import RATIO_ONE, Divisor, candidates, choose


def float_to_int4(
    weight: npt.NDArray[np.float32] | npt.NDArray[np.float64],
    group_size: int,
    divisors: tuple[Divisor, ...],
    signed: bool,
    packed: npt.NDArray[np.uint32],
    out_scale: npt.NDArray[np.uint16],
) -> int:
    """Quantize `weight` float32 or float64 [N, K] into words `packed` [N, K / 8] and `out_scale` [N, K / group_size].

    `divisors` and `signed` as in `fp8_block_to_int4`. `group_size` is a multiple of 32 and divides K. Returns -1, or
    the flat position of the first group with a NaN, an infinity, or a magnitude whose scale would overflow; the arrays
    are then incomplete.
    """
    fractions = np.array(divisors, np.float64)
    search = candidates(divisors) if len(divisors) > 1 else None
    return int(_quantize(weight, group_size, fractions, signed, search, packed, out_scale))


@numba.njit(nogil=True, cache=True)
def _quantize(weight, group_size, divisors, signed, search, packed, out_scale):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    groups = columns // group_size
    choice, scores = np.zeros(groups, np.int64), np.empty((2, groups), np.int64)
    ratios, nibbles = np.empty(columns, np.int16), np.empty(columns, np.uint8)
    amax, sign = np.empty(groups, np.float64), np.ones(groups, np.float64)
    for row in range(rows):
        source = weight[row]
        for group in range(groups):
            amax[group], first = _largest(source, group * group_size, group_size)
            if not amax[group] <= 2.0**127:
                return row * columns + group * group_size
            sign[group] = -1.0 if signed and first > 0 else 1.0
        if search is not None:
            for group in range(groups):
                to_ratio = sign[group] * (amax[group] if amax[group] > 0 else 1.0)
                for position in range(group * group_size, (group + 1) * group_size):
                    ratios[position] = np.rint(np.float64(source[position]) / to_ratio * RATIO_ONE)
            choose(ratios, group_size, search[0], search[1], scores, choice)
        for group in range(groups):
            bits, _ = store_scale(amax[group], divisors[choice[group], 0], divisors[choice[group], 1])
            out_scale[row, group] = bits | (np.uint16(0x8000) if sign[group] < 0 else np.uint16(0))
            step = sign[group] * _value(bits)
            for position in range(group * group_size, (group + 1) * group_size):
                code = np.rint(np.float64(source[position]) / step)
                nibbles[position] = np.uint8(min(max(code, -8.0), 7.0) + 8)
        pack(nibbles, packed[row])
    return -1


@numba.njit(nogil=True, cache=True)
def _largest(source, begin, group_size):  # type: ignore[no-untyped-def]
    """The largest magnitude, NaN if there is one, and the first weight that has it."""
    amax, first = 0.0, 0.0
    for position in range(begin, begin + group_size):
        value = np.float64(source[position])
        if not abs(value) <= amax:
            amax, first = abs(value), value
            if np.isnan(value):
                break
    return amax, first


@numba.njit(nogil=True, cache=True)
def _value(bits):  # type: ignore[no-untyped-def]
    pattern = np.empty(1, np.uint32)
    pattern[0] = np.uint32(bits) << np.uint32(16)
    return np.float64(pattern.view(np.float32)[0])

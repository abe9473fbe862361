"""Rows of x as the loops of `packed_rows` want them: near 2^100 for FP8, in fixed point for 4-bit weights."""

import math
from typing import Any

import numba
import numpy as np
from numba.extending import overload

WORD = 8  # columns of a word of 4-bit weights
PLACES = (1, 1 << 7, -1 << 15)  # what digits count; -2^15 is an int16 and 2^15 not, so its products are taken off
_STEP = 64  # columns for which numbers are kept together, in as many places of a float32
_BITS = 22
AS_IT_IS, NORMALIZED = -2, -1  # how x is arranged; or as digits, for weights to which this much is added


@numba.njit(nogil=True, cache=True)
def arrange(x, how):  # type: ignore[no-untyped-def]
    """Rows of x [T, K], float32 or the bits of BF16, as the loops want them, and float64 [T], what undoes it."""
    wide = _wide(x)
    if how == NORMALIZED:
        return _normalize(wide)
    if how == AS_IT_IS:
        return wide, np.ones(x.shape[0])
    return _to_digits(wide, how), np.ones(x.shape[0])


@numba.njit(nogil=True, cache=True)
def give(y, out):  # type: ignore[no-untyped-def]
    """Write y float32 [M, N] into `out`, as it is or rounded to the bits of BF16."""
    for row in range(y.shape[0]):
        _give_row(y[row], out[row])


def _wide(x: Any) -> Any: ...


def _give_row(y: Any, out: Any) -> None: ...


@overload(_wide)
def _overload_wide(x):  # type: ignore[no-untyped-def]
    def widen(x):  # type: ignore[no-untyped-def]
        out = np.empty(x.shape, np.float32)
        for row in range(x.shape[0]):
            bits = out[row].view(np.uint32)
            for column in range(x.shape[1]):
                bits[column] = np.uint32(x[row, column]) << np.uint32(16)
        return out

    return widen if x.dtype == numba.types.uint16 else lambda x: x


@overload(_give_row)
def _overload_give_row(y, out):  # type: ignore[no-untyped-def]
    def copy(y, out):  # type: ignore[no-untyped-def]
        out[:] = y

    def round_to_bf16(y, out):  # type: ignore[no-untyped-def]
        bits = y.view(np.uint32)
        for column in range(np.uint64(len(y))):
            number = bits[column]
            rounded = (number + np.uint32(0x7FFF) + ((number >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (number & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[column] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)

    return round_to_bf16 if out.dtype == numba.types.uint16 else copy


@numba.njit(nogil=True)
def _normalize(x):  # type: ignore[no-untyped-def]
    """x float32 [T, K] with each row brought near 2^100, and float64 [T], what undoes it.

    FP8's weights are 2^-120 of their numbers; their products with this x are normal float32, however large x is.
    """
    out, factors = np.empty(x.shape, np.float32), np.empty(x.shape[0])
    for row in range(x.shape[0]):
        largest = np.float32(0)
        for column in range(x.shape[1]):
            largest = max(largest, abs(x[row, column]))
        power = min(100 - math.frexp(largest)[1], 126) if np.isfinite(largest) else 0
        factor = np.float32(2.0**power)
        for column in range(x.shape[1]):
            out[row, column] = x[row, column] * factor
        factors[row] = 2.0 ** (120 - power)
    return out, factors


@numba.njit(nogil=True)
def _to_digits(x, offset):  # type: ignore[no-untyped-def]
    """Bring x float32 [T, K] into fixed point for 4-bit weights: as float32 [T, ceil(K / 64) * 64].

    The numbers of a word, 8 columns, are integers of at most 22 bits and a sign times the word's unit, a power of two:
    the largest has 22 or 21 bits. BF16 is exact where it is not less than 2^-14 of that. Of 64 columns there are

        int8    32 * 2d + i, 32 * (2d + 1) + i    digit d of columns 2i, and 2i + 1
        int32   48 + j                            what undoes `offset`, which is added to each weight of word j
        float32 56 + j                            the unit, NaN where a number is not finite

    and a number is digit 0 + 2^7 digit 1 + 2^15 digit 2.
    """
    width = -(-x.shape[1] // _STEP) * _STEP
    room = np.zeros(x.shape[0] * width + 16, np.float32)
    first = -(room.ctypes.data // 4) % 16
    out = room[first : first + x.shape[0] * width].reshape(x.shape[0], width)
    for row in range(x.shape[0]):
        digits, sums = out[row].view(np.int8), out[row].view(np.int32)
        for word in range(x.shape[1] // WORD):
            numbers = x[row, word * WORD : (word + 1) * WORD]
            step, place = word // WORD * _STEP, word % WORD
            factor, unit = _units(numbers)
            out[row, step + 56 + place] = unit
            if np.isnan(unit):
                continue
            total = np.int32(0)
            for column in range(WORD):
                number = np.int32(np.rint(numbers[column] * factor))
                total += number
                at = 4 * step + 32 * (column & 1) + 4 * place + (column >> 1)
                digits[at] = low = ((number + 64) & 127) - 64
                digits[at + 64] = middle = (((number - low >> 7) + 128) & 255) - 128
                digits[at + 128] = (number - low >> 7) - middle >> 8
            sums[step + 48 + place] = -offset * total
    return out


@numba.njit(nogil=True, inline="always")
def _units(numbers):  # type: ignore[no-untyped-def]
    """What brings numbers to 22 bits, and what undoes it; both are normal float32 also for the smallest numbers."""
    largest, size = np.float32(0), 0.0
    for number in numbers:
        largest, size = max(largest, abs(number)), size + abs(number)
    if not np.isfinite(size):
        return np.float32(1), np.float32(np.nan)
    power = min(_BITS - math.frexp(largest * np.float32(1 + 2**-6))[1], 126)  # the highest digit would be 128
    return np.float32(2.0**power), np.float32(2.0**-power)

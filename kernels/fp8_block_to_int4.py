"""FP8 block weights to packed INT4 without decoding them: a table lookup for each byte.

The tables and why they are exact: `int4_tables.py`. The result is that of `quantkit.formats.int4.quantize` on float64
weights, byte for byte.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import NAN_BYTE, SMALLEST_SCALE, VALUES
from quantkit.kernels.int4_groups import CODES_PER_WORD, RAISED, first_smallest, store_scale
from quantkit.kernels.int4_tables import Divisor, code_tables, error_tables

_UNKNOWN, _DIVIDE = -2, -1  # instead of where a code table begins


def fp8_block_to_int4(
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    block: tuple[int, int],
    group_size: int,
    divisors: tuple[Divisor, ...],
    signed: bool,
    packed: npt.NDArray[np.uint32],
    out_scale: npt.NDArray[np.uint16],
) -> int:
    """Quantize FP8 bytes `weight` [N, K] with `scale` float32 [ceil(N/rows), ceil(K/columns)] into the given arrays.

    divisors   the candidates for a group's scale = largest magnitude / divisor; that of the smallest error is taken
    signed     whether scales are negative where that maps the group's largest weight to the code -8
    packed     [N, K / 8] words of eight nibbles
    out_scale  [N, K / group_size] BF16 bits

    `group_size` divides K and the block's columns. Scales lie in 2^-126..2^119. Returns -1, or the flat position of the
    first group with a NaN in it; the arrays are then incomplete.
    """
    fractions = np.array(divisors, np.float64)
    tables, errors = code_tables(divisors), error_tables(divisors)
    return int(
        _quantize(weight, scale, block[0], block[1], group_size, fractions, signed, tables, errors, packed, out_scale)
    )


@numba.njit(nogil=True, cache=True)
def _quantize(  # type: ignore[no-untyped-def]
    weight, scale, block_rows, block_columns, group_size, divisors, signed, tables, errors, packed, out_scale
):
    rows, columns = weight.shape
    candidates = len(divisors)
    flat_tables = tables.reshape(-1)
    largest = np.empty(columns // group_size, np.uint8)
    stored = np.empty((scale.shape[1], NAN_BYTE, candidates), np.uint16)
    table_begin = np.empty((scale.shape[1], NAN_BYTE, candidates), np.int64)
    for row in range(rows):
        if row % block_rows == 0:
            table_begin[:] = _UNKNOWN
        _largest_bytes(weight[row], group_size, largest)
        for group in range(largest.size):
            begin = group * group_size
            byte, block = largest[group], begin // block_columns
            if byte == NAN_BYTE:
                return row * columns + begin
            source = weight[row, begin : begin + group_size]
            flip = _flip(source, byte) if signed and byte else np.uint8(0)
            choice = _choose(source, flip, errors[byte]) if candidates > 1 else 0
            if table_begin[block, byte, choice] == _UNKNOWN:
                block_scale = np.float64(scale[row // block_rows, block])
                bits, side = store_scale(VALUES[byte] * block_scale, divisors[choice, 0], divisors[choice, 1])
                stored[block, byte, choice] = bits
                at = ((choice * 3 + side) * NAN_BYTE + byte) * 256
                table_begin[block, byte, choice] = _DIVIDE if side == RAISED else at
            out_scale[row, group] = stored[block, byte, choice] | np.uint16(flip) << np.uint16(8)
            target = packed[row, begin // CODES_PER_WORD : (begin + group_size) // CODES_PER_WORD]
            if table_begin[block, byte, choice] == _DIVIDE:
                _divide(source, flip, np.float64(scale[row // block_rows, block]) / SMALLEST_SCALE, target)
            else:
                _look_up(source, flip, flat_tables, np.uint64(table_begin[block, byte, choice]), target)
    return -1


@numba.njit(nogil=True, cache=True)
def _largest_bytes(source, group_size, largest):  # type: ignore[no-untyped-def]
    for group in range(np.uint64(largest.size)):  # unsigned indices: no test for negative ones, so that LLVM vectorizes
        found = np.uint8(0)
        for position in range(np.uint64(group_size)):
            byte = source[group * np.uint64(group_size) + position] & np.uint8(0x7F)
            found = byte if byte > found else found
        largest[group] = found


@numba.njit(nogil=True, cache=True)
def _flip(source, largest):  # type: ignore[no-untyped-def]
    """The sign bit if the first weight of the largest magnitude is positive: with a negative scale it becomes -8."""
    for byte in source:
        if byte & np.uint8(0x7F) == largest:
            return ~byte & np.uint8(0x80)
    return np.uint8(0)


@numba.njit(nogil=True, cache=True)
def _choose(source, flip, errors):  # type: ignore[no-untyped-def]
    """The candidate of the smallest error. Each number of `errors` is of two candidates, so each sum is, too."""
    sum0 = sum1 = sum2 = sum3 = np.uint64(0)
    for position in range(np.uint64(source.size)):
        row = np.uint64(source[position] ^ flip)
        sum0 += errors[row, 0]
        sum1 += errors[row, 1]
        sum2 += errors[row, 2]
        sum3 += errors[row, 3]
    return first_smallest((sum0, sum1, sum2, sum3))


@numba.njit(nogil=True, cache=True)
def _look_up(source, flip, tables, begin, target):  # type: ignore[no-untyped-def]
    for word in range(np.uint64(target.size)):
        value = np.uint32(0)
        for position in range(np.uint64(CODES_PER_WORD)):
            byte = np.uint64(source[word * np.uint64(CODES_PER_WORD) + position] ^ flip)
            value |= np.uint32(tables[begin + byte]) << np.uint32(np.uint64(4) * position)
        target[word] = value


@numba.njit(nogil=True, cache=True)
def _divide(source, flip, ratio, target):  # type: ignore[no-untyped-def]
    """The codes of a group whose scale was raised to the smallest one; such groups are zeros, or nearly."""
    for word in range(target.size):
        value = np.uint32(0)
        for position in range(CODES_PER_WORD):
            code = np.rint(VALUES[source[word * CODES_PER_WORD + position] ^ flip] * ratio)
            value |= np.uint32(np.int64(min(max(code, -8.0), 7.0)) + 8) << np.uint32(4 * position)
        target[word] = value

"""FP8 block weights to packed INT4 without decoding them: a table lookup for each byte.

The tables and why they are exact: `int4_tables.py`. The result is that of `quantkit.formats.int4.quantize` on float64
weights, byte for byte.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.int4_groups import RAISED, pack, store_scale
from quantkit.kernels.convert.int4_search import Divisor, candidates, choose, ratio_table
from quantkit.kernels.convert.int4_tables import code_tables
from quantkit.kernels.e4m3 import NAN_BYTE, SMALLEST_SCALE, VALUES
from quantkit.kernels.vectors import LANES, largest_magnitude

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

    `group_size` is a multiple of 32 and divides K and the block's columns. Scales lie in 2^-126..2^119. Returns -1, or
    the flat position of the first group with a NaN in it; the arrays are then incomplete.
    """
    fractions = np.array(divisors, np.float64)
    search = (ratio_table(), *candidates(divisors)) if len(divisors) > 1 else None
    tables = code_tables(divisors).reshape(-1)
    return int(_quantize(weight, scale, block, group_size, fractions, signed, tables, search, packed, out_scale))


@numba.njit(nogil=True, cache=True)
def _quantize(  # type: ignore[no-untyped-def]
    weight, scale, block, group_size, divisors, signed, tables, search, packed, out_scale
):
    rows, columns = weight.shape
    groups = columns // group_size
    largest, flip = np.empty(groups, np.uint8), np.zeros(groups, np.uint8)
    choice, scores = np.zeros(groups, np.int64), np.empty((2, groups), np.int64)
    ratios, nibbles = np.empty(columns, np.int16), np.empty(columns, np.uint8)
    block_of = np.arange(groups) * group_size // block[1]
    stored = np.empty(scale.shape[1] * NAN_BYTE * len(divisors), np.uint16)  # by block, largest byte and choice
    table_begin = np.empty(stored.size, np.int64)
    for row in range(rows):
        if row % block[0] == 0:
            table_begin[:] = _UNKNOWN
        source, block_scales = weight[row], scale[row // block[0]]
        _largest_bytes(source, group_size, largest)
        if largest.max() == NAN_BYTE:
            return row * columns + np.argmax(largest) * group_size
        if signed:
            _flips(source, group_size, largest, flip)
        if search is not None:
            _look_up_ratios(source, group_size, largest, flip, search[0], ratios)
            choose(ratios, group_size, search[1], search[2], scores, choice)
        for group in range(np.uint64(groups)):
            at = np.uint64((block_of[group] * NAN_BYTE + largest[group]) * len(divisors) + choice[group])
            if table_begin[at] == _UNKNOWN:
                amax = VALUES[largest[group]] * np.float64(block_scales[block_of[group]])
                stored[at], side = store_scale(amax, divisors[choice[group], 0], divisors[choice[group], 1])
                begin = ((choice[group] * 3 + side) * NAN_BYTE + largest[group]) * 256
                table_begin[at] = _DIVIDE if side == RAISED else begin
            out_scale[row, group] = stored[at] | np.uint16(flip[group]) << np.uint16(8)
            if table_begin[at] == _DIVIDE:
                step = SMALLEST_SCALE / np.float64(block_scales[block_of[group]])
                _divide(source, flip[group], step, group, group_size, nibbles)
            else:
                _look_up(source, flip[group], tables, np.uint64(table_begin[at]), group, group_size, nibbles)
        pack(nibbles, packed[row])
    return -1


# Below, unsigned indices spare a test for negative ones, so that LLVM can vectorize.


@numba.njit(nogil=True, cache=True)
def _largest_bytes(source, group_size, largest):  # type: ignore[no-untyped-def]
    position = np.uint64(0)
    for group in range(np.uint64(largest.size)):
        found = np.uint8(0)
        for _ in range(group_size // LANES):
            found = max(found, largest_magnitude(source, position))  # type: ignore[call-arg]
            position += np.uint64(LANES)
        largest[group] = found


@numba.njit(nogil=True, cache=True)
def _flips(source, group_size, largest, flip):  # type: ignore[no-untyped-def]
    """The sign bit where the first weight of the largest magnitude is positive: a negative scale makes it -8."""
    for group in range(np.uint64(largest.size)):
        position = group * np.uint64(group_size)
        while source[position] & np.uint8(0x7F) != largest[group]:
            position += np.uint64(1)
        flip[group] = ~source[position] & np.uint8(0x80) if largest[group] else np.uint8(0)


@numba.njit(nogil=True, cache=True)
def _look_up_ratios(source, group_size, largest, flip, table, ratios):  # type: ignore[no-untyped-def]
    for group in range(np.uint64(largest.size)):
        row = table[np.uint64(largest[group])]
        for position in range(group * np.uint64(group_size), (group + np.uint64(1)) * np.uint64(group_size)):
            ratios[position] = row[np.uint64(source[position] ^ flip[group])]


@numba.njit(nogil=True, cache=True)
def _look_up(source, flip, tables, begin, group, group_size, nibbles):  # type: ignore[no-untyped-def]
    for position in range(group * np.uint64(group_size), (group + np.uint64(1)) * np.uint64(group_size)):
        nibbles[position] = tables[begin + np.uint64(source[position] ^ flip)]


@numba.njit(nogil=True, cache=True)
def _divide(source, flip, step, group, group_size, nibbles):  # type: ignore[no-untyped-def]
    """The codes of a group whose scale was raised to the smallest one; such groups are zeros, or nearly."""
    for position in range(group * np.uint64(group_size), (group + np.uint64(1)) * np.uint64(group_size)):
        code = np.rint(VALUES[source[position] ^ flip] / step)
        nibbles[position] = np.uint8(min(max(code, -8.0), 7.0) + 8)

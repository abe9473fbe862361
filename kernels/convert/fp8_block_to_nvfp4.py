"""FP8 block weights to packed NVFP4 without decoding them: tables by byte, made for each block.

All weights of a group lie in one FP8 block and share its scale b. A weight is T[byte] * b, and 2^exponent is taken out
of b. So under a block scale s a code depends on the byte alone: it is the number of midpoints of E2M1, times s, that
T[byte] * b passes. A byte's order is its number's, so each midpoint is a threshold on the byte, and what a byte adds to
the squared error is a table [byte, s] too. T[byte] * b has at most 28 significant bits and midpoint * s seven:
comparisons are exact in float64.

The result is that of `quantkit.formats.nvfp4.quantize` on float64 weights, byte for byte.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.nvfp4_groups import (
    CANDIDATES,
    CANDIDATES_ROW,
    FULL_RANGE,
    GROUP_SIZE,
    LARGEST,
    MIDPOINTS,
    SEARCHED,
    SMALLEST,
    Nvfp4Counts,
    is_raised,
    plain_scale,
)
from quantkit.kernels.convert.nvfp4_vectors import best_by_byte, largest_byte, pack_bytes, store_errors
from quantkit.kernels.e4m3 import NAN_BYTE, VALUES

_STRIDE = 136  # of the table of errors: room for all candidates, and 17 cache lines, which spreads rows over all sets
_FIRST = SMALLEST - 1  # the scale of the table's first column, which is never chosen


def fp8_block_to_nvfp4(
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    block: tuple[int, int],
    exponent: int,
    search: bool,
    packed: npt.NDArray[np.uint8],
    out_scale: npt.NDArray[np.uint8],
) -> Nvfp4Counts:
    """Quantize FP8 bytes `weight` [N, K] with `scale` float32 [ceil(N/rows), ceil(K/columns)] into the given arrays.

    exponent   of the tensor's global scale 2^exponent
    search     whether a group's scale is the best of eight, or the plain one
    packed     [N, K / 2] bytes of two codes
    out_scale  [N, K / 16] E4M3 bytes

    16 divides K and the block's columns. Scales lie in 2^-126..2^119. `bad` of the result is None, or the flat position
    of a block with a NaN in it; the arrays and counts are then incomplete.
    """
    words = packed.view(np.uint64)
    bad, counts = _quantize(weight, scale, block, 2.0**-exponent, search, CANDIDATES, words, out_scale)
    return Nvfp4Counts(None if bad < 0 else bad, *counts.tolist())


@numba.njit(nogil=True, cache=True)
def _quantize(weight, scale, block, unit, search, candidates, words, out_scale):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    seen, plain = np.empty(NAN_BYTE + 1, np.bool_), np.full(NAN_BYTE, SMALLEST, np.uint8)
    magnitudes, below = np.empty(NAN_BYTE, np.float64), np.zeros((LARGEST + 1) * SEARCHED, np.uint8)
    errors = np.full(NAN_BYTE * _STRIDE, np.inf)
    errors[SMALLEST - _FIRST : LARGEST + 1 - _FIRST] = 0  # of the byte 0
    counts = np.zeros(3, np.int64)
    for block_row in range(scale.shape[0]):
        for block_column in range(scale.shape[1]):
            for byte in range(NAN_BYTE):
                magnitudes[byte] = VALUES[byte] * (np.float64(scale[block_row, block_column]) * unit)
            row_range = block_row * block[0], min((block_row + 1) * block[0], rows)
            first, last = block_column * block[1], min((block_column + 1) * block[1], columns)
            group_range = first // GROUP_SIZE, last // GROUP_SIZE
            _look(weight, row_range, group_range, seen)
            if seen[NAN_BYTE]:
                return row_range[0] * columns + first, counts
            _make_tables(seen, magnitudes, search, candidates, plain, errors, below)
            _convert(weight, row_range, group_range, magnitudes, search, plain, errors, below, words, out_scale, counts)
    return -1, counts


# Below, unsigned indices spare a test for negative ones.


@numba.njit(nogil=True, cache=True)
def _look(weight, row_range, group_range, seen):  # type: ignore[no-untyped-def]
    """Mark the magnitude bytes that are the largest of a group."""
    seen[:] = False
    for row in range(row_range[0], row_range[1]):
        source = weight[row]
        for group in range(np.uint64(group_range[0]), np.uint64(group_range[1])):
            seen[np.uint64(largest_byte(source, group * np.uint64(GROUP_SIZE)))] = True  # type: ignore[call-arg]


@numba.njit(nogil=True, cache=True)
def _make_tables(seen, magnitudes, search, candidates, plain, errors, below):  # type: ignore[no-untyped-def]
    """Make the tables that groups need whose largest bytes are in `seen`; the byte 0 needs none."""
    needed = np.zeros(LARGEST + 1 + SEARCHED, np.bool_)
    for byte in range(1, NAN_BYTE):
        if seen[byte]:
            plain[byte] = plain_scale(magnitudes[byte])
            if search:
                needed[plain[byte] - 1 : plain[byte] - 1 + SEARCHED] = True
            else:
                needed[plain[byte]] = True
    made = SMALLEST
    for scale in range(SMALLEST, LARGEST + 1):
        if needed[scale]:
            for index in range(len(MIDPOINTS)):
                below[scale * SEARCHED + index] = _last_below(magnitudes, MIDPOINTS[index] * VALUES[scale], index)
        if needed[scale] and search and scale >= made:
            made = scale + SEARCHED
            begin = np.uint64((scale - _FIRST) * CANDIDATES_ROW)
            for byte in range(NAN_BYTE):
                position = np.uint64(byte * _STRIDE + scale - _FIRST)
                store_errors(magnitudes[byte], candidates, begin, errors, position)  # type: ignore[call-arg]


@numba.njit(nogil=True, cache=True)
def _last_below(magnitudes, midpoint, index):  # type: ignore[no-untyped-def]
    """The last of the rising `magnitudes` that rounds to number `index`, below `midpoint`, or less; ties to even."""
    if index & 1:
        return np.searchsorted(magnitudes, midpoint, "left") - 1
    return np.searchsorted(magnitudes, midpoint, "right") - 1


@numba.njit(nogil=True, cache=True)
def _convert(  # type: ignore[no-untyped-def]
    weight, row_range, group_range, magnitudes, search, plain, errors, below, words, out_scale, counts
):
    clamped, raised, flushed = 0, 0, 0
    for row in range(row_range[0], row_range[1]):
        source, row_words, row_scale = weight[row], words[row], out_scale[row]
        for group in range(np.uint64(group_range[0]), np.uint64(group_range[1])):
            position = group * np.uint64(GROUP_SIZE)
            largest = np.uint64(largest_byte(source, position))  # type: ignore[call-arg]
            scale = np.uint64(plain[largest])
            if search:
                begin = scale - np.uint64(1 + _FIRST)
                best = best_by_byte(source, position, errors, begin, np.uint64(_STRIDE))
                scale += np.uint64(best) - np.uint64(1)
            row_scale[group] = scale
            word = pack_bytes(source, position, below, scale * np.uint64(SEARCHED))
            row_words[group] = word
            clamped += magnitudes[largest] > FULL_RANGE
            raised += is_raised(magnitudes[largest])
            flushed += word == 0 and largest > 0
    counts += np.array((clamped, raised, flushed))

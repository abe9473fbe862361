"""FP8 block weights to packed INT4 without decoding them: a table lookup for each byte.

All weights of a group lie in one FP8 block and share its scale b. With m the group's largest magnitude byte, T the E4M3
numbers and d the divisor, the ideal scale is T[m] * b / d and the code of a byte k is the integer nearest to

    T[k] * b / stored scale,    about    T[k] * d / T[m] :    b cancels.

The stored scale is the ideal one rounded to BF16, which moves the quotient by a factor of at most 1 +- 2^-8. No
quotient of a safe divisor comes that close to a half step, except those exactly on one, and these go up, to even or
down as the stored scale is below, at or above the ideal. So three tables [m, k] hold the exact nearest codes.

The result is the one of `quantkit.formats.int4.quantize` on float64 weights, byte for byte.
"""

from functools import cache

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import NAN_BYTE, SMALLEST_SCALE, VALUES, bf16_bits

_CODES_PER_WORD = 8
_BELOW, _AT, _ABOVE = 0, 1, 2


@cache
def code_tables(divisor: float) -> npt.NDArray[np.uint8]:
    """Nibbles (code + 8) [3, 127, 256] by stored scale below, at or above the ideal, group maximum byte, and byte.

    Raises ValueError for a divisor that is not safe. `divisor` must be a float64 with few significant bits, so that
    every product below is exact.
    """
    magnitudes = VALUES[:NAN_BYTE]
    numerator = (magnitudes * divisor)[None, :]  # [1, k]
    below, above = np.zeros((127, 127), np.int64), np.zeros((127, 127), np.int64)
    tie_to_even = np.zeros((127, 127), np.int64)
    for step in range(8):
        half = ((step + 0.5) * magnitudes)[:, None]  # [m, 1]
        exact = (numerator == half) & (half > 0)
        near = (np.abs(numerator - half) <= 2.0**-8 * half) & ~exact & (half > 0)
        if (near & np.tri(127, dtype=bool)).any():
            raise ValueError(f"divisor {divisor} is not safe: rounding its scale to BF16 can move a code")
        above += (numerator > half) & (half > 0)
        below += (numerator >= half) & (half > 0)
        tie_to_even += ((numerator > half) | (exact & (step % 2 == 1))) & (half > 0)
    magnitude = np.stack([below, tie_to_even, above])  # [3, m, k]
    nibbles = np.full((3, 127, 256), 8, np.uint8)
    nibbles[:, :, :127] = 8 + np.minimum(magnitude, 7)
    nibbles[:, :, 128:255] = 8 - magnitude
    return nibbles


def fp8_block_to_int4(
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    block: tuple[int, int],
    group_size: int,
    packed: npt.NDArray[np.uint32],
    out_scale: npt.NDArray[np.uint16],
    divisor: float = 7.5,
) -> int:
    """Quantize FP8 `weight` [N, K] (bytes) with `scale` float32 [ceil(N/rows), ceil(K/columns)] into the given arrays.

    packed     [N, K / 8] words of eight nibbles
    out_scale  [N, K / group_size] BF16 bits

    `group_size` divides K and the block's columns. Scales lie in 2^-126..2^119. Returns -1, or the flat position of the
    first group with a NaN in it; the arrays are then incomplete.
    """
    return int(
        _quantize(weight, scale, block[0], block[1], group_size, divisor, code_tables(divisor), packed, out_scale)
    )


@numba.njit(nogil=True, cache=True)
def _quantize(weight, scale, block_rows, block_columns, group_size, divisor, tables, packed, out_scale):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    flat_tables = tables.reshape(-1)
    largest = np.empty(columns // group_size, np.uint8)
    stored = np.empty((scale.shape[1], NAN_BYTE), np.uint16)
    table_begin = np.empty((scale.shape[1], NAN_BYTE), np.int64)
    for row in range(rows):
        if row % block_rows == 0:
            for block in range(scale.shape[1]):
                _scales(scale[row // block_rows, block], divisor, stored[block], table_begin[block])
        _largest_bytes(weight[row], group_size, largest)
        for group in range(largest.size):
            begin = group * group_size
            byte, block = largest[group], begin // block_columns
            if byte == NAN_BYTE:
                return row * columns + begin
            out_scale[row, group] = stored[block, byte]
            source = weight[row, begin : begin + group_size]
            target = packed[row, begin // _CODES_PER_WORD : (begin + group_size) // _CODES_PER_WORD]
            if table_begin[block, byte] < 0:
                _divide(source, np.float64(scale[row // block_rows, block]) / SMALLEST_SCALE, target)
            else:
                _look_up(source, flat_tables, np.uint64(table_begin[block, byte]), target)
    return -1


@numba.njit(nogil=True, cache=True)
def _scales(block_scale, divisor, stored, table_begin):  # type: ignore[no-untyped-def]
    """For each possible group maximum: the stored scale's BF16 bits, and where its code table begins (-1: divide)."""
    ideal = np.empty(1, np.float32)
    ideal_bits = ideal.view(np.uint32)
    rounded_bits = np.empty(1, np.uint32)
    rounded = rounded_bits.view(np.float32)
    for byte in range(NAN_BYTE):
        amax = VALUES[byte] * np.float64(block_scale)
        ideal[0] = amax / divisor
        rounded_bits[0] = np.uint32(bf16_bits(ideal_bits[0])) << np.uint32(16)
        position = np.float64(rounded[0]) * divisor
        side = _BELOW if position < amax else _AT if position == amax else _ABOVE
        table_begin[byte] = (side * NAN_BYTE + byte) * 256
        if rounded[0] < SMALLEST_SCALE:
            rounded[0] = SMALLEST_SCALE
            table_begin[byte] = -1
        stored[byte] = np.uint16(rounded_bits[0] >> np.uint32(16))


@numba.njit(nogil=True, cache=True)
def _largest_bytes(source, group_size, largest):  # type: ignore[no-untyped-def]
    for group in range(np.uint64(largest.size)):  # unsigned indices: no test for negative ones, so that LLVM vectorizes
        found = np.uint8(0)
        for position in range(np.uint64(group_size)):
            byte = source[group * np.uint64(group_size) + position] & np.uint8(0x7F)
            found = byte if byte > found else found
        largest[group] = found


@numba.njit(nogil=True, cache=True)
def _look_up(source, tables, begin, target):  # type: ignore[no-untyped-def]
    for word in range(np.uint64(target.size)):
        value = np.uint32(0)
        for position in range(np.uint64(_CODES_PER_WORD)):
            byte = np.uint64(source[word * np.uint64(_CODES_PER_WORD) + position])
            value |= np.uint32(tables[begin + byte]) << np.uint32(np.uint64(4) * position)
        target[word] = value


@numba.njit(nogil=True, cache=True)
def _divide(source, ratio, target):  # type: ignore[no-untyped-def]
    """The codes of a group whose scale was raised to the smallest one; such groups are zeros, or nearly."""
    for word in range(target.size):
        value = np.uint32(0)
        for position in range(_CODES_PER_WORD):
            code = np.rint(VALUES[source[word * _CODES_PER_WORD + position]] * ratio)
            value |= np.uint32(np.int64(min(max(code, -8.0), 7.0)) + 8) << np.uint32(4 * position)
        target[word] = value

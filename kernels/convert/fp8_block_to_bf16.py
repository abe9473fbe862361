"""FP8 block weights to BF16: number times block scale, rounded to float32 and then to BF16, as engines do.

The bits of an E4M3 number, moved under float32's exponent, mean 2^-120 of it, subnormal numbers included: three short
loops without a table or a branch, which become vectors and are several times faster than looking bytes up.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import NAN_BYTE, bf16_bits

_UNIT = np.float32(2.0**120)


def fp8_block_to_bf16(
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    block: tuple[int, int],
    out: npt.NDArray[np.uint16],
) -> int:
    """Decode FP8 bytes `weight` [N, K] with `scale` float32 [ceil(N/rows), ceil(K/columns)] into BF16 `out` [N, K].

    Scales lie in 2^-126..2^119. Returns -1, or the flat position of the first NaN; `out` is then incomplete.
    """
    return int(_decode(weight, scale, block[0], block[1], out))


@numba.njit(nogil=True, cache=True)
def _decode(weight, scale, block_rows, block_columns, out):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    bits = np.empty(min(block_columns, columns), np.uint32)
    numbers = bits.view(np.float32)
    for row in range(rows):
        if _has_nan(weight[row]):
            return row * columns + np.argmax((weight[row] & np.uint8(NAN_BYTE)) == NAN_BYTE)
        for begin in range(0, columns, block_columns):
            first, count = np.uint64(begin), np.uint64(min(block_columns, columns - begin))
            step = scale[row // block_rows, begin // block_columns]
            for position in range(count):
                byte = np.uint32(weight[row, first + position])
                bits[position] = (byte & np.uint32(0x80)) << np.uint32(24) | (byte & np.uint32(0x7F)) << np.uint32(20)
            for position in range(count):
                numbers[position] = (numbers[position] * _UNIT) * step
            for position in range(count):
                out[row, first + position] = bf16_bits(bits[position])
    return -1


@numba.njit(nogil=True, cache=True)
def _has_nan(source):  # type: ignore[no-untyped-def]
    nan = False
    for position in range(np.uint64(source.size)):
        nan |= source[position] & np.uint8(NAN_BYTE) == NAN_BYTE
    return nan

"""FP8 block weights to BF16: byte value times block scale, rounded to float32 and then to BF16, as engines do."""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import NAN_BYTE, VALUES, bf16_bits

_VALUES32 = VALUES.astype(np.float32)


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
    products = np.empty(256, np.float32)
    bits = products.view(np.uint32)
    table = np.empty(256, np.uint16)
    for row_begin in range(0, rows, block_rows):
        row_end = min(row_begin + block_rows, rows)
        for begin in range(0, columns, block_columns):
            end = min(begin + block_columns, columns)
            products[:] = _VALUES32 * scale[row_begin // block_rows, begin // block_columns]
            for byte in range(256):
                table[byte] = bf16_bits(bits[byte])
            for row in range(row_begin, row_end):
                if _translate(weight[row, begin:end], table, out[row, begin:end]):
                    nan = np.argmax(weight[row, begin:end] & np.uint8(NAN_BYTE))
                    return row * columns + begin + nan
    return -1


@numba.njit(nogil=True, cache=True)
def _translate(source, table, target):  # type: ignore[no-untyped-def]
    """Look up each byte; returns whether one of them was a NaN."""
    nan = False
    for position in range(np.uint64(source.size)):
        byte = source[position]
        nan |= byte & np.uint8(0x7F) == NAN_BYTE
        target[position] = table[byte]
    return nan

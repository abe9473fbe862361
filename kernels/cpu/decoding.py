"""Packed weights to float32 on a CPU, bit for bit as `quantkit.formats` defines the numbers."""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.nvfp4_groups import NUMBERS
from quantkit.kernels.e4m3 import VALUES

_NUMBERS = np.concatenate((NUMBERS, -NUMBERS))  # [16] float64
_UNIT = np.float32(2.0**120)  # an E4M3 byte moved under float32's exponent is 2^-120 of its number
_NAN = np.uint32(0x7FC00000)

Floats = npt.NDArray[np.float32]


def fp8_to_float32(weight: npt.NDArray[np.uint8], scale: Floats, block: tuple[int, int], out: Floats) -> None:
    """Decode bytes `weight` [N, K] with `scale` [ceil(N/rows), ceil(K/columns)] into `out` [N, K]; NaN stays NaN."""
    _fp8(weight, scale, *block, out)


def int4_to_float32(packed: npt.NDArray[np.uint32], scale: npt.NDArray[np.uint16], out: Floats) -> None:
    """Decode words `packed` [N, K/8] with BF16 bits `scale` [N, K/g] into `out` [N, K]."""
    steps = (scale.astype(np.uint32) << 16).view(np.float32)
    _int4(packed, steps, out.shape[1] // scale.shape[1], out)


def nvfp4_to_float32(
    packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8], multiplier: float, out: Floats
) -> None:
    """Decode codes `packed` [N, K/2] with E4M3 bytes `scale` [N, K/16] into `out` [N, K]; a NaN scale gives NaN."""
    with np.errstate(over="ignore"):
        _nvfp4(packed, scale, np.outer(VALUES, _NUMBERS * multiplier).astype(np.float32), out)


@numba.njit(nogil=True, cache=True)
def _fp8(weight, scale, block_rows, block_columns, out):  # type: ignore[no-untyped-def]
    for row in range(weight.shape[0]):
        bits = out[row].view(np.uint32)
        for begin in range(0, weight.shape[1], block_columns):
            first, last = np.uint64(begin), np.uint64(min(begin + block_columns, weight.shape[1]))
            step = scale[row // block_rows, begin // block_columns]
            for column in range(first, last):
                byte = np.uint32(weight[row, column])
                magnitude = byte & np.uint32(0x7F)
                number = (byte & np.uint32(0x80)) << np.uint32(24) | magnitude << np.uint32(20)
                bits[column] = _NAN if magnitude == np.uint32(0x7F) else number
            for column in range(first, last):
                out[row, column] = (out[row, column] * _UNIT) * step


@numba.njit(nogil=True, cache=True)
def _int4(packed, steps, group, out):  # type: ignore[no-untyped-def]
    for row in range(packed.shape[0]):
        for column in range(np.uint64(out.shape[1])):
            nibble = (packed[row, column >> np.uint64(3)] >> np.uint32((column & np.uint64(7)) << np.uint64(2))) & 15
            out[row, column] = np.float32(np.int32(nibble) - np.int32(8))
        for index in range(np.uint64(steps.shape[1])):
            step = steps[row, index]
            for column in range(index * np.uint64(group), (index + np.uint64(1)) * np.uint64(group)):
                out[row, column] *= step


@numba.njit(nogil=True, cache=True)
def _nvfp4(packed, scale, table, out):  # type: ignore[no-untyped-def]
    for row in range(packed.shape[0]):
        for byte in range(np.uint64(packed.shape[1])):
            numbers, codes = table[scale[row, byte >> np.uint64(3)]], packed[row, byte]
            out[row, byte << np.uint64(1)] = numbers[codes & np.uint8(0xF)]
            out[row, (byte << np.uint64(1)) + np.uint64(1)] = numbers[codes >> np.uint8(4)]

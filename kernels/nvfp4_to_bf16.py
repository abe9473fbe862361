"""NVFP4 weights to BF16: number times block scale times multiplier, rounded to float32 and then to BF16."""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import VALUES, bf16_bits
from quantkit.kernels.nvfp4_groups import NUMBERS

_GROUP_BYTES = 8
_CODES = np.concatenate((NUMBERS, -NUMBERS))  # [16] float64


def nvfp4_to_bf16(
    packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8], multiplier: float, out: npt.NDArray[np.uint16]
) -> None:
    """Decode codes `packed` [N, K/2] with E4M3 bytes `scale` [N, K/16] and `multiplier` into BF16 `out` [N, K].

    A NaN scale gives NaN weights.
    """
    with np.errstate(over="ignore"):
        products = np.outer(VALUES, _CODES * multiplier).astype(np.float32)
    _decode(packed, scale, _table(products.view(np.uint32)), out)


@numba.njit(nogil=True, cache=True)
def _table(products):  # type: ignore[no-untyped-def]
    """BF16 bits [256, 16] of float32 bits, by scale and code."""
    table = np.empty(products.shape, np.uint16)
    for scale in range(256):
        for code in range(16):
            number = products[scale, code]
            table[scale, code] = bf16_bits(number) if number & np.uint32(0x7FFFFFFF) <= 0x7F800000 else 0x7FFF
    return table


@numba.njit(nogil=True, cache=True)
def _decode(packed, scale, table, out):  # type: ignore[no-untyped-def]
    for row in range(np.uint64(packed.shape[0])):
        for group in range(np.uint64(scale.shape[1])):
            numbers = table[scale[row, group]]
            for byte in range(group * np.uint64(_GROUP_BYTES), (group + np.uint64(1)) * np.uint64(_GROUP_BYTES)):
                codes = packed[row, byte]
                out[row, np.uint64(2) * byte] = numbers[codes & np.uint8(0xF)]
                out[row, np.uint64(2) * byte + np.uint64(1)] = numbers[codes >> np.uint8(4)]

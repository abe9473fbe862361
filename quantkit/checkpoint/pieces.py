"""Reading weights in pieces of at most 4 MiB, into buffers that belong to the thread and are used again.

So the memory of a conversion depends neither on a shard's size nor on a tensor's.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import CODES_PER_WORD, Encoding, Weight
from quantkit.errors import SourceError

PIECE_BYTES = 4 << 20
_DAMAGED = "The file is damaged; download or convert it again."


class _Buffers(threading.local):
    def __init__(self) -> None:
        self._bytes: dict[str, npt.NDArray[np.uint8]] = {}

    def __call__(self, key: str, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        needed = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if key not in self._bytes or self._bytes[key].nbytes < needed:
            self._bytes[key] = np.empty(needed, np.uint8)
        array: npt.NDArray[Any] = self._bytes[key][:needed].view(dtype).reshape(shape)
        return array


_buffer = _Buffers()  # (key, shape, dtype): the calling thread's array of that key, with whatever was in it before


def byte_ranges(nbytes: int) -> Iterator[tuple[int, int]]:
    """`nbytes` cut into pieces."""
    for begin in range(0, nbytes, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, nbytes)


def row_ranges(weight: Weight) -> Iterator[tuple[int, int]]:
    """The rows of a matrix that is not packed, cut into pieces at the borders of its blocks."""
    rows, columns = weight.shape
    block_rows = weight.block[0] if weight.block else 1
    width = max(columns, 1) * DTYPE_BYTES[weight.data.spec.dtype]
    height = max(PIECE_BYTES // width // block_rows, 1) * block_rows
    for begin in range(0, rows, height):
        yield begin, min(begin + height, rows)


@dataclass(frozen=True)
class Reader:
    """Reads the tensors of `source`."""

    source: Source

    def tensor_bytes(self, tensor: StoredTensor, begin: int, end: int, key: str = "data") -> npt.NDArray[np.uint8]:
        """The bytes `begin` to `end` of a tensor."""
        array: npt.NDArray[np.uint8] = _buffer(key, (end - begin,), np.uint8)
        self.source.read_into(tensor, begin, array.data)
        return array

    def fp8_rows(self, weight: Weight, begin: int, end: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """The rows `begin` (at a block's border) to `end` of an FP8 block weight: bytes [rows, K], and their scales.

        Raises SourceError, naming tensor and block, for a scale that is not sound.
        """
        assert weight.encoding is Encoding.FP8_BLOCK
        assert weight.scale is not None
        assert weight.block is not None
        columns = weight.shape[1]
        data = self.tensor_bytes(weight.data, begin * columns, end * columns)
        grid_columns = weight.scale.spec.shape[1]
        first, last = begin // weight.block[0], -(-end // weight.block[0])
        scale = self.tensor_bytes(weight.scale, first * grid_columns * 4, last * grid_columns * 4, "scale")
        scales = scale.view(np.float32).reshape(last - first, grid_columns)
        check_block_scales(weight.scale, scales, first)
        return data.reshape(end - begin, columns), scales

    def float_rows(self, weight: Weight, begin: int, end: int) -> npt.NDArray[np.float32]:
        """The rows `begin` to `end` of a plain BF16, F16 or F32 matrix as float32 [rows, K]."""
        dtype = weight.data.spec.dtype
        width = weight.shape[1] * DTYPE_BYTES[dtype]
        return ops.to_float32(self.tensor_bytes(weight.data, begin * width, end * width), dtype).reshape(
            end - begin, -1
        )

    def int4_rows(self, weight: Weight, begin: int, end: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        """The rows `begin` to `end` of an INT4 weight: words [rows, K/8], and BF16 bits of the scales [rows, K/g]."""
        assert weight.encoding is Encoding.INT4
        assert weight.scale is not None
        words, groups = weight.shape[1] // CODES_PER_WORD, weight.scale.spec.shape[1]
        packed = self.tensor_bytes(weight.data, begin * words * 4, end * words * 4, "packed")
        scale = self.tensor_bytes(weight.scale, begin * groups * 2, end * groups * 2, "int4_scale")
        return packed.view(np.uint32).reshape(-1, words), scale.view(np.uint16).reshape(-1, groups)


def check_block_scales(tensor: StoredTensor, scales: npt.NDArray[np.float32], first_row: int) -> None:
    """Raise SourceError, naming tensor and block, for an FP8 block scale that is not sound."""
    bad = ops.bad_scale(scales.reshape(-1))
    if bad is not None:
        row, column = divmod(bad, scales.shape[1])
        raise SourceError(
            f"{tensor.spec.name} has the scale {scales[row, column]} for the block [{first_row + row}, {column}]; "
            "block scales must be positive, at least 2^-126 and at most 2^119",
            hint=_DAMAGED,
        )


def nan_error(tensor: StoredTensor, position: int) -> SourceError:
    """The error for a NaN at the flat `position` of a tensor."""
    place = [int(index) for index in np.unravel_index(position, tensor.spec.shape)]
    return SourceError(f"{tensor.spec.name} holds a NaN at or after {place}", hint=_DAMAGED)

"""Reading weights in pieces of at most 4 MiB, into buffers that belong to the thread and are used again.

So the memory of a conversion depends neither on a shard's size nor on a tensor's.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.weights.weight import FLOAT_DTYPES, Weight

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
    """The rows of a matrix, cut into pieces of which none holds parts of two rows of FP8 blocks."""
    rows, columns = weight.shape
    if weight.fused_columns:  # its rows are columns of what is stored
        yield 0, rows
        return
    block_rows = weight.block[0] if weight.block and weight.block[0] < rows else 1
    width = max(columns, 1) * max(DTYPE_BYTES[weight.data.spec.dtype], 1)
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

    def fused_rows(self, weight: Weight, begin: int, end: int) -> npt.NDArray[Any]:
        """The rows `begin` to `end` of an expert that lies in columns of a fused tensor: unsigned items [rows, K]."""
        assert weight.fused_columns is not None
        rows, columns = weight.shape
        width = weight.fused_columns.width * DTYPE_BYTES[weight.data.spec.dtype]
        stored = self.tensor_bytes(weight.data, 0, columns * width)
        items = stored.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[DTYPE_BYTES[weight.data.spec.dtype]])
        part = items.reshape(columns, -1)[:, weight.fused_columns.begin : weight.fused_columns.begin + rows]
        return np.ascontiguousarray(part.T[begin:end])

    def scalar(self, tensor: StoredTensor) -> float:
        """The one number of a tensor. Raises SourceError, naming it, unless it is positive and normal."""
        value = float(ops.to_float32(self.tensor_bytes(tensor, 0, tensor.spec.nbytes, "scalar"), tensor.spec.dtype)[0])
        if not 2.0**-126 <= value <= 2.0**126:
            raise SourceError(f"{tensor.spec.name} is {value}; scales are positive, 2^-126 to 2^126", hint=_DAMAGED)
        return value

    def rows(self, weight: Weight, begin: int, end: int) -> npt.NDArray[np.float32] | npt.NDArray[np.float64]:
        """The numbers of the rows `begin` to `end` of a weight in any encoding, exactly: [rows, K]."""
        return weight.encoding.rows(self, weight, begin, end)

    def largest(self, weight: Weight) -> float:
        """No number of the weight is larger in magnitude."""
        return weight.encoding.largest(self, weight)


def scalar_tensor(tensor: StoredTensor | None) -> StoredTensor | None:
    """`tensor`, which must hold one float; SourceError names it otherwise."""
    if tensor is not None and (tensor.spec.dtype not in FLOAT_DTYPES or math.prod(tensor.spec.shape) != 1):
        raise SourceError(f"{tensor.spec.name} is {tensor.spec.dtype} {list(tensor.spec.shape)}, not one number")
    return tensor


def shape_in(dtype: str, data: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    """What the bytes of a `weight_shape` say."""
    return tuple(data.view(np.int64 if dtype == "I64" else np.int32).tolist())


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

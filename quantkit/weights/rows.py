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
from quantkit.errors import SourceError
from quantkit.weights.layout import CODES_PER_WORD, NVFP4, NVFP4_GROUP
from quantkit.weights.weight import Encoding, Weight

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
    if weight.slab:  # its rows are columns of what is stored
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

    def fp8_rows(self, weight: Weight, begin: int, end: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """The rows `begin` to `end` of an FP8 weight, a piece of `row_ranges`: bytes [rows, K], and their scales.

        Raises SourceError, naming tensor and block, for a scale that is not sound.
        """
        assert weight.block is not None
        columns = weight.shape[1]
        data = self.tensor_bytes(weight.data, begin * columns, end * columns)
        first, last = begin // weight.block[0], -(-end // weight.block[0])
        return data.reshape(end - begin, columns), self.fp8_scales(weight, first, last)

    def fp8_scales(self, weight: Weight, first: int, last: int) -> npt.NDArray[np.float32]:
        """The rows `first` to `last` of an FP8 weight's scales [rows, columns] of its grid, whatever their dtype."""
        assert weight.encoding is Encoding.FP8
        assert weight.scale is not None
        dtype, columns = weight.scale.spec.dtype, weight.grid[1]
        width = columns * DTYPE_BYTES[dtype]
        data = self.tensor_bytes(weight.scale, first * width, last * width, "scale")
        scales = ops.to_float32(data, dtype).reshape(last - first, columns)
        check_block_scales(weight.scale, scales, first)
        return scales

    def float_rows(self, weight: Weight, begin: int, end: int) -> npt.NDArray[np.float32]:
        """The rows `begin` to `end` of a plain BF16, F16 or F32 matrix as float32 [rows, K]."""
        dtype = weight.data.spec.dtype
        if weight.slab:
            items = self.slab_rows(weight, begin, end)
            return ops.to_float32(items.reshape(-1).view(np.uint8), dtype).reshape(items.shape)
        width = weight.shape[1] * DTYPE_BYTES[dtype]
        return ops.to_float32(self.tensor_bytes(weight.data, begin * width, end * width), dtype).reshape(
            end - begin, -1
        )

    def slab_rows(self, weight: Weight, begin: int, end: int) -> npt.NDArray[Any]:
        """The rows `begin` to `end` of an expert that lies in columns of a fused tensor: unsigned items [rows, K]."""
        assert weight.slab is not None
        rows, columns = weight.shape
        width = weight.slab.width * DTYPE_BYTES[weight.data.spec.dtype]
        stored = self.tensor_bytes(weight.data, 0, columns * width)
        items = stored.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[DTYPE_BYTES[weight.data.spec.dtype]])
        part = items.reshape(columns, -1)[:, weight.slab.begin : weight.slab.begin + rows]
        return np.ascontiguousarray(part.T[begin:end])

    def int4_rows(self, weight: Weight, begin: int, end: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        """The rows `begin` to `end` of an INT4 weight: words [rows, K/8], and BF16 bits of the scales [rows, K/g].

        Raises SourceError, naming the tensor, if its `weight_shape` is another one.
        """
        assert weight.encoding is Encoding.INT4
        assert weight.scale is not None
        if begin == 0:
            self.check_shape(weight)
        words, groups = weight.shape[1] // CODES_PER_WORD, weight.scale.spec.shape[1]
        packed = self.tensor_bytes(weight.data, begin * words * 4, end * words * 4, "packed")
        scale = self.tensor_bytes(weight.scale, begin * groups * 2, end * groups * 2, "int4_scale")
        return packed.view(np.uint32).reshape(-1, words), scale.view(np.uint16).reshape(-1, groups)

    def check_shape(self, weight: Weight) -> None:
        """Raise SourceError, naming the tensor, unless `weight_shape` is the shape of the packed INT4 codes."""
        assert weight.packed_shape is not None
        stored = weight.packed_shape.spec
        shape = shape_in(stored.dtype, self.tensor_bytes(weight.packed_shape, 0, stored.nbytes, "shape"))
        if shape != weight.shape:
            raise SourceError(
                f"{stored.name} is {list(shape)}; {weight.name} holds {list(weight.shape)} codes of 4 bits",
                hint="Weights of other widths than 4 bits are not understood; else the file is damaged.",
            )

    def nvfp4_rows(self, weight: Weight, begin: int, end: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The rows `begin` to `end` of an NVFP4 weight: bytes of two codes [rows, K/2] and E4M3 scales [rows, K/16]."""
        assert weight.encoding is Encoding.NVFP4
        assert weight.scale is not None
        nbytes, groups = weight.shape[1] // 2, weight.shape[1] // NVFP4_GROUP
        packed = self.tensor_bytes(weight.data, begin * nbytes, end * nbytes, "nvfp4")
        scale = self.tensor_bytes(weight.scale, begin * groups, end * groups, "nvfp4_scale")
        return packed.reshape(-1, nbytes), scale.reshape(-1, groups)

    def scalar(self, tensor: StoredTensor) -> float:
        """The one number of a tensor. Raises SourceError, naming it, unless it is positive and normal."""
        value = float(ops.to_float32(self.tensor_bytes(tensor, 0, tensor.spec.nbytes, "scalar"), tensor.spec.dtype)[0])
        if not 2.0**-126 <= value <= 2.0**126:
            raise SourceError(f"{tensor.spec.name} is {value}; scales are positive, 2^-126 to 2^126", hint=_DAMAGED)
        return value

    def multiplier(self, weight: Weight) -> float:
        """What the scales of an NVFP4 weight are multiplied with, from the global scale in either dialect."""
        assert weight.global_scale is not None
        assert weight.dialect is not None
        value = self.scalar(weight.global_scale)
        return 1 / value if NVFP4[weight.dialect].divisor else value

    def rows(self, weight: Weight, begin: int, end: int) -> npt.NDArray[np.float32] | npt.NDArray[np.float64]:
        """The numbers of the rows `begin` to `end` of a weight in any encoding, exactly: [rows, K]."""
        if weight.encoding is Encoding.PLAIN:
            return self.float_rows(weight, begin, end)
        assert weight.block is not None
        if weight.encoding is Encoding.FP8:
            return ops.fp8_block_to_float(*self.fp8_rows(weight, begin, end), weight.block)
        if weight.encoding is Encoding.INT4:
            return ops.int4_to_float(*self.int4_rows(weight, begin, end))
        return ops.nvfp4_to_float(*self.nvfp4_rows(weight, begin, end), self.multiplier(weight))

    def largest(self, weight: Weight) -> float:
        """No number of the weight is larger in magnitude; of quantized ones from the scales alone.

        The largest FP8 number is 448 times its scale, the largest INT4 one 8 times.
        """
        if weight.encoding is Encoding.FP8:
            return 448.0 * float(self.fp8_scales(weight, 0, weight.grid[0]).max(initial=0))
        if weight.encoding is Encoding.INT4:
            assert weight.scale is not None
            bits = self.tensor_bytes(weight.scale, 0, weight.scale.spec.nbytes, "int4_scale")
            return 8.0 * float(np.abs(ops.to_float32(bits, weight.scale.spec.dtype)).max(initial=0))
        pieces = (self.rows(weight, begin, end) for begin, end in row_ranges(weight))
        return max((float(np.abs(piece).max(initial=0)) for piece in pieces), default=0.0)


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

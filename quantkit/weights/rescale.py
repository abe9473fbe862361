"""Powers of two multiplied into stored weights, exactly: as few bytes as the storage lets change, or an error.

    plain   the numbers themselves, of rows that change
    fp8     the scale of a block whose numbers all change alike; else its codes, too, if E4M3 holds them
    int4    the scales of groups
    nvfp4   the global scale if all numbers change alike; else the scales of groups, if E4M3 holds them

The static scale of the activations that a weight meets goes along: what a column is multiplied with, its input lacks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor
from quantkit.errors import FoldError
from quantkit.weights.layout import NVFP4
from quantkit.weights.rows import PIECE_BYTES, Reader
from quantkit.weights.weight import Encoding, Weight

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_NORMAL = {  # dtype -> its smallest and its largest normal number
    "BF16": (2.0**-126, 2.0**127 * (2 - 2.0**-7)),
    "F16": (2.0**-14, 65504.0),
    "F32": (2.0**-126, 2.0**127 * (2 - 2.0**-23)),
    "F8_E8M0": (2.0**-127, 2.0**127),
    "U8": (2.0**-127, 2.0**127),
}
_FP8_SCALES = (2.0**-126, 2.0**119)  # that engines and `ops.bad_scale` take
_SMALLER = "Give the layer a scale nearer to 1, or convert this weight to BF16 first."
_COARSE = "Give one number for the whole part, or convert this weight to BF16 first."


@dataclass(frozen=True)
class Powers:
    """Exponents: the number [i, j] of a weight is multiplied with 2 ** (rows[i] + columns[j]).

    rows     int64 [N] or [1]
    columns  int64 [K] or [1]; of a vector [1]
    """

    rows: Ints
    columns: Ints

    @classmethod
    def of(cls, rows: Iterable[int] = (0,), columns: Iterable[int] = (0,)) -> "Powers":
        """From whole numbers."""
        return cls(np.array(list(rows), np.int64), np.array(list(columns), np.int64))

    @property
    def is_one(self) -> bool:
        """Whether nothing changes."""
        return not (self.rows.any() or self.columns.any())

    def full(self, begin: int, end: int, width: int) -> Ints:
        """The exponents of the rows `begin` to `end`, [rows, width]."""
        rows = self.rows[begin:end] if len(self.rows) > 1 else self.rows
        return np.broadcast_to(rows[:, None] + self.columns[None, :], (end - begin, width))

    def cells(self, shape: tuple[int, int], block: tuple[int, int]) -> tuple[Ints, Ints]:
        """The smallest and the largest exponent of each block of a matrix, [grid rows, grid columns] each."""
        axes = [
            (np.broadcast_to(exponents, size), np.arange(0, size, span))
            for exponents, size, span in zip((self.rows, self.columns), shape, block, strict=True)
        ]
        low, high = ([reduce.reduceat(*axis) for axis in axes] for reduce in (np.minimum, np.maximum))
        return low[0][:, None] + low[1], high[0][:, None] + high[1]


@dataclass(frozen=True)
class Patch:
    """New bytes of a tensor, from its byte `begin` on."""

    tensor: StoredTensor
    begin: int
    data: Bytes


@dataclass(frozen=True)
class Extent:
    """What headers tell of a change: how many bytes it writes, and whether only the weight itself can tell if it is
    exact, because codes or E4M3 scales change. Where they do, it is the most that may be written."""

    nbytes: int
    depends: bool


def extent(weight: Weight, powers: Powers, fused: bool = False) -> Extent:
    """How much of a weight changes; `fused`: engines take its global scale from one of several weights."""
    if powers.is_one:
        return Extent(0, False)
    if weight.encoding is Encoding.PLAIN:
        rows, row_bytes = _rows(weight)
        return Extent(int(_changed_rows(powers, rows).sum()) * row_bytes, False)
    assert weight.scale is not None
    assert weight.block is not None
    inputs = weight.input_scale.spec.nbytes if weight.input_scale and powers.columns.any() else 0
    low, high = powers.cells(_matrix(weight), weight.block)
    mixed, itemsize = low != high, DTYPE_BYTES[weight.scale.spec.dtype]
    if weight.encoding is Encoding.NVFP4:
        assert weight.global_scale is not None
        if low.min() == high.max() and not (fused and low.any()):
            return Extent((weight.global_scale.spec.nbytes if low.any() else 0) + inputs, False)
        return Extent(low.size + inputs + (0 if fused else weight.global_scale.spec.nbytes), True)
    codes = 0
    if mixed.any() and weight.encoding is Encoding.FP8:
        heights = np.minimum(weight.block[0], weight.shape[0] - np.arange(len(low)) * weight.block[0])
        codes = int(heights[mixed.any(axis=1)].sum()) * weight.shape[1]
    return Extent(int((mixed | (low != 0)).sum()) * itemsize + codes + inputs, bool(mixed.any()))


def multiplied(reader: Reader, weight: Weight, powers: Powers, fused: bool = False) -> Iterator[Patch]:
    """The bytes that change when `weight` is multiplied; none for powers that are all one.

    Raises FoldError, naming the tensor, for a number that would leave the normal numbers of its dtype, codes that E4M3
    does not hold, and exponents that differ within what shares a scale.
    """
    if powers.is_one:
        return
    if weight.encoding is Encoding.PLAIN:
        yield from _plain(reader, weight, powers)
        return
    make = {Encoding.FP8: _fp8, Encoding.INT4: _int4, Encoding.NVFP4: _nvfp4}[weight.encoding]
    yield from make(reader, weight, powers, fused)
    if weight.input_scale and powers.columns.any():
        yield from _input_scale(reader, weight, powers)


def _plain(reader: Reader, weight: Weight, powers: Powers) -> Iterator[Patch]:
    rows, row_bytes = _rows(weight)
    height, width = max(PIECE_BYTES // row_bytes, 1), row_bytes // DTYPE_BYTES[weight.data.spec.dtype]
    for begin, end in _runs(_changed_rows(powers, rows)):
        for first in range(begin, end, height):
            last = min(first + height, end)
            data = reader.tensor_bytes(weight.data, first * row_bytes, last * row_bytes)
            exponents = powers.full(first, last, width).reshape(-1)
            yield Patch(weight.data, first * row_bytes, _floats(weight.data, data, exponents, first * width))


def _fp8(reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
    assert weight.scale is not None
    assert weight.block is not None
    shape, (height, width) = _matrix(weight), weight.block
    base, high = powers.cells(shape, weight.block)
    mixed = base != high
    for row in np.flatnonzero(mixed.any(axis=1)):
        begin, end = int(row) * height, min((int(row) + 1) * height, shape[0])
        codes = reader.tensor_bytes(weight.data, begin * shape[1], end * shape[1]).reshape(end - begin, -1).copy()
        exponents = powers.full(begin, end, shape[1])
        for column in np.flatnonzero(mixed[row]):
            place = slice(int(column) * width, (int(column) + 1) * width)
            found = _shifted_codes(codes[:, place], exponents[:, place])
            if found is None:
                raise _does_not_hold(weight, weight.data, begin)
            base[row, column], codes[:, place] = found
        yield Patch(weight.data, begin * shape[1], codes.reshape(-1))
    yield from _scales(reader, weight.scale, base, _FP8_SCALES)


def _int4(reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
    assert weight.scale is not None
    assert weight.block is not None
    low, high = powers.cells(_matrix(weight), weight.block)
    if (low != high).any():
        raise _several(weight)
    yield from _scales(reader, weight.scale, low, _NORMAL[weight.scale.spec.dtype])


def _nvfp4(reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
    assert weight.scale is not None
    assert weight.block is not None
    assert weight.global_scale is not None
    assert weight.dialect is not None
    low, high = powers.cells(_matrix(weight), weight.block)
    if (low != high).any():
        raise _several(weight)
    common = 0
    if fused or low.min() != low.max():
        scales = reader.tensor_bytes(weight.scale, 0, weight.scale.spec.nbytes).reshape(low.shape)
        found = _shifted_codes(scales, low, bases=(0,) if fused else None)
        if found is None:
            raise _does_not_hold(weight, weight.scale, 0)
        common, shifted = found
        for begin, end in _runs((shifted != scales).any(axis=1)):
            yield Patch(weight.scale, begin * low.shape[1], shifted[begin:end].reshape(-1).copy())
    else:
        common = int(low.min())
    sign = -1 if NVFP4[weight.dialect].divisor else 1
    yield from _scales(reader, weight.global_scale, np.array([[sign * common]]), _NORMAL["F32"])


def _input_scale(reader: Reader, weight: Weight, powers: Powers) -> Iterator[Patch]:
    """The input of the weight is divided by what its columns are multiplied with."""
    assert weight.input_scale is not None
    if powers.columns.min() != powers.columns.max():
        what = f"{weight.input_scale.spec.name} is one scale for all channels, and the fold has several for them"
        raise FoldError(what, hint=_COARSE)
    divisor = weight.dialect is not None and NVFP4[weight.dialect].divisor
    exponent = int(powers.columns[0]) * (1 if divisor else -1)
    yield from _scales(reader, weight.input_scale, np.array([[exponent]]), _NORMAL["F32"])


def _scales(reader: Reader, tensor: StoredTensor, exponents: Ints, sound: tuple[float, float]) -> Iterator[Patch]:
    """Scales, one for each exponent, as far as they change."""
    flat, itemsize = exponents.reshape(-1), DTYPE_BYTES[tensor.spec.dtype]
    for begin, end in _runs(flat != 0):
        data = reader.tensor_bytes(tensor, begin * itemsize, end * itemsize, "scale")
        yield Patch(tensor, begin * itemsize, _floats(tensor, data, flat[begin:end], begin, sound))


def _floats(
    tensor: StoredTensor, data: Bytes, exponents: Ints, first: int, sound: tuple[float, float] = (0.0, np.inf)
) -> Bytes:
    """Numbers of the tensor's dtype, from its number `first` on, multiplied."""
    dtype = tensor.spec.dtype
    values = ops.to_float32(data, dtype)
    results = np.ldexp(values.astype(np.float64), exponents)
    low, high = max(sound[0], _NORMAL[dtype][0]), min(sound[1], _NORMAL[dtype][1])
    sizes = np.abs(results)
    fine = (exponents == 0) | (values == 0) | ((sizes >= low) & (sizes <= high))
    if not fine.all():
        bad = int(np.argmin(fine))
        place = [int(index) for index in np.unravel_index(first + bad, tensor.spec.shape or (1,))]
        raise FoldError(
            f"{tensor.spec.name} holds {values[bad]:g} at {place}; times 2^{exponents[bad]} it is no normal number of "
            f"{dtype}, or no sound scale",
            hint=_SMALLER,
        )
    if dtype == "BF16":
        return (results.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if dtype in ("F8_E8M0", "U8"):
        return (np.log2(results) + 127).astype(np.uint8)
    return results.astype(np.float16 if dtype == "F16" else np.float32).view(np.uint8)


def _shifted_codes(codes: Bytes, exponents: Ints, bases: tuple[int, ...] | None = None) -> tuple[int, Bytes] | None:
    """E4M3 `codes` times 2 ** (exponents - base) for the first base, the largest exponent first, for which all of them
    are E4M3 numbers; None if there is none."""
    low, high = int(exponents.min()), int(exponents.max())
    for base in bases or range(high, low - 1, -1):
        table = np.stack([_e4m3_times(exponent - base) for exponent in range(low, high + 1)])
        shifted = table[exponents - low, codes]
        if (shifted >= 0).all():
            return base, shifted.astype(np.uint8)
    return None


@cache
def _e4m3_times(exponent: int) -> npt.NDArray[np.int16]:
    """The byte of each E4M3 byte's number times 2 ** `exponent`, [256]; -1 where it is none."""
    values = ops.e4m3_values()
    magnitudes = values[:127]
    with np.errstate(invalid="ignore"):
        products = np.abs(np.ldexp(values, exponent))
        places = np.minimum(np.searchsorted(magnitudes, np.nan_to_num(products)), 126)
        found: npt.NDArray[np.bool_] = magnitudes[places] == products
    return np.where(found, places | (np.arange(256) & 0x80), -1).astype(np.int16)


def _does_not_hold(weight: Weight, tensor: StoredTensor, row: int) -> FoldError:
    return FoldError(
        f"{tensor.spec.name} ({weight.label}), row {row} on: numbers that share a scale take different powers of two, "
        "and E4M3 does not hold all of the results",
        hint=_COARSE,
    )


def _several(weight: Weight) -> FoldError:
    assert weight.block is not None
    what = f"{weight.name} ({weight.label}) has one scale for {weight.block[1]} columns, and the fold several numbers"
    return FoldError(what, hint=_COARSE)


def _matrix(weight: Weight) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _rows(weight: Weight) -> tuple[int, int]:
    """The number of rows of a plain weight, and the bytes of one."""
    return weight.shape[0], weight.data.spec.nbytes // max(weight.shape[0], 1)


def _changed_rows(powers: Powers, rows: int) -> npt.NDArray[np.bool_]:
    low, high = powers.columns.min(), powers.columns.max()
    if low != high:
        return np.ones(rows, bool)
    return np.broadcast_to(powers.rows + low != 0, rows)


def _runs(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Where flags are set without a gap: begin, and end, not included."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)

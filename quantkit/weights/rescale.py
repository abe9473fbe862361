"""Powers of two multiplied into stored weights, exactly: as few bytes as the storage lets change, or an error.

What changes is the encoding's to say; here is what several of them do. The static scale of the activations that a
weight meets goes along: what a column is multiplied with, its input lacks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor
from quantkit.errors import FoldError
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Weight

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
NORMAL = {  # dtype -> its smallest and its largest normal number
    "BF16": (2.0**-126, 2.0**127 * (2 - 2.0**-7)),
    "F16": (2.0**-14, 65504.0),
    "F32": (2.0**-126, 2.0**127 * (2 - 2.0**-23)),
    "F8_E8M0": (2.0**-127, 2.0**127),
    "U8": (2.0**-127, 2.0**127),
}
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
    return Extent(0, False) if powers.is_one else weight.encoding.extent(weight, powers, fused)


def multiplied(reader: Reader, weight: Weight, powers: Powers, fused: bool = False) -> Iterator[Patch]:
    """The bytes that change when `weight` is multiplied; none for powers that are all one.

    Raises FoldError, naming the tensor, for a number that would leave the normal numbers of its dtype, codes that E4M3
    does not hold, and exponents that differ within what shares a scale.
    """
    if not powers.is_one:
        yield from weight.encoding.multiplied(reader, weight, powers, fused)


def one_each(weight: Weight, powers: Powers) -> Ints:
    """The exponent of each scale of a matrix [grid rows, grid columns]; FoldError if a scale would need several."""
    assert weight.block is not None
    low, high = powers.cells(weight.matrix, weight.block)
    if (low != high).any():
        what = (
            f"{weight.name} ({weight.label}) has one scale for {weight.block[1]} columns, and the fold several numbers"
        )
        raise FoldError(what, hint=_COARSE)
    return low


def scales_extent(weight: Weight, powers: Powers) -> Extent:
    """What `scales_multiplied` writes of a weight in groups."""
    assert weight.scale is not None
    assert weight.block is not None
    low, high = powers.cells(weight.matrix, weight.block)
    mixed = low != high
    return Extent(int((mixed | (low != 0)).sum()) * DTYPE_BYTES[weight.scale.spec.dtype], bool(mixed.any()))


def inputs_extent(weight: Weight, powers: Powers) -> int:
    """What `inputs_divided` writes."""
    return weight.input_scale.spec.nbytes if weight.input_scale and powers.columns.any() else 0


def inputs_divided(reader: Reader, weight: Weight, powers: Powers, sign: int = -1) -> Iterator[Patch]:
    """The input of the weight is divided by what its columns are multiplied with: its static scale, if there is one.

    sign  -1 for a scale that multiplies, 1 for one that divides
    """
    if weight.input_scale is None or not powers.columns.any():
        return
    if powers.columns.min() != powers.columns.max():
        what = f"{weight.input_scale.spec.name} is one scale for all channels, and the fold has several for them"
        raise FoldError(what, hint=_COARSE)
    exponent = int(powers.columns[0]) * sign
    yield from scales_multiplied(reader, weight.input_scale, np.array([[exponent]]), NORMAL["F32"])


def scales_multiplied(
    reader: Reader, tensor: StoredTensor, exponents: Ints, sound: tuple[float, float]
) -> Iterator[Patch]:
    """Scales, one for each exponent, as far as they change."""
    flat, itemsize = exponents.reshape(-1), DTYPE_BYTES[tensor.spec.dtype]
    for begin, end in runs(flat != 0):
        data = reader.tensor_bytes(tensor, begin * itemsize, end * itemsize, "scale")
        yield Patch(tensor, begin * itemsize, floats_multiplied(tensor, data, flat[begin:end], begin, sound))


def floats_multiplied(
    tensor: StoredTensor, data: Bytes, exponents: Ints, first: int, sound: tuple[float, float] = (0.0, np.inf)
) -> Bytes:
    """Numbers of the tensor's dtype, from its number `first` on, multiplied."""
    dtype = tensor.spec.dtype
    values = ops.to_float32(data, dtype)
    results = np.ldexp(values.astype(np.float64), exponents)
    low, high = max(sound[0], NORMAL[dtype][0]), min(sound[1], NORMAL[dtype][1])
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


def shifted_e4m3(codes: Bytes, exponents: Ints, bases: tuple[int, ...] | None = None) -> tuple[int, Bytes] | None:
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


def cannot_hold(weight: Weight, tensor: StoredTensor, row: int) -> FoldError:
    """The error for numbers that share a scale and take different powers, where E4M3 has no room for them."""
    return FoldError(
        f"{tensor.spec.name} ({weight.label}), row {row} on: numbers that share a scale take different powers of two, "
        "and E4M3 does not hold all of the results",
        hint=_COARSE,
    )


def runs(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Where flags are set without a gap: begin, and end, not included."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)

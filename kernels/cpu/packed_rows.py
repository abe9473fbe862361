"""The compiled loops of `linear`: rows of packed weights, of one matrix or of chosen experts, times rows of x.

Rows of weights are taken two or four at a time with up to four rows of x, so that a vector of weights is made once for
these. For four rows of x or fewer they are rows that lie far apart, so that memory is read in two or four streams that
never jump. With more a block of weights stays in the cache until all have met it, chunk by chunk of the columns.
Every number of the result is the sum over the same chunks in the same order, whatever else is computed beside it.
"""

# mypy: disable-error-code="call-arg, var-annotated"

import functools
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.arranging import arrange, give
from quantkit.kernels.cpu.code_vectors import STEP, STEP4, WIDTH
from quantkit.kernels.cpu.dot_vectors import AT, copy_bytes, dot, peek, poke

CHUNK = 2048  # columns, or less, of whole blocks; four rows of x take a first-level cache
_BLOCK_ROWS = 32  # of weights, for many rows of x


class Layout(NamedTuple):
    """How the arrays of a kind of weights are to be read.

    rows, columns  of a matrix
    step           columns of a step of `dot`, for which `codes` and `xs` are elements of the codes' array and of x
    block_rows     rows of a scale
    block          columns of a scale, or of the `scales` that share a step
    grid           scales of a row
    """

    rows: int
    columns: int
    step: int
    codes: int
    xs: int
    block_rows: int
    block: int
    scales: int
    grid: int


class Pairs(NamedTuple):
    """Which rows of x meet which matrix, and where the products go.

    experts  int64 [A]      the matrices, each once
    ends     int64 [A + 1]  pairs ends[i] to ends[i + 1] belong to experts[i]
    x_rows   int64 [pairs]  the row of x, and `places` that of y
    """

    experts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    x_rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


class Segments(NamedTuple):
    """The columns of a matrix cut into what `dot` takes at once.

    layout  int64 [9], the `Layout`
    parts   int64 [S, 6]: segments, their steps, columns that fill no step; first element of the row's codes, scales, x
    chunks  int64 [C + 1]: parts chunks[i] to chunks[i + 1] are a chunk
    """

    layout: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]


@functools.cache
def cut(layout: Layout) -> Segments:
    """The segments of each chunk."""
    size = max(1, CHUNK // layout.block) * layout.block if layout.block < CHUNK else CHUNK
    parts, chunks = [], [0]
    for left in range(0, layout.columns, size):
        right, position = min(left + size, layout.columns), left
        while position < right:
            width = min(layout.block - position % layout.block, right - position)
            steps, rest = divmod(width, layout.step)
            segments = (right - position) // width if width == layout.block and not rest else 1
            elements = (
                position * layout.codes // layout.step,
                position // layout.block * layout.scales,
                position * layout.xs // layout.step,
            )
            parts.append((segments, steps, rest, *elements))
            position += width * segments
        chunks.append(len(parts))
    return Segments(np.array(layout), np.array(parts), np.array(chunks))


ROOM = 4096  # bytes that a call of `multiply` works in: addresses, sums, and what does not fill a step
_STARTS, _AT, _SUMS = 0, 8 * 3 * AT, 2 * 8 * 3 * AT  # where in it they are; `dot` wants the sums behind the addresses
_REST = (512, 1024, 1536)  # copies of codes, scales and x


@numba.njit(nogil=True, cache=True)
def product(  # type: ignore[no-untyped-def]
    layout, parts, chunks, codes, scale, factors, how, experts, ends, x_rows, places, x, out
):
    """Write into `out` [pairs, rows] the products with x [T, columns], both float32 or the bits of BF16.

    how  to `arrange` x; the rest as `multiply` says
    """
    arranged, x_factors = arrange(x, how)
    y, room = np.empty(out.shape, np.float32), np.empty(ROOM, np.uint8)
    end = len(experts) * layout[0]
    multiply(
        layout,
        parts,
        chunks,
        codes,
        scale,
        factors,
        arranged,
        x_factors,
        experts,
        ends,
        x_rows,
        places,
        0,
        end,
        room,
        y,
    )
    give(y, out)


@numba.njit(nogil=True, cache=True)
def multiply(  # type: ignore[no-untyped-def]
    layout, parts, chunks, codes, scale, factors, x, x_factors, experts, ends, x_rows, places, begin, end, room, y
):
    """Write into y float32 [pairs, rows] what rows begin..end, counted over the matrices of the pairs, give.

    layout              a `Layout` as int64 [9]; parts and chunks are its `Segments`, experts to places the `Pairs`
    codes, scale        flat, of all matrices
    factors, x_factors  float64, of each matrix and of each row of x; they multiply the result
    x                   float32 [T, ..], as `arranging` makes it
    room                uint8 [ROOM], of this call alone

    The inner functions get addresses, since to count references to arrays would take longer than what they do.
    """
    layout, kinds = Layout(*_nine(layout)), (codes[0], scale[0])
    arrays = codes.ctypes.data, scale.ctypes.data, x.ctypes.data
    strides = (
        layout.columns * layout.codes // layout.step * codes.itemsize,
        layout.grid * scale.itemsize,
        x.shape[1] * 4,
    )
    sizes, at = (codes.itemsize, scale.itemsize, 4), room.ctypes.data
    pairs = x_rows.ctypes.data, places.ctypes.data, x_factors.ctypes.data
    for index in range(begin // layout.rows, -(-end // layout.rows)):
        first = max(begin - index * layout.rows, 0)
        last = min(end - index * layout.rows, layout.rows)
        few = ends[index + 1] - ends[index] <= AT
        gap = -(-(last - first) // _rows(ends[index + 1] - ends[index])) if few else 1
        for top in range(first, first + gap if few else last, 1 if few else _BLOCK_ROWS):
            bottom, limit = (top + 1, last) if few else (min(top + _BLOCK_ROWS, last), min(top + _BLOCK_ROWS, last))
            for chunk in range(len(chunks) - 1):
                cut = parts.ctypes.data, chunks[chunk], chunks[chunk + 1]
                for pair in range(ends[index], ends[index + 1], AT):
                    count = min(ends[index + 1] - pair, AT)
                    for row in range(top, bottom, _rows(count)):
                        rows = row, gap, limit
                        _find(layout, arrays, strides, pairs, experts[index], rows, pair, count, at)
                        _add_parts(layout, cut, kinds, sizes, count, at)
                        _write(layout, pairs, factors[experts[index]], rows, pair, count, chunk, at, y.ctypes.data)


@numba.njit(nogil=True, inline="always")
def _rows(count):  # type: ignore[no-untyped-def]
    """How many rows of weights are taken at a time for so many of x."""
    return AT if count <= 2 else AT // 2


@numba.njit(nogil=True, inline="always")
def _nine(values):  # type: ignore[no-untyped-def]
    """Numbers of an array as a tuple. (Arrays reach compiled code in a tenth of the time that named tuples need.)"""
    return values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8]


@numba.njit(nogil=True, inline="always")
def _find(layout, arrays, strides, pairs, expert, rows, pair, count, at):  # type: ignore[no-untyped-def]
    """Write down where rows of codes, of scales and of x begin; beyond the last row it is the last again."""
    row, gap, limit = rows
    first_row, first_scale = expert * layout.rows, expert * -(-layout.rows // layout.block_rows)
    for index in range(AT):
        place = min(row + index * gap, limit - 1)
        scale_row = first_scale + (place if layout.block_rows == 1 else place // layout.block_rows)
        x_row = peek(pairs[0] + 8 * (pair + min(index, count - 1)), np.int64(0))
        poke(at + 8 * index, arrays[0] + (first_row + place) * strides[0])
        poke(at + 8 * (AT + index), arrays[1] + scale_row * strides[1])
        poke(at + 8 * (2 * AT + index), arrays[2] + x_row * strides[2])
    for index in range(AT * AT):
        poke(at + _SUMS + 4 * index, np.float32(0))


@numba.njit(nogil=True, inline="always")
def _add_parts(layout, cut, kinds, sizes, count, at):  # type: ignore[no-untyped-def]
    """Add what whole steps give, and then what is left, copied and filled up with zeros."""
    for part in range(cut[0] + 48 * cut[1], cut[0] + 48 * cut[2], 48):
        segments, steps, rest = peek(part, np.int64(0)), peek(part + 8, np.int64(0)), peek(part + 16, np.int64(0))
        for kind in range(3):
            offset = peek(part + 24 + 8 * kind, np.int64(0)) * sizes[kind]
            for index in range(kind * AT, (kind + 1) * AT):
                poke(at + _AT + 8 * index, peek(at + _STARTS + 8 * index, np.int64(0)) + offset)
        for turn in range(np.int64(steps == 0), 1 + np.int64(rest > 0)):
            if turn:
                _copy_rest(layout, steps, rest, sizes, at)
                segments = steps = 1
            if count == 1:
                dot(4, 1, kinds[0], kinds[1], at + _AT, segments, steps)
            elif count == 2:
                dot(4, 2, kinds[0], kinds[1], at + _AT, segments, steps)
            else:
                dot(2, 4, kinds[0], kinds[1], at + _AT, segments, steps)


@numba.njit(nogil=True)
def _copy_rest(layout, steps, columns, sizes, at):  # type: ignore[no-untyped-def]
    """Copy the `columns` that follow `steps` whole steps, and write down where the copies are."""
    whole, room = (layout.codes, 0, layout.xs), (layout.codes, layout.scales, layout.xs)
    used = (
        columns * layout.codes // layout.step,
        -(-columns * layout.scales // layout.step),
        columns if layout.codes == layout.step else layout.xs,
    )
    for kind in range(3):
        for index in range(AT):
            start = at + _AT + 8 * (kind * AT + index)
            copy = at + _REST[kind] + index * room[kind] * sizes[kind]
            source = peek(start, np.int64(0)) + steps * whole[kind] * sizes[kind]
            copy_bytes(copy, source, used[kind] * sizes[kind], room[kind] * sizes[kind])
            poke(start, copy)


@numba.njit(nogil=True, inline="always")
def _write(layout, pairs, factor, rows, pair, count, chunk, at, y):  # type: ignore[no-untyped-def]
    row, gap, limit = rows
    batch = count if count <= 2 else AT
    for each in range(count):
        x_row, place = peek(pairs[0] + 8 * (pair + each), np.int64(0)), peek(pairs[1] + 8 * (pair + each), np.int64(0))
        product = factor * peek(pairs[2] + 8 * x_row, 0.0)
        for index in range(min(_rows(count), -(-(limit - row) // gap))):
            target = y + 4 * (place * layout.rows + row + index * gap)
            number = np.float32(peek(at + _SUMS + 4 * (index * batch + each), np.float32(0)) * product)
            poke(target, peek(target, number) + number if chunk else number)


@numba.njit(nogil=True, cache=True)
def sort(chosen, experts, rows_per_x):  # type: ignore[no-untyped-def]
    """`Pairs` of the experts `chosen` int64 [pairs], by expert, in their order; none if there is not such an expert."""
    counts, places = np.zeros(experts + 1, np.int64), np.empty(len(chosen), np.int64)
    for expert in chosen:
        if not 0 <= expert < experts:
            return places[:0], places[:0], places[:0], places[:0]
        counts[expert + 1] += 1
    used = np.flatnonzero(counts) - 1
    following = np.cumsum(counts)
    ends = np.append(following[used], len(chosen))
    for pair in range(len(chosen)):
        places[following[chosen[pair]]] = pair
        following[chosen[pair]] += 1
    return used, ends, places // rows_per_x, places


def natural(rows: int, columns: int, block_rows: int, block: int) -> Layout:
    """The layout of weights of 8 bits and wider."""
    return Layout(rows, columns, STEP, STEP, STEP, block_rows, block, 1, -(-columns // block))


def by_words(rows: int, columns: int, group: int, scales: int) -> Layout:
    """The layout of 4-bit weights in groups of a multiple of 64, or with so many `scales` for 64 columns."""
    block, grid = (group, columns // group) if scales == 1 else (STEP4, -(-columns * scales // STEP4))
    return Layout(rows, columns, STEP4, WIDTH, STEP4, 1, block, scales, grid)

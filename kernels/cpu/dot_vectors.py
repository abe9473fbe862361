"""Dot products of packed weights with rows of x, spelled out as vectors for the compiled loops of `linear`.

Weights are taken as checkpoints store them (`code_vectors`), and never rounded. A step turns some of them into vectors,
each of which is multiplied with the rows of x in turn: float32 with float32, products and sums fused; or, of 4 bits,
bytes with the digits of x in fixed point, which `arranging.to_digits` makes. Then an instruction multiplies 32 weights,
and the sum over the 8 columns of a word is exact before it becomes a float32.

How sums are added depends on the columns alone, not on how many rows of weights and of x a call takes.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.kernels.cpu.arranging import PLACES
from quantkit.kernels.cpu.code_vectors import (
    BYTE,
    E4M3_NAN,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    KINDS,
    LONG,
    SHORT,
    STEP,
    STEP_BYTES,
    WIDTH,
    Halves,
    Kind,
    scale_vector,
)
from quantkit.kernels.vectors import load, reduce, splat

AHEAD = 1024  # bytes by which codes are fetched before they are needed
AT = 4  # the most rows of weights, and of x, at a time

_STEP_SHORTS = ir.VectorType(SHORT, STEP // 2)


@intrinsic(prefer_literal=True)
def dot(typing_context: Any, rows: Any, batch: Any, code: Any, scale: Any, at: Any, segments: Any, steps: Any) -> Any:
    """Add the products of rows of weights with rows of x to sums float32 [rows * batch]; both counts are literals.

    code, scale   of whose types codes and scales are: they say what the weights are (`KINDS`)
    at            the address of int64 [3, AT], the addresses of rows of codes, of their scales and of rows of x; the
                  sums follow
    segments      follow each other; each has `steps` steps, and its own scale
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> None:
        places = builder.inttoptr(arguments[4], LONG.as_pointer())

        def starts(row: int, element: ir.Type, count: int) -> list[ir.Value]:
            found = [builder.load(builder.gep(places, [LONG(AT * row + index)])) for index in range(count)]
            return [builder.inttoptr(place, element.as_pointer()) for place in found]

        elements = [context.get_value_type(kind) for kind in (code, scale)]
        rows_of_codes, scales = (starts(row, element, rows.literal_value) for row, element in enumerate(elements))
        xs = starts(2, FLOAT, batch.literal_value)
        has_avx2 = "+avx2" in context.codegen().magic_tuple()[2].split(",")
        tile = _Tile(builder, KINDS[code, scale], rows_of_codes, scales, xs, has_avx2)
        with cgutils.for_range(builder, arguments[5]) as segment:
            tile.add_segment(segment.index, arguments[6])
        tile.finish(builder.bitcast(builder.gep(places, [LONG(3 * AT)]), FLOAT.as_pointer()))

    long = numba.types.int64
    return numba.types.void(rows, batch, code, scale, long, long, long), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any, room: Any) -> Any:
    """Copy `count` bytes from one address to another, and make zeros of what follows, up to `room` bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> None:
        to, origin = (builder.inttoptr(address, BYTE.as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)  # type: ignore[no-untyped-call]
        left = builder.sub(arguments[3], arguments[2])
        cgutils.memset(builder, builder.gep(to, [arguments[2]]), left, 0)  # type: ignore[no-untyped-call]

    return numba.types.void(*[numba.types.int64] * 4), generate


@intrinsic
def peek(typing_context: Any, address: Any, like: Any) -> Any:
    """The number at an address, of the type of `like`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.load(builder.inttoptr(arguments[0], context.get_value_type(like).as_pointer()))

    return like(numba.types.int64, like), generate


@intrinsic
def poke(typing_context: Any, address: Any, number: Any) -> Any:
    """Write a number to an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> None:
        builder.store(arguments[1], builder.inttoptr(arguments[0], arguments[1].type.as_pointer()))

    return numba.types.void(numba.types.int64, number), generate


class _Tile:
    """The code for some rows of weights by some rows of x."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        kind: Kind,
        codes: list[ir.Value],
        scales: list[ir.Value],
        xs: list[ir.Value],
        has_avx2: bool,
    ) -> None:
        self.builder, self.kind, self.codes, self.scales, self.xs = builder, kind, codes, scales, xs
        self.has_avx2 = has_avx2
        self.totals = [[self._variable(FLOATS) for _ in xs] for _ in codes]
        self.sums = [[self._variable(FLOATS) for _ in xs] for _ in codes] if kind.floats else []
        self.largest = [self._variable(STEP_BYTES) for _ in codes] if kind.e4m3 else []

    def _variable(self, kind: ir.VectorType) -> ir.Value:
        variable = cgutils.alloca_once(self.builder, kind)  # type: ignore[no-untyped-call]
        self.builder.store(splat(kind, 0), variable)
        return variable

    def add_segment(self, segment: ir.Value, steps: ir.Value) -> None:
        """Add a segment to the totals."""
        first = self.builder.mul(segment, steps)
        if self.kind.halves:
            scales = self._scales(segment)
            if self.kind.scales > 1:  # a segment is a step
                self._add_halves(self.kind.halves, segment, scales)
            else:
                with cgutils.for_range(self.builder, steps) as step:
                    self._add_halves(self.kind.halves, self.builder.add(first, step.index), scales)
        elif self.kind.floats:
            for variable in (variable for row in self.sums for variable in row):
                self.builder.store(splat(FLOATS, 0.0), variable)
            with cgutils.for_range(self.builder, steps) as step:
                self._add_floats(self.kind.floats, self.builder.add(first, step.index))
            for sums, totals, scale in zip(self.sums, self.totals, self._scales(segment), strict=True):
                for total, part in zip(totals, sums, strict=True):
                    self._add_product(self.builder.load(part), scale, total)

    def _scales(self, segment: ir.Value) -> list[ir.Value]:
        count = self.kind.scales
        places = [self.builder.gep(start, [self.builder.mul(segment, LONG(count))]) for start in self.scales]
        return [scale_vector(self.builder, place, count) for place in places]

    def _open(self, step: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
        """Where a step begins in rows of codes, which are fetched ahead, and of x."""
        builder, kind = self.builder, self.kind
        codes = [builder.gep(start, [builder.mul(step, LONG(kind.codes))]) for start in self.codes]
        for at in codes:
            _prefetch(builder, at)
        return codes, [builder.gep(start, [builder.mul(step, LONG(kind.xs))]) for start in self.xs]

    def _add_floats(self, decode: Callable[..., list[ir.Value]], step: ir.Value) -> None:
        builder, (codes, xs) = self.builder, self._open(step)
        for largest, at in zip(self.largest, codes, strict=False):
            magnitudes = builder.or_(load(builder, at, STEP_BYTES), splat(STEP_BYTES, 0x80))
            kept = builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", magnitudes, kept), magnitudes, kept), largest)
        weights = [decode(builder, at) for at in codes]
        for number, vectors in enumerate(zip(*weights, strict=True)):
            for index, at in enumerate(xs):
                x = load(builder, builder.gep(at, [LONG(WIDTH * number)]), FLOATS)
                for sums, vector in zip(self.sums, vectors, strict=True):
                    self._add_product(vector, x, sums[index])

    def _add_halves(self, decode: Callable[..., Halves], step: ir.Value, scales: list[ir.Value]) -> None:
        """Of a step of x there are the digits of even and of odd columns, what to add to each word, and its unit."""
        builder, (codes, xs) = self.builder, self._open(step)
        for totals, place, scale in zip(self.totals, codes, scales, strict=True):
            halves = decode(builder, place)
            for total, at in zip(totals, xs, strict=True):
                builder.fence("seq_cst", "singlethread")  # else x is kept in registers, and other things are not
                self._add_product(*self._multiply_halves(halves, at, scale), total)

    def _multiply_halves(self, halves: Halves, x: ir.Value, scale: ir.Value) -> tuple[ir.Value, ir.Value]:
        builder = self.builder
        *digits, added, unit = (
            load(builder, builder.gep(x, [LONG(WIDTH * place)]), kind)
            for place, kind in enumerate([STEP_BYTES] * 2 * len(PLACES) + [INTS, FLOATS])
        )
        for even, odd, place in zip(digits[::2], digits[1::2], PLACES, strict=True):
            pairs = builder.add(self._multiply(halves.low, even), self._multiply(halves.high, odd))
            products = self._multiply(pairs, splat(_STEP_SHORTS, place))
            added = builder.sub(added, products) if place < 0 else builder.add(added, products)
        return builder.sitofp(added, FLOATS), builder.fmul(unit, scale)

    def _multiply(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Products of two vectors of bytes, the first not negative, or of int16, each added to its neighbour's."""
        builder, kind = self.builder, left.type
        wide = ir.VectorType(ir.IntType(2 * kind.element.width), kind.count)
        half = ir.VectorType(wide.element, kind.count // 2)
        if self.has_avx2:
            name = "llvm.x86.avx2.pmadd.ub.sw" if kind == STEP_BYTES else "llvm.x86.avx2.pmadd.wd"
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(half, [kind] * 2), name)  # type: ignore[no-untyped-call]
            return builder.call(function, [left, right])
        products = builder.mul(*(builder.sext(part, wide) for part in (left, right)))
        places = ir.VectorType(INT, half.count)
        even, odd = (ir.Constant(places, [*range(begin, kind.count, 2)]) for begin in (0, 1))
        return builder.add(*(builder.shuffle_vector(products, products, part) for part in (even, odd)))

    def _add_product(self, left: ir.Value, right: ir.Value, total: ir.Value) -> None:
        """Add the products of two vectors to a variable, fused."""
        builder, kind = self.builder, ir.FunctionType(FLOATS, [FLOATS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32")  # type: ignore[no-untyped-call]
        builder.store(builder.call(function, [left, right, builder.load(total)]), total)

    def finish(self, sums: ir.Value) -> None:
        """Add the lanes of each total, always in the same way, to `sums`; NaN where a code is."""
        builder, place = self.builder, 0
        for row, totals in enumerate(self.totals):
            for total in totals:
                number = _add_lanes(builder, builder.load(total))
                if self.largest:
                    highest = reduce(builder, "umax", builder.load(self.largest[row]))
                    bad = builder.icmp_unsigned("==", highest, BYTE(E4M3_NAN))
                    number = builder.select(bad, FLOAT(float("nan")), number)
                at = builder.gep(sums, [LONG(place)])
                builder.store(builder.fadd(builder.load(at), number), at)
                place += 1


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for what lies `AHEAD` bytes behind an address, which need not exist."""
    pointer = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
    ahead = builder.gep(builder.bitcast(address, pointer), [LONG(AHEAD)])
    builder.call(function, [ahead, INT(0), INT(3), INT(1)])  # to read, into all caches, data


def _add_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    count = WIDTH
    while count > 1:
        count //= 2
        halves = (ir.Constant(ir.VectorType(INT, count), [*range(begin, begin + count)]) for begin in (0, count))
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, INT(0))

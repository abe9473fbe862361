"""Dot products of packed weights with rows of float32, spelled out as vectors for the compiled loops of `cpu_linear`.

Weights are taken as checkpoints store them. A step turns some of them into vectors of 8 float32, each of which is
multiplied with the rows of x in turn:

    FP8     byte   s eeee mmm  ->  s 0000eeee mmm0..0     2^-120 of the number, since float32's exponent is wider
    BF16    bits moved up by 16
    INT4    8 words, nibble i of each:  word & 15 << 4i  ->  float32, 16^i (code + 8); x has the 16^-i
    NVFP4   as INT4, by bytes: twice the number, plus 12

So 4-bit weights want x in another order, with factors, and with what the 8 or the 12 adds, taken off: `interleave`.
A weight is exact in float32 and is never rounded; products and sums are fused and float32. How sums are added depends
on the columns alone, not on how many rows of weights and of x a call takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.kernels.vectors import load, reduce, splat

WIDTH = 8  # float32 in a vector
AHEAD = 1024  # bytes by which codes are fetched before they are needed
AT = 4  # the most rows of weights, and of x, at a time
STEP = 32  # columns of a step, of 8-bit and wider weights
STEP4 = 64  # columns of a step of 4-bit weights
INTERLEAVED = STEP4 + WIDTH  # float32 of x for it: 8 vectors, and what to add

_BYTE, _SHORT, _INT, _LONG, _FLOAT = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
_BYTES, _SHORTS, _INTS, _FLOATS = (ir.VectorType(kind, WIDTH) for kind in (_BYTE, _SHORT, _INT, _FLOAT))
_STEP_BYTES = ir.VectorType(_BYTE, STEP)
_E4M3_MASK, _E4M3_NAN = 0x87F00000 - (1 << 32), 0xFF

Vectors = Callable[[ir.IRBuilder, ir.Value], list[ir.Value]]


@dataclass(frozen=True)
class _Kind:
    """How weights of one kind are read.

    vectors  the weights of the step at an address
    codes    elements of the array of codes, and
    xs       float32 of x, of a step
    scales   of a segment: one, or 2, 4 or 8 that share its step's vectors
    e4m3     whether codes may be NaN
    """

    vectors: Vectors
    codes: int
    xs: int
    scales: int = 1
    e4m3: bool = False


@intrinsic(prefer_literal=True)
def dot(typing_context: Any, rows: Any, batch: Any, code: Any, scale: Any, at: Any, segments: Any, steps: Any) -> Any:
    """Add the products of rows of weights with rows of x to sums float32 [rows * batch]; both counts are literals.

    code, scale   of whose types codes and scales are: they say what the weights are (`_KINDS`)
    at            the address of int64 [3, AT], the addresses of rows of codes, of their scales and of rows of x; the
                  sums follow
    segments      follow each other; each has `steps` steps, and its own scale
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> None:
        places = builder.inttoptr(arguments[4], _LONG.as_pointer())

        def starts(row: int, element: ir.Type, count: int) -> list[ir.Value]:
            found = [builder.load(builder.gep(places, [_LONG(AT * row + index)])) for index in range(count)]
            return [builder.inttoptr(place, element.as_pointer()) for place in found]

        elements = [context.get_value_type(kind) for kind in (code, scale)]
        rows_of_codes, scales = (starts(row, element, rows.literal_value) for row, element in enumerate(elements))
        xs = starts(2, _FLOAT, batch.literal_value)
        tile = _Tile(builder, _KINDS[code, scale], rows_of_codes, scales, xs)
        with cgutils.for_range(builder, arguments[5]) as segment:
            tile.add_segment(segment.index, arguments[6])
        tile.finish(builder.bitcast(builder.gep(places, [_LONG(3 * AT)]), _FLOAT.as_pointer()))

    long = numba.types.int64
    return numba.types.void(rows, batch, code, scale, long, long, long), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any, room: Any) -> Any:
    """Copy `count` bytes from one address to another, and make zeros of what follows, up to `room` bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> None:
        to, origin = (builder.inttoptr(address, _BYTE.as_pointer()) for address in arguments[:2])
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
        self, builder: ir.IRBuilder, kind: _Kind, codes: list[ir.Value], scales: list[ir.Value], xs: list[ir.Value]
    ) -> None:
        self.builder, self.kind, self.codes, self.scales, self.xs = builder, kind, codes, scales, xs
        self.sums, self.totals = ([[self._variable(_FLOATS) for _ in xs] for _ in codes] for _ in range(2))
        self.largest = [self._variable(_STEP_BYTES) for _ in codes] if kind.e4m3 else []

    def _variable(self, kind: ir.VectorType) -> ir.Value:
        variable = cgutils.alloca_once(self.builder, kind)  # type: ignore[no-untyped-call]
        self.builder.store(splat(kind, 0), variable)
        return variable

    def add_segment(self, segment: ir.Value, steps: ir.Value) -> None:
        """Add a segment to the totals."""
        builder, kind = self.builder, self.kind
        for variable in (variable for row in self.sums for variable in row):
            builder.store(splat(_FLOATS, 0.0), variable)
        first = builder.mul(segment, steps)
        with cgutils.for_range(builder, steps) as step:
            self._add_step(builder.add(first, step.index))
        for row, (sums, totals) in enumerate(zip(self.sums, self.totals, strict=True)):
            at = builder.gep(self.scales[row], [builder.mul(segment, _LONG(kind.scales))])
            scale = _scale_vector(builder, at, kind.scales)
            for total, part in zip(totals, sums, strict=True):
                builder.store(_fma(builder, builder.load(part), scale, builder.load(total)), total)

    def _add_step(self, step: ir.Value) -> None:
        builder, kind = self.builder, self.kind
        codes = [builder.gep(start, [builder.mul(step, _LONG(kind.codes))]) for start in self.codes]
        xs = [builder.gep(start, [builder.mul(step, _LONG(kind.xs))]) for start in self.xs]
        for at in codes:
            _prefetch(builder, at)
        for largest, at in zip(self.largest, codes, strict=False):
            magnitudes = builder.or_(load(builder, at, _STEP_BYTES), splat(_STEP_BYTES, 0x80))
            kept = builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", magnitudes, kept), magnitudes, kept), largest)
        weights = [kind.vectors(builder, at) for at in codes]
        for number, vectors in enumerate(zip(*weights, strict=True)):
            for index, at in enumerate(xs):
                x = load(builder, builder.gep(at, [_LONG(WIDTH * number)]), _FLOATS)
                for sums, vector in zip(self.sums, vectors, strict=True):
                    builder.store(_fma(builder, vector, x, builder.load(sums[index])), sums[index])
        if kind.xs == INTERLEAVED:
            for index, at in enumerate(xs):
                x = load(builder, builder.gep(at, [_LONG(STEP4)]), _FLOATS)
                for sums in self.sums:
                    builder.store(builder.fadd(builder.load(sums[index]), x), sums[index])

    def finish(self, sums: ir.Value) -> None:
        """Add the lanes of each total, always in the same way, to `sums`; NaN where a code is."""
        builder, place = self.builder, 0
        for row, totals in enumerate(self.totals):
            for total in totals:
                number = _add_lanes(builder, builder.load(total))
                if self.largest:
                    highest = reduce(builder, "umax", builder.load(self.largest[row]))
                    bad = builder.icmp_unsigned("==", highest, _BYTE(_E4M3_NAN))
                    number = builder.select(bad, _FLOAT(float("nan")), number)
                at = builder.gep(sums, [_LONG(place)])
                builder.store(builder.fadd(builder.load(at), number), at)
                place += 1


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for what lies `AHEAD` bytes behind an address, which need not exist."""
    pointer = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
    ahead = builder.gep(builder.bitcast(address, pointer), [_LONG(AHEAD)])
    builder.call(function, [ahead, _INT(0), _INT(3), _INT(1)])  # to read, into all caches, data


def _fp8(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    def vector(number: int) -> ir.Value:
        part = load(builder, builder.gep(address, [_LONG(WIDTH * number)]), _BYTES)
        moved = builder.shl(builder.sext(part, _INTS), splat(_INTS, 20))
        return builder.bitcast(builder.and_(moved, splat(_INTS, _E4M3_MASK)), _FLOATS)

    return [vector(number) for number in range(STEP // WIDTH)]


def _bf16(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    def vector(number: int) -> ir.Value:
        return _bf16_vector(builder, load(builder, builder.gep(address, [_LONG(WIDTH * number)]), _SHORTS))

    return [vector(number) for number in range(STEP // WIDTH)]


def _int4(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    words = load(builder, address, _INTS)
    nibbles = [builder.and_(words, splat(_INTS, 15 << 4 * place)) for place in range(7)]
    return [builder.sitofp(part, _FLOATS) for part in (*nibbles, builder.lshr(words, splat(_INTS, 28)))]


def _nvfp4(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    words = load(builder, address, _INTS)
    low, high = (_shifted_e2m1(builder, part) for part in (words, builder.lshr(words, splat(_INTS, 4))))
    pairs = [builder.and_(part, splat(_INTS, 255 << 8 * place)) for place in range(4) for part in (low, high)]
    return [builder.sitofp(part, _FLOATS) for part in pairs]


def _shifted_e2m1(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """12 + twice the number of the low half of each byte: of 0..7 it is 0 1 2 3 4 6 8 12."""
    halves = builder.and_(builder.bitcast(words, _STEP_BYTES), splat(_STEP_BYTES, 15))
    place = builder.and_(halves, splat(_STEP_BYTES, 7))
    name, kinds = "llvm.usub.sat.v32i8", [_STEP_BYTES] * 2
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_STEP_BYTES, kinds), name)  # type: ignore[no-untyped-call]
    beyond4, beyond6 = (builder.call(function, [place, splat(_STEP_BYTES, bound)]) for bound in (4, 6))
    twice = builder.add(builder.add(place, beyond4), builder.add(beyond6, beyond6))
    middle = splat(_STEP_BYTES, 12)
    negative = builder.icmp_unsigned(">", halves, splat(_STEP_BYTES, 7))
    shifted = builder.select(negative, builder.sub(middle, twice), builder.add(middle, twice))
    return builder.bitcast(shifted, _INTS)


def _scale_vector(builder: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    """`count` scales, each for its share of the lanes."""
    stored = address.type.pointee
    kind = ir.VectorType(stored, count)
    scales = load(builder, address, kind)
    lanes = ir.Constant(_INTS, [lane * count // WIDTH for lane in range(WIDTH)])
    spread = builder.shuffle_vector(scales, ir.Constant(kind, ir.Undefined), lanes)
    if stored == _FLOAT:
        return spread
    if stored == _SHORT:
        return _bf16_vector(builder, spread)
    moved = builder.shl(builder.sext(spread, _INTS), splat(_INTS, 20))
    number = builder.bitcast(builder.and_(moved, splat(_INTS, _E4M3_MASK)), _FLOATS)
    nan = builder.icmp_unsigned("==", builder.or_(spread, splat(_BYTES, 0x80)), splat(_BYTES, _E4M3_NAN))
    return builder.select(nan, splat(_FLOATS, float("nan")), builder.fmul(number, splat(_FLOATS, 2.0**120)))


def _bf16_vector(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.bitcast(builder.shl(builder.zext(bits, _INTS), splat(_INTS, 16)), _FLOATS)


def _add_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    count = WIDTH
    while count > 1:
        count //= 2
        halves = (ir.Constant(ir.VectorType(_INT, count), [*range(begin, begin + count)]) for begin in (0, count))
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, _INT(0))


def _fma(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, added: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32")  # type: ignore[no-untyped-call]
    return builder.call(function, [left, right, added])


_types = numba.types
_KINDS = {
    (_types.uint8, _types.float32): _Kind(_fp8, STEP, STEP, e4m3=True),
    (_types.uint16, _types.float32): _Kind(_bf16, STEP, STEP),
    (_types.uint32, _types.uint16): _Kind(_int4, WIDTH, INTERLEAVED),  # groups of a multiple of 64
    (_types.uint32, _types.int16): _Kind(_int4, WIDTH, INTERLEAVED, scales=2),  # groups of 32
    (_types.uint32, _types.float32): _Kind(_int4, WIDTH, INTERLEAVED, scales=WIDTH),  # a scale for each word
    (_types.uint32, _types.uint8): _Kind(_nvfp4, WIDTH, INTERLEAVED, scales=4),
}

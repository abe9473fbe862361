"""How packed weights become vectors: their codes as float32 or, of 4 bits, as bytes, and their scales as float32.

FP8     byte   s eeee mmm  ->  s 0000eeee mmm0..0     2^-120 of the number, since float32's exponent is wider
BF16    bits moved up by 16
INT4    32 bytes, the nibbles of each:  code + 8
NVFP4   likewise:                       twice the number, plus 12
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numba
from llvmlite import ir
from numba.core import cgutils

from quantkit.kernels.vectors import load, splat

WIDTH = 8  # float32 in a vector
STEP = 32  # columns of a step, of 8-bit and wider weights
STEP4 = 64  # columns of a step of 4-bit weights: 8 words
E4M3_NAN = 0xFF

BYTE, SHORT, INT, LONG, FLOAT = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
BYTES, SHORTS, INTS, FLOATS = (ir.VectorType(kind, WIDTH) for kind in (BYTE, SHORT, INT, FLOAT))
STEP_BYTES = ir.VectorType(BYTE, STEP)
_E4M3_MASK = 0x87F00000 - (1 << 32)


class Halves(NamedTuple):
    """Vectors of bytes that the low and the high nibbles of 32 bytes give."""

    low: ir.Value
    high: ir.Value


@dataclass(frozen=True)
class Kind:
    """How weights of one kind are read.

    codes    elements of the array of codes, and
    xs       float32 of x, of a step
    floats   the step at an address as vectors of float32, or
    halves   as bytes that are not negative
    scales   of a segment: one, or 2, 4 or 8 that share a step's vectors
    e4m3     whether codes may be NaN
    """

    codes: int
    xs: int
    floats: Callable[[ir.IRBuilder, ir.Value], list[ir.Value]] | None = None
    halves: Callable[[ir.IRBuilder, ir.Value], Halves] | None = None
    scales: int = 1
    e4m3: bool = False


def scale_vector(builder: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    """`count` scales, each for its share of the lanes."""
    stored = address.type.pointee
    if (stored, count) == (SHORT, 2):  # as one element
        pair = ir.VectorType(INT, 1)
        shifts = ir.Constant(INTS, [16] * 4 + [0] * 4)
        both = builder.shuffle_vector(load(builder, address, pair), ir.Constant(pair, ir.Undefined), splat(INTS, 0))
        return builder.bitcast(builder.and_(builder.shl(both, shifts), splat(INTS, -1 << 16)), FLOATS)
    kind = ir.VectorType(stored, count)
    scales = load(builder, address, kind)
    lanes = ir.Constant(INTS, [lane * count // WIDTH for lane in range(WIDTH)])
    spread = builder.shuffle_vector(scales, ir.Constant(kind, ir.Undefined), lanes)
    if stored == FLOAT:
        return spread
    if stored == SHORT:
        return _bf16_vector(builder, spread)
    nan = builder.icmp_unsigned("==", builder.or_(spread, splat(BYTES, 0x80)), splat(BYTES, E4M3_NAN))
    number = builder.fmul(_e4m3_vector(builder, spread), splat(FLOATS, 2.0**120))
    return builder.select(nan, splat(FLOATS, float("nan")), number)


def _fp8(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [_e4m3_vector(builder, part) for part in _parts(builder, address, BYTES)]


def _bf16(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [_bf16_vector(builder, part) for part in _parts(builder, address, SHORTS)]


def _parts(builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType) -> list[ir.Value]:
    return [load(builder, builder.gep(address, [LONG(WIDTH * part)]), kind) for part in range(STEP // WIDTH)]


def _e4m3_vector(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    moved = builder.shl(builder.sext(codes, INTS), splat(INTS, 20))
    return builder.bitcast(builder.and_(moved, splat(INTS, _E4M3_MASK)), FLOATS)


def _bf16_vector(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), splat(INTS, 16)), FLOATS)


def _int4(builder: ir.IRBuilder, address: ir.Value) -> Halves:
    words = load(builder, address, INTS)
    halves = (builder.bitcast(part, STEP_BYTES) for part in (words, builder.lshr(words, splat(INTS, 4))))
    return Halves(*(builder.and_(half, splat(STEP_BYTES, 15)) for half in halves))


def _nvfp4(builder: ir.IRBuilder, address: ir.Value) -> Halves:
    return Halves(*(_shifted_e2m1(builder, half) for half in _int4(builder, address)))


def _shifted_e2m1(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """12 + twice the number of each code: of 0..7 it is 0 1 2 3 4 6 8 12."""
    place = builder.and_(codes, splat(STEP_BYTES, 7))
    name, kinds = "llvm.usub.sat.v32i8", [STEP_BYTES] * 2
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(STEP_BYTES, kinds), name)  # type: ignore[no-untyped-call]
    beyond4, beyond6 = (builder.call(function, [place, splat(STEP_BYTES, bound)]) for bound in (4, 6))
    twice = builder.add(builder.add(place, beyond4), builder.add(beyond6, beyond6))
    middle = splat(STEP_BYTES, 12)
    negative = builder.icmp_unsigned(">", codes, splat(STEP_BYTES, 7))
    return builder.select(negative, builder.sub(middle, twice), builder.add(middle, twice))


_types = numba.types
KINDS = {  # by the types of codes and scales
    (_types.uint8, _types.float32): Kind(STEP, STEP, _fp8, e4m3=True),
    (_types.uint16, _types.float32): Kind(STEP, STEP, _bf16),
    (_types.uint32, _types.uint16): Kind(WIDTH, STEP4, halves=_int4),  # groups of a multiple of 64
    (_types.uint32, _types.int16): Kind(WIDTH, STEP4, halves=_int4, scales=2),  # groups of 32
    (_types.uint32, _types.float32): Kind(WIDTH, STEP4, halves=_int4, scales=WIDTH),  # a scale for each word
    (_types.uint32, _types.uint8): Kind(WIDTH, STEP4, halves=_nvfp4, scales=4),
}

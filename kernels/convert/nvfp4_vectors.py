"""A group's 16 weights at once, spelled out as vectors for the compiled NVFP4 loops.

Of the vectors of a search each lane belongs to one candidate. So a candidate's errors are added in the order of the
weights, and the sums, in float64, are those of the reference to the last bit, however wide the machine's vectors are.
"""

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.kernels.convert.nvfp4_groups import GROUP_SIZE, MIDPOINTS, SEARCHED
from quantkit.kernels.vectors import at, load, reduce, splat

_INDEX = numba.types.uint64
_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_BYTES, _LONGS, _DOUBLES = (ir.VectorType(kind, GROUP_SIZE) for kind in (_BYTE, _LONG, ir.DoubleType()))
_PAIRS, _CANDIDATES = ir.VectorType(ir.IntType(16), GROUP_SIZE // 2), ir.VectorType(ir.DoubleType(), SEARCHED)


@intrinsic
def largest_byte(typing_context: Any, source: Any, position: Any) -> Any:
    """The largest of the bytes `source[position : position + 16]` without their sign bits, as uint8."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        group = load(builder, at(context, builder, signature.args[0], *arguments), _BYTES)
        return reduce(builder, "umax", builder.and_(group, splat(_BYTES, 0x7F)))

    return numba.types.uint8(source, _INDEX), generate


@intrinsic
def largest_value(typing_context: Any, values: Any, position: Any) -> Any:
    """The largest magnitude of the float64 `values[position : position + 16]`, or NaN if there is one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits = load(builder, at(context, builder, signature.args[0], *arguments), _LONGS)
        magnitudes = builder.and_(bits, splat(_LONGS, (1 << 63) - 1))  # their order is that of the numbers, NaN last
        return builder.bitcast(reduce(builder, "umax", magnitudes), ir.DoubleType())

    return numba.types.float64(values, _INDEX), generate


@intrinsic
def best_by_byte(typing_context: Any, source: Any, position: Any, errors: Any, begin: Any, stride: Any) -> Any:
    """The first of the candidates with the smallest error, as int64, for the bytes `source[position : position + 16]`.

    errors[begin + stride * m + i]  what a weight with the magnitude byte m adds to the error of candidate i
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        group = at(context, builder, signature.args[0], *arguments[:2])
        table = at(context, builder, signature.args[2], *arguments[2:4])
        total = None
        for index in range(GROUP_SIZE):
            byte = builder.and_(builder.load(builder.gep(group, [_LONG(index)])), _BYTE(0x7F))
            row = builder.mul(builder.zext(byte, _LONG), arguments[4])
            error = load(builder, builder.gep(table, [row]), _CANDIDATES)
            total = builder.fadd(total, error) if total else error
        return _first_least(builder, total)

    return numba.types.int64(source, _INDEX, errors, _INDEX, _INDEX), generate


@intrinsic
def best_by_value(typing_context: Any, values: Any, position: Any, candidates: Any, begin: Any) -> Any:
    """The first of the candidates with the smallest error, as int64, for float64 `values[position : position + 16]`.

    candidates[begin : begin + 24]  a row of `CANDIDATES`
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        group = at(context, builder, signature.args[0], *arguments[:2])
        *steps, total = _load_candidates(builder, at(context, builder, signature.args[2], *arguments[2:]))
        for index in range(GROUP_SIZE):
            error = _squared_distance(builder, builder.load(builder.gep(group, [_LONG(index)])), *steps)
            total = builder.fadd(total, error)
        return _first_least(builder, total)

    return numba.types.int64(values, _INDEX, candidates, _INDEX), generate


@intrinsic
def store_errors(typing_context: Any, value: Any, candidates: Any, begin: Any, errors: Any, position: Any) -> Any:
    """Write what `value` adds to the errors of eight candidates into `errors[position : position + 8]`.

    candidates[begin : begin + 24]  a row of `CANDIDATES`
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> None:
        *steps, least = _load_candidates(builder, at(context, builder, signature.args[1], *arguments[1:3]))
        address = at(context, builder, signature.args[3], *arguments[3:])
        error = builder.fadd(least, _squared_distance(builder, arguments[0], *steps))
        builder.store(error, builder.bitcast(address, _CANDIDATES.as_pointer()), align=8)

    return numba.types.void(value, candidates, _INDEX, errors, _INDEX), generate


@intrinsic
def pack_bytes(typing_context: Any, source: Any, position: Any, below: Any, begin: Any) -> Any:
    """The packed codes, uint64, of the bytes `source[position : position + 16]`.

    below[begin : begin + 7]  for each midpoint of E2M1 the largest magnitude byte that rounds to the number below it
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        group = load(builder, at(context, builder, signature.args[0], *arguments[:2]), _BYTES)
        magnitudes = builder.and_(group, splat(_BYTES, 0x7F))
        thresholds = at(context, builder, signature.args[2], *arguments[2:])
        codes = splat(_BYTES, 0)
        for index in range(len(MIDPOINTS)):
            last = _spread(builder, builder.load(builder.gep(thresholds, [_LONG(index)])), GROUP_SIZE)
            codes = builder.sub(codes, builder.sext(builder.icmp_signed(">", magnitudes, last), _BYTES))
        return _packed(builder, codes, builder.icmp_signed("<", group, splat(_BYTES, 0)))

    return numba.types.uint64(source, _INDEX, below, _INDEX), generate


@intrinsic
def pack_values(typing_context: Any, values: Any, position: Any, step: Any) -> Any:
    """The packed codes, uint64, of the float64 `values[position : position + 16]` under the scale `step` float64."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        group = load(builder, at(context, builder, signature.args[0], *arguments[:2]), _DOUBLES)
        magnitudes = _absolute(builder, group)
        codes = splat(_LONGS, 0)
        for index, midpoint in enumerate(MIDPOINTS):  # a tie goes to the even code
            end = _spread(builder, builder.fmul(arguments[2], ir.DoubleType()(float(midpoint))), GROUP_SIZE)
            passed = builder.fcmp_ordered(">=" if index % 2 else ">", magnitudes, end)
            codes = builder.sub(codes, builder.sext(passed, _LONGS))
        negative = builder.fcmp_ordered("<", group, splat(_DOUBLES, 0.0))
        return _packed(builder, builder.trunc(codes, _BYTES), negative)

    return numba.types.uint64(values, _INDEX, numba.types.float64), generate


def _packed(builder: ir.IRBuilder, codes: ir.Value, negative: ir.Value) -> ir.Value:
    """Sixteen codes 0..7 with their signs, packed into 64 bits, the first lowest; zero has no sign."""
    signed = builder.and_(negative, builder.icmp_unsigned("!=", codes, splat(_BYTES, 0)))
    codes = builder.or_(codes, builder.select(signed, splat(_BYTES, 8), splat(_BYTES, 0)))
    pairs = builder.bitcast(codes, _PAIRS)
    pairs = builder.or_(pairs, builder.lshr(pairs, splat(_PAIRS, 4)))
    return builder.bitcast(builder.trunc(pairs, ir.VectorType(_BYTE, GROUP_SIZE // 2)), _LONG)


def _load_candidates(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """The scales, their reciprocals, and the errors that they begin with."""
    return [load(builder, builder.gep(address, [_LONG(SEARCHED * part)]), _CANDIDATES) for part in range(3)]


def _squared_distance(builder: ir.IRBuilder, value: ir.Value, scales: ir.Value, reciprocals: ir.Value) -> ir.Value:
    """The squares, a vector of candidates, of the distances of |value| from the nearest number of E2M1 * scale.

    A quotient is rounded by adding and subtracting 2^51 times its power of two, or 2^51 if it is below one. That it is
    inexact could matter within 2^-51 of a midpoint; but a value of up to 46 significant bits that is so close to one
    lies on it, and then both neighbours have the same distance.
    """
    magnitude = _absolute(builder, _spread(builder, value, SEARCHED))
    quotient = _smaller(builder, builder.fmul(magnitude, reciprocals), splat(_CANDIDATES, 6.0))
    not_below_one = _larger(builder, quotient, splat(_CANDIDATES, 1.0))
    bits = builder.bitcast(not_below_one, ir.VectorType(_LONG, SEARCHED))
    power = builder.bitcast(builder.and_(bits, splat(bits.type, 0x7FF << 52)), _CANDIDATES)
    shift = builder.fmul(power, splat(_CANDIDATES, 2.0**51))
    nearest = builder.fsub(builder.fadd(quotient, shift), shift)
    distance = builder.fsub(magnitude, builder.fmul(nearest, scales))
    return builder.fmul(distance, distance)


def _absolute(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    kind = values.type
    name = f"llvm.fabs.v{kind.count}f64"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)  # type: ignore[no-untyped-call]
    return builder.call(function, [values])


def _spread(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """The vector whose elements are all `value`."""
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, splat(ir.VectorType(ir.IntType(32), lanes), 0))


def _smaller(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", left, right), left, right)


def _larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _first_least(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """The index, int64, of the first smallest element of a vector of eight float64 without NaN."""
    least = values
    for distance in (4, 2, 1):
        places = [(lane + distance) % SEARCHED for lane in range(SEARCHED)]
        turned = builder.shuffle_vector(least, least, ir.Constant(ir.VectorType(ir.IntType(32), SEARCHED), places))
        least = _smaller(builder, turned, least)
    found = builder.bitcast(builder.fcmp_ordered("==", values, least), ir.IntType(SEARCHED))
    return builder.zext(builder.cttz(found, ir.IntType(1)(1)), _LONG)

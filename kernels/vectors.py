"""Sums and maxima over 32 weights, spelled out as vectors for the compiled loops.

LLVM's own choice is half as wide or none: its vectorizer takes the width of the widest type in a loop, which is the
sum's, and does not know that a group holds a multiple of 32 weights. The vectors are those of no machine in particular.
"""

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32
_BYTES, _INT16, _INT32 = (ir.VectorType(ir.IntType(bits), LANES) for bits in (8, 16, 32))


@intrinsic
def largest_magnitude(typing_context: Any, source: Any, position: Any) -> Any:
    """The largest of the bytes `source[position : position + LANES]` without their sign bits, as uint8."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        group = load(builder, at(context, builder, signature.args[0], *arguments), _BYTES)
        magnitudes = builder.and_(group, splat(_BYTES, 0x7F))
        return reduce(builder, "umax", magnitudes)

    return numba.types.uint8(source, numba.types.uint64), generate


@intrinsic
def squared_distance(typing_context: Any, ratios: Any, position: Any, step: Any) -> Any:
    """The sum, int32, of squared distances from the nearest code of the int16 `ratios[position : position + LANES]`
    under a candidate's int16 `step`, both in the units of `int4_search`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        ratio = load(builder, at(context, builder, signature.args[0], *arguments[:2]), _INT16)
        nothing = ir.Constant(_INT16, ir.Undefined)
        first = builder.insert_element(nothing, arguments[2], ir.Constant(ir.IntType(32), 0))
        steps = builder.shuffle_vector(first, nothing, splat(_INT32, 0))
        product = builder.mul(builder.sext(ratio, _INT32), builder.sext(steps, _INT32))
        place = builder.trunc(builder.ashr(product, splat(_INT32, 16)), _INT16)
        code = builder.ashr(builder.add(place, splat(_INT16, 1 << 8)), splat(_INT16, 9))
        for comparison, end in ((">", -8), ("<", 7)):
            inside = builder.icmp_signed(comparison, code, splat(_INT16, end))
            code = builder.select(inside, code, splat(_INT16, end))
        distance = builder.sext(builder.sub(place, builder.shl(code, splat(_INT16, 9))), _INT32)
        return reduce(builder, "add", builder.mul(distance, distance))

    return numba.types.int32(ratios, numba.types.uint64, numba.types.int16), generate


def at(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, index: ir.Value) -> ir.Value:
    """The address of `array[index]`, where `array` is of numba's type `kind`."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType) -> ir.Value:
    """The vector that begins at an address."""
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def splat(kind: ir.VectorType, value: float) -> ir.Constant:
    """The vector whose elements are all `value`."""
    return ir.Constant(kind, [value] * kind.count)


def reduce(builder: ir.IRBuilder, how: str, vector: ir.Value) -> ir.Value:
    """The sum ("add"), maximum ("umax") or other reduction of a vector of integers."""
    element = vector.type.element
    name = f"llvm.vector.reduce.{how}.v{vector.type.count}i{element.width}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [vector.type]), name)  # type: ignore[no-untyped-call]
    return builder.call(function, [vector])

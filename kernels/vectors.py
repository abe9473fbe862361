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
        magnitudes = builder.and_(_load(context, builder, signature, arguments, _BYTES), _splat(_BYTES, 0x7F))
        return _reduce(builder, "umax", magnitudes)

    return numba.types.uint8(source, numba.types.uint64), generate


@intrinsic
def squared_distance(typing_context: Any, ratios: Any, position: Any, step: Any) -> Any:
    """The sum, int32, of squared distances from the nearest code of the int16 `ratios[position : position + LANES]`
    under a candidate's int16 `step`, both in the units of `int4_search`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        ratio = _load(context, builder, signature, arguments, _INT16)
        nothing = ir.Constant(_INT16, ir.Undefined)
        first = builder.insert_element(nothing, arguments[2], ir.Constant(ir.IntType(32), 0))
        steps = builder.shuffle_vector(first, nothing, _splat(_INT32, 0))
        product = builder.mul(builder.sext(ratio, _INT32), builder.sext(steps, _INT32))
        place = builder.trunc(builder.ashr(product, _splat(_INT32, 16)), _INT16)
        code = builder.ashr(builder.add(place, _splat(_INT16, 1 << 8)), _splat(_INT16, 9))
        for comparison, end in ((">", -8), ("<", 7)):
            inside = builder.icmp_signed(comparison, code, _splat(_INT16, end))
            code = builder.select(inside, code, _splat(_INT16, end))
        distance = builder.sext(builder.sub(place, builder.shl(code, _splat(_INT16, 9))), _INT32)
        return _reduce(builder, "add", builder.mul(distance, distance))

    return numba.types.int32(ratios, numba.types.uint64, numba.types.int16), generate


def _load(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, kind: ir.VectorType) -> ir.Value:
    """The vector at the index `arguments[1]` of the array `arguments[0]`."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    address = builder.gep(array.data, [arguments[1]])
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=kind.element.width // 8)


def _splat(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _reduce(builder: ir.IRBuilder, how: str, vector: ir.Value) -> ir.Value:
    element = vector.type.element
    name = f"llvm.vector.reduce.{how}.v{LANES}i{element.width}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [vector.type]), name)  # type: ignore[no-untyped-call]
    return builder.call(function, [vector])

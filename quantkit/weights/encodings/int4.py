"""INT4 in groups of a row's columns, packed as compressed-tensors does (`pack-quantized`).

    weight_packed I32 [N, K/8], weight_scale BF16 [N, K/g], weight_shape I64 or I32 [2]

Source: `compressed_tensors_wNa16.py` of vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.choices import Dialect, ScaleMethod
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.encodings.encoding import (
    Format,
    Making,
    Origin,
    Outputs,
    Quantizer,
    Rows,
    Storage,
    StoredFacts,
    Target,
)
from quantkit.weights.encodings.fp8 import FP8, has_groups
from quantkit.weights.encodings.groups import check_divides, matrix
from quantkit.weights.encodings.plain import PLAIN
from quantkit.weights.rescale import NORMAL, Extent, Patch, Powers, one_each, scales_extent, scales_multiplied
from quantkit.weights.rows import Reader, shape_in
from quantkit.weights.weight import Strategy, Weight

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.convert.weight_error import WeightError
    from quantkit.kernels.cpu.linear import Weights
    from quantkit.weights.packed import Packed

CODES_PER_WORD = 8  # in an int32
SCALE, SHAPE = "weight_scale", "weight_shape"
_PACKED = "weight_packed"


class Int4(Target):
    """See above."""

    name = "int4"
    parts = (SHAPE,)
    origins = frozenset({PLAIN.name, FP8.name})
    negative_scales = True
    group_sizes = (32, 64, 128)  # what the engines' kernels take

    # --- stored

    def claims(self, name: TensorName, dtype: str) -> bool:
        """Packed words; NVFP4's bytes have that name, too."""
        return name.leaf == _PACKED and dtype != "U8"

    def read(
        self, name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], facts: StoredFacts
    ) -> Weight:
        """The group size follows from the scale's shape."""
        if facts.bits is not None:
            raise SourceError(
                f"{name} may have num_bits {facts.bits}, as config.json says; only 4 are understood",
                hint="Convert the FP8 or BF16 release of the model.",
            )
        scale, shape = tensors.get(name.sibling(SCALE)), tensors.get(name.sibling(SHAPE))
        if scale is None or shape is None:
            missing = SCALE if scale is None else SHAPE
            raise SourceError(f"{name} is packed INT4 and {name.sibling(missing)} is missing")
        if shape.spec.dtype not in ("I32", "I64") or shape.spec.shape != (2,):
            raise SourceError(f"{shape.spec.name} is {shape.spec.dtype} {list(shape.spec.shape)}, not two integers")
        match data.spec, scale.spec:
            case TensorSpec(dtype="I32", shape=(rows, words)), TensorSpec(dtype="BF16", shape=(scale_rows, groups)):
                columns = words * CODES_PER_WORD
                if rows == scale_rows and groups and columns % groups == 0:
                    block = (1, columns // groups)
                    return Weight(name, self, (rows, columns), data, scale, block, packed_shape=shape)
        raise SourceError(
            f"{name} is {data.spec.dtype} {list(data.spec.shape)} and its scale {scale.spec.dtype} "
            f"{list(scale.spec.shape)}; INT4 needs I32 [N, K/8] and BF16 [N, K/g]"
        )

    def label(self, weight: Weight) -> str:
        assert weight.block is not None
        return self.made_label(weight.block[1])

    def copy(
        self, reader: Reader, weight: Weight, tensor: StoredTensor, target: TensorSpec, begin: int, end: int
    ) -> Rows:
        """Its `weight_shape` must be true."""
        if tensor is weight.packed_shape:
            check_shape(reader, weight)
        return super().copy(reader, weight, tensor, target, begin, end)

    # --- described

    def format(self, weight: Weight) -> Format:
        assert weight.block is not None
        return self.made_format(weight.block[1])

    def kind(self, form: Format) -> str:
        assert form.block is not None
        return f"g={form.block[1]}"

    def described(self, form: Format) -> dict[str, Any]:
        """Groups, or, for the class `Linear` alone, blocks."""
        assert form.block is not None
        blocks = form.strategy == Strategy.BLOCK
        weights = {
            **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": form.strategy, "dynamic": False},
            "group_size": None if blocks else form.block[1],
            "actorder": None,
            "block_structure": list(form.block) if blocks else None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        return {"format": "pack-quantized", "weights": weights, "input_activations": None}

    def class_format(self, blocks: Format) -> Format:
        """INT4 in these blocks, which SGLang takes as the block size of FP8 and as INT4: `quantization_config`."""
        return Format(self, blocks.strategy, blocks.block)

    def is_described(self, weights: Mapping[str, Any]) -> bool:
        """Integers of 4 bits."""
        return bool(weights["type"] == "int" and weights["num_bits"] == 4)

    def leaves(self, static: bool) -> frozenset[str]:
        """Three, whatever is done with activations."""
        return frozenset({_PACKED, SCALE, SHAPE})

    def storage(self, key: str, weights: Mapping[str, Any], static: bool, shape_dtype: str) -> Storage | None:
        """Of groups; blocks are of no module: `quantization_config` says why such a group is written."""
        match weights:
            case {"group_size": int(group_size)}:
                return partial(_group_specs, group_size=group_size, shape_dtype=shape_dtype)
            case {"strategy": "block"}:
                return partial(_of_no_module, key)
        return None

    # --- made

    def made_label(self, group_size: int | None) -> str:
        return f"int4 g={group_size}"

    def made_format(self, group_size: int | None) -> Format:
        assert group_size is not None
        return Format(self, "group", (1, group_size))

    def outputs(self, weight: Weight, group_size: int | None, dialect: Dialect) -> tuple[TensorSpec, ...]:
        """Packed codes, scale, shape."""
        assert group_size is not None
        rows, columns = matrix(weight, "INT4", group_size, "Choose a smaller --group-size.")
        return specs(weight.module, (rows, columns), group_size)

    def quantizer(self, reader: Reader) -> Quantizer:
        """In the byte domain where groups lie in FP8 blocks, else from numbers."""
        return partial(_quantize, reader)

    # --- read

    def coded_rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> tuple[ops.Words, ops.Bf16Bits]:
        """The rows `begin` to `end`: words [rows, K/8], and BF16 bits of the scales [rows, K/g].

        Raises SourceError, naming the tensor, if its `weight_shape` is another one.
        """
        assert weight.scale is not None
        if begin == 0:
            check_shape(reader, weight)
        words, groups = weight.shape[1] // CODES_PER_WORD, weight.scale.spec.shape[1]
        packed = reader.tensor_bytes(weight.data, begin * words * 4, end * words * 4, "packed")
        scale = reader.tensor_bytes(weight.scale, begin * groups * 2, end * groups * 2, "int4_scale")
        return packed.view(np.uint32).reshape(-1, words), scale.view(np.uint16).reshape(-1, groups)

    def rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> ops.Scales:
        """Code times scale, exactly."""
        return ops.int4_to_float(*self.coded_rows(reader, weight, begin, end))

    def largest(self, reader: Reader, weight: Weight) -> float:
        """8 times the largest scale."""
        assert weight.scale is not None
        bits = reader.tensor_bytes(weight.scale, 0, weight.scale.spec.nbytes, "int4_scale")
        return 8.0 * float(np.abs(ops.to_float32(bits, weight.scale.spec.dtype)).max(initial=0))

    def error(
        self, reader: Reader, weight: Weight, origin: Origin, begin: int, end: int, slack: float
    ) -> "WeightError":
        """Against FP8 in the byte domain, else against numbers."""
        packed, scale = self.coded_rows(reader, weight, begin, end)
        if origin.numbers is None and has_groups(origin.weight, 1):
            assert origin.weight.block is not None
            fp8, scales = FP8.coded_rows(origin.reader, origin.weight, begin, end)
            return ops.int4_error(fp8, scales, origin.weight.block, packed, scale)
        return ops.float_int4_error(origin.rows(begin, end), packed, scale, slack)

    # --- rescaled

    def extent(self, weight: Weight, powers: Powers, fused: bool) -> Extent:
        """The scales of groups that change."""
        return scales_extent(weight, powers)

    def multiplied(self, reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
        """The scales of groups."""
        assert weight.scale is not None
        exponents = one_each(weight, powers)
        yield from scales_multiplied(reader, weight.scale, exponents, NORMAL[weight.scale.spec.dtype])

    # --- computed

    def empty(self, weight: Weight, count: int) -> "Packed":
        """codes int32 [N, K/8], scale bfloat16 [N, K/g]."""
        import torch

        from quantkit.weights.packed import Packed, empty

        rows, columns = weight.matrix
        codes = empty(count, (rows, columns // CODES_PER_WORD), torch.int32)
        return Packed(self, weight.matrix, codes, empty(count, weight.grid, torch.bfloat16), block=weight.block)

    def fill(self, packed: "Packed", weight: Weight, reader: Reader) -> None:
        packed.read_codes(weight, reader)
        packed.read_scale(weight, reader)

    def decode(self, packed: "Packed", dtype: "torch.dtype") -> "torch.Tensor":
        """Exact in float32."""
        from quantkit.ops import linear

        return linear.decode_int4(*_parts(packed), dtype)

    def ready(self, packed: "Packed") -> "Weights | None":
        from quantkit.ops import linear

        return linear.ready_int4(*_parts(packed))

    def product(self, x: "torch.Tensor", packed: "Packed", ids: "torch.Tensor | None") -> "torch.Tensor":
        from quantkit.ops import linear

        return linear.int4(x, *_parts(packed), ids)


INT4 = Int4()


def _parts(packed: "Packed") -> "tuple[torch.Tensor, torch.Tensor]":
    """What `ops.linear` takes of a weight."""
    assert packed.scale is not None
    return packed.codes, packed.scale


def specs(
    module: str, shape: tuple[int, int], group_size: int, shape_dtype: str = "I64"
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """The tensors of an INT4 weight of `shape` [N, K]: packed codes, scale, shape."""
    rows, columns = shape
    return (
        TensorSpec(f"{module}.{_PACKED}", "I32", (rows, columns // CODES_PER_WORD)),
        TensorSpec(f"{module}.{SCALE}", "BF16", (rows, columns // group_size)),
        TensorSpec(f"{module}.{SHAPE}", shape_dtype, (2,)),
    )


def check_shape(reader: Reader, weight: Weight) -> None:
    """Raise SourceError, naming the tensor, unless `weight_shape` is the shape of the packed codes."""
    assert weight.packed_shape is not None
    stored = weight.packed_shape.spec
    shape = shape_in(stored.dtype, reader.tensor_bytes(weight.packed_shape, 0, stored.nbytes, "shape"))
    if shape != weight.shape:
        raise SourceError(
            f"{stored.name} is {list(shape)}; {weight.name} holds {list(weight.shape)} codes of 4 bits",
            hint="Weights of other widths than 4 bits are not understood; else the file is damaged.",
        )


def _group_specs(module: str, rows: int, columns: int, *, group_size: int, shape_dtype: str) -> Iterator[TensorSpec]:
    check_divides(module, columns, group_size)
    return iter(specs(module, (rows, columns), group_size, shape_dtype))


def _of_no_module(key: str, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    raise ValueError(f"{module} is left to {key} of the quantization_config, INT4 in blocks, which nothing stores")


def _quantize(reader: Reader, making: Making, begin: int, end: int) -> Rows:
    weight, group_size, method = making.weight, making.group_size, making.scale
    assert group_size is not None
    assert method is not None
    rows, columns = end - begin, weight.shape[1]
    packed: ops.Words = np.empty((rows, columns // CODES_PER_WORD), np.uint32)
    scale: ops.Bf16Bits = np.empty((rows, columns // group_size), np.uint16)
    settings = group_size, method.divisors, method is ScaleMethod.SIGNED, packed, scale
    if has_groups(weight, group_size):
        assert weight.block is not None
        fp8, scales = FP8.coded_rows(reader, weight, begin, end)
        bad = ops.fp8_block_to_int4(fp8, scales, weight.block, *settings)
    else:
        bad = ops.float_to_int4(reader.rows(weight, begin, end), *settings)
    outputs: Outputs = {making.outputs[0].name: packed, making.outputs[1].name: scale}
    if begin == 0:
        outputs[making.outputs[2].name] = np.array(weight.shape, np.int64)
    return Rows(outputs, bad)

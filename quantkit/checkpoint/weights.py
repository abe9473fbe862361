"""Stored tensors grouped into weights: what a tensor is, is decided by its dtype and its siblings, never by the config.

(GLM-5.2's `modules_to_not_convert` names a module that does not exist.) This is the one place that knows how the
dialects spell their tensors:

    FP8 block  (DeepSeek, GLM)               weight F8_E4M3 [N, K], weight_scale_inv F32 [ceil(N/rows), ceil(K/columns)]
    FP8 block  (compressed-tensors)          the same with weight_scale
    INT4 group (compressed-tensors)          weight_packed I32 [N, K/8], weight_scale BF16 [N, K/g], weight_shape I64
    plain                                    any other tensor, kept as it is

Layouts as vLLM 0.33 and SGLang 0.5.23 create them: `fp8_utils.py` and `compressed_tensors_wNa16.py` of both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.naming import TensorName

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
_FP8_SCALES = ("weight_scale_inv", "weight_scale")
_NOT_UNDERSTOOD = ("weight_zero_point", "weight_g_idx", "qweight", "qzeros", "weight_scale_2")
_INT4_SCALE, _INT4_SHAPE = "weight_scale", "weight_shape"
CODES_PER_WORD = 8  # 4-bit codes in an int32


class Encoding(StrEnum):
    """How a weight's numbers are stored."""

    PLAIN = "plain"
    FP8_BLOCK = "fp8_block"
    INT4 = "int4"


@dataclass(frozen=True)
class Weight:
    """One weight of the model and the stored tensors that hold it.

    shape       the weight's own, unpacked
    data        the tensor with its numbers: `weight` or `weight_packed`
    scale       its scale, if it has one
    block       rows and columns that share a scale: (128, 128) for FP8 blocks, (1, group size) for INT4
    others      what else belongs to it: `weight_shape`
    """

    name: TensorName
    encoding: Encoding
    shape: tuple[int, ...]
    data: StoredTensor
    scale: StoredTensor | None = None
    block: tuple[int, int] | None = None
    others: tuple[StoredTensor, ...] = ()

    @property
    def module(self) -> str:
        """The name of the module that owns the weight."""
        return self.name.module

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All stored tensors that hold the weight."""
        return (self.data, *((self.scale,) if self.scale else ()), *self.others)

    @property
    def nbytes(self) -> int:
        """The bytes stored for the weight."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def label(self) -> str:
        """What a report calls the weight's format: `int4 g=32`, `fp8 128x128`, or the dtype of a plain tensor."""
        if self.encoding is Encoding.INT4:
            return f"int4 g={self.block[1]}" if self.block else "int4"
        if self.encoding is Encoding.FP8_BLOCK and self.block:
            return f"fp8 {self.block[0]}x{self.block[1]}"
        return self.data.spec.dtype.lower()


def read_weights(source: Source) -> tuple[Weight, ...]:
    """Group all tensors of `source` into weights, each tensor in exactly one.

    Raises SourceError, naming the tensor, for an FP8 or packed weight without its scale, a scale without its weight,
    and a scale whose shape does not cover the weight.
    """
    block = _config_block(source)
    weights: list[Weight] = []
    used: set[str] = set()
    for tensor in source.tensors.values():
        name = TensorName.parse(tensor.spec.name)
        if tensor.spec.dtype == "F8_E4M3" and name.leaf == "weight":
            weights.append(_fp8_weight(name, tensor, source.tensors, block))
        elif name.leaf == "weight_packed":
            weights.append(_int4_weight(name, tensor, source))
        else:
            continue
        used.update(stored.spec.name for stored in weights[-1].tensors)
    left = [tensor for tensor in source.tensors.values() if tensor.spec.name not in used]
    for name in (TensorName.parse(tensor.spec.name) for tensor in left):
        if name.leaf in _NOT_UNDERSTOOD:
            raise SourceError(
                f"{name}: quantized weights with {name.leaf} are not understood; they would come out wrong"
            )
    return (*weights, *map(_plain_weight, left))


def fp8_block_specs(module: str, shape: tuple[int, ...], block: tuple[int, int], scale: str) -> tuple[TensorSpec, ...]:
    """The tensors of an FP8 block weight of `shape` [N, K]; `scale` is `weight_scale_inv` or `weight_scale`."""
    name = TensorName(module, "weight")
    grid = tuple(-(-size // span) for size, span in zip(shape, block, strict=True))
    return TensorSpec(str(name), "F8_E4M3", shape), TensorSpec(name.sibling(scale), "F32", grid)


def int4_specs(module: str, shape: tuple[int, ...], group_size: int) -> tuple[TensorSpec, ...]:
    """The tensors of an INT4 weight of `shape` [N, K]: packed codes, scale, shape."""
    rows, columns = shape
    name = TensorName(module, "weight_packed")
    return (
        TensorSpec(str(name), "I32", (rows, columns // CODES_PER_WORD)),
        TensorSpec(name.sibling(_INT4_SCALE), "BF16", (rows, columns // group_size)),
        TensorSpec(name.sibling(_INT4_SHAPE), "I64", (2,)),
    )


def _config_block(source: Source) -> tuple[int, int]:
    """The FP8 block shape: the config's of either dialect, else 128 x 128."""
    quantization = source.config.get("quantization_config") or {}
    try:
        block = quantization.get("weight_block_size")
        for group in (quantization.get("config_groups") or {}).values():
            block = block or (group["weights"] or {}).get("block_structure")
    except (AttributeError, KeyError, TypeError) as error:
        raise SourceError(f"{source.name}: quantization_config in config.json is malformed: {error!r}") from error
    match block or [128, 128]:
        case [rows, columns] if type(rows) is type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise SourceError(f"{source.name}: the FP8 block size in config.json is {block}, not two positive numbers")


def _fp8_weight(
    name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], block: tuple[int, int]
) -> Weight:
    scale = next((tensors[sibling] for leaf in _FP8_SCALES if (sibling := name.sibling(leaf)) in tensors), None)
    if scale is None:
        raise SourceError(
            f"{name} is FP8 and has no scale: {' or '.join(name.sibling(leaf) for leaf in _FP8_SCALES)} is missing",
            hint="Without its scale the weight would be wrong by a factor of hundreds; download the checkpoint again.",
        )
    if len(data.spec.shape) != 2:
        raise SourceError(f"{name} is FP8 with the shape {list(data.spec.shape)}; only matrices are understood")
    expected = fp8_block_specs(name.module, data.spec.shape, block, "weight_scale_inv")[1]
    if (scale.spec.dtype, scale.spec.shape) != (expected.dtype, expected.shape):
        raise SourceError(
            f"{scale.spec.name} is {scale.spec.dtype} {list(scale.spec.shape)}, but {name} {list(data.spec.shape)} in "
            f"blocks of {block[0]}x{block[1]} needs {expected.dtype} {list(expected.shape)}",
            hint="Check weight_block_size in config.json.",
        )
    return Weight(name, Encoding.FP8_BLOCK, data.spec.shape, data, scale, block)


def _int4_weight(name: TensorName, data: StoredTensor, source: Source) -> Weight:
    scale = source.tensors.get(name.sibling(_INT4_SCALE))
    shape = source.tensors.get(name.sibling(_INT4_SHAPE))
    if scale is None or shape is None:
        missing = _INT4_SCALE if scale is None else _INT4_SHAPE
        raise SourceError(f"{name} is packed INT4 and {name.sibling(missing)} is missing")
    match data.spec, scale.spec:
        case TensorSpec(dtype="I32", shape=(rows, words)), TensorSpec(dtype="BF16", shape=(scale_rows, groups)):
            columns = words * CODES_PER_WORD
            if rows == scale_rows and groups and columns % groups == 0:
                block = (1, columns // groups)
                return Weight(name, Encoding.INT4, (rows, columns), data, scale, block, (shape,))
    raise SourceError(
        f"{name} is {data.spec.dtype} {list(data.spec.shape)} and its scale {scale.spec.dtype} "
        f"{list(scale.spec.shape)}; INT4 needs I32 [N, K/8] and BF16 [N, K/g]"
    )


def _plain_weight(tensor: StoredTensor) -> Weight:
    name = TensorName.parse(tensor.spec.name)
    if name.leaf in (*_FP8_SCALES, _INT4_SHAPE):
        raise SourceError(
            f"{name} is the scale or shape of a weight that is not there",
            hint="A shard or an index entry is missing; download the checkpoint again.",
        )
    if tensor.spec.dtype.startswith("F8"):
        raise SourceError(f"{name} is {tensor.spec.dtype}, which is understood only as a module's `weight`")
    return Weight(name, Encoding.PLAIN, tensor.spec.shape, tensor)

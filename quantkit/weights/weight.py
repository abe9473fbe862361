"""Stored tensors grouped into weights: what a tensor is, is decided by its dtype and its siblings, never by the config.

(GLM-5.2's `modules_to_not_convert` names a module that does not exist.) How the dialects spell a weight: `spelling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import Dialect
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.experts import Slab, split_experts
from quantkit.weights.layout import (
    CODES_PER_WORD,
    FP8_SCALES,
    INT4_SCALE,
    INT4_SHAPE,
    KV_SCALES,
    NVFP4,
    NVFP4_GROUP,
    fp8_block_specs,
)

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
SCALE_DTYPES = frozenset({*FLOAT_DTYPES, "F8_E8M0", "U8"})  # U8: the bytes of E8M0
_INPUT_SCALE = "input_scale"
_NOT_UNDERSTOOD = ("weight_zero_point", "weight_g_idx", "qweight", "qzeros")
_PARTS = (*FP8_SCALES, INT4_SHAPE, *(spelling.global_scale for spelling in NVFP4.values()))


class Strategy(StrEnum):
    """What shares a scale of FP8."""

    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


class Encoding(StrEnum):
    """How a weight's numbers are stored."""

    PLAIN = "plain"
    FP8 = "fp8"
    INT4 = "int4"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class Weight:
    """One weight of the model and the stored tensors that hold it.

    shape         the weight's own, unpacked
    data          the tensor with its numbers; of an expert in a fused tensor, its part of that
    scale         its scales, if it has some
    block         rows and columns that share a scale: (128, 128), (1, K) for a channel and (N, K) for a tensor of FP8;
                  (1, group size) for INT4 and NVFP4
    strategy      of FP8; a small weight may be one block
    packed_shape  INT4's `weight_shape`
    global_scale  NVFP4's FP32 scale of the tensor, in the spelling of `dialect`
    input_scale   the static scale of the activations that the weight meets
    within        of an expert in a fused tensor, that tensor's name
    slab          where the expert lies in it, if its rows are not the expert's own
    """

    name: TensorName
    encoding: Encoding
    shape: tuple[int, ...]
    data: StoredTensor
    scale: StoredTensor | None = None
    block: tuple[int, int] | None = None
    strategy: Strategy | None = None
    packed_shape: StoredTensor | None = None
    global_scale: StoredTensor | None = None
    input_scale: StoredTensor | None = None
    dialect: Dialect | None = None
    within: str | None = None
    slab: Slab | None = None

    @property
    def module(self) -> str:
        """The name of the module that owns the weight."""
        return self.name.module

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All stored tensors that hold the weight."""
        parts = (self.data, self.scale, self.packed_shape, self.global_scale, self.input_scale)
        return tuple(tensor for tensor in parts if tensor is not None)

    @property
    def nbytes(self) -> int:
        """The bytes stored for the weight."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of its scales."""
        assert self.block is not None
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    def groups_lie_in_blocks(self, group_size: int) -> bool:
        """Whether it is FP8 and each group of a row has one scale, so that it is quantized without being decoded."""
        return self.encoding is Encoding.FP8 and self.block is not None and self.block[1] % group_size == 0

    @property
    def label(self) -> str:
        """What a report calls the weight's format: `int4 g=32`, `fp8 128x128`, `nvfp4`, or a plain tensor's dtype."""
        if self.encoding is Encoding.INT4:
            return f"int4 g={self.block[1]}" if self.block else "int4"
        if self.encoding is Encoding.FP8 and self.block:
            return (
                f"fp8 {self.strategy}"
                if self.strategy is not Strategy.BLOCK
                else f"fp8 {self.block[0]}x{self.block[1]}"
            )
        return "nvfp4" if self.encoding is Encoding.NVFP4 else self.data.spec.dtype.lower()


def read_weights(source: Source) -> tuple[Weight, ...]:
    """Group all tensors of `source` into weights, each tensor in exactly one; fused experts are taken apart.

    Raises SourceError, naming the tensor, for an FP8 or packed weight without its scale, a scale without its weight,
    a scale whose shape does not cover the weight, packed codes that the config says have another width than 4 bits, and
    fused experts whose orientation cannot be told.
    """
    said = _Said.by(source)
    weights: list[Weight] = []
    used: set[str] = set()
    for tensor in source.tensors.values():
        name = TensorName.parse(tensor.spec.name)
        dtype = tensor.spec.dtype
        if dtype == "F8_E4M3" and name.leaf == "weight":
            weights.append(_fp8_weight(name, tensor, source.tensors, said.block))
        elif dtype == "U8" and name.leaf in ("weight", "weight_packed"):
            weights.append(_nvfp4_weight(name, tensor, source.tensors))
        elif name.leaf == "weight_packed":
            if said.bits is not None:
                raise SourceError(
                    f"{name} may have num_bits {said.bits}, as config.json says; only 4 are understood",
                    hint="Convert the FP8 or BF16 release of the model.",
                )
            weights.append(_int4_weight(name, tensor, source.tensors))
        else:
            continue
        used.update(stored.spec.name for stored in weights[-1].tensors)
    left = [tensor for tensor in source.tensors.values() if tensor.spec.name not in used]
    for tensor in left:
        if parts := split_experts(tensor, source):
            weights.extend(_expert_weight(tensor, data, slab) for data, slab in parts)
        else:
            weights.append(_plain_weight(tensor))
    return tuple(weights)


@dataclass(frozen=True)
class _Said:
    """What the config says of weights and no tensor tells.

    block  rows and columns of an FP8 block, in either dialect; 128 x 128 unless it says so
    bits   of packed integers, where they are not 4
    """

    block: tuple[int, int]
    bits: int | None

    @classmethod
    def by(cls, source: Source) -> "_Said":
        quantization = source.quantization_config
        try:
            groups = [group["weights"] or {} for group in (quantization.get("config_groups") or {}).values()]
            blocks = [quantization.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
            bits = {group.get("num_bits") for group in groups if group.get("type") == "int"} - {4, None}
        except (AttributeError, KeyError, TypeError) as error:
            raise SourceError(f"{source.name}: quantization_config in config.json is malformed: {error!r}") from error
        match block := next(filter(None, blocks), [128, 128]):
            case [rows, columns] if type(rows) is type(columns) is int and rows > 0 and columns > 0:
                return cls((rows, columns), next(iter(bits), None))
        raise SourceError(f"{source.name}: the FP8 block size in config.json is {block}, not two positive numbers")


def _fp8_weight(
    name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], block: tuple[int, int]
) -> Weight:
    scale = next((tensors[sibling] for leaf in FP8_SCALES if (sibling := name.sibling(leaf)) in tensors), None)
    if scale is None:
        raise SourceError(
            f"{name} is FP8 and has no scale: {' or '.join(name.sibling(leaf) for leaf in FP8_SCALES)} is missing",
            hint="Without its scale the weight would be wrong by a factor of hundreds; download the checkpoint again.",
        )
    if len(data.spec.shape) != 2:
        raise SourceError(f"{name} is FP8 with the shape {list(data.spec.shape)}; only matrices are understood")
    rows, columns = data.spec.shape
    expected = fp8_block_specs(name.module, data.spec.shape, block, "weight_scale_inv")[1]
    shape, dtype, strategy = scale.spec.shape, scale.spec.dtype, Strategy.BLOCK
    if shape in ((), (1,), (1, 1)) and expected.shape != shape:
        block, strategy = (rows, columns), Strategy.TENSOR
    elif shape in ((rows,), (rows, 1)) and expected.shape != shape:
        block, strategy = (1, columns), Strategy.CHANNEL
    elif shape != expected.shape:
        raise SourceError(
            f"{scale.spec.name} is {dtype} {list(shape)}, but {name} {list(data.spec.shape)} in blocks of "
            f"{block[0]}x{block[1]} needs {list(expected.shape)}, one for each row [{rows}, 1], or one in all [1]",
            hint="Check weight_block_size in config.json.",
        )
    if dtype not in SCALE_DTYPES:
        raise SourceError(f"{scale.spec.name} is {dtype}; FP8 scales are {', '.join(sorted(SCALE_DTYPES))}")
    input_scale = _scalar(tensors.get(name.sibling(_INPUT_SCALE)))
    return Weight(name, Encoding.FP8, (rows, columns), data, scale, block, strategy, input_scale=input_scale)


def _int4_weight(name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor]) -> Weight:
    scale, shape = tensors.get(name.sibling(INT4_SCALE)), tensors.get(name.sibling(INT4_SHAPE))
    if scale is None or shape is None:
        missing = INT4_SCALE if scale is None else INT4_SHAPE
        raise SourceError(f"{name} is packed INT4 and {name.sibling(missing)} is missing")
    if shape.spec.dtype not in ("I32", "I64") or shape.spec.shape != (2,):
        raise SourceError(f"{shape.spec.name} is {shape.spec.dtype} {list(shape.spec.shape)}, not two integers")
    match data.spec, scale.spec:
        case TensorSpec(dtype="I32", shape=(rows, words)), TensorSpec(dtype="BF16", shape=(scale_rows, groups)):
            columns = words * CODES_PER_WORD
            if rows == scale_rows and groups and columns % groups == 0:
                block = (1, columns // groups)
                return Weight(name, Encoding.INT4, (rows, columns), data, scale, block, packed_shape=shape)
    raise SourceError(
        f"{name} is {data.spec.dtype} {list(data.spec.shape)} and its scale {scale.spec.dtype} "
        f"{list(scale.spec.shape)}; INT4 needs I32 [N, K/8] and BF16 [N, K/g]"
    )


def _nvfp4_weight(name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor]) -> Weight:
    dialect = next(dialect for dialect, spelling in NVFP4.items() if spelling.codes == name.leaf)
    spelling = NVFP4[dialect]
    scale, global_scale = (tensors.get(name.sibling(leaf)) for leaf in (spelling.scale, spelling.global_scale))
    if scale is None or global_scale is None:
        missing = spelling.scale if scale is None else spelling.global_scale
        raise SourceError(f"{name} is U8, as packed NVFP4 is, and {name.sibling(missing)} is missing")
    match data.spec.shape, scale.spec:
        case (rows, nbytes), TensorSpec(dtype="F8_E4M3", shape=(scale_rows, groups)):
            if rows == scale_rows and nbytes * 2 == groups * NVFP4_GROUP:
                return Weight(
                    name=name,
                    encoding=Encoding.NVFP4,
                    shape=(rows, nbytes * 2),
                    data=data,
                    scale=scale,
                    block=(1, NVFP4_GROUP),
                    global_scale=_scalar(global_scale),
                    input_scale=_scalar(tensors.get(name.sibling(spelling.input_scale))),
                    dialect=dialect,
                )
    raise SourceError(
        f"{name} is U8 {list(data.spec.shape)} and its scale {scale.spec.dtype} {list(scale.spec.shape)}; NVFP4 needs "
        "U8 [N, K/2] and F8_E4M3 [N, K/16]"
    )


def _scalar(tensor: StoredTensor | None) -> StoredTensor | None:
    """`tensor`, which must hold one float; SourceError names it otherwise."""
    if tensor is not None and (tensor.spec.dtype not in FLOAT_DTYPES or prod(tensor.spec.shape) != 1):
        raise SourceError(f"{tensor.spec.name} is {tensor.spec.dtype} {list(tensor.spec.shape)}, not one number")
    return tensor


def _expert_weight(tensor: StoredTensor, data: StoredTensor, slab: Slab | None) -> Weight:
    """The expert that has the part `data` of the fused `tensor`."""
    name = TensorName.parse(data.spec.name)
    return Weight(name, Encoding.PLAIN, data.spec.shape, data, within=tensor.spec.name, slab=slab)


def _plain_weight(tensor: StoredTensor) -> Weight:
    name = TensorName.parse(tensor.spec.name)
    if name.leaf in _NOT_UNDERSTOOD:
        raise SourceError(f"{name}: quantized weights with {name.leaf} are not understood; they would come out wrong")
    if name.leaf in _PARTS:
        raise SourceError(
            f"{name} is the scale or shape of a weight that is not there",
            hint="A shard or an index entry is missing; download the checkpoint again.",
        )
    if tensor.spec.dtype.startswith("F8"):
        raise SourceError(f"{name} is {tensor.spec.dtype}, which is understood only as a module's `weight`")
    if tensor.spec.dtype in ("U8", "I8") and len(tensor.spec.shape) > 1:
        raise SourceError(
            f"{name} is {tensor.spec.dtype} {list(tensor.spec.shape)}: a quantization that is not understood"
        )
    if name.leaf in KV_SCALES:
        _scalar(tensor)
    return Weight(name, Encoding.PLAIN, tensor.spec.shape, tensor)

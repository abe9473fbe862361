"""A weight of the model and the stored tensors that hold it."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from quantkit.checkpoint.header import StoredTensor
from quantkit.choices import Dialect
from quantkit.naming import TensorName
from quantkit.weights.experts import FusedColumns

if TYPE_CHECKING:
    from quantkit.weights.encodings.encoding import Encoding

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
KV_SCALES = ("k_scale", "v_scale", "kv_scale")  # of an FP8 KV cache, of the attention or of k_proj and v_proj


class Strategy(StrEnum):
    """What shares a scale of FP8."""

    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Weight:
    """One weight of the model and the stored tensors that hold it.

    shape         the weight's own, unpacked
    data          the tensor with its numbers; of an expert in a fused tensor, its part of that
    scale         its scales, if it has some
    block         rows and columns that share a scale: (128, 128), (1, K) for a channel and (N, K) for a tensor of FP8;
                  (1, group size) for weights in groups
    strategy      of FP8; a small weight may be one block
    packed_shape  the `weight_shape` of packed integers
    global_scale  NVFP4's FP32 scale of the tensor, in the spelling of `dialect`
    input_scale   the static scale of the activations that the weight meets
    within        of an expert in a fused tensor, that tensor's name
    fused_columns          where the expert lies in it, if its rows are not the expert's own
    """

    name: TensorName
    encoding: "Encoding"
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
    fused_columns: FusedColumns | None = None

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
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of a matrix."""
        rows, columns = self.shape
        return rows, columns

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of its scales."""
        assert self.block is not None
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def label(self) -> str:
        """What a report calls the weight's format: `int4 g=32`, `fp8 128x128`, `nvfp4`, or a plain tensor's dtype."""
        return self.encoding.label(self)

"""What comes out of a piece of a weight: the arrays of its output tensors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.conversion.plan import Step
from quantkit.conversion.steps import Action
from quantkit.weights.encodings import FP8, TARGETS
from quantkit.weights.encodings.encoding import Rows
from quantkit.weights.encodings.int4 import check_shape
from quantkit.weights.rows import Reader, check_block_scales, nan_error
from quantkit.weights.weight import KV_SCALES


class Maker:
    """Makes outputs from `source`; safe to use from threads."""

    def __init__(self, source: Source) -> None:
        self.reader = Reader(source)
        self._quantizers = {target: target.quantizer(self.reader) for target in TARGETS}

    def made(self, step: Step, begin: int, end: int) -> Rows:
        """The outputs of the rows `begin` to `end`, a piece of `row_ranges`, of a weight that is not copied.

        Raises SourceError, naming the tensor, for a scale that is not sound.
        """
        if step.target:
            return self._quantizers[step.target](step, begin, end)
        make = {Action.DECODE: self._decode, Action.TRANSPOSE: self._transpose}
        return make[step.action](step, begin, end)

    def copied(self, step: Step, tensor: StoredTensor, target: TensorSpec, begin: int, end: int) -> Rows:
        """The bytes `begin` to `end` of a tensor as `target` holds them: E8M0 as FP32, restated global scales inverted.

        Raises SourceError, naming the tensor, for a NaN and for a scale that is not sound.
        """
        weight = step.weight
        if tensor in (weight.global_scale, weight.input_scale):
            return _scalar(step, target, self.reader.scalar(tensor))
        if tensor is weight.packed_shape:
            check_shape(self.reader, weight)
        if weight.name.leaf in KV_SCALES:
            self.reader.scalar(tensor)  # refuses what is not positive
        data: npt.NDArray[Any] = np.empty(end - begin, np.uint8)
        self.reader.source.read_into(tensor, begin, data.data)
        if weight.encoding is FP8 and tensor is weight.scale:
            scales = ops.to_float32(data, tensor.spec.dtype)
            check_block_scales(tensor, scales.reshape(1, -1), begin)
            return Rows({target.name: data if target.dtype == tensor.spec.dtype else scales})
        if tensor.spec.dtype == "F8_E4M3" and (nan := ops.first_nan(data)) is not None:
            raise nan_error(tensor, begin + nan)
        return Rows({target.name: data})

    def _decode(self, step: Step, begin: int, end: int) -> Rows:
        """Any encoding to BF16."""
        weight, target = step.weight, step.outputs[0].name
        if weight.encoding is not FP8:
            return Rows({target: ops.to_bf16(self.reader.rows(weight, begin, end))})
        assert weight.block is not None
        data, scale = FP8.coded_rows(self.reader, weight, begin, end)
        decoded = np.empty(data.shape, np.uint16)
        return Rows({target: decoded}, ops.fp8_block_to_bf16(data, scale, weight.block, decoded))

    def _transpose(self, step: Step, begin: int, end: int) -> Rows:
        return Rows({step.outputs[0].name: self.reader.fused_rows(step.weight, begin, end)})


def _scalar(step: Step, target: TensorSpec, value: float) -> Rows:
    """A scale of a whole tensor, restated as its reciprocal; only that of a power of two is exact."""
    stored = np.array([value], np.float32)
    if step.action is not Action.RESTATE:
        return Rows({target.name: stored})
    exact = np.frexp(value)[0] == 0.5
    return Rows({target.name: np.float32(1) / stored}, rounded=() if exact else (target.name,))

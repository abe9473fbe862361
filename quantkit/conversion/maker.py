"""What comes out of a piece of a weight: the arrays of its output tensors."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import ScaleMethod
from quantkit.conversion.plan import Step
from quantkit.conversion.steps import Action
from quantkit.weights.layout import CODES_PER_WORD, KV_SCALES, NVFP4, NVFP4_GROUP
from quantkit.weights.rows import Reader, check_block_scales, nan_error
from quantkit.weights.weight import Encoding

Outputs = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Rows:
    """Some rows of each output tensor, by name; the flat position of a NaN among them; what NVFP4 did to its groups;
    the restated scales whose reciprocals had to be rounded."""

    outputs: Outputs
    bad: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()


class Maker:
    """Makes outputs from `source`; safe to use from threads."""

    def __init__(self, source: Source) -> None:
        self.reader = Reader(source)
        self._exponents = _Exponents(self.reader)

    def made(self, step: Step, begin: int, end: int) -> Rows:
        """The outputs of the rows `begin` to `end`, a piece of `row_ranges`, of a weight that is not copied.

        Raises SourceError, naming the tensor, for a scale that is not sound.
        """
        make: dict[Action, Callable[[Step, int, int], Rows]] = {
            Action.DECODE: self._decode,
            Action.TRANSPOSE: self._transpose,
            Action.INT4: self._int4,
            Action.NVFP4: self._nvfp4,
        }
        return make[step.action](step, begin, end)

    def copied(self, step: Step, tensor: StoredTensor, target: TensorSpec, begin: int, end: int) -> Rows:
        """The bytes `begin` to `end` of a tensor as `target` holds them: E8M0 as FP32, restated global scales inverted.

        Raises SourceError, naming the tensor, for a NaN and for a scale that is not sound.
        """
        weight = step.weight
        if tensor in (weight.global_scale, weight.input_scale):
            return _scalar(step, target, self.reader.scalar(tensor))
        if tensor is weight.packed_shape:
            self.reader.check_shape(weight)
        if weight.name.leaf in KV_SCALES:
            self.reader.scalar(tensor)  # refuses what is not positive
        data: npt.NDArray[Any] = np.empty(end - begin, np.uint8)
        self.reader.source.read_into(tensor, begin, data.data)
        if weight.encoding is Encoding.FP8 and tensor is weight.scale:
            scales = ops.to_float32(data, tensor.spec.dtype)
            check_block_scales(tensor, scales.reshape(1, -1), begin)
            return Rows({target.name: data if target.dtype == tensor.spec.dtype else scales})
        if tensor.spec.dtype == "F8_E4M3" and (nan := ops.first_nan(data)) is not None:
            raise nan_error(tensor, begin + nan)
        return Rows({target.name: data})

    def _decode(self, step: Step, begin: int, end: int) -> Rows:
        """Any encoding to BF16."""
        weight, target = step.weight, step.outputs[0].name
        if weight.encoding is not Encoding.FP8:
            return Rows({target: ops.to_bf16(self.reader.rows(weight, begin, end))})
        assert weight.block is not None
        data, scale = self.reader.fp8_rows(weight, begin, end)
        decoded = np.empty(data.shape, np.uint16)
        return Rows({target: decoded}, ops.fp8_block_to_bf16(data, scale, weight.block, decoded))

    def _transpose(self, step: Step, begin: int, end: int) -> Rows:
        return Rows({step.outputs[0].name: self.reader.slab_rows(step.weight, begin, end)})

    def _int4(self, step: Step, begin: int, end: int) -> Rows:
        weight, group_size, method = step.weight, step.treatment.group_size, step.treatment.scale
        assert group_size is not None
        assert method is not None
        rows, columns = end - begin, weight.shape[1]
        packed: ops.Words = np.empty((rows, columns // CODES_PER_WORD), np.uint32)
        scale: ops.Bf16Bits = np.empty((rows, columns // group_size), np.uint16)
        settings = group_size, method.divisors, method is ScaleMethod.SIGNED, packed, scale
        if weight.groups_lie_in_blocks(group_size):
            assert weight.block is not None
            fp8, scales = self.reader.fp8_rows(weight, begin, end)
            bad = ops.fp8_block_to_int4(fp8, scales, weight.block, *settings)
        else:
            bad = ops.float_to_int4(self.reader.rows(weight, begin, end), *settings)
        outputs: Outputs = {step.outputs[0].name: packed, step.outputs[1].name: scale}
        if begin == 0:
            outputs[step.outputs[2].name] = np.array(weight.shape, np.int64)
        return Rows(outputs, bad)

    def _nvfp4(self, step: Step, begin: int, end: int) -> Rows:
        weight, exponent = step.weight, self._exponents(step)
        rows, columns = end - begin, weight.shape[1]
        packed: ops.Bytes = np.empty((rows, columns // 2), np.uint8)
        scale: ops.Bytes = np.empty((rows, columns // NVFP4_GROUP), np.uint8)
        settings = exponent, step.treatment.scale is ScaleMethod.SEARCH, packed, scale
        if weight.groups_lie_in_blocks(NVFP4_GROUP):
            assert weight.block is not None
            fp8, scales = self.reader.fp8_rows(weight, begin, end)
            counts = ops.fp8_block_to_nvfp4(fp8, scales, weight.block, *settings)
        else:
            counts = ops.float_to_nvfp4(self.reader.rows(weight, begin, end), *settings)
        outputs: Outputs = {step.outputs[0].name: packed, step.outputs[1].name: scale}
        if begin == 0:
            sign = -1 if NVFP4[step.dialect].divisor else 1
            outputs[step.outputs[2].name] = np.array([2.0 ** (sign * exponent)], np.float32)
        return Rows(outputs, counts.bad, {key: value for key, value in counts._asdict().items() if key != "bad"})


def _scalar(step: Step, target: TensorSpec, value: float) -> Rows:
    """A scale of a whole tensor, restated as its reciprocal; only that of a power of two is exact."""
    stored = np.array([value], np.float32)
    if step.action is not Action.RESTATE:
        return Rows({target.name: stored})
    exact = np.frexp(value)[0] == 0.5
    return Rows({target.name: np.float32(1) / stored}, rounded=() if exact else (target.name,))


class _Exponents:
    """The global scales 2^exponent of NVFP4 weights: one for all partners, whichever thread or shard asks first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._found: dict[str, Future[int]] = {}

    def __call__(self, step: Step) -> int:
        owner = step.partners[0].module
        with self._lock:
            first = owner not in self._found
            found = self._found.setdefault(owner, Future())
        if first:
            try:
                largest = max(self._reader.largest(partner) for partner in step.partners)
                found.set_result(ops.nvfp4_exponent(largest, " and ".join(weight.module for weight in step.partners)))
            except BaseException as error:
                found.set_exception(error)
        return found.result()

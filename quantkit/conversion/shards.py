"""One shard: its tensors in pieces, each read, converted and written by one thread.

Every output tensor's place in the file is known before, so pieces may finish in any order and the bytes are the same.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.pieces import Reader, buffer, byte_ranges, check_block_scales, nan_error, row_ranges
from quantkit.checkpoint.weights import CODES_PER_WORD, Encoding
from quantkit.checkpoint.writer import write_at
from quantkit.plan import ShardJob, Step
from quantkit.recipe import ScaleMethod, Scheme


def convert_shard(
    job: ShardJob, inputs: Mapping[str, int], output: int, pool: Executor, progress: Callable[[int], None]
) -> None:
    """Write the whole file of `job` to the descriptor `output`, reading from the descriptors `inputs` by shard.

    Raises SourceError, naming the tensor, for a NaN and for a block scale that is NaN, not positive or out of range.
    """
    write_at(output, 0, memoryview(job.header))
    shard = _Shard(job, Reader(inputs), output)
    futures = [pool.submit(work) for work in _pieces(shard)]
    try:
        for future in futures:
            progress(future.result())
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # the caller closes the descriptors


@dataclass(frozen=True)
class _Shard:
    job: ShardJob
    reader: Reader
    output: int

    def write(self, name: str, begin: int, array: npt.NDArray[Any]) -> None:
        """Write `array` at the byte `begin` of the output tensor `name`."""
        write_at(self.output, self.job.places[name].offset + begin, array.data.cast("B"))


def _pieces(shard: _Shard) -> Iterator[Callable[[], int]]:
    """The shard's work in the order of the source; each piece returns the source bytes that it dealt with."""
    for step in shard.job.steps:
        if step.weight.encoding is Encoding.FP8_BLOCK and step.treatment.scheme is not Scheme.KEEP:
            yield from (partial(_convert, shard, step, begin, end) for begin, end in row_ranges(step.weight))
        else:
            for tensor, target in zip(step.weight.tensors, step.outputs, strict=True):
                ranges = byte_ranges(tensor.spec.nbytes)
                yield from (partial(_copy, shard, step, tensor, target.name, begin, end) for begin, end in ranges)


def _copy(shard: _Shard, step: Step, tensor: StoredTensor, target: str, begin: int, end: int) -> int:
    data = shard.reader.tensor_bytes(tensor, begin, end)
    if step.weight.encoding is Encoding.FP8_BLOCK:
        if tensor is step.weight.scale:
            check_block_scales(tensor, data.view(np.float32).reshape(1, -1), begin)
        elif (nan := ops.first_nan(data)) is not None:
            raise nan_error(tensor, begin + nan)
    shard.write(target, begin, data)
    return end - begin


def _convert(shard: _Shard, step: Step, begin: int, end: int) -> int:
    """Convert the rows `begin` to `end` of an FP8 weight."""
    data, scale = shard.reader.fp8_rows(step.weight, begin, end)
    convert = _to_int4 if step.treatment.scheme is Scheme.INT4 else _to_bf16
    bad = convert(shard, step, begin, data, scale)
    if bad is not None:
        raise nan_error(step.weight.data, begin * step.weight.shape[1] + bad)
    return data.nbytes + scale.nbytes


def _to_bf16(shard: _Shard, step: Step, begin: int, data: ops.Bytes, scale: ops.Scales) -> int | None:
    assert step.weight.block is not None
    decoded = buffer("decoded", data.shape, np.uint16)
    bad = ops.fp8_block_to_bf16(data, scale, step.weight.block, decoded)
    shard.write(step.outputs[0].name, begin * data.shape[1] * 2, decoded)
    return bad


def _to_int4(shard: _Shard, step: Step, begin: int, data: ops.Bytes, scale: ops.Scales) -> int | None:
    assert step.weight.block is not None
    group_size, method = step.treatment.group_size, step.treatment.scale
    assert group_size is not None
    assert method is not None
    rows, columns = data.shape
    packed = buffer("packed", (rows, columns // CODES_PER_WORD), np.uint32)
    out_scale = buffer("out_scale", (rows, columns // group_size), np.uint16)
    signed = method is ScaleMethod.SIGNED
    bad = ops.fp8_block_to_int4(data, scale, step.weight.block, group_size, method.divisors, signed, packed, out_scale)
    packed_name, scale_name, shape_name = (spec.name for spec in step.outputs)
    shard.write(packed_name, begin * packed.shape[1] * 4, packed)
    shard.write(scale_name, begin * out_scale.shape[1] * 2, out_scale)
    if begin == 0:
        shard.write(shape_name, 0, np.array(step.weight.shape, np.int64))
    return bad

"""One shard: its tensors in pieces, each read, converted and written by one thread.

Every output tensor's place in the file is known before, so pieces may finish in any order and the bytes are the same.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.pieces import Reader, buffer, byte_ranges, check_block_scales, nan_error, row_ranges
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import CODES_PER_WORD, Encoding
from quantkit.checkpoint.writer import write_at
from quantkit.plan import ShardJob, Step
from quantkit.recipe import ScaleMethod, Scheme


def convert_shard(job: ShardJob, source: Source, output: int, pool: Executor, progress: Callable[[int], None]) -> None:
    """Write the whole file of `job`, which is made from `source`, to the descriptor `output`.

    Raises SourceError, naming the tensor, for a NaN and for a block scale that is NaN, not positive or out of range.
    """
    write_at(output, 0, memoryview(job.header))
    shard = _Shard(job, Reader(source), output)
    futures = [pool.submit(work) for work in _pieces(shard)]
    try:
        for future in futures:
            progress(future.result())
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # the caller closes the descriptor


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
        decoded = step.weight.encoding is Encoding.FP8_BLOCK and step.treatment.scheme is Scheme.BF16
        if decoded or step.treatment.scheme is Scheme.INT4:
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
    """Convert the rows `begin` to `end` of a weight."""
    weight = step.weight
    if weight.encoding is Encoding.FP8_BLOCK:
        data, scale = shard.reader.fp8_rows(weight, begin, end)
        convert = _fp8_to_int4 if step.treatment.scheme is Scheme.INT4 else _fp8_to_bf16
        bad, nbytes = convert(shard, step, begin, data, scale), data.nbytes + scale.nbytes
    else:
        floats = shard.reader.float_rows(weight, begin, end)
        bad, nbytes = _to_int4(shard, step, begin, floats), weight.nbytes * (end - begin) // weight.shape[0]
    if bad is not None:
        raise nan_error(weight.data, begin * weight.shape[1] + bad)
    return nbytes


def _fp8_to_bf16(shard: _Shard, step: Step, begin: int, data: ops.Bytes, scale: ops.Scales) -> int | None:
    assert step.weight.block is not None
    decoded = buffer("decoded", data.shape, np.uint16)
    bad = ops.fp8_block_to_bf16(data, scale, step.weight.block, decoded)
    shard.write(step.outputs[0].name, begin * data.shape[1] * 2, decoded)
    return bad


def _fp8_to_int4(shard: _Shard, step: Step, begin: int, data: ops.Bytes, scale: ops.Scales) -> int | None:
    """In the byte domain where each group lies in one block, else by way of exact floats."""
    block, group_size, method = step.weight.block, step.treatment.group_size, step.treatment.scale
    assert block is not None
    assert group_size is not None
    assert method is not None
    if block[1] % group_size:
        return _to_int4(shard, step, begin, ops.fp8_block_to_float(data, scale, block))
    packed, out_scale = _int4_buffers(data.shape, group_size)
    signed = method is ScaleMethod.SIGNED
    bad = ops.fp8_block_to_int4(data, scale, block, group_size, method.divisors, signed, packed, out_scale)
    _write_int4(shard, step, begin, packed, out_scale)
    return bad


def _to_int4(shard: _Shard, step: Step, begin: int, floats: ops.Floats) -> int | None:
    group_size, method = step.treatment.group_size, step.treatment.scale
    assert group_size is not None
    assert method is not None
    packed, out_scale = _int4_buffers(floats.shape, group_size)
    signed = method is ScaleMethod.SIGNED
    bad = ops.float_to_int4(floats, group_size, method.divisors, signed, packed, out_scale)
    _write_int4(shard, step, begin, packed, out_scale)
    return bad


def _int4_buffers(shape: tuple[int, ...], group_size: int) -> tuple[ops.Words, ops.Bf16Bits]:
    rows, columns = shape
    packed = buffer("packed", (rows, columns // CODES_PER_WORD), np.uint32)
    return packed, buffer("out_scale", (rows, columns // group_size), np.uint16)


def _write_int4(shard: _Shard, step: Step, begin: int, packed: ops.Words, out_scale: ops.Bf16Bits) -> None:
    packed_name, scale_name, shape_name = (spec.name for spec in step.outputs)
    shard.write(packed_name, begin * packed.shape[1] * 4, packed)
    shard.write(scale_name, begin * out_scale.shape[1] * 2, out_scale)
    if begin == 0:
        shard.write(shape_name, 0, np.array(step.weight.shape, np.int64))

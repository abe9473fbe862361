"""One shard: its tensors in pieces, each read and converted by one thread, and written in the order of the file."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.pieces import Reader, byte_ranges, check_block_scales, nan_error, row_ranges
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import CODES_PER_WORD, Encoding
from quantkit.checkpoint.writer import ShardFile
from quantkit.plan import ShardJob, Step
from quantkit.recipe import ScaleMethod, Scheme

Outputs = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class _Piece:
    """What comes next of some output tensors, by name; the source bytes that it was made from, and where they end."""

    outputs: Outputs
    source_bytes: int
    source_end: int


def convert_shard(
    job: ShardJob, source: Source, file: ShardFile, pool: Executor, ahead: int, progress: Callable[[int, int], None]
) -> str:
    """Write the whole file of `job`, which is made from `source`, and return its sha256.

    ahead     at most so many pieces are read or held in memory before they are written
    progress  is called with the source bytes just converted, and where in their shard they end

    Raises SourceError, naming the tensor, for a NaN and for a block scale that is NaN, not positive or out of range.
    """
    file.append(memoryview(job.header))
    order = _Order(job, file)
    running: deque[Future[_Piece]] = deque()

    def take() -> None:
        piece = running.popleft().result()
        order.add(piece.outputs)
        progress(piece.source_bytes, piece.source_end)

    try:
        for work in _pieces(job, Reader(source)):
            running.append(pool.submit(work))
            if len(running) == ahead:
                take()
        while running:
            take()
    finally:
        for future in running:
            future.cancel()
        wait(running)
    return file.finish()


class _Order:
    """Puts the tensors of `job` into `file` one after the other. What comes early waits: the scales of a weight until
    its codes are complete, and small tensors that have their place at the end."""

    def __init__(self, job: ShardJob, file: ShardFile) -> None:
        self._file = file
        self._turns = deque((name, place.spec.nbytes) for name, place in job.places.items() if place.spec.nbytes)
        self._waiting: dict[str, list[npt.NDArray[Any]]] = {}

    def add(self, outputs: Outputs) -> None:
        for name, array in outputs.items():
            self._waiting.setdefault(name, []).append(array)
        while self._turns and (arrays := self._waiting.pop(self._turns[0][0], None)) is not None:
            name, missing = self._turns.popleft()
            for array in arrays:
                self._file.append(array.data)
            missing -= sum(array.nbytes for array in arrays)
            if missing:
                self._turns.appendleft((name, missing))


def _pieces(job: ShardJob, reader: Reader) -> Iterator[Callable[[], _Piece]]:
    """The shard's work in the order of the source."""
    for step in job.steps:
        decoded = step.weight.encoding is Encoding.FP8_BLOCK and step.treatment.scheme is Scheme.BF16
        if decoded or step.treatment.scheme is Scheme.INT4:
            yield from (partial(_convert, reader, step, begin, end) for begin, end in row_ranges(step.weight))
        else:
            for tensor, target in zip(step.weight.tensors, step.outputs, strict=True):
                ranges = byte_ranges(tensor.spec.nbytes)
                yield from (partial(_copy, reader, step, tensor, target.name, begin, end) for begin, end in ranges)


def _copy(reader: Reader, step: Step, tensor: StoredTensor, target: str, begin: int, end: int) -> _Piece:
    data = np.empty(end - begin, np.uint8)
    reader.source.read_into(tensor, begin, data.data)
    if step.weight.encoding is Encoding.FP8_BLOCK:
        if tensor is step.weight.scale:
            check_block_scales(tensor, data.view(np.float32).reshape(1, -1), begin)
        elif (nan := ops.first_nan(data)) is not None:
            raise nan_error(tensor, begin + nan)
    return _Piece({target: data}, end - begin, tensor.offset + end)


def _convert(reader: Reader, step: Step, begin: int, end: int) -> _Piece:
    """Convert the rows `begin` to `end` of a weight."""
    weight = step.weight
    if weight.encoding is Encoding.FP8_BLOCK:
        data, scale = reader.fp8_rows(weight, begin, end)
        convert = _fp8_to_int4 if step.treatment.scheme is Scheme.INT4 else _fp8_to_bf16
        outputs, bad = convert(step, data, scale)
        nbytes = data.nbytes + scale.nbytes
    else:
        outputs, bad = _to_int4(step, reader.float_rows(weight, begin, end))
        nbytes = weight.nbytes * (end - begin) // weight.shape[0]
    if bad is not None:
        raise nan_error(weight.data, begin * weight.shape[1] + bad)
    if begin == 0 and step.treatment.scheme is Scheme.INT4:
        outputs[step.outputs[2].name] = np.array(weight.shape, np.int64)
    return _Piece(outputs, nbytes, weight.data.offset + weight.data.spec.nbytes * end // weight.shape[0])


def _fp8_to_bf16(step: Step, data: ops.Bytes, scale: ops.Scales) -> tuple[Outputs, int | None]:
    assert step.weight.block is not None
    decoded = np.empty(data.shape, np.uint16)
    bad = ops.fp8_block_to_bf16(data, scale, step.weight.block, decoded)
    return {step.outputs[0].name: decoded}, bad


def _fp8_to_int4(step: Step, data: ops.Bytes, scale: ops.Scales) -> tuple[Outputs, int | None]:
    """In the byte domain where each group lies in one block, else by way of exact floats."""
    block, group_size = step.weight.block, step.treatment.group_size
    assert block is not None
    assert group_size is not None
    if block[1] % group_size:
        return _to_int4(step, ops.fp8_block_to_float(data, scale, block))
    return _quantize(partial(ops.fp8_block_to_int4, data, scale, block), step, data.shape)


def _to_int4(step: Step, floats: ops.Floats) -> tuple[Outputs, int | None]:
    return _quantize(partial(ops.float_to_int4, floats), step, floats.shape)


def _quantize(kernel: Callable[..., int | None], step: Step, shape: tuple[int, ...]) -> tuple[Outputs, int | None]:
    """The packed codes and scales that `kernel` makes of a piece, and where it met a NaN."""
    group_size, method = step.treatment.group_size, step.treatment.scale
    assert group_size is not None
    assert method is not None
    packed: ops.Words = np.empty((shape[0], shape[1] // CODES_PER_WORD), np.uint32)
    scale: ops.Bf16Bits = np.empty((shape[0], shape[1] // group_size), np.uint16)
    bad = kernel(group_size, method.divisors, method is ScaleMethod.SIGNED, packed, scale)
    return {step.outputs[0].name: packed, step.outputs[1].name: scale}, bad

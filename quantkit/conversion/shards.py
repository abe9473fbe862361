"""One shard: its tensors in pieces, each read and converted by one thread, and written in the order of the file."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.writer import ShardFile
from quantkit.conversion.maker import Maker
from quantkit.conversion.plan import ShardJob, Step
from quantkit.conversion.steps import Action
from quantkit.weights.encodings.encoding import Outputs, Rows
from quantkit.weights.rows import byte_ranges, nan_error, row_ranges


@dataclass(frozen=True)
class _Piece:
    """What comes next of some output tensors; the source bytes that it was made from, and where they end."""

    rows: Rows
    source_bytes: int
    source_end: int


@dataclass(frozen=True)
class ShardResult:
    """The sha256 of a file, how many of its NVFP4 groups were clamped, raised or flushed, and the scales in it whose
    reciprocals were rounded."""

    sha256: str
    counts: dict[str, int]
    rounded: tuple[str, ...]


def convert_shard(
    job: ShardJob, maker: Maker, file: ShardFile, pool: Executor, ahead: int, progress: Callable[[int, int], None]
) -> ShardResult:
    """Write the whole file of `job` out of what `maker` makes.

    ahead     at most so many pieces are read or held in memory before they are written
    progress  is called with the source bytes just converted, and where in their shard they end

    Raises SourceError, naming the tensor, for a NaN and for a block scale that is NaN, not positive or out of range.
    """
    file.append(memoryview(job.header))
    order = _Order(job, file)
    running: deque[Future[_Piece]] = deque()
    counts: Counter[str] = Counter()
    rounded: list[str] = []

    def take() -> None:
        piece = running.popleft().result()
        order.add(piece.rows.outputs)
        counts.update(piece.rows.counts)
        rounded.extend(piece.rows.rounded)
        progress(piece.source_bytes, piece.source_end)

    try:
        for work in _pieces(job, maker):
            running.append(pool.submit(work))
            if len(running) == ahead:
                take()
        while running:
            take()
    finally:
        for future in running:
            future.cancel()
        wait(running)
    return ShardResult(file.finish(), dict(sorted(counts.items())), tuple(rounded))


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


def _pieces(job: ShardJob, maker: Maker) -> Iterator[Callable[[], _Piece]]:
    """The shard's work in the order of the source."""
    for step in job.steps:
        if step.action not in (Action.COPY, Action.RESTATE):
            yield from (partial(_convert, maker, step, begin, end) for begin, end in row_ranges(step.weight))
            continue
        for tensor, target in zip(step.weight.tensors, step.outputs, strict=True):
            ranges = byte_ranges(tensor.spec.nbytes)
            yield from (partial(_copy, maker, step, tensor, target, begin, end) for begin, end in ranges)


def _copy(maker: Maker, step: Step, tensor: StoredTensor, target: TensorSpec, begin: int, end: int) -> _Piece:
    return _Piece(maker.copied(step, tensor, target, begin, end), end - begin, tensor.offset + end)


def _convert(maker: Maker, step: Step, begin: int, end: int) -> _Piece:
    """Convert the rows `begin` to `end` of a weight."""
    weight = step.weight
    rows = maker.made(step, begin, end)
    if rows.bad is not None:
        raise nan_error(weight.data, begin * weight.shape[1] + rows.bad)
    done, total = (weight.nbytes * row // weight.shape[0] for row in (begin, end))
    source_end = weight.data.offset + weight.data.spec.nbytes * end // weight.shape[0]
    return _Piece(rows, total - done, source_end)

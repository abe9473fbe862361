"""The checks against the source: every weight accounted for, copies equal, codes nearest, and each weight's error."""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from quantkit import ops
from quantkit.checkpoint.pieces import Reader, byte_ranges, row_ranges
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import Encoding, Weight, read_weights
from quantkit.errors import QuantkitError
from quantkit.report import RoleError, TensorError
from quantkit.verification.findings import Findings

_BF16_UNIT = 2.0**-8 * (1 + 2.0**-15)  # half a unit in the last place; the product was rounded to float32 before


@dataclass(frozen=True)
class Compared:
    """A weight of the checkpoint; for one that is not stored as in the source, also its sums of squares against it."""

    weight: Weight
    mtp: bool
    changed: bool
    squared_error: float
    squared_weight: float

    def error(self) -> TensorError | None:
        """The weight's error, or None for a copy."""
        if not self.changed:
            return None
        relative, sqnr = _error(self.squared_error, self.squared_weight)
        name = self.weight.name
        return TensorError(name.module, name.role, self.mtp, self.weight.label, relative, sqnr)


@dataclass(frozen=True)
class Made:
    """How a checkpoint was made: without the MTP layers, or with INT4 weights from FP8 ones."""

    without_mtp: bool
    int4_from_fp8: bool


def compare_weights(
    checkpoint: Source,
    weights: Iterable[Weight],
    source: Source,
    made: Made,
    pool: Executor,
    findings: Findings,
    progress: Callable[[int], None],
) -> tuple[Compared, ...]:
    """Compare every one of the checkpoint's `weights` with the source's; the shards are read in their order.

    An FP8 source may also be its decoded copy in BF16, whose numbers are rounded.
    """
    ours = {_key(weight): weight for weight in weights}
    found = read_weights(source)
    wanted = [w for w in found if not (made.without_mtp and w.name.is_mtp(source.num_hidden_layers))]
    theirs = {_key(weight): weight for weight in wanted}
    dropped = f", {len(found) - len(wanted):,} of the MTP layers left out on request" if made.without_mtp else ""
    findings.done("accounted for", f"{len(theirs):,} weights of the source{dropped}")
    for name in theirs.keys() - ours.keys():
        findings.problem("accounted for", f"{name} of the source is not in the checkpoint")
    for name in ours.keys() - theirs.keys():
        findings.problem("accounted for", f"{name} is not in the source")
    pairs = [(ours[name], theirs[name]) for name in sorted(theirs.keys() & ours.keys())]
    pairs.sort(key=lambda pair: (pair[1].data.shard, pair[1].data.offset))
    work = partial(_compare, Reader(checkpoint), Reader(source), findings, made, checkpoint.num_hidden_layers)
    compared = []
    for (_, theirs_weight), result in zip(pairs, pool.map(lambda pair: work(*pair), pairs), strict=True):
        progress(theirs_weight.nbytes)
        compared.append(result)
    counts = {encoding: sum(pair[0].encoding is encoding for pair in pairs) for encoding in Encoding}
    findings.done("codes", f"each code of {counts[Encoding.INT4]:,} INT4 weights is a nearest one under its scale")
    findings.done("copies", f"{sum(not entry.changed for entry in compared):,} weights equal byte for byte")
    return tuple(compared)


def pool_by_role(compared: Iterable[Compared]) -> tuple[RoleError, ...]:
    """The errors of the weights that changed, pooled by role and format."""
    groups: dict[tuple[str, bool, str], list[Compared]] = {}
    for entry in compared:
        if entry.changed:
            key = (str(entry.weight.name.role), entry.mtp, entry.weight.label)
            groups.setdefault(key, []).append(entry)
    pooled = []
    for key, entries in sorted(groups.items()):
        relative, sqnr = _error(
            sum(entry.squared_error for entry in entries), sum(entry.squared_weight for entry in entries)
        )
        worst = max(_error(entry.squared_error, entry.squared_weight)[0] for entry in entries)
        pooled.append(RoleError(*key, len(entries), relative, sqnr, worst))
    return tuple(pooled)


def _error(squared_error: float, squared_weight: float) -> tuple[float, float | None]:
    """Relative root mean square, and signal to quantization noise in dB."""
    ratio = squared_error / squared_weight if squared_weight else 0.0
    return math.sqrt(ratio), -10 * math.log10(ratio) if ratio else None


def _key(weight: Weight) -> str:
    """The name of a weight whatever its encoding."""
    return str(weight.name) if weight.encoding is Encoding.PLAIN else weight.name.sibling("weight")


def _compare(
    reader: Reader, source_reader: Reader, findings: Findings, made: Made, num_layers: int, ours: Weight, theirs: Weight
) -> Compared:
    slack = _BF16_UNIT if made.int4_from_fp8 and theirs.data.spec.dtype == "BF16" else 0.0
    changes: dict[tuple[Encoding, Encoding], _Comparison] = {
        (Encoding.FP8_BLOCK, Encoding.INT4): _compare_int4,
        (Encoding.FP8_BLOCK, Encoding.PLAIN): _compare_bf16,
        (Encoding.PLAIN, Encoding.FP8_BLOCK): _compare_decoded_source,
        (Encoding.PLAIN, Encoding.INT4): partial(_compare_int4, slack=slack),
    }
    compare = changes.get((theirs.encoding, ours.encoding))
    sums = 0.0, 0.0
    try:
        if ours.shape != theirs.shape:
            findings.problem("copies", f"{ours.name} is {list(ours.shape)}; the source's is {list(theirs.shape)}")
        elif compare:
            sums = compare(reader, source_reader, findings, ours, theirs)
        else:
            _compare_copy(reader, source_reader, findings, ours, theirs)
    except QuantkitError as error:
        findings.problem("source", str(error))
    return Compared(ours, ours.name.is_mtp(num_layers), compare is not None, *sums)


_Comparison = Callable[[Reader, Reader, Findings, Weight, Weight], tuple[float, float]]


def _compare_int4(
    reader: Reader, source_reader: Reader, findings: Findings, ours: Weight, theirs: Weight, slack: float = 0.0
) -> tuple[float, float]:
    not_nearest, squared_error, squared_weight = 0, 0.0, 0.0
    for begin, end in row_ranges(theirs):
        packed, out_scale = reader.int4_rows(ours, begin, end)
        if theirs.block:
            fp8 = source_reader.fp8_rows(theirs, begin, end)
            error = ops.int4_error(*fp8, theirs.block, packed, out_scale)
        else:
            error = ops.float_int4_error(source_reader.float_rows(theirs, begin, end), packed, out_scale, slack)
        squared_error += error.squared_error
        squared_weight += error.squared_weight
        not_nearest += error.not_nearest
    if not_nearest:
        findings.problem("codes", f"{ours.name}: {not_nearest:,} codes are not the nearest under their scale")
    return squared_error, squared_weight


def _compare_bf16(
    reader: Reader, source_reader: Reader, findings: Findings, ours: Weight, theirs: Weight
) -> tuple[float, float]:
    assert theirs.block is not None
    squared_error = squared_weight = 0.0
    for begin, end in row_ranges(theirs):
        exact = ops.fp8_block_to_float(*source_reader.fp8_rows(theirs, begin, end), theirs.block)
        columns = ours.shape[1]
        bits = reader.tensor_bytes(ours.data, begin * columns * 2, end * columns * 2)
        decoded = ops.to_float32(bits, "BF16").reshape(exact.shape)
        difference = decoded - exact
        if (np.abs(difference) > np.abs(exact) * _BF16_UNIT).any():
            findings.problem("codes", f"{ours.name} is not its source decoded to BF16")
        squared_error += float(np.square(difference).sum())
        squared_weight += float(np.square(exact).sum())
    return squared_error, squared_weight


def _compare_decoded_source(
    reader: Reader, source_reader: Reader, findings: Findings, ours: Weight, theirs: Weight
) -> tuple[float, float]:
    """A weight that is still FP8 must be what the source was decoded from; its error is the source's rounding."""
    return _compare_bf16(source_reader, reader, findings, theirs, ours)


def _compare_copy(reader: Reader, source_reader: Reader, findings: Findings, ours: Weight, theirs: Weight) -> None:
    """Both must have the same dtypes and bytes; a block scale may have another name."""
    if [tensor.spec.dtype for tensor in ours.tensors] != [tensor.spec.dtype for tensor in theirs.tensors]:
        findings.problem("copies", f"{ours.name} is {ours.label}; the source's is {theirs.label}")
        return
    for our_tensor, their_tensor in zip(ours.tensors, theirs.tensors, strict=True):
        for begin, end in byte_ranges(our_tensor.spec.nbytes):
            data = reader.tensor_bytes(our_tensor, begin, end)
            if not np.array_equal(data, source_reader.tensor_bytes(their_tensor, begin, end, "source")):
                findings.problem("copies", f"{our_tensor.spec.name} differs from the source's {their_tensor.spec.name}")
                break

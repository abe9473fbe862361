"""Two forms of one weight compared: by its own encoding and its source's.

ours       source         must be
plain      plain          equal, byte for byte
plain      any other      the source decoded to BF16
FP8        FP8            equal, a scale in number
FP8        plain          what the source was decoded from
INT4       INT4           equal, byte for byte
INT4       plain, FP8     nearest codes under their scale
NVFP4      NVFP4          the same codes and scales under the same or the inverted global scale
NVFP4      any other      nearest codes under their scale
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor
from quantkit.verification.findings import Findings
from quantkit.weights.encodings import PLAIN, target
from quantkit.weights.encodings.encoding import Origin
from quantkit.weights.rows import Reader, byte_ranges, row_ranges
from quantkit.weights.weight import Weight

BF16_UNIT = 2.0**-8 * (1 + 2.0**-15)  # half a unit in the last place; the product was rounded to float32 before
Sums = tuple[float, float]  # of squared errors, and of squared weights


@dataclass(frozen=True)
class Comparison:
    """A weight of the checkpoint and the one of the source.

    slack  how far the source may be, relatively, from the numbers that 4-bit codes were made from
    """

    reader: Reader
    source_reader: Reader
    findings: Findings
    ours: Weight
    theirs: Weight
    slack: float

    def problem(self, check: str, what: str) -> None:
        """Report `what` is wrong with the weight."""
        self.findings.problem(check, f"{self.ours.name} {what}")


def comparison(ours: Weight, theirs: Weight) -> Callable[[Comparison], Sums] | None:
    """How the two are compared, which returns the error; None if the one cannot have been made from the other."""
    if ours.encoding is theirs.encoding:
        return _restated if ours.encoding.restated else _copied
    if ours.encoding is PLAIN:
        return _decoded
    if theirs.encoding.name in ours.encoding.origins:
        return _quantized
    return _decoded_source if theirs.encoding is PLAIN else None


def _quantized(pair: Comparison) -> Sums:
    made, origin = target(pair.ours.encoding.name), Origin(pair.source_reader, pair.theirs)
    assert made is not None
    errors = [made.error(pair.reader, pair.ours, origin, *rows, pair.slack) for rows in row_ranges(pair.theirs)]
    if bad_scales := sum(error.bad_scales for error in errors):
        pair.problem(
            "values", f"has {bad_scales:,} groups whose scale is NaN, negative, or zero for numbers that are not"
        )
    if not_nearest := sum(error.not_nearest for error in errors):
        pair.problem("codes", f"has {not_nearest:,} codes that are not the nearest under their scale")
    return math.fsum(error.squared_error for error in errors), math.fsum(error.squared_weight for error in errors)


def _decoded(pair: Comparison) -> Sums:
    return _against_bf16(pair, pair.source_reader, pair.theirs, pair.reader, pair.ours)


def _decoded_source(pair: Comparison) -> Sums:
    """A weight that is still FP8 must be what the source was decoded from; its error is the source's rounding."""
    return _against_bf16(pair, pair.reader, pair.ours, pair.source_reader, pair.theirs)


def _against_bf16(
    pair: Comparison, exact_reader: Reader, exact_weight: Weight, reader: Reader, decoded_weight: Weight
) -> Sums:
    squared_error = squared_weight = 0.0
    for begin, end in row_ranges(exact_weight):
        exact = exact_reader.rows(exact_weight, begin, end)
        decoded = reader.rows(decoded_weight, begin, end)
        difference = decoded - exact.astype(np.float64)
        if (np.abs(difference) > np.abs(exact) * BF16_UNIT).any():
            pair.findings.problem("codes", f"{decoded_weight.name} is not its source decoded to BF16")
        squared_error += float(np.square(difference).sum())
        squared_weight += float(np.square(exact, dtype=np.float64).sum())
    return squared_error, squared_weight


def _copied(pair: Comparison) -> Sums:
    """Both hold the same bytes; FP8 scales may have another name, and another dtype that holds the same numbers."""
    ours, theirs = pair.ours, pair.theirs
    if theirs.fused_columns:
        _check_slab(pair)
        return 0.0, 0.0
    if len(ours.tensors) != len(theirs.tensors) or ours.label != theirs.label:
        pair.problem("copies", f"is {ours.label}; the source's is {theirs.label}, or has other scales")
        return 0.0, 0.0
    for our_tensor, their_tensor in zip(ours.tensors, theirs.tensors, strict=True):
        if our_tensor.spec.dtype == their_tensor.spec.dtype:
            _check_bytes(pair, our_tensor, their_tensor)
        elif our_tensor is ours.data or not np.array_equal(
            _numbers(pair.reader, our_tensor), _numbers(pair.source_reader, their_tensor)
        ):
            pair.findings.problem(
                "copies", f"{our_tensor.spec.name} differs from the source's {their_tensor.spec.name}"
            )
    return 0.0, 0.0


def _numbers(reader: Reader, tensor: StoredTensor) -> npt.NDArray[np.float32]:
    numbers = ops.to_float32(reader.tensor_bytes(tensor, 0, tensor.spec.nbytes), tensor.spec.dtype)
    return numbers.copy()  # the buffer is used again


def _check_slab(pair: Comparison) -> None:
    ours, theirs = pair.ours, pair.theirs
    for begin, end in row_ranges(theirs):
        expected = pair.source_reader.fused_rows(theirs, begin, end).reshape(-1).view(np.uint8)
        if ours.fused_columns:
            data = pair.reader.fused_rows(ours, begin, end).reshape(-1).view(np.uint8)
        else:
            data = pair.reader.tensor_bytes(ours.data, 0, ours.data.spec.nbytes, "ours")
        if ours.data.spec.dtype != theirs.data.spec.dtype or not np.array_equal(data, expected):
            pair.problem("copies", f"differs from its part of the source's fused tensor in {theirs.data.shard}")


def _check_bytes(pair: Comparison, ours: StoredTensor, theirs: StoredTensor) -> None:
    if ours.spec.nbytes != theirs.spec.nbytes:
        return pair.findings.problem("copies", f"{ours.spec.name} is not as large as the source's {theirs.spec.name}")
    for begin, end in byte_ranges(ours.spec.nbytes):
        data = pair.reader.tensor_bytes(ours, begin, end)
        if not np.array_equal(data, pair.source_reader.tensor_bytes(theirs, begin, end, "source")):
            return pair.findings.problem("copies", f"{ours.spec.name} differs from the source's {theirs.spec.name}")
    return None


def _restated(pair: Comparison) -> Sums:
    """The same codes and scales; global scales equal, or each other's reciprocal to the last bit."""
    ours, theirs = pair.ours, pair.theirs
    assert ours.scale is not None
    assert theirs.scale is not None
    _check_bytes(pair, ours.data, theirs.data)
    _check_bytes(pair, ours.scale, theirs.scale)
    for our_tensor, their_tensor in ((ours.global_scale, theirs.global_scale), (ours.input_scale, theirs.input_scale)):
        if (our_tensor is None) != (their_tensor is None):
            pair.problem("copies", "has a scale of its activations; only one of it and the source's has")
        elif our_tensor and their_tensor:
            value = np.float32(pair.source_reader.scalar(their_tensor))
            expected = value if ours.dialect is theirs.dialect else np.float32(1) / value
            if pair.reader.scalar(our_tensor) != float(expected):
                pair.problem("copies", f"has the scale {our_tensor.spec.name} of another value than the source's")
    return 0.0, 0.0

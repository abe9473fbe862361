"""Checkpoints with KV scales: folded into weights, which then are the source's times powers of two, or as tensors."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.manifest import Fold, Manifest
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import MANIFEST_FILE
from quantkit.errors import QuantkitError, SourceError
from quantkit.verification.comparisons import BF16_UNIT, Comparison, Sums
from quantkit.verification.findings import Findings
from quantkit.weights.encodings import Target, target
from quantkit.weights.encodings.encoding import Origin
from quantkit.weights.encodings.nvfp4 import multiplier_of
from quantkit.weights.rescale import Powers
from quantkit.weights.rows import Reader, row_ranges
from quantkit.weights.weight import KV_SCALES, Weight

_HINT = "Fold again, from the checkpoint that it was made from."


@dataclass(frozen=True)
class KvScaling:
    """What a manifest says of KV scales.

    fold      that is in the weights; None without one
    embedded  the scales that were stored as tensors, by name
    """

    fold: Fold | None = None
    embedded: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, made: Manifest | None) -> "KvScaling":
        """What a checkpoint's manifest says; nothing without one."""
        return cls(made.fold, made.kv_scales) if made else cls()

    @property
    def digest(self) -> str | None:
        """The fold's."""
        return self.fold.digest if self.fold else None

    def powers(self, checkpoint: Source) -> dict[str, Powers]:
        """What the fold multiplied each tensor with, by name. Raises SourceError if the record does not say so."""
        if not self.fold:
            return {}
        from quantkit.families.config import read_config  # torch comes along
        from quantkit.models.folding import fold_digest, from_record, layer_powers

        config = read_config(checkpoint)
        try:
            folds = {int(layer): from_record(record) for layer, record in self.fold.layers.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{MANIFEST_FILE} does not say what was folded: {error!r}", hint=_HINT) from error
        if fold_digest(folds) != self.digest:
            raise SourceError(f"{MANIFEST_FILE}: the fold of its layers has another digest than it says", hint=_HINT)
        by_layer = (layer_powers(config, layer, fold) for layer, fold in folds.items())
        return {name: powers for found in by_layer for name, powers in found.items()}


def check_scaling(checkpoint: Source, weights: Iterable[Weight], scaling: KvScaling, findings: Findings) -> None:
    """KV scales are folded or stored, not both; stored ones are those of the manifest, and engines look for them."""
    stored = {str(weight.name): weight for weight in weights if weight.name.leaf in KV_SCALES}
    if not (stored or scaling.fold or scaling.embedded):
        return
    findings.done("kv scales", f"{len(stored)} stored" if stored else f"folded into the weights: {scaling.digest}")
    quantization = checkpoint.quantization_config
    if scaling.embedded and not quantization.get("kv_cache_scheme"):
        findings.problem("kv scales", "scales were embedded, and the config has no kv_cache_scheme")
    expected = dict.fromkeys(stored, 1.0) if scaling.fold else scaling.embedded
    for name, scale in expected.items():
        try:
            if name not in stored:
                findings.problem("kv scales", f"{name} is missing")
            elif (found := Reader(checkpoint).scalar(stored[name].data)) != scale:
                why = "scales are folded in, and both count" if scaling.fold else f"{MANIFEST_FILE} says {scale:g}"
                findings.problem("kv scales", f"{name} is {found:g}; {why}")
        except QuantkitError as error:
            findings.problem("kv scales", str(error))
    if checkpoint.text_config.get("kv_lora_rank"):
        _check_rows(checkpoint, stored.values(), findings)


def _check_rows(checkpoint: Source, scales: Iterable[Weight], findings: Findings) -> None:
    """MLA keeps one row that is key and value, so a layer can have one scale only; unsound ones are told elsewhere."""
    first: dict[int | None, tuple[str, float]] = {}
    for weight in scales:
        try:
            found = str(weight.name), Reader(checkpoint).scalar(weight.data)
        except QuantkitError:
            continue
        name, scale = first.setdefault(weight.name.layer, found)
        if scale != found[1]:
            both = f"{name} is {scale:g} and {found[0]} is {found[1]:g}"
            findings.problem("kv scales", f"{both}, but MLA keeps one row for both")


def multiplied_by(ours: KvScaling, theirs: KvScaling, checkpoint: Source, findings: Findings) -> dict[str, Powers]:
    """What the checkpoint's tensors are the source's times, by name; a source with another fold is a problem."""
    if theirs.fold and ours.digest != theirs.digest:
        findings.problem("fold", f"the source's fold is {theirs.digest}, and the checkpoint's {ours.digest}")
    try:
        mine, others = ours.powers(checkpoint), theirs.powers(checkpoint)
    except SourceError as error:
        findings.problem("fold", str(error))
        return {}
    one = Powers.of()
    found = {}
    for name in mine.keys() | others.keys():
        left, right = mine.get(name, one), others.get(name, one)
        found[name] = Powers(left.rows - right.rows, left.columns - right.columns)
    if found:
        findings.done("fold", f"{len(mine):,} names of tensors that are the unfolded ones times powers of two, exactly")
    return {name: powers for name, powers in found.items() if not powers.is_one}


def compare_multiplied(pair: Comparison, powers: Powers) -> Sums:
    """The checkpoint's weight must be the source's times powers of two: the same numbers, or made from these."""
    if pair.ours.encoding is pair.theirs.encoding and pair.ours.label != pair.theirs.label:
        pair.problem("fold", f"is {pair.ours.label}; the source's is {pair.theirs.label}")
    _compare_inputs(pair, powers)
    sums = [_compare_rows(pair, powers, begin, end) for begin, end in _ranges(pair.theirs)]
    return math.fsum(error for error, _ in sums), math.fsum(weight for _, weight in sums)


def _compare_inputs(pair: Comparison, powers: Powers) -> None:
    """The static scale of the activations lacks what the columns have got."""
    ours, theirs = pair.ours.input_scale, pair.theirs.input_scale
    if (ours is None) != (theirs is None):
        pair.problem("fold", "has a scale of its activations; only one of it and the source's has")
    elif ours and theirs:
        expected = math.ldexp(multiplier_of(pair.source_reader, pair.theirs, theirs), -int(powers.columns[0]))
        if multiplier_of(pair.reader, pair.ours, ours) != expected:
            pair.problem("fold", f"has the scale {ours.spec.name} of another value than its columns ask for")


def _compare_rows(pair: Comparison, powers: Powers, begin: int, end: int) -> Sums:
    source = _rows(pair.source_reader, pair.theirs, begin, end).astype(np.float64)
    expected = np.ldexp(source, powers.full(begin, end, source.shape[1]))
    if pair.ours.encoding is not pair.theirs.encoding and (made := target(pair.ours.encoding.name)):
        return _quantized(pair, made, expected, begin, end)
    difference = _rows(pair.reader, pair.ours, begin, end).astype(np.float64) - expected
    slack = 0.0 if pair.ours.encoding is pair.theirs.encoding else BF16_UNIT
    if (np.abs(difference) > np.abs(expected) * slack).any():
        pair.problem("fold", f"is not the source's times the powers of two of the fold, in rows {begin} to {end}")
    return (0.0, 0.0) if not slack else (float(np.square(difference).sum()), float(np.square(expected).sum()))


def _quantized(pair: Comparison, made: Target, expected: npt.NDArray[np.float64], begin: int, end: int) -> Sums:
    origin = Origin(pair.source_reader, pair.theirs, expected)
    error = made.error(pair.reader, pair.ours, origin, begin, end, pair.slack)
    if error.not_nearest or error.bad_scales:
        pair.problem(
            "codes", f"has {error.not_nearest:,} codes that are not the nearest to the folded source's numbers"
        )
    return error.squared_error, error.squared_weight


def _ranges(weight: Weight) -> Iterable[tuple[int, int]]:
    return row_ranges(weight) if len(weight.shape) == 2 else ((0, weight.shape[0]),)


def _rows(reader: Reader, weight: Weight, begin: int, end: int) -> npt.NDArray[Any]:
    """The rows of a weight, of a vector in one column."""
    if len(weight.shape) == 2:
        return reader.rows(weight, begin, end)
    data = reader.tensor_bytes(weight.data, 0, weight.data.spec.nbytes)
    return ops.to_float32(data, weight.data.spec.dtype)[begin:end, None]

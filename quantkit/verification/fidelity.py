"""The checks against the source: every weight accounted for, and each compared with the one that it was made from."""

import math
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from quantkit.checkpoint.source import Source
from quantkit.errors import QuantkitError
from quantkit.progress import Advance
from quantkit.verification.comparisons import BF16_UNIT, Comparison, comparison
from quantkit.verification.findings import Findings
from quantkit.verification.folded import compare_multiplied
from quantkit.verification.report import RoleError, TensorError
from quantkit.weights.encodings import PLAIN
from quantkit.weights.grouping import read_weights
from quantkit.weights.rescale import Powers
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Weight


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
    """How a checkpoint was made: without the MTP layers, or with 4-bit weights from FP8 ones.

    powers    what its tensors are the source's times, by name, where KV scales were folded in
    embedded  KV scales that were added
    """

    without_mtp: bool
    from_fp8: bool
    powers: Mapping[str, Powers] = field(default_factory=dict)
    embedded: Collection[str] = ()


def compare_weights(
    checkpoint: Source,
    weights: Iterable[Weight],
    source: Source,
    made: Made,
    pool: Executor,
    findings: Findings,
    progress: Advance,
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
    for name in ours.keys() - theirs.keys() - set(made.embedded):
        findings.problem("accounted for", f"{name} is not in the source")
    pairs = [(ours[name], theirs[name]) for name in sorted(theirs.keys() & ours.keys())]
    pairs.sort(key=lambda pair: (pair[1].data.shard, pair[1].data.offset))
    work = partial(_compare, Reader(checkpoint), Reader(source), findings, made, checkpoint.num_hidden_layers)
    compared = []
    for (_, theirs_weight), result in zip(pairs, pool.map(lambda pair: work(*pair), pairs), strict=True):
        progress(theirs_weight.nbytes)
        compared.append(result)
    codes = sum(pair[0].encoding.is_main and pair[1].encoding is not pair[0].encoding for pair in pairs)
    findings.done("codes", f"each code of {codes:,} 4-bit weights is a nearest one under its scale")
    copies = sum(not entry.changed and _key(entry.weight) not in made.powers for entry in compared)
    findings.done("copies", f"{copies:,} weights equal byte for byte")
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
    return str(weight.name) if weight.encoding is PLAIN else weight.name.sibling("weight")


def _compare(
    reader: Reader, source_reader: Reader, findings: Findings, made: Made, num_layers: int, ours: Weight, theirs: Weight
) -> Compared:
    slack = BF16_UNIT if made.from_fp8 and theirs.data.spec.dtype == "BF16" else 0.0
    compare = comparison(ours, theirs)
    sums = 0.0, 0.0
    try:
        if ours.shape != theirs.shape:
            findings.problem("copies", f"{ours.name} is {list(ours.shape)}; the source's is {list(theirs.shape)}")
        elif powers := made.powers.get(_key(ours)):
            sums = compare_multiplied(Comparison(reader, source_reader, findings, ours, theirs, slack), powers)
        elif compare is None:
            findings.problem("copies", f"{ours.name} is {ours.label}; the source's is {theirs.label}")
        else:
            sums = compare(Comparison(reader, source_reader, findings, ours, theirs, slack))
    except QuantkitError as error:
        findings.problem("source", str(error))
    return Compared(ours, ours.name.is_mtp(num_layers), ours.encoding is not theirs.encoding, *sums)

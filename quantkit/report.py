"""What workflows report: frozen dataclasses that turn into JSON with a schema version."""

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import StrEnum
from typing import Any, Self, cast, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1


class Report:
    """A frozen dataclass that a workflow returns."""

    def to_json(self) -> str:
        """The report as JSON text, `schema_version` and the report's kind first."""
        assert is_dataclass(self)
        content = {"schema_version": SCHEMA_VERSION, "kind": type(self).__name__, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote; ValueError, KeyError or TypeError if it is none."""
        content = json.loads(text)
        del content["schema_version"]
        if (kind := content.pop("kind")) != cls.__name__:
            raise ValueError(f"a {kind}, not a {cls.__name__}")
        return cast(Self, _build(cls, content))


def _build(kind: Any, value: Any) -> Any:
    """What `to_json` made of a value of the type `kind`, turned back."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return cast(Any, kind)(**{name: _build(hints[name], entry) for name, entry in dict(value).items()})
    arguments = get_args(kind)
    if type(None) in arguments:
        return None if value is None else _build(arguments[0], value)
    if get_origin(kind) is tuple:
        return tuple(_build(arguments[0], entry) for entry in value)
    if get_origin(kind) is dict:
        return {name: _build(arguments[1], entry) for name, entry in dict(value).items()}
    return Verdict(value) if kind is Verdict else value


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: size in bytes and sha256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Group:
    """The weights of one role that were treated alike: how many, and their bytes before and after.

    mtp  whether they belong to a multi-token-prediction layer
    """

    role: str
    mtp: bool
    source_format: str
    format: str
    weights: int
    source_bytes: int
    nbytes: int


@dataclass(frozen=True)
class Manifest(Report):
    """What a conversion made of what; `quantkit.json` in its output. A dry run's has no files.

    source          name, revision (for Hub repositories), model type, bytes, number of tensors, sha256 of all files
    recipe          as its YAML file says it, overrides applied
    total_bytes     of all tensors, as the index's `total_size`; file_bytes: of all shards, headers included
    nvfp4_groups    whose scales were clamped at the largest or raised to the smallest, or whose codes are all zero
    rounded_scales  global scales of another dialect that are no powers of two: their reciprocals are rounded
    fold, kv_scales scales of an FP8 cache that were folded into the weights, or embedded as tensors, by their names
    """

    version: str
    source: dict[str, Any]
    recipe: dict[str, Any]
    quantization_config: dict[str, Any] | None
    groups: tuple[Group, ...]
    num_tensors: int
    total_bytes: int
    file_bytes: int
    files: dict[str, File] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    nvfp4_groups: dict[str, int] = field(default_factory=dict)
    rounded_scales: tuple[str, ...] = ()
    fold: dict[str, Any] | None = None
    kv_scales: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Holding:
    """The weights of one role that are stored alike: how many, their numbers and their bytes, scales included."""

    role: str
    mtp: bool
    format: str
    weights: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class LayerGroup:
    """Layers that hold the same: `layers` as `0-2, 6`, then what each of them holds.

    weights  their number in one layer, by `role: format`
    nbytes   of one layer
    """

    layers: str
    mtp: bool
    num_layers: int
    weights: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class Inspection(Report):
    """What a checkpoint holds."""

    checkpoint: str
    model_type: str
    num_shards: int
    num_tensors: int
    parameters: int
    total_bytes: int
    quantization: str | None
    holdings: tuple[Holding, ...]
    layers: tuple[LayerGroup, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """One thing that was checked: `problems` in all, the first few in words (None: it was skipped), and what it covered
    or why it was skipped."""

    name: str
    problems: int | None
    examples: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class TensorError:
    """How far a weight is from its source: root mean square of the difference over that of the source, and signal to
    quantization noise, None for no error at all."""

    name: str
    role: str
    mtp: bool
    format: str
    relative_rms: float
    sqnr_db: float | None


@dataclass(frozen=True)
class RoleError:
    """The same for all weights of a role, pooled over their numbers, with the worst weight's."""

    role: str
    mtp: bool
    format: str
    weights: int
    relative_rms: float
    sqnr_db: float | None
    worst_relative_rms: float


@dataclass(frozen=True)
class Verification(Report):
    """What `verify` found. `errors` and `worst` are empty without a source to compare with."""

    checkpoint: str
    against: str | None
    passed: bool
    checks: tuple[Check, ...]
    errors: tuple[RoleError, ...]
    worst: tuple[TensorError, ...]
    seconds: float


@dataclass(frozen=True)
class PositionRange:
    """The same figures for the scored tokens at the positions `first` to `last` of a window, counted from 0."""

    first: int
    last: int
    baseline_bits_per_byte: float
    candidate_bits_per_byte: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True)
class DistributionReport(Report):
    """How far the next-token distributions of a candidate are from its baseline's on a text.

    kl_divergence     mean of KL(baseline || candidate) over the scored tokens, in nats
    top1_agreement    share of the scored tokens for which both rank the same token first
    baseline_correct  scored tokens that the baseline ranks first
    lost, gained      scored tokens that only the baseline, or only the candidate, ranks first
    flips             share of the scored tokens that are lost or gained
    """

    candidate: str
    baseline: str
    text: str
    window: int
    scored_tokens: int
    scored_bytes: int
    baseline_bits_per_byte: float
    candidate_bits_per_byte: float
    kl_divergence: float
    top1_agreement: float
    baseline_correct: int
    lost: int
    gained: int
    flips: float
    positions: tuple[PositionRange, ...]


class Verdict(StrEnum):
    """What the accuracy gate says of a candidate."""

    PASS = "pass"
    FAIL = "fail"
    CANNOT_DECIDE = "cannot decide"
    INVALID = "invalid"  # the two runs are not comparable, or one of them is not sound


@dataclass(frozen=True)
class Comparison:
    """One task's items, or all tasks' together, answered by both models. Differences are candidate minus baseline.

    metric, filter      as the harness names them; empty for all tasks together
    lost, gained        items that only the baseline, or only the candidate, has right
    lower, upper        one-sided 95 % bounds of the difference, each
    p_value             exact McNemar test, two-sided
    adjusted_p_value    the same by Holm over all tasks
    detectable_drop     the smallest true drop that so many items find in 80 % of all cases
    has_power           whether so many items pass in 80 % of all cases if there is no difference
    """

    task: str
    metric: str
    filter: str
    items: int
    baseline_correct: int
    candidate_correct: int
    lost: int
    gained: int
    difference: float
    lower: float
    upper: float
    p_value: float
    adjusted_p_value: float
    detectable_drop: float
    has_power: bool


@dataclass(frozen=True)
class AccuracyReport(Report):
    """The accuracy gate's verdict on a candidate, with its evidence.

    candidate, baseline    names; their digests stand for all bytes of the checkpoints
    rule, max_drop         `paired` or `point`, and the margin as a share: 0.008 is 0.8 points
    reasons, needed_items  in words, what decided; for `cannot decide`: about so many items in all would decide
    tasks, pooled          the comparisons, and that of all items together; none for an invalid run
    distribution           next-token distributions on a text, when they were compared
    settings               what both runs share: backend, versions of harness and libraries, seed, few-shot, sampling
    seconds                wall time of each stage; 0 where a result came from the cache
    pages                  of `candidate` and `baseline` by the runtime: `kv`, and of FP8 `scales` and `scales_digest`;
                           `query` where queries are FP8, too
    """

    candidate: str
    baseline: str
    candidate_digest: str
    baseline_digest: str
    suite: str
    rule: str
    max_drop: float
    verdict: Verdict
    reasons: tuple[str, ...]
    tasks: tuple[Comparison, ...]
    pooled: Comparison | None
    needed_items: int | None
    distribution: DistributionReport | None
    settings: dict[str, Any]
    seconds: dict[str, float]
    warnings: tuple[str, ...] = ()
    pages: dict[str, dict[str, str]] = field(default_factory=dict)

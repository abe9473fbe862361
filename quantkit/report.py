"""What workflows report: frozen dataclasses that turn into JSON with a schema version."""

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

SCHEMA_VERSION = 1


class Report:
    """A frozen dataclass that a workflow returns."""

    def to_json(self) -> str:
        """The report as JSON text, `schema_version` and the report's kind first."""
        assert is_dataclass(self)
        content = {"schema_version": SCHEMA_VERSION, "kind": type(self).__name__, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


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

    source       name, revision (for Hub repositories), model type, bytes, number of tensors, sha256 of all files
    recipe       as its YAML file says it, overrides applied
    total_bytes  of all tensors, as the index's `total_size`
    file_bytes   of all shards, headers included
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

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The manifest that `to_json` wrote; ValueError, KeyError or TypeError if it is none."""
        content = json.loads(text)
        del content["schema_version"], content["kind"]
        groups = tuple(Group(**group) for group in content.pop("groups"))
        files = {name: File(**file) for name, file in content.pop("files").items()}
        return cls(groups=groups, files=files, warnings=tuple(content.pop("warnings")), **content)


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
    """One thing that was checked: `problems` in all, the first few of them in words; None problems is a skipped check.

    note  what was covered, or why the check was skipped
    """

    name: str
    problems: int | None
    examples: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class TensorError:
    """How far a weight is from its source: root mean square of the difference over that of the source, and in dB.

    sqnr_db  signal to quantization noise; None for no error at all
    """

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
class DistributionReport(Report):
    """How far the next-token distributions of a candidate are from its baseline's on a text.

    kl_divergence   mean of KL(baseline || candidate) over the scored tokens, in nats
    top1_agreement  share of the scored tokens for which both rank the same token first
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

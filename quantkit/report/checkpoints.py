"""What conversions and inspections report, and the records of a manifest."""

from dataclasses import dataclass, field
from typing import Any

from quantkit.records import Report


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
class Origin:
    """Weights as they were published, or another checkpoint's: sha256 of its config.json and of each shard."""

    config_sha256: str
    shards_sha256: dict[str, str]


@dataclass(frozen=True)
class ModelIdentity:
    """Which model a checkpoint holds, in whatever form: `quantkit.weights.identity`.

    name, model_type  of the checkpoint that it was taken from, to be told to people
    weights_sha256    of some weights that every form of the model shares
    """

    name: str
    model_type: str
    weights_sha256: str


@dataclass(frozen=True)
class MadeFrom:
    """The checkpoint that another was made from: what the user called it, its commit on the Hub, size and hashes."""

    name: str
    revision: str | None
    model_type: str
    num_tensors: int
    total_bytes: int
    config_sha256: str
    shards_sha256: dict[str, str]

    @property
    def origin(self) -> Origin:
        """The hashes alone."""
        return Origin(self.config_sha256, self.shards_sha256)


@dataclass(frozen=True)
class Fold:
    """Scales of an FP8 cache that were folded into the weights: their digest, and the exponents by layer.

    origin  what they were folded into; None for a patch, which says that itself
    """

    digest: str
    layers: dict[str, dict[str, Any]]
    origin: Origin | None = None


@dataclass(frozen=True)
class Manifest(Report):
    """What a conversion made of what; `quantkit.json` in its output. A dry run's has no files.

    recipe          as its YAML file says it, overrides applied
    total_bytes     of all tensors, as the index's `total_size`; file_bytes: of all shards, headers included
    nvfp4_groups    whose scales were clamped at the largest or raised to the smallest, or whose codes are all zero
    rounded_scales  global scales of another dialect that are no powers of two: their reciprocals are rounded
    fold, kv_scales scales of an FP8 cache that were folded into the weights, or embedded as tensors, by their names
    in_place        whether the files are those of somebody else, in which quantkit only edited weights where they lay;
                    None where that is not said, as in version 0.1
    respelled       config.json as it was under earlier spellings of the same tensors, the first one first
    """

    version: str
    source: MadeFrom
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
    fold: Fold | None = None
    kv_scales: dict[str, float] = field(default_factory=dict)
    in_place: bool | None = None
    respelled: tuple[File, ...] = ()


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

"""`quantkit.json`, the manifest of a checkpoint: what is recorded, and the one place that reads it."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import MANIFEST_FILE, File
from quantkit.errors import SourceError
from quantkit.records import Report
from quantkit.tables import Line, TextTable, role_name, size

PUBLISHED = "published"  # the name of the recipe of weights that quantkit did not convert, but folded scales into


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

    def tables(self) -> Iterator[TextTable]:
        """What became of the weights of each role."""
        title = f"{self.source.name}  by  {self.recipe['name']}: {self.recipe['description']}"
        rows = (
            (
                role_name(group.role, group.mtp),
                f"{group.weights:,}",
                group.source_format,
                group.format,
                size(group.source_bytes),
                size(group.nbytes),
            )
            for group in self.groups
        )
        yield TextTable(title, ("role", "weights", "from:", "to:", "before", "after"), tuple(rows))

    def answer(self) -> Line:
        """The sizes before and after, and what was written."""
        source = self.source
        ratio = self.total_bytes / source.total_bytes if source.total_bytes else 1.0
        sizes = (
            f"source {source.total_bytes:,} bytes in {source.num_tensors:,} tensors; "
            f"output {self.total_bytes:,} bytes in {self.num_tensors:,} tensors ({ratio:.1%})"
        )
        if self.respelled:
            return Line(f"{sizes}; {len(self.files)} files, of which config.json is new and describes the same tensors")
        return Line(f"{sizes}; {len(self.files)} files written" if self.files else f"{sizes}; nothing was written")


def is_of_others(manifest: Manifest) -> bool:
    """Whether the files are not quantkit's to remove: it edited them in place, or may have (0.1 did not say)."""
    return bool(manifest.in_place) or (manifest.in_place is None and manifest.recipe["name"] == PUBLISHED)


def read_manifest(folder: Path | None) -> Manifest | None:
    """The manifest in `folder`; None where there is none, as for a checkpoint as published, and for a config alone.

    Raises SourceError, saying what is wrong with it, for a damaged one.
    """
    if folder is None:
        return None
    path = folder / MANIFEST_FILE
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
        _check(manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read: {error}", hint="Convert again.") from error
    return manifest


def made_from(source: Source, shards_sha256: Mapping[str, str]) -> MadeFrom:
    """What a manifest says of the checkpoint `source`, whose shards have these hashes."""
    return MadeFrom(
        name=source.name,
        revision=source.revision,
        model_type=source.model_type,
        num_tensors=len(source.tensors),
        total_bytes=source.nbytes,
        config_sha256=hashlib.sha256(source.config_text.encode()).hexdigest(),
        shards_sha256=dict(sorted(shards_sha256.items())),
    )


def _check(manifest: Manifest) -> None:
    """Raise ValueError for what its types do not tell: a recipe without its words or rules, and files elsewhere."""
    match manifest.recipe:
        case {"name": str(), "description": str(), "rules": [*rules]} if all(isinstance(rule, dict) for rule in rules):
            if not isinstance(manifest.recipe.get("engines", []), list):
                raise ValueError("recipe.engines is no list")
        case _:
            raise ValueError("recipe has no name, description and rules")
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise ValueError(f"files names {name!r}, which is no file of the folder")
        name.encode()  # half a surrogate pair is the name of no file

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

    source       name, revision (for Hub repositories), model type, bytes, number of tensors and sha256 of the config
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
    seconds: float | None = None

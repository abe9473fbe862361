"""What a phase plan says: the pools of a deployment, what was weighed against what, and the drift from it.

A deployment manifest is what `quantkit plan --phases -o FILE` writes and `quantkit plan --check FILE` reads.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.manifest import Origin
from quantkit.checkpoint.writer import File
from quantkit.errors import SourceError
from quantkit.planning.report import CapacityReport
from quantkit.records import Record


@dataclass(frozen=True)
class ServedModel:
    """The model that all pools serve.

    repo, revision  on the Hub; None for a folder
    config_sha256   of the config without `quantization_config` and the count of MTP layers, keys sorted
    origin          what every checkpoint of it is or was made from, without shards that hold nothing but MTP layers,
                    which a conversion may drop; None while no checkpoint of it is there
    """

    name: str
    model_type: str
    repo: str | None
    revision: str | None
    config_sha256: str
    origin: Origin | None


@dataclass(frozen=True)
class Pool:
    """Engines that serve one phase, or both, with one checkpoint.

    phase         `prefill`, `decode` or `both`
    checkpoint    folder or Hub repository, the latter at `revision`; a folder that `prepare` makes, where that is given
    recipe        that made the checkpoint, as its YAML file says it; None for one as published
    formats       of the weights of each role
    mtp           whether the checkpoint holds MTP layers; `speculate` whether the engine loads them
    digest        over `files`, which decide what the model says; None (and empty) while the checkpoint is not there
    kv_space_id   of what the cache means: weights of the source, fold and kind of cache. Neither weight format nor
                  cache dtype enters it. None while neither the checkpoint nor its source is there
    gpus, gpu     how many of which, of the generation `sm`: `replicas` of the model on `tp` ranks each
    kv_layout     of the cache as the engines store it: `kv_tokens` in all replicas, for `requests` of `context` tokens
    utilization   the share of the GPU's memory that the engine takes; `static_fraction` that of weights and cache
    """

    phase: str
    checkpoint: str
    revision: str | None
    prepare: str | None
    recipe: dict[str, Any] | None
    formats: dict[str, str]
    mtp: bool
    digest: str | None
    files: dict[str, File]
    kv_space_id: str | None
    gpus: int
    gpu: str
    sm: int | None
    tp: int
    ep: bool
    dp_attention: bool
    replicas: int
    speculate: bool
    kv_layout: str
    index_cache: str
    kv_bytes_per_token: int
    kv_tokens: int
    context: int
    requests: int
    checkpoint_bytes: int
    rank_bytes: int
    utilization: float
    static_fraction: float


@dataclass(frozen=True)
class Launch:
    """How to start the pools with one engine: `commands` by what they start; none where `refusal` says why not.

    source  the engine's file that refuses, in the pinned version
    notes   what the user has to know about the commands
    """

    engine: str
    refusal: str | None
    source: str | None
    commands: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeploymentManifest(Record):
    """A deployment as planned: one pool, or one for prefill and one for decode."""

    version: str
    model: ServedModel
    pools: tuple[Pool, ...]
    launches: tuple[Launch, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A weight format on the GPUs of either phase; its rates are rooflines."""

    name: str
    prefill: CapacityReport
    decode: CapacityReport


def read_manifest(path: Path) -> DeploymentManifest:
    """The manifest in the file `path`; SourceError if there is none."""
    try:
        return DeploymentManifest.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SourceError(
            f"{path}: no deployment manifest: {error}", hint="quantkit plan MODEL --phases -o FILE writes one."
        ) from error

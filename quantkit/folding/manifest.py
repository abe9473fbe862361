"""The manifest of a folded checkpoint: what it was before, with the fold and the files as they are now."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import Weight, read_weights
from quantkit.checkpoint.writer import MANIFEST_FILE
from quantkit.errors import FoldError, SourceError
from quantkit.folding.plan import FoldPlan
from quantkit.models.folding import as_record
from quantkit.report import File, Group, Manifest
from quantkit.version import VERSION

_AS_PUBLISHED = {"name": "published", "description": "the weights as published, but for their KV scales", "rules": []}


def read_made(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None for a checkpoint as published. Raises SourceError for a damaged one."""
    try:
        return Manifest.from_json((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{folder / MANIFEST_FILE} cannot be read: {error!r}", hint="Convert again.") from error


def check_unfolded(name: str, made: Manifest | None, digest: str | None) -> None:
    """Raise FoldError for a checkpoint that has scales folded in, or embedded by quantkit, already."""
    if made and made.kv_scales:
        hint = "Fold into the checkpoint that it was made from."
        raise FoldError(f"{name} has embedded KV scales, which would be multiplied with the fold", hint=hint)
    if made and made.fold:
        which = "these" if made.fold.get("digest") == digest else "other"
        raise FoldError(
            f"{name} has {which} KV scales folded in already; folded twice, the cache would be divided twice",
            hint="Fold into the checkpoint that it was made from, or take an in-place fold back with --undo.",
        )


def check_sources(source: Source, made: Manifest | None, hashes: Mapping[str, str]) -> None:
    """Raise SourceError for a shard that is not the one that its manifest says."""
    for shard, sha256 in hashes.items():
        if made and shard in made.files and made.files[shard].sha256 != sha256:
            what = f"{source.name}: {shard} has another sha256 than {MANIFEST_FILE} says"
            raise SourceError(what, hint="quantkit verify says what else is wrong; convert again.")


def folded_manifest(
    plan: FoldPlan, made: Manifest | None, before: Mapping[str, str], config_sha256: str, files: Mapping[str, File]
) -> Manifest:
    """The manifest of the folded checkpoint.

    made           that of the checkpoint before, if it has one
    before         sha256 of its shards; config_sha256 that of its config
    files          of the folded checkpoint
    """
    manifest = made or _of_published(plan.source, before, config_sha256)
    fold: dict[str, Any] | None = None
    if plan.digest:
        layers = {str(layer): as_record(entry) for layer, entry in plan.folds.items() if not entry.is_one}
        origin = {name: manifest.source[name] for name in ("config_sha256", "shards_sha256")}
        fold = {"digest": plan.digest, "layers": layers, "origin": origin}
    return replace(manifest, fold=fold, files=dict(sorted(files.items())))


def _of_published(source: Source, before: Mapping[str, str], config_sha256: str) -> Manifest:
    assert source.folder is not None
    return Manifest(
        version=VERSION,
        source={
            "name": source.name,
            "revision": source.revision,
            "model_type": source.model_type,
            "num_tensors": len(source.tensors),
            "total_bytes": source.nbytes,
            "config_sha256": config_sha256,
            "shards_sha256": dict(sorted(before.items())),
        },
        recipe=_AS_PUBLISHED,
        quantization_config=source.quantization_config or None,
        groups=_groups(source),
        num_tensors=len(source.tensors),
        total_bytes=source.nbytes,
        file_bytes=sum((source.folder / shard).stat().st_size for shard in source.shards),
        warnings=source.warnings,
    )


def _groups(source: Source) -> tuple[Group, ...]:
    """The weights by role and format, which a fold does not change."""
    found: dict[tuple[str, bool, str, str], list[Weight]] = {}
    for weight in read_weights(source):
        mtp = weight.name.is_mtp(source.num_hidden_layers)
        found.setdefault((str(weight.name.role), mtp, weight.label, weight.label), []).append(weight)
    sizes = {key: sum(weight.nbytes for weight in weights) for key, weights in found.items()}
    return tuple(Group(*key, len(found[key]), sizes[key], sizes[key]) for key in sorted(found))

"""`quantkit.json`, the manifest of a checkpoint: the one place that reads it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import MANIFEST_FILE
from quantkit.errors import SourceError
from quantkit.report import MadeFrom, Manifest

PUBLISHED = "published"  # the name of the recipe of weights that quantkit did not convert, but folded scales into


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

"""The manifest of a folded checkpoint: what it was before, with the fold and the files as they are now."""

from collections.abc import Mapping
from dataclasses import replace

from quantkit.checkpoint.manifest import PUBLISHED, Group, Manifest, made_from
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import MANIFEST_FILE, File
from quantkit.errors import FoldError, SourceError
from quantkit.folding.plan import FoldPlan
from quantkit.folding.shards import file_size
from quantkit.version import VERSION
from quantkit.weights.grouping import read_weights
from quantkit.weights.weight import Weight

_AS_PUBLISHED = {"name": PUBLISHED, "description": "the weights as published, but for their KV scales", "rules": []}


def check_unfolded(name: str, made: Manifest | None, digest: str | None) -> None:
    """Raise FoldError for a checkpoint that has scales folded in, or embedded by quantkit, already."""
    if made and made.kv_scales:
        hint = "Fold into the checkpoint that it was made from."
        raise FoldError(f"{name} has embedded KV scales, which would be multiplied with the fold", hint=hint)
    if made and made.fold:
        which = "these" if made.fold.digest == digest else "other"
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
    plan: FoldPlan,
    made: Manifest | None,
    before: Mapping[str, str],
    files: Mapping[str, File],
    *,
    in_place: bool = False,
) -> Manifest:
    """The manifest of the folded checkpoint.

    made      that of the checkpoint before, if it has one
    before    sha256 of its shards
    files     of the folded checkpoint
    in_place  whether it is the checkpoint before, edited, and not a copy
    """
    manifest = made or _of_published(plan.source, before)
    others = in_place and (made is None or bool(made.in_place))
    return replace(
        manifest, in_place=others, fold=plan.record(manifest.source.origin), files=dict(sorted(files.items()))
    )


def _of_published(source: Source, before: Mapping[str, str]) -> Manifest:
    assert source.folder is not None
    return Manifest(
        version=VERSION,
        source=made_from(source, before),
        recipe=_AS_PUBLISHED,
        quantization_config=source.quantization_config or None,
        groups=_groups(source),
        num_tensors=len(source.tensors),
        total_bytes=source.nbytes,
        file_bytes=sum(file_size(source.folder / shard) for shard in source.shards),
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

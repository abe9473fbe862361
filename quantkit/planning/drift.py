"""Are these the checkpoints of that deployment, and do they go together? All that is wrong is listed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.manifest import Origin
from quantkit.checkpoint.source import open_source
from quantkit.checkpoint.writer import File
from quantkit.planning.deployment import DeploymentManifest, Pool, read_manifest
from quantkit.planning.fingerprint import Fingerprint, fingerprint
from quantkit.planning.phase_report import Drift, DriftReport
from quantkit.progress import Progress, silent

_NO_POOL, _NOTHING = "none of the pools", "nothing"


@dataclass(frozen=True)
class _Match:
    pool: Pool
    found: Fingerprint


def check_drift(
    manifest: str | Path, checkpoints: Sequence[str | Path], *, quick: bool = False, progress: Progress = silent
) -> DriftReport:
    """Compare the checkpoints in the folders `checkpoints` with the pools of the deployment in the file `manifest`.

    A checkpoint belongs to the pool with its digest, else with its weight formats, else with its name.

    quick     believe the sha256 in quantkit.json or the manifest of files that have the size it says; else every byte
              is read
    progress  is given the bytes to read of each checkpoint, and returns what is called with those just read

    Raises SourceError for a manifest or a checkpoint that cannot be read.
    """
    planned = read_manifest(Path(manifest))
    also = [pool.files for pool in planned.pools]
    found = [fingerprint(open_source(Path(path)), trust=quick, also=also, progress=progress) for path in checkpoints]
    matches = _match(planned.pools, found)
    drifts = [drift for match in matches for drift in _pool_drifts(planned, match)]
    drifts += _peer_drifts(matches)
    drifts += _unmatched(planned.pools, found, matches)
    return DriftReport(
        manifest=str(manifest),
        passed=not drifts,
        checkpoints={match.pool.phase: match.found.name for match in matches},
        drifts=tuple(drifts),
        unchecked=tuple(text for match in matches for text in _unchecked(planned, match, quick)),
    )


def _match(pools: Sequence[Pool], found: Sequence[Fingerprint]) -> list[_Match]:
    """Each checkpoint with the pool that fits it best; the surest pairs first."""
    pairs = ((_likeness(pool, entry), index, pool) for index, entry in enumerate(found) for pool in pools)
    taken: dict[int, Pool] = {}
    for likeness, index, pool in sorted(pairs, key=lambda pair: -pair[0]):
        if likeness and index not in taken and pool not in taken.values():
            taken[index] = pool
    return [_Match(pool, found[index]) for pool in pools for index, entry in taken.items() if entry is pool]


def _likeness(pool: Pool, found: Fingerprint) -> int:
    """Digest, formats and name, the former ones counting more."""
    same_digest = pool.digest is not None and pool.digest == found.digest
    return 4 * same_digest + 2 * (pool.formats == found.formats) + (Path(pool.checkpoint).name == Path(found.name).name)


def _pool_drifts(planned: DeploymentManifest, match: _Match) -> Iterator[Drift]:
    """In what a checkpoint is not what its pool says."""
    pool, found = match.pool, match.found
    other = next((entry for entry in planned.pools if entry is not pool and _is_at(entry, found)), None)
    if other and not _is_at(pool, found):
        yield Drift(pool.phase, "checkpoint", pool.checkpoint, f"{found.name}, where {other.phase} has its own")
    yield from _differ(pool, "model config", planned.model.config_sha256, found.config_sha256)
    yield from _differ(pool, "MTP layers", _presence(pool.mtp), _presence(found.mtp))
    yield from _mapping_drifts(pool, "format of {}", pool.formats, found.formats)
    if (pool.recipe or {}) != (found.recipe or {}):
        yield from _recipe_drifts(pool, found)
    yield from _file_drifts(pool, found)
    if planned.model.origin and found.origin:
        yield from _origin_drifts(pool, planned.model.origin, found.origin)
    if pool.kv_space_id:
        yield from _differ(pool, "kv_space_id", pool.kv_space_id, found.kv_space_id)


def _recipe_drifts(pool: Pool, found: Fingerprint) -> Iterator[Drift]:
    """Whole recipes are long: only the keys that differ, and the recipes' names where only one side has a recipe."""
    if not pool.recipe or not found.recipe:
        names = (recipe["name"] if recipe else "as published" for recipe in (pool.recipe, found.recipe))
        yield Drift(pool.phase, "recipe", *names)
        return
    for key in sorted(pool.recipe.keys() | found.recipe.keys()):
        yield from _differ(pool, f"recipe's {key}", pool.recipe.get(key), found.recipe.get(key))


def _file_drifts(pool: Pool, found: Fingerprint) -> Iterator[Drift]:
    """Against the files of the plan; while it has none, against those that the checkpoint's own quantkit.json names."""
    for name in sorted((expected := pool.files or found.recorded or found.files).keys() | found.files.keys()):
        yield from _differ(pool, f"file {name}", _file(expected.get(name)), _file(found.files.get(name)))


def _file(file: File | None) -> str | None:
    return None if file is None else f"{file.nbytes:,} bytes, sha256 {file.sha256}"


def _origin_drifts(pool: Pool, planned: Origin, found: Origin) -> Iterator[Drift]:
    yield from _differ(pool, "source config.json", planned.config_sha256, found.config_sha256)
    yield from _mapping_drifts(pool, "source shard {}", planned.shards_sha256, found.shards_sha256)


def _peer_drifts(matches: Sequence[_Match]) -> Iterator[Drift]:
    """In what the pools' checkpoints do not go together: cache, config and tokenizer."""
    if len(matches) < 2:
        return
    first, second = matches
    pools = f"{first.pool.phase} and {second.pool.phase}"
    ours, theirs = first.found, second.found
    pairs = {
        "kv_space_id": (ours.kv_space_id, theirs.kv_space_id),
        "model config": (ours.config_sha256, theirs.config_sha256),
        **{
            f"tokenizer file {name}": (ours.tokenizer.get(name), theirs.tokenizer.get(name))
            for name in sorted(ours.tokenizer.keys() | theirs.tokenizer.keys())
        },
    }
    for field, (expected, found) in pairs.items():
        if expected != found:
            yield Drift(pools, field, str(expected or _NOTHING), str(found or _NOTHING))


def _unmatched(pools: Sequence[Pool], found: Sequence[Fingerprint], matches: Sequence[_Match]) -> Iterator[Drift]:
    taken = [match.found for match in matches]
    for entry in found:
        if not any(entry is other for other in taken):
            formats = ", ".join(f"{role} {label}" for role, label in entry.formats.items())
            yield Drift(_NO_POOL, "checkpoint", _NOTHING, f"{entry.name}: {formats}")
    for pool in pools:
        if not any(pool is match.pool for match in matches):
            yield Drift(pool.phase, "checkpoint", pool.checkpoint, _NOTHING)


def _unchecked(planned: DeploymentManifest, match: _Match, quick: bool) -> Iterator[str]:
    pool, found = match.pool, match.found
    if not pool.files:
        against = "its quantkit.json was taken instead" if found.recorded else "nothing else names them"
        yield f"{pool.phase}: the files, since the checkpoint was not there when it was planned; {against}"
    if not pool.kv_space_id:
        yield f"{pool.phase}: kv_space_id with the plan, for the same reason; the pools were compared with each other"
    if not planned.model.origin:
        yield f"{pool.phase}: what it was made from, for the same reason"
    if quick and (pool.files or found.recorded):
        yield f"{pool.phase}: the bytes of files that have their recorded size (--quick)"


def _is_at(pool: Pool, found: Fingerprint) -> bool:
    return Path(pool.checkpoint).resolve() == Path(found.name).resolve()


def _mapping_drifts(pool: Pool, field: str, expected: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Drift]:
    for key in sorted(expected.keys() | found.keys()):
        yield from _differ(pool, field.format(key), expected.get(key), found.get(key))


def _differ(pool: Pool, field: str, expected: object, found: object) -> Iterator[Drift]:
    if expected != found:
        yield Drift(pool.phase, field, str(expected or _NOTHING), str(found or _NOTHING))


def _presence(there: bool) -> str:
    return "there" if there else "left out"

"""`--in-place`: patches written into the checkpoint itself, behind a journal that takes them back.

    .quantkit/old, new     the bytes of all patches before and after, one after the other
    .quantkit/fold.json    where they belong; written and flushed before the first edit
    .quantkit/config.json  the config, moved away while shards are edited: a folder without one does not load
    .quantkit-fold/        old and fold.json of a finished fold, for --undo; remove it when it is not wanted

An interrupted fold is finished by the next run if all its bytes and its manifest were written, else rolled back.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from quantkit.checkpoint.digest import GATE_FILE, hash_file, hash_files, list_files
from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.journal import IN_PLACE, Opening
from quantkit.checkpoint.lock import lock
from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.occupancy import NEW_BYTES, OLD_BYTES, UNDO_FOLDER, own_run
from quantkit.checkpoint.source import CONFIG_FILE, readable
from quantkit.checkpoint.writer import LOCK_FILE, MANIFEST_FILE, WORK_FOLDER, File, clear, explained, sync, write_whole
from quantkit.errors import OutputError, SourceError, UsageError
from quantkit.folding.manifest import check_sources, folded_manifest
from quantkit.folding.plan import FoldPlan, place
from quantkit.folding.shards import Hashes, hash_patched, write_patches
from quantkit.progress import Advance
from quantkit.weights.rescale import Patch

_JOURNAL = IN_PLACE.journal


@dataclass(frozen=True)
class Spot:
    """Bytes of a file that are replaced."""

    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Journal:
    """What it takes to go back: the fold's digest, the manifest's text before (None: there was none), and the places.

    new_sha256  of the new bytes of all places, one after the other
    old_sha256  of those before; None in a journal of a version that did not record it
    """

    digest: str
    manifest: str | None
    new_sha256: str
    spots: tuple[Spot, ...]
    old_sha256: str | None = None

    @classmethod
    def read(cls, path: Path) -> "Journal | None":
        """The journal in the file `path`; None if there is none. Raises OutputError for a damaged one."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            spots = tuple(Spot(**spot) for spot in content["spots"])
            named = (content["digest"], content["manifest"], content["new_sha256"])
            return cls(*named, spots, content.get("old_sha256"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{path} cannot be read: {error!r}", hint="Download or convert it again.") from error


def recover(folder: Path) -> str | None:
    """Finish an interrupted fold in a folder that is locked, or take it back.

    Returns what was done, in words, or None if there was none. Raises OutputError for an interrupted run of another
    command, and for old bytes that are not those of the journal.
    """
    work = folder / WORK_FOLDER
    journal = Journal.read(work / _JOURNAL)
    if own_run(folder, IN_PLACE) is None:
        return None
    with explained(folder):
        if journal is None:
            _remove(work)
            return "what an interrupted fold had left was tidied up; it had not edited anything, or put it back"
        if _digest_in(folder) == journal.digest:
            _finish(folder)
            return "an interrupted fold had only to be tidied up, and is finished"
        _roll_back(folder, journal)
        return "an interrupted fold was rolled back"


def undo(folder: Path) -> str:
    """Take back the fold that was made in `folder`, or an interrupted one; what was done, in words.

    Raises UsageError if there is nothing to take back, OutputError if the edited bytes are not those of the fold.
    """
    with lock(folder, "fold --undo") as left:
        recovered = recover(folder)
        journal = Journal.read(folder / UNDO_FOLDER / _JOURNAL)
        if journal is None:
            if recovered or left:
                return (
                    recovered or "an interrupted run had only to be tidied up: there is no fold to take back any more"
                )
            raise UsageError(f"{folder}: there is no fold to take back", hint="Only --in-place leaves a journal.")
        found = hashlib.sha256()
        for spot in journal.spots:
            found.update(_read(folder, spot))
        if found.hexdigest() != journal.new_sha256:
            raise OutputError(f"{folder}: the weights are not those that the fold wrote; they are left as they are")
        _check_old(folder / UNDO_FOLDER, journal)
        with explained(folder):
            for name in (_JOURNAL, OLD_BYTES):
                _move(folder / UNDO_FOLDER, folder / WORK_FOLDER, name)
            shutil.rmtree(folder / UNDO_FOLDER)
            _roll_back(folder, journal)
        return "the fold was taken back: the checkpoint has the bytes that it had before"


def fold_in_place(
    plan: FoldPlan,
    made: Manifest | None,
    prove: Callable[[], str],
    *,
    workers: int = 2,
    progress: Advance = lambda done: None,
) -> str:
    """Edit the checkpoint, whose folder is locked, and return what `prove` says; if it raises, everything is put back.

    Raises OutputError for shards that other folders share and for a full disk, SourceError for a shard that is not the
    one of its manifest; then nothing was edited, or all was put back.
    """
    folder = plan.source.folder
    assert folder is not None
    _check_own(folder, plan.source.shards)
    with explained(folder):
        try:
            manifest, journal = _prepare(plan, made, workers, progress)
        except (Exception, KeyboardInterrupt):
            _remove(folder / WORK_FOLDER)
            raise
        try:
            _apply(folder, journal)
            proof = prove()
            write_whole(folder / WORK_FOLDER / MANIFEST_FILE, manifest.to_json().encode())
            _move(folder / WORK_FOLDER, folder, MANIFEST_FILE)
        except (Exception, KeyboardInterrupt):  # what can be put back now need not be left to the next run
            _roll_back(folder, journal)
            raise
        _finish(folder)
    return proof


def _prepare(plan: FoldPlan, made: Manifest | None, workers: int, progress: Advance) -> tuple[Manifest, Journal]:
    """The manifest that is to be, and the journal, which is on the disk with all old and new bytes."""
    folder = plan.source.folder
    assert folder is not None
    work, spots, old_sha256, new_sha256 = folder / WORK_FOLDER, [], hashlib.sha256(), hashlib.sha256()
    hashes: dict[str, Hashes] = {}
    with (
        (work / OLD_BYTES).open("wb") as old,
        (work / NEW_BYTES).open("wb") as new,
        ThreadPoolExecutor(workers) as pool,
    ):
        for shard in plan.source.shards:
            patches = plan.patches(shard)
            for patch in patches:
                spots.append(Spot(shard, place(patch), patch.data.nbytes))
                before = _read(folder, spots[-1])
                old.write(before)
                old_sha256.update(before)
                new.write(patch.data.data)
                new_sha256.update(patch.data.data)
        read = pool.map(lambda shard: hash_patched(folder / shard, plan.patches(shard), progress), plan.source.shards)
        hashes = dict(zip(plan.source.shards, read, strict=True))
    sources = {shard: found.before for shard, found in hashes.items()}
    check_sources(plan.source, made, sources)
    files = {shard: File(found.nbytes, found.after) for shard, found in hashes.items()}
    others = {name: path for name, path in list_files(folder).items() if name not in files}
    files |= {name: file for name, file in hash_files(others).items() if name not in (MANIFEST_FILE, GATE_FILE)}
    manifest = folded_manifest(plan, made, sources, files, in_place=True)
    assert plan.digest is not None
    text = (folder / MANIFEST_FILE).read_text(encoding="utf-8") if made else None
    journal = Journal(plan.digest, text, new_sha256.hexdigest(), tuple(spots), old_sha256.hexdigest())
    for name in (OLD_BYTES, NEW_BYTES):
        sync(work / name)
    write_whole(work / _JOURNAL, json.dumps(Opening(IN_PLACE, binding=asdict(journal)).to_line()).encode())
    return manifest, journal


def _apply(folder: Path, journal: Journal) -> None:
    """Move the config away and write the new bytes."""
    _move(folder, folder / WORK_FOLDER, CONFIG_FILE)
    _put(folder, journal, folder / WORK_FOLDER / NEW_BYTES)


def _finish(folder: Path) -> None:
    """Everything is written: bring the config back and keep what an undo needs."""
    work = folder / WORK_FOLDER
    (work / NEW_BYTES).unlink(missing_ok=True)
    if (work / CONFIG_FILE).exists():
        _move(work, folder, CONFIG_FILE)
    if (work / OLD_BYTES).exists():
        shutil.rmtree(folder / UNDO_FOLDER, ignore_errors=True)
        (folder / UNDO_FOLDER).mkdir()
        _move(work, folder / UNDO_FOLDER, OLD_BYTES)
    _move(work, folder / UNDO_FOLDER, _JOURNAL)  # last: until then this can be begun again
    clear(work, keep=(LOCK_FILE,))
    sync(folder, os.O_DIRECTORY)


def _roll_back(folder: Path, journal: Journal) -> None:
    """Everything as it was before; may be interrupted and begun again."""
    work = folder / WORK_FOLDER
    _check_old(work, journal)
    if (folder / CONFIG_FILE).exists():
        _move(folder, work, CONFIG_FILE)
    if journal.manifest is None:
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
    else:
        write_whole(work / MANIFEST_FILE, journal.manifest.encode())
        _move(work, folder, MANIFEST_FILE)
    _put(folder, journal, work / OLD_BYTES)
    _move(work, folder, CONFIG_FILE)
    _remove(work)


def _check_old(folder: Path, journal: Journal) -> None:
    """Raise OutputError if the old bytes in `folder` are not those that the journal recorded."""
    with readable(folder / OLD_BYTES):
        found = hash_file(folder / OLD_BYTES).sha256
    if journal.old_sha256 not in (None, found):
        what = f"{folder / OLD_BYTES} is damaged: sha256 {found}, and {journal.old_sha256} was written"
        raise OutputError(f"{what}; nothing is put back", hint="Download or convert the checkpoint again.")


def _put(folder: Path, journal: Journal, data: Path) -> None:
    """Write the bytes in the file `data` to the journal's places, and flush."""
    with data.open("rb") as stream:
        for shard in dict.fromkeys(spot.shard for spot in journal.spots):
            file = os.open(folder / shard, os.O_WRONLY)
            try:
                for spot in (spot for spot in journal.spots if spot.shard == shard):
                    write_patches(file, [_patch(spot, stream.read(spot.nbytes))])
                os.fsync(file)
            finally:
                os.close(file)


def _patch(spot: Spot, data: bytes) -> Patch:
    tensor = StoredTensor(TensorSpec("", "U8", (spot.nbytes,)), spot.shard, 0)
    return Patch(tensor, spot.offset, np.frombuffer(data, np.uint8))


def _read(folder: Path, spot: Spot) -> bytes:
    path = folder / spot.shard
    with readable(path), path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), spot.nbytes, spot.offset)


def _check_own(folder: Path, shards: Sequence[str]) -> None:
    """The shards are this folder's alone: an edit through a link would change another checkpoint."""
    for shard in shards:
        path = folder / shard
        if path.is_symlink() or path.stat().st_nlink > 1:
            raise OutputError(
                f"{path} is a link, and its bytes belong to another folder, too (the Hub's cache?)",
                hint="Fold into a copy: -o OUT.",
            )


def _digest_in(folder: Path) -> str | None:
    try:
        made = read_manifest(folder)
    except SourceError:
        return None
    return made.fold.digest if made and made.fold else None


def _move(source: Path, target: Path, name: str) -> None:
    os.rename(source / name, target / name)
    for folder in (source, target):
        sync(folder, os.O_DIRECTORY)


def _remove(work: Path) -> None:
    """Empty the work folder but for the lock, the journal first: without it there is nothing to go back to."""
    (work / _JOURNAL).unlink(missing_ok=True)
    clear(work, keep=(LOCK_FILE,))
    sync(work.parent, os.O_DIRECTORY)

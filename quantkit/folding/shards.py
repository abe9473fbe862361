"""Shards with patches: copied or cloned, and hashed on the way as they were and as they become."""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.source import readable
from quantkit.checkpoint.writer import OutputFolder, explained
from quantkit.folding.plan import place
from quantkit.progress import Advance
from quantkit.weights.rescale import Patch

FICLONE = 0x40049409  # linux/fs.h: share a file's blocks until one of the two is written to
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Hashes:
    """The size of a shard, and its sha256 before and after the patches."""

    nbytes: int
    before: str
    after: str


def can_clone(source: Path, folder: Path) -> bool:
    """Whether files of `source` can be cloned into `folder`, or the next one above it that is there."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as target:
            clone(source, target.fileno())
        return True
    except OSError:
        return False


def clone(source: Path, target: int) -> None:
    """Let the file behind the descriptor `target` share all bytes of `source`; OSError where that cannot be."""
    with source.open("rb") as file:
        fcntl.ioctl(target, FICLONE, file.fileno())


def file_size(path: Path) -> int:
    """The bytes of a file. Raises SourceError if it is not there any more."""
    with readable(path):
        return path.stat().st_size


def write_shard(
    source: Path, name: str, patches: Sequence[Patch], folder: OutputFolder, cloned: bool, progress: Advance
) -> Hashes:
    """Put `source` with its patches into `folder` as `name`. Every byte is read; cloned, only patches are written."""
    size = file_size(source)
    if not cloned:
        with folder.shard(name, size) as shard:
            hashes = hash_patched(source, patches, progress, shard.append)
            shard.finish()
    else:
        with explained(folder.path / name), (folder.work / name).open("wb") as target:
            clone(source, target.fileno())
            write_patches(target.fileno(), patches)
        hashes = hash_patched(source, patches, progress)
    folder.publish(name)
    return hashes


def hash_patched(
    path: Path,
    patches: Sequence[Patch],
    progress: Advance = lambda done: None,
    write: Callable[[memoryview], None] = lambda data: None,
) -> Hashes:
    """The hashes of the file with and without the patches; `write` is given it piece by piece with them."""
    before, after, nbytes = hashlib.sha256(), hashlib.sha256(), 0
    for begin, piece in _pieces(path):
        before.update(piece)
        for patch in patches:
            _lay_over(piece, begin, patch)
        after.update(piece)
        write(piece)
        progress(len(piece))
        nbytes += len(piece)
    return Hashes(nbytes, before.hexdigest(), after.hexdigest())


def write_patches(file: int, patches: Sequence[Patch]) -> None:
    """Write patches to their places in the file behind a descriptor."""
    for patch in patches:
        data, offset = patch.data.data, place(patch)
        while data:
            done = os.pwrite(file, data, offset)
            data, offset = data[done:], offset + done


def _pieces(path: Path) -> Iterator[tuple[int, memoryview]]:
    """The file in pieces, each in the same buffer, and where they begin."""
    buffer, begin = memoryview(bytearray(_PIECE_BYTES)), 0
    with readable(path):
        file = path.open("rb", buffering=0)
    with file:
        while True:
            with readable(path):
                count = file.readinto(buffer)
            if not count:
                return
            yield begin, buffer[:count]
            begin += count


def _lay_over(piece: memoryview, begin: int, patch: Patch) -> None:
    """Put the part of a patch that falls into the piece of a file from `begin` on to its place."""
    offset = place(patch) - begin
    first, last = max(offset, 0), min(offset + len(patch.data), len(piece))
    if first < last:
        piece[first:last] = patch.data.data[first - offset : last - offset]

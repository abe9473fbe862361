"""The output folder. Nothing lands under a final name before it is whole and on the disk.

OUT/.quantkit/NAME        a file while it is written, the journal, and the lock
OUT/NAME                  the same after fsync and rename
OUT/config.json           last of all: a folder without it does not load, so an interrupted run never looks finished
"""

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.journal import COMMANDS
from quantkit.checkpoint.source import CONFIG_FILE, readable
from quantkit.errors import OutputError

MANIFEST_FILE = "quantkit.json"
WORK_FOLDER = ".quantkit"
LOCK_FILE = ".lock"  # in the work folder; no file of a checkpoint is called so
_BUFFER_BYTES = 8 << 20  # a multiple of any disk's block size
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: size in bytes and sha256."""

    nbytes: int
    sha256: str


class ShardFile:
    """A file that is written from its beginning to its end, and hashed on the way.

    The bytes pass by the page cache where the file system lets them: filling fresh cache pages costs several times as
    much as the writing itself, and a checkpoint would push everything else out of the memory.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))  # begins at a page, as direct writes must
        self._used = 0
        self._sha256 = hashlib.sha256()
        try:
            os.posix_fallocate(self._file, 0, size)  # before: where it is emulated, it writes single bytes
        except OSError:
            self.close()
            raise
        _write_past_cache(self._file)

    def append(self, data: memoryview) -> None:
        """Add all bytes of `data`."""
        data = data.cast("B")
        while data:
            piece = data[: _BUFFER_BYTES - self._used]
            self._buffer[self._used : self._used + len(piece)] = piece
            self._used += len(piece)
            data = data[len(piece) :]
            if self._used == _BUFFER_BYTES:
                self._write()

    def finish(self) -> str:
        """Write what is left, and return the sha256 of the whole file."""
        _write_through_cache(self._file)  # the end is no whole block
        self._write()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._file)

    def _write(self) -> None:
        data = self._buffer[: self._used]
        self._sha256.update(data)
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _write_through_cache(self._file):
                    raise
        self._used = 0


def _write_past_cache(file: int) -> None:
    """Let what follows pass by the page cache, if the file system can."""
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)


def _write_through_cache(file: int) -> bool:
    """Let the page cache take what follows; False if it did so already."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


class OutputFolder:
    """A folder that a checkpoint is written into, once `quantkit.checkpoint.output` has found that it may be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / WORK_FOLDER

    def check_space(self, needed_bytes: int, old_bytes: int = 0) -> None:
        """Raise OutputError when the disk has less than `needed_bytes`; `old_bytes` will be free by then."""
        _check_space(self.path, needed_bytes, old_bytes)

    @contextmanager
    def shard(self, name: str, size: int) -> Iterator[ShardFile]:
        """The file to write the shard `name` to, `size` bytes reserved; `publish` makes it final."""
        with explained(self.path / name):
            file = ShardFile(self.work / name, size)
            try:
                yield file
            finally:
                file.close()

    def publish(self, name: str) -> None:
        """Flush the file `name` and put it under its final name."""
        with explained(self.path / name):
            sync(self.work / name)
            os.rename(self.work / name, self.path / name)
            sync((self.path / name).parent, os.O_DIRECTORY)

    def write_text(self, name: str, text: str) -> str:
        """Write a whole text file and return its sha256."""
        data = text.encode("utf-8")  # line ends as they are
        with explained(self.path / name):
            (self.work / name).write_bytes(data)
        self.publish(name)
        return hashlib.sha256(data).hexdigest()

    def copy(self, source: Path, name: str) -> File:
        """Copy a file, through links, byte for byte. Raises SourceError for one that cannot be read."""
        with readable(source):
            original = source.open("rb")
        with original, explained(self.path / name):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            with (self.work / name).open("wb+") as file:
                shutil.copyfileobj(original, file)
                file.seek(0)
                copied = File(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
        self.publish(name)
        return copied

    def link(self, source: Path, name: str) -> None:
        """Put a file under its final name as a hard link to `source`, or to what that leads to.

        Raises OutputError where the two are on different disks, or the file system has no hard links.
        """
        with explained(self.path / name):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(os.path.realpath(source), self.path / name)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise
                what = f"{self.path / name} cannot be a hard link to {source}: {error.strerror}"
                raise OutputError(what, hint="Choose a folder on the same disk, or give --in-place.") from error
            sync((self.path / name).parent, os.O_DIRECTORY)

    def seal(self, manifest_text: str, config_text: str) -> None:
        """Write the manifest and, last, the config; then nothing of the run is left but the checkpoint."""
        self.write_text(MANIFEST_FILE, manifest_text)
        self.write_text(CONFIG_FILE, config_text)
        self.tidy()

    def tidy(self) -> None:
        """Take the work folder away but for the lock; the journal goes last: until then the run can be gone on with."""
        with explained(self.work):
            clear(self.work, keep=(LOCK_FILE, *(command.journal for command in COMMANDS.values())))
            clear(self.work, keep=(LOCK_FILE,))
            sync(self.path, os.O_DIRECTORY)


def file_of(data: bytes) -> File:
    """What bytes are as a file."""
    return File(len(data), hashlib.sha256(data).hexdigest())


def clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Take out everything that is in `folder` but the entries to keep; of a link, not what it leads to."""
    for entry in sorted(folder.iterdir()):
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def check_apart(source: Path, output: Path) -> None:
    """Raise OutputError if the output is the source, or inside it, or around it, by any path or link."""
    ours, theirs = (Path(os.path.realpath(path)) for path in (output, source))  # which bears with links in a circle
    if source.is_dir() and (ours == theirs or ours in theirs.parents or theirs in ours.parents):
        raise OutputError(f"the output {output} and the source {source} overlap", hint="Choose another output.")


def _check_space(path: Path, needed_bytes: int, old_bytes: int) -> None:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free + old_bytes
    if free < needed_bytes:
        raise OutputError(
            f"{path} needs {needed_bytes:,} bytes, and its disk has {free:,} free",
            hint="Choose an output folder on another disk.",
        )


def sync(path: Path, flags: int = 0) -> None:
    """Flush a file, or with O_DIRECTORY a folder's entries, to the disk."""
    file = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, with its folder. Raises OutputError, naming it, if it cannot be.

    What is no file, such as a pipe, is written to as it is.
    """
    with explained(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path = Path(os.path.realpath(path))  # a link stays one
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(data)
            sync(part)
            os.rename(part, path)
        except (Exception, KeyboardInterrupt):
            part.unlink(missing_ok=True)
            raise
        sync(path.parent, os.O_DIRECTORY)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise OutputError, naming `path`, for what goes wrong in writing it."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Free some space and run again." if full else "Choose another place, or make this one writable."
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint=hint) from error

"""The output folder. Nothing lands under a final name before it is whole and on the disk.

OUT/.quantkit/NAME        a file while it is written, and the journal
OUT/NAME                  the same after fsync and rename
OUT/config.json           last of all: a folder without it does not load, so an interrupted run never looks finished
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE
from quantkit.errors import OutputError

MANIFEST_FILE = "quantkit.json"
WORK_FOLDER = ".quantkit"


class OutputFolder:
    """A folder that a checkpoint is written into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / WORK_FOLDER

    @classmethod
    def create(cls, path: Path, needed_bytes: int, *, overwrite: bool = False) -> "OutputFolder":
        """Make the folder, or empty it when `overwrite` is set and it is one of ours.

        Raises OutputError as `check` does, and when the disk has less than `needed_bytes`.
        """
        cls.check(path, overwrite=overwrite)
        old_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.exists() else 0
        _check_space(path, needed_bytes, old_bytes)
        folder = cls(path)
        with _explained(path):
            folder._empty()
            folder.work.mkdir(parents=True)
        return folder

    @classmethod
    def reopen(cls, path: Path, needed_bytes: int) -> "OutputFolder":
        """Go on in the folder of an interrupted run; raises OutputError when the disk has less than `needed_bytes`."""
        _check_space(path, needed_bytes, 0)
        return cls(path)

    @staticmethod
    def check(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        """Raise OutputError if `path` is in use, unless it is quantkit's own and to be overwritten or resumed."""
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return
        if resume and ((path / WORK_FOLDER).exists() or (path / MANIFEST_FILE).exists()):
            return
        if not overwrite:
            interrupted = (path / WORK_FOLDER).exists()
            hint = "Go on with --resume" if interrupted else "Choose another folder"
            what = "holds an interrupted run" if interrupted else "exists and is not empty"
            raise OutputError(f"{path} {what}", hint=f"{hint}, or give --overwrite.")
        if not (path / MANIFEST_FILE).exists() and not (path / WORK_FOLDER).exists():
            raise OutputError(
                f"{path} was not written by quantkit; it is not overwritten", hint="Remove it yourself if you mean it."
            )

    @contextmanager
    def shard(self, name: str, size: int) -> Iterator[int]:
        """A descriptor to write the shard `name` to, `size` bytes reserved; `publish` makes it final."""
        with _explained(self.path / name):
            file = os.open(self.work / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(file, 0, size)
                yield file
            finally:
                os.close(file)

    def publish(self, name: str) -> str:
        """Flush the file `name`, put it under its final name, and return its sha256."""
        with _explained(self.path / name):
            digest = sync_and_hash(self.work / name)
            os.rename(self.work / name, self.path / name)
            _sync_folder(self.path)
        return digest

    def write_text(self, name: str, text: str) -> str:
        """Write a whole text file and return its sha256."""
        with _explained(self.path / name):
            (self.work / name).write_bytes(text.encode("utf-8"))  # line ends as they are
        return self.publish(name)

    def copy(self, source: Path, name: str) -> str:
        """Copy a file, through links, byte for byte, and return its sha256."""
        with _explained(self.path / name):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.work / name)
        return self.publish(name)

    def seal(self, manifest_text: str, config_text: str) -> None:
        """Write the manifest and, last, the config; then nothing of the run is left but the checkpoint."""
        self.write_text(MANIFEST_FILE, manifest_text)
        self.write_text(CONFIG_FILE, config_text)
        shutil.rmtree(self.work)
        _sync_folder(self.path)

    def _empty(self) -> None:
        """Take out what an earlier run left, the config first, so that no half-removed folder can load."""
        for name in (CONFIG_FILE, INDEX_FILE):
            (self.path / name).unlink(missing_ok=True)
        for entry in self.path.iterdir() if self.path.exists() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _check_space(path: Path, needed_bytes: int, old_bytes: int) -> None:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free + old_bytes
    if free < needed_bytes:
        raise OutputError(
            f"{path} needs {needed_bytes / 1e9:,.1f} GB and its disk has {free / 1e9:,.1f} GB free",
            hint="Choose an output folder on another disk.",
        )


def write_at(file: int, offset: int, buffer: memoryview) -> None:
    """Write all of `buffer` to the descriptor `file` at the byte `offset`."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(file, buffer[done:], offset + done)


def sync_and_hash(path: Path) -> str:
    """Flush `path` to the disk and return its sha256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "Free some space and run again." if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint=hint) from error

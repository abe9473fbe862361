"""The folder that a command is asked to write to: whether it may, and the beginning of the run.

    output = Output(path, CONVERT, overwrite=True)
    output.check()                             nothing is touched; before anything that takes long
    with output.held():                        locked, and checked again
        folder = output.begin(nbytes, opening) emptied of what is ours, with a journal
        ...
        folder.seal(manifest, config)

A run that is refused between `held` and `begin` leaves nothing behind.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.journal import Command, Opening, append_line
from quantkit.checkpoint.lock import check_free, lock
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.occupancy import Listing, Occupant, find_run, own_run, read_listing
from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE
from quantkit.checkpoint.writer import MANIFEST_FILE, WORK_FOLDER, OutputFolder, clear, explained, sync
from quantkit.errors import OutputError


@dataclass(frozen=True)
class Output:
    """The folder `path` for the output of `command`.

    kind       of the report that a finished run leaves there as its manifest
    overwrite  what the command, or one whose manifest is of the same kind, has left there is removed
    resume     an interrupted run is gone on with
    """

    path: Path
    command: Command
    kind: type[Listing] = Manifest
    overwrite: bool = False
    resume: bool = False

    def check(self) -> None:
        """Raise OutputError if the folder is in use, unless all in it is ours and to be overwritten or gone on with."""
        check_free(self.path)
        try:
            self._check()
        except OutputError:  # of what a run that has begun or ended meanwhile was writing, perhaps
            check_free(self.path)
            self._check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other run out of the folder. Raises OutputError as `check` does, and if one is at work there."""
        with lock(self.path, self.command.name):
            self._check()
            yield

    def run(self) -> Opening | None:
        """The interrupted run that is to be gone on with, if there is one."""
        return own_run(self.path, self.command) if self.resume else None

    def finished(self) -> Listing | None:
        """The manifest of a run that has ended here, when it is to be gone on with; `check_whole` is to follow."""
        return read_listing(self.path, self.kind) if self.resume and not find_run(self.path) else None

    def check_whole(self, listing: Listing) -> None:
        """Raise OutputError if a file of a finished run is gone or changed; every byte is read."""
        with explained(self.path):
            if damage := Occupant(self.path, None, listing).damage():
                raise OutputError(f"{self.path} holds a finished run whose {damage}", hint=self.another())

    def another(self) -> str:
        """A hint for a finished run that is in the way: --overwrite is named only if it would be done."""
        occupant = Occupant(self.path, None, self._listing())
        anew = ", or give --overwrite." if occupant.listing and not occupant.foreign() else "."
        return f"Choose another folder{anew}"

    def begin(self, needed_bytes: int, opening: Opening) -> OutputFolder:
        """Empty the folder and write the first line of the journal; to be called while it is held.

        Raises OutputError when the disk has less than `needed_bytes`.
        """
        folder = OutputFolder(self.path)
        with explained(self.path):
            old_bytes = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
            folder.check_space(needed_bytes, old_bytes)
            self._empty()
            append_line(folder.work / self.command.journal, opening.to_line())
            sync(folder.work, os.O_DIRECTORY)
        return folder

    def reopen(self, needed_bytes: int) -> OutputFolder:
        """Go on in the folder; OutputError when the disk has less than `needed_bytes`."""
        folder = OutputFolder(self.path)
        folder.check_space(needed_bytes)
        return folder

    def _check(self) -> None:
        with explained(self.path):
            there = self.path.exists()
            if there and not self.path.is_dir():
                raise OutputError(f"{self.path} is a file, and the output is a folder", hint="Choose another one.")
            if not there or not self._is_used():
                return
            self._check_occupant(own_run(self.path, self.command))

    def _is_used(self) -> bool:
        return any(path.name != WORK_FOLDER for path in self.path.iterdir()) or find_run(self.path) is not None

    def _check_occupant(self, run: Opening | None) -> None:
        listing = self._listing()
        if run is None and not (self.overwrite or (self.resume and listing)):
            raise OutputError(f"{self.path} exists and is not empty", hint=self.another())
        if run is None and listing is None:
            what = f"{self.path} was not written by quantkit {self.command.name}; it is not overwritten"
            raise OutputError(what, hint="Remove it yourself if you mean it.")
        removed = self.overwrite or (run is not None and run.files is not None)
        if removed and (foreign := Occupant(self.path, run, listing).foreign()):
            what = "an interrupted run" if run else "an output of quantkit"
            raise OutputError(f"{self.path} holds {what}, and {foreign}", hint="Take that out of it first.")
        if run and not (self.overwrite or self.resume):
            hint = (
                "Go on with --resume, or give --overwrite." if self.command.resumes else "Start anew with --overwrite."
            )
            raise OutputError(f"{self.path} holds an interrupted run", hint=hint)

    def _listing(self) -> Listing | None:
        """A manifest that is not ours is nobody's when nothing is to be removed: the folder is in use all the same."""
        try:
            return read_listing(self.path, self.kind)
        except OutputError:
            if self.overwrite or self.resume:
                raise
            return None

    def _empty(self) -> None:
        """Take out what is ours, which is all.

        The config goes first, so that no half-removed folder loads, and the manifest and the journal, by which the
        next run knows the rest for ours, last.
        """
        for name in (CONFIG_FILE, INDEX_FILE):
            (self.path / name).unlink(missing_ok=True)
        clear(self.path, keep=(MANIFEST_FILE, WORK_FOLDER))
        (self.path / MANIFEST_FILE).unlink(missing_ok=True)
        if (self.path / WORK_FOLDER).is_dir():
            OutputFolder(self.path).tidy()

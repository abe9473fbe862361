"""What lies in a folder that is to be written to: an interrupted run, a finished one, or what is not quantkit's.

Only what is quantkit's beyond doubt is gone on with or removed: a run by its journal, a finished one by its manifest,
and then every other file by the list that the two hold.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from quantkit.checkpoint.digest import GATE_FILE, hash_file, hash_files
from quantkit.checkpoint.journal import COMMANDS, IN_PLACE, Command, Opening, read_opening, shards_of
from quantkit.checkpoint.manifest import Manifest, is_of_others
from quantkit.checkpoint.source import readable
from quantkit.checkpoint.writer import LOCK_FILE, MANIFEST_FILE, WORK_FOLDER, File
from quantkit.errors import OutputError, SourceError

UNDO_FOLDER = ".quantkit-fold"
OLD_BYTES, NEW_BYTES = "old", "new"  # of a fold in place: `quantkit.folding.in_place`
_LEFT_IN_PLACE = {OLD_BYTES, NEW_BYTES, MANIFEST_FILE, f".{MANIFEST_FILE}.part", f".{IN_PLACE.journal}.part"}
_HASHED_BYTES = 64 << 20  # of larger files the size must do: a checkpoint is not read to be thrown away
_REMOVE = "Remove it yourself if you mean it."


class Listing(Protocol):
    """A report that a finished run leaves as quantkit.json, with the files beside it."""

    @property
    def files(self) -> Mapping[str, File]:
        """Every file but itself."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that is in `text`; ValueError if it is none."""


def find_run(folder: Path) -> Opening | None:
    """The run that was interrupted in `folder`; None if there is none, or one that had done nothing yet.

    Raises OutputError for a work folder that is not one of quantkit, or of two runs.
    """
    work = folder / WORK_FOLDER
    if not os.path.lexists(work):
        return None
    if work.is_symlink() or not work.is_dir():
        raise OutputError(f"{work} is no folder of quantkit", hint=_REMOVE)
    journals = sorted({command.journal for command in COMMANDS.values()})
    try:
        with readable(work):
            found = [opening for name in journals if (opening := read_opening(work / name))]
            left = {path.name for path in work.iterdir()} - {LOCK_FILE, *journals}
    except (SourceError, ValueError) as error:
        what = f"{work} holds an interrupted run of another command or version of quantkit ({error})"
        raise OutputError(what, hint=_REMOVE) from error
    if not found and left and left <= _LEFT_IN_PLACE:  # nothing was edited yet, or everything was put back
        return Opening(IN_PLACE)
    if len(found) > 1 or (left and not found):
        what = "journals of two runs" if found else f"{min(left)} and no journal"
        raise OutputError(f"{work} holds {what}: whose it is cannot be told", hint=_REMOVE)
    return found[0] if found else None


def own_run(folder: Path, command: Command) -> Opening | None:
    """The interrupted run of `command` in `folder`, if there is one; OutputError for another command's."""
    run = find_run(folder)
    if run and run.command != command:
        what = f"{folder} holds an interrupted run of another command, quantkit {run.command.name}"
        raise OutputError(what, hint=run.command.go_on)
    return run


def is_idle(folder: Path) -> bool:
    """Whether there is no work folder, or one with nothing in it but the lock of a run that has ended."""
    work = folder / WORK_FOLDER
    if not work.is_dir() or work.is_symlink():
        return not os.path.lexists(work)
    return {path.name for path in work.iterdir()} <= {LOCK_FILE}


def read_listing(folder: Path, kind: type[Listing]) -> Listing | None:
    """The report of a finished run in `folder`; None if there is none.

    Raises OutputError for what is called so and is none, or of another kind.
    """
    path = folder / MANIFEST_FILE
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise OutputError(f"{path} is no manifest of this command: it is no file", hint=_REMOVE)
    try:
        return kind.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} is no manifest of this command: {error}", hint=_REMOVE) from error


@dataclass(frozen=True)
class Occupant:
    """What quantkit has left in `folder`: an interrupted run, a finished one, or both while it is being tidied up."""

    folder: Path
    run: Opening | None
    listing: Listing | None

    @property
    def known(self) -> dict[str, File | None]:
        """The files that may be there, with their sizes and hashes where they are recorded."""
        known: dict[str, File | None] = {}
        if self.run and self.run.files is not None:
            known = dict.fromkeys(self.run.files)
        elif self.run:
            known = dict.fromkeys(shards_of(self.folder / WORK_FOLDER / self.run.command.journal))
        if self.listing:
            known |= {name: None if self.run else file for name, file in self.listing.files.items()}
            known[GATE_FILE] = None
            if getattr(self.listing, "fold", None):
                known |= {f"{UNDO_FOLDER}/{name}": None for name in (IN_PLACE.journal, OLD_BYTES)}
        if known:
            known[MANIFEST_FILE] = None
        return known

    def foreign(self) -> str | None:
        """The first thing in the folder that quantkit did not write, in words; None if there is none."""
        if isinstance(self.listing, Manifest) and is_of_others(self.listing):
            return "weights that were there before quantkit edited them"
        known = self.known
        folders = {str(parent) for name in known for parent in Path(name).parents}
        for name, path in _entries(self.folder):
            shown = name.encode(errors="backslashreplace").decode()  # any bytes are a name
            if path.is_dir() and not path.is_symlink():
                if name not in folders:
                    return f"{shown}/, which it did not make"
            elif name not in known or path.is_symlink() or not path.is_file():
                return f"{shown}, which it did not write"
            elif (file := known[name]) and _differs(path, file):
                return f"{shown}, which was changed since"
        return None

    def damage(self) -> str | None:
        """The first file of a finished run that is gone or another one, in words; every byte is read."""
        listed = dict(sorted(self.listing.files.items())) if self.listing else {}
        for name, file in listed.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != file.nbytes:
                return f"{name} is {'another one' if path.exists() else 'gone'}"
        found = hash_files({name: self.folder / name for name in listed})
        return next((f"{name} is another one" for name, file in listed.items() if found[name] != file), None)


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Everything below `folder` but the work folder, by its name there; what a link leads to is not below."""
    for entry in sorted(folder.iterdir()):
        if entry.name != WORK_FOLDER:
            yield from _walk(folder, entry)


def _walk(folder: Path, entry: Path) -> Iterator[tuple[str, Path]]:
    yield entry.relative_to(folder).as_posix(), entry
    if entry.is_dir() and not entry.is_symlink():
        for inner in sorted(entry.iterdir()):
            yield from _walk(folder, inner)


def _differs(path: Path, file: File) -> bool:
    """Whether a file is not the one that is recorded, as far as a look at it tells."""
    if path.stat().st_size != file.nbytes:
        return True
    return file.nbytes <= _HASHED_BYTES and hash_file(path) != file

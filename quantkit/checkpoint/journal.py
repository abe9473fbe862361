"""Journals of open runs: a JSON object in each line, flushed to the disk before the run goes on.

    the first line    whose run it is, the files that it may leave in its folder, and what it is bound to
    each further one  what is finished

The last line may be torn by a crash; it then counts as not written.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quantkit.checkpoint.source import INDEX_FILE, Source
from quantkit.errors import OutputError
from quantkit.records import parse_json

T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """A command that writes into folders.

    name     as journals and locks have it
    journal  the file in the work folder, whose first line says `command`
    go_on    a hint: what may go on with its interrupted run
    fields   of a first line as it was before it said `command`; empty where there was none
    resumes  whether it has --resume
    """

    name: str
    journal: str
    go_on: str
    fields: frozenset[str] = frozenset()
    resumes: bool = False


_BOUND = frozenset({"version", "source config", "source headers"})
CONVERT = Command(
    "convert",
    "journal.jsonl",
    "Go on with quantkit convert --resume.",
    fields=_BOUND | {"recipe"},
    resumes=True,
)
RESPELL = Command("convert --respell", "journal.jsonl", "Only quantkit convert --respell may begin it anew.")
FOLD = Command("fold", "journal.jsonl", "Only quantkit fold -o may begin it anew.")
PATCH = Command("fold --patch-only", "journal.jsonl", "Only quantkit fold --patch-only may begin it anew.")
IN_PLACE = Command(
    "fold --in-place",
    "fold.json",
    "Run it again, or take it back: quantkit fold --undo.",
    fields=frozenset({"digest", "manifest", "new_sha256", "spots"}),
)
CALIBRATE = Command(
    "calibrate",
    "calibration.jsonl",
    "Go on with quantkit calibrate --resume.",
    fields=_BOUND | {"source files", "data", "options"},
    resumes=True,
)
COMMANDS = {command.name: command for command in (CONVERT, RESPELL, FOLD, PATCH, IN_PLACE, CALIBRATE)}


@dataclass(frozen=True)
class Opening:
    """The first line of a journal.

    files    that the run may leave in its folder; None in a journal of a version that did not say
    binding  what a run that goes on must have in common with it
    """

    command: Command
    files: frozenset[str] | None = frozenset()
    binding: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> dict[str, Any]:
        """As it is written."""
        assert self.files is not None
        return {"command": self.command.name, "files": sorted(self.files), **self.binding}

    @classmethod
    def from_line(cls, line: Mapping[str, Any], journal: str) -> "Opening | None":
        """What `to_line` made, or an earlier version, in a file called `journal`; None for anything else."""
        known = [each for each in COMMANDS.values() if each.journal == journal]
        binding = {name: value for name, value in line.items() if name not in ("command", "files")}
        if "command" not in line:
            old = next((each for each in known if each.fields and each.fields == line.keys()), None)
            return cls(old, None, binding) if old else None
        command, files = COMMANDS.get(str(line["command"])), line.get("files")
        if command not in known or not isinstance(files, list) or not all(isinstance(name, str) for name in files):
            return None
        return cls(command, frozenset(files), binding)

    def differences(self, now: "Opening") -> Iterator[str]:
        """In words, in what the run that goes on differs from this one."""
        yield from differences(dict(self.binding), json.loads(json.dumps(dict(now.binding))))
        if self.files is not None and now.files is not None:
            for name in sorted(self.files ^ now.files):
                yield f"files: {name} {'before' if name in self.files else 'now'} alone"


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Add a line to the journal `path`, and wait until the disk has it."""
    with path.open("ab") as file:
        file.write(json.dumps(content).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_opening(path: Path) -> Opening | None:
    """The first line of the journal `path`.

    None if there is no journal or its first line is torn: nothing was done yet. Raises ValueError for what is no
    journal of quantkit.
    """
    if not os.path.lexists(path):
        return None
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path.name} is no file")
    with path.open("rb") as file:
        first = file.readline()
    if not first.endswith(b"\n") and path.suffix == ".jsonl":
        return None
    line = parse_json(first.decode())
    opening = Opening.from_line(line, path.name) if isinstance(line, dict) else None
    if opening is None:
        raise ValueError("not a journal of quantkit, or of another version")
    return opening


def reopen_journal(path: Path, opening: Opening, parse: Callable[[dict[str, Any]], T]) -> tuple[T, ...] | None:
    """The entries of the journal `path`, to be gone on with; None if there is none, or not even a whole first line.

    A line that `parse` refuses with ValueError, and what might follow it, is cut off. Raises OutputError, naming the
    first difference, if the run that was interrupted began otherwise than `opening`.
    """
    before = read_opening(path)
    if before is None:
        return None
    if difference := next(before.differences(opening), None):
        anew = "." if before.files is None else ", or start anew with --overwrite."
        raise OutputError(
            f"{path.parent.parent}: the run that was interrupted differs in {difference}",
            hint=f"Go on with the same options, source and data{anew}",
        )
    first, *lines = path.read_bytes().splitlines(keepends=True)
    entries, whole = [], len(first)
    for line in lines:
        try:
            entries.append(_parse_line(line, parse))
        except ValueError:
            break
        whole += len(line)
    os.truncate(path, whole)
    return tuple(entries)


def _parse_line(line: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    content = parse_json(line.decode()) if line.endswith(b"\n") else None
    if not isinstance(content, dict):
        raise ValueError("torn")
    return parse(content)


def shards_of(path: Path) -> frozenset[str]:
    """The files that a journal without a list of them is known to have left: finished shards, and the index."""
    names = {INDEX_FILE}
    for line in path.read_bytes().splitlines():
        try:
            content = parse_json(line.decode())
        except ValueError:
            break
        if isinstance(content, dict) and isinstance(content.get("shard"), str):
            names.add(content["shard"])
    return frozenset(names)


def source_binding(source: Source) -> dict[str, str]:
    """What a journal binds a run to: the digests of the config and of all headers."""
    headers = hashlib.sha256()
    for name, tensor in sorted(source.tensors.items()):
        headers.update(f"{name} {tensor.spec.dtype} {tensor.spec.shape} {tensor.shard} {tensor.offset}\n".encode())
    return {
        "source config": hashlib.sha256(source.config_text.encode()).hexdigest(),
        "source headers": headers.hexdigest(),
    }


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """In words, each field in which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {old} before, {new} now"

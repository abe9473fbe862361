"""The journal of an open run, so that it can go on after a kill -9: a JSON object in each line of `journal.jsonl`.

    the first line    what the run is bound to: version, recipe, and digests of the source's config and headers
    each further one  a shard that is whole under its final name, and the sha256 of every source shard that went into it

A line is flushed before the next shard's is written. The last line may be torn; it then counts as not written.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import OutputError
from quantkit.plan import Plan
from quantkit.version import VERSION

JOURNAL_FILE = "journal.jsonl"


@dataclass(frozen=True)
class Entry:
    """A finished shard: its size and sha256, those of the source shards that it was made from, by name, how many of its
    NVFP4 groups were clamped, raised or flushed, and the scales in it whose reciprocals were rounded."""

    shard: str
    nbytes: int
    sha256: str
    sources: dict[str, str]
    counts: dict[str, int] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Journal:
    """The journal in `folder`, with the entries that it held when it was opened."""

    path: Path
    entries: tuple[Entry, ...] = ()

    @classmethod
    def begin(cls, folder: Path, plan: Plan) -> "Journal":
        """Start the journal of a new run."""
        journal = cls(folder / JOURNAL_FILE)
        journal._append(_binding(plan))
        return journal

    @classmethod
    def reopen(cls, folder: Path, plan: Plan) -> "Journal | None":
        """Go on with the journal in `folder`; None if there is none, or not even a whole first line.

        Raises OutputError, naming the first field that differs, if it belongs to another version, recipe or source.
        """
        path = folder / JOURNAL_FILE
        lines, whole = _read(path)
        if not lines:
            return None
        if difference := next(_differences(lines[0], _binding(plan), ""), None):
            raise OutputError(
                f"{folder.parent}: the run that was interrupted differs in {difference}",
                hint="Go on with the same options and source, or start anew with --overwrite.",
            )
        os.truncate(path, whole)
        return cls(path, tuple(Entry(**line) for line in lines[1:]))

    def add(self, entry: Entry) -> None:
        """Record a finished shard."""
        self._append(asdict(entry))

    def _append(self, content: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(content).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _binding(plan: Plan) -> dict[str, Any]:
    headers = hashlib.sha256()
    for name, tensor in sorted(plan.source.tensors.items()):
        headers.update(f"{name} {tensor.spec.dtype} {tensor.spec.shape} {tensor.shard} {tensor.offset}\n".encode())
    binding = {
        "version": VERSION,
        "recipe": plan.recipe.as_dict(),
        "source config": hashlib.sha256(plan.source.config_text.encode()).hexdigest(),
        "source headers": headers.hexdigest(),
    }
    return dict(json.loads(json.dumps(binding)))


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines, and how many bytes they are; a torn line, and what might follow it, is left out."""
    lines: list[dict[str, Any]] = []
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            content = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            break
        lines.append(content)
        whole += len(line)
    return lines, whole


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {old} before, {new} now"

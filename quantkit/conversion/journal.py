"""The journal of an open run, so that it can go on after a kill -9: a JSON object in each line of `journal.jsonl`.

    the first line    what the run is bound to: version, recipe, and digests of the source's config and headers
    each further one  a shard that is whole under its final name, and the sha256 of every source shard that went into it

A line is flushed before the next shard's is written. How lines are kept: `quantkit.checkpoint.journal`.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.journal import append_line, differences, read_lines, source_binding
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
        append_line(journal.path, _binding(plan))
        return journal

    @classmethod
    def reopen(cls, folder: Path, plan: Plan) -> "Journal | None":
        """Go on with the journal in `folder`; None if there is none, or not even a whole first line.

        Raises OutputError, naming the first field that differs, if it belongs to another version, recipe or source.
        """
        path = folder / JOURNAL_FILE
        lines, whole = read_lines(path)
        if not lines:
            return None
        if difference := next(differences(lines[0], _binding(plan)), None):
            raise OutputError(
                f"{folder.parent}: the run that was interrupted differs in {difference}",
                hint="Go on with the same options and source, or start anew with --overwrite.",
            )
        os.truncate(path, whole)
        return cls(path, tuple(Entry(**line) for line in lines[1:]))

    def add(self, entry: Entry) -> None:
        """Record a finished shard."""
        append_line(self.path, asdict(entry))


def _binding(plan: Plan) -> dict[str, Any]:
    binding = {"version": VERSION, "recipe": plan.recipe.as_dict(), **source_binding(plan.source)}
    return dict(json.loads(json.dumps(binding)))

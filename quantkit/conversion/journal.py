"""The journal of an open run, so that it can go on after a kill -9: a JSON object in each line of `journal.jsonl`.

    the first line    what the run is bound to: version, recipe, and digests of the source's config and headers
    each further one  a shard that is whole under its final name, and the sha256 of every source shard that went into it

A line is flushed before the next shard's is written. How lines are kept: `quantkit.checkpoint.journal`.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.journal import CONVERT, Opening, append_line, reopen_journal, source_binding
from quantkit.checkpoint.writer import MANIFEST_FILE
from quantkit.conversion.plan import Plan
from quantkit.records import read_record
from quantkit.version import VERSION

_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    """The journal in `folder`, with the entries that it held when it was opened: the last one of each shard."""

    path: Path
    entries: tuple[Entry, ...] = ()

    @classmethod
    def begin(cls, folder: Path) -> "Journal":
        """The journal of a run whose first line was just written."""
        return cls(folder / CONVERT.journal)

    @classmethod
    def reopen(cls, folder: Path, plan: Plan, opening: Opening) -> "Journal | None":
        """Go on with the journal in `folder`, up to the first line that is not of this plan; None if there is none.

        Raises OutputError, naming the first field that differs, if it belongs to another version, recipe or source.
        """
        sources = {job.shard: job.reads for job in plan.jobs}
        sizes = {job.shard: job.file_bytes for job in plan.jobs}

        def parse(line: dict[str, Any]) -> Entry:
            entry = read_record(Entry, line)
            hashes = (entry.sha256, *entry.sources.values())
            if sizes.get(entry.shard) != entry.nbytes or set(sources[entry.shard]) != entry.sources.keys():
                raise ValueError(f"{entry.shard} is no shard of the plan, or of another size or source")
            if not all(_SHA256.fullmatch(sha256) for sha256 in hashes) or min(entry.counts.values(), default=0) < 0:
                raise ValueError(f"{entry.shard} has no sound hash or count")
            return entry

        entries = reopen_journal(folder / CONVERT.journal, opening, parse)
        if entries is None:
            return None
        return cls(folder / CONVERT.journal, tuple({entry.shard: entry for entry in entries}.values()))

    def add(self, entry: Entry) -> None:
        """Record a finished shard."""
        append_line(self.path, asdict(entry))


def open_with(plan: Plan, beside: Iterable[str]) -> Opening:
    """What a run of `plan` begins its journal with; `beside` are the names of the files that go along."""
    binding = {"version": VERSION, "recipe": plan.recipe.as_dict(), **source_binding(plan.source)}
    files = {*(job.shard for job in plan.jobs), *plan.texts, *beside, MANIFEST_FILE}
    return Opening(CONVERT, frozenset(files), dict(json.loads(json.dumps(binding))))

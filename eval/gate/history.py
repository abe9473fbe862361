"""Results that are already known: an SQLite file of task runs, keyed by all that they depend on.

The key is a digest of the checkpoint's content, not of its path, with the task's definition, documents and settings,
and with dtype and KV scales of the pages it ran on, if there were any: other weights at the same path are another key,
the same weights on other pages too, and a baseline is not run twice.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantkit.errors import OutputError
from quantkit.eval.gate.runs import TaskRun

FILE = "history.sqlite"
_TABLE = """CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY, checkpoint TEXT NOT NULL, task TEXT NOT NULL, run TEXT NOT NULL,
    kept_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)"""


class History:
    """The task runs in the SQLite file `path`, which is made when one is first looked for; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def find(
        self, checkpoint: str, task: str, settings: dict[str, Any], pages: Mapping[str, str] = MappingProxyType({})
    ) -> TaskRun | None:
        """The run of `task` with these settings by the checkpoint of that digest, on these pages.

        Raises OutputError where `keep` could not keep it: before it is run, not after.
        """
        if self._path is None:
            return None
        with self._open() as database:
            key = _key(checkpoint, task, settings, pages)
            row = database.execute("SELECT run FROM runs WHERE key = ?", (key,)).fetchone()
        try:
            return TaskRun.from_json(row[0]) if row else None
        except (ValueError, KeyError, TypeError):  # an older version's, or damaged
            return None

    def keep(self, checkpoint: str, run: TaskRun) -> None:
        """Remember `run`, in the place of an earlier one of the same key."""
        if self._path is None:
            return
        with self._open() as database, database:
            database.execute(
                "INSERT OR REPLACE INTO runs (key, checkpoint, task, run) VALUES (?, ?, ?, ?)",
                (_key(checkpoint, run.task, run.settings, run.pages), checkpoint, run.task, run.to_json()),
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=60)) as database:
                database.execute(_TABLE)
                yield database
        except (OSError, sqlite3.Error) as error:
            raise OutputError(
                f"{self._path}: results cannot be kept or found: {error}",
                hint="Give another file with --history, or --no-history.",
            ) from error


def _key(checkpoint: str, task: str, settings: dict[str, Any], pages: Mapping[str, str]) -> str:
    """Where the scales were read is no part of it: their digest is."""
    kept = {name: value for name, value in pages.items() if name != "scales"}
    content = json.dumps([checkpoint, task, settings, *([kept] if kept else [])], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()

"""Faults that strike a worker process at a named point, once; which one and where is written into a file."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

POINTS = {
    "prefill": ("started", "ready", "received", "chunk", "computed", "half written", "written", "complete", "told"),
    "decode": (
        *("started", "ready", "received", "checked", "converted", "opened", "acknowledged"),
        *("step", "stepped", "sent"),
    ),
}


@dataclass(frozen=True)
class Trap:
    """The hook of the workers of one role: the first to reach the point named in the file ends as it says."""

    role: str
    file: Path

    def __call__(self, point: str) -> None:
        try:
            role, place, how = self.file.read_text().split(",")
        except OSError:
            return
        if (role, place) != (self.role, point):
            return
        try:
            self.file.unlink()
        except FileNotFoundError:
            return  # another one was first
        if how == "hang":
            signal.pause()
        os.kill(os.getpid(), signal.Signals[how])
        signal.pause()

    def set(self, role: str, point: str, how: str) -> None:
        """Lay the trap; whole at once."""
        new = self.file.with_suffix(".new")
        new.write_text(f"{role},{point},{how}")
        new.rename(self.file)

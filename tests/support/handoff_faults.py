"""Faults that strike a worker process at a named point, once; which one and where is written into a file."""

import gc
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from quantkit.runtime.allocator import Generations

POINTS = {
    "prefill": ("started", "ready", "received", "chunk", "computed", "half written", "written", "complete", "told"),
    "decode": (
        *("started", "ready", "received", "checked", "converted", "opened", "acknowledged"),
        *("step", "stepped", "sent"),
    ),
}


@dataclass(frozen=True)
class Trap:
    """The hook of the workers of one role: the first to reach the point named in the file ends as it says, pauses until
    it is let go, or finds the tags of its pages changed.
    """

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
        if how == "pause":
            while not self._gate.exists():
                time.sleep(0.01)
            self._gate.unlink()
            return
        if how == "smudge":
            smudge()
            return
        if how == "hang":
            signal.pause()
        os.kill(os.getpid(), signal.Signals[how])
        signal.pause()

    def set(self, role: str, point: str, how: str) -> None:
        """Lay the trap; whole at once."""
        self._gate.unlink(missing_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(f"{role},{point},{how}")
        new.rename(self.file)

    def let_go(self) -> None:
        """End the pause."""
        self._gate.touch()

    @property
    def _gate(self) -> Path:
        return self.file.with_suffix(".go")


def smudge() -> None:
    """Change the tags of this process's pages as a stray write would: its bookkeeping does not know."""
    for ledger in gc.get_objects():
        if type(ledger) is Generations:
            for page in range(len(ledger.numbers)):
                ledger.tags[page] ^= 1 << 40

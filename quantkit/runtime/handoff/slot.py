"""The coordinator's side of one worker process: start it, talk to it, notice that it is gone or hangs."""

import contextlib
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from quantkit.errors import QuantkitError, WorkerError
from quantkit.runtime.handoff.messages import Failed, Ready
from quantkit.runtime.handoff.worker import WorkerSettings, serve

_LEAVING = 2.0  # seconds that a process takes to end once it has closed its pipe

Context = ForkServerContext | SpawnContext


class Slot:
    """A place for a worker process, which may be started again.

    running   whether there is one
    ready     what it said when it had loaded; None before
    starts    that are left
    deadline  by when it must give a sign of life; None while nothing is expected of it
    """

    connection: Connection

    def __init__(self, settings: WorkerSettings, index: int, context: Context, starts: int) -> None:
        self.role, self.index, self.starts = settings.role, index, starts
        self.running = False
        self.ready: Ready | None = None
        self.deadline: float | None = None
        self._failure: QuantkitError | None = None
        self._settings, self._context = settings, context

    @property
    def name(self) -> str:
        """As the user reads it."""
        return f"{self.role} worker {self.index}"

    @property
    def key(self) -> dict[str, int]:
        """How the board calls it."""
        return {str(self.role): self.index}

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return self._process.pid

    @property
    def is_overdue(self) -> bool:
        """Whether a sign of life is missing."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def start(self, timeout: float) -> None:
        """Start a process, which has `timeout` seconds to be ready. Raises WorkerError if the system has none left."""
        self.starts -= 1
        try:
            self.connection, theirs = self._context.Pipe()
            with theirs:
                args = self._settings, theirs
                self._process = self._context.Process(target=serve, args=args, name=self.name, daemon=True)
                self._process.start()
        except (OSError, EOFError) as error:
            raise WorkerError(f"{self.name} cannot be started: {error}") from error
        self.running, self.ready, self._failure, self.deadline = True, None, None, time.monotonic() + timeout

    def expect(self, owes: bool, timeout: float) -> None:
        """Whether the worker has something to get on with, of which it gives a sign every `timeout` seconds."""
        if self.ready is not None:
            self.deadline = (self.deadline or time.monotonic() + timeout) if owes else None

    def send(self, message: Any) -> None:
        """Tell the worker; if it is gone, `receive` will say so."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> tuple[list[Any], QuantkitError | None]:
        """What the worker has said, and why it is no more, if it is not."""
        messages: list[Any] = []
        try:
            while self.connection.poll():
                message = self.connection.recv()
                self.deadline = None
                if isinstance(message, Ready):
                    self.ready = message
                elif isinstance(message, Failed):
                    self._failure = message.error
                    return messages, self._end()
                else:
                    messages.append(message)
        except (EOFError, OSError):
            return messages, self._end()
        return messages, self._end() if self.is_overdue else None

    def kill(self) -> None:
        """End the process and wait until it is gone."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self.running = False

    def _end(self) -> QuantkitError:
        """Wait for the end of a process, and say why it came."""
        overdue = self.is_overdue
        if not overdue:
            self._process.join(_LEAVING)
        self.kill()
        if failure := self._failure:
            failure.args = (f"{self.name}: {failure}",)
            return failure
        when = "" if self.ready else " while it was starting"
        if overdue:
            return WorkerError(f"{self.name} gave no sign of life{when}, and was ended")
        code = self._process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "Each worker loads its own copy of the weights: look at the machine's memory."
        return WorkerError(f"{self.name} {how}{when}", hint=hint)

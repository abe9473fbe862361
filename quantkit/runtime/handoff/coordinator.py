"""Prefill and decode in processes of their own: requests in, tokens out, as the engine has it.

    with Coordinator(prefill, decode) as coordinator:
        number = coordinator.submit(prompt, max_new_tokens=100)
        coordinator.run(on_event)
        coordinator.take(number)

The coordinator makes the segments of shared memory and removes them, so nothing is left of them however a worker ends:
a segment goes once the worker that was told of it has answered or is gone. If the coordinator itself is killed,
Python's resource tracker removes them.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import Literal, Self

from quantkit.errors import HandoffError, QuantkitError, RequestError, UsageError, WorkerError
from quantkit.runtime.handoff.counters import HandoffCounters, HandoffReport
from quantkit.runtime.handoff.jobs import Board, Job
from quantkit.runtime.handoff.messages import Compute, Drop, Exported, Open, Opened, Produced, Ready, Refused, Said
from quantkit.runtime.handoff.shared import make_segment, remove_segment
from quantkit.runtime.handoff.slot import Context, Slot
from quantkit.runtime.handoff.terms import check_identity, check_peers
from quantkit.runtime.handoff.worker import Role, WorkerSettings
from quantkit.runtime.requests import Completion, Event, Finish, check_request, most_tokens
from quantkit.runtime.sampling import GREEDY, Sampling

_PRELOAD = "quantkit.runtime.handoff.preload"


@dataclass(frozen=True)
class CoordinatorOptions:
    """How many workers there are, and how long they are waited for.

    attempts       at a request, the first included
    restarts       of each worker that died or hung
    timeout        seconds without a chunk or a step after which a worker that has work counts as hung
    start_timeout  seconds to load a checkpoint
    start_method   forkserver: workers are forked off a process that has imported torch, and no weights; or spawn
    """

    prefill_workers: int = 1
    decode_workers: int = 1
    attempts: int = 3
    restarts: int = 2
    timeout: float = 300.0
    start_timeout: float = 3600.0
    start_method: Literal["forkserver", "spawn"] = "forkserver"

    def __post_init__(self) -> None:
        if min(self.prefill_workers, self.decode_workers, self.attempts) < 1 or self.restarts < 0:
            raise UsageError("one prefill worker, one decode worker and one attempt at a request are the least")


class Coordinator:
    """Serves requests with the workers that it starts; use it in a `with` statement.

    prefill, decode  what the workers of each kind said when they had loaded
    counters         what was done, and what went wrong

    Raises the error of a worker that cannot start, and HandoffError for workers that do not go together.
    """

    prefill: Ready
    decode: Ready

    def __init__(
        self, prefill: WorkerSettings, decode: WorkerSettings, options: CoordinatorOptions = CoordinatorOptions()
    ) -> None:
        check_identity(prefill.identity, decode.identity)
        self._options = options
        context: Context = SpawnContext() if options.start_method == "spawn" else ForkServerContext()
        context.set_forkserver_preload([_PRELOAD])
        counts = ((prefill, options.prefill_workers), (decode, options.decode_workers))
        self.slots = [
            Slot(settings, index, context, options.restarts + 1) for settings, count in counts for index in range(count)
        ]
        self.counters = HandoffCounters()
        self._board = Board(options.attempts)
        self._segments: dict[int, SharedMemory] = {}
        self._numbers = count()
        self._gone = {role: WorkerError(f"all {role} workers have been ended") for role in Role}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """Whether there is something to wait for, or an event to tell."""
        return bool(self._board.jobs or self._board.events)

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling = GREEDY, stop: Iterable[int] = ()
    ) -> int:
        """Add a request, as `Engine.submit` does; RequestError for one that no worker of a kind could ever serve."""
        for ready, given, new in ((self.prefill, prompt[:-1] or prompt, 2), (self.decode, prompt, max_new_tokens)):
            check_request(given, new, ready.config, ready.spec, ready.num_pages)
        number, pages = next(self._numbers), self.decode.spec.pages_for(most_tokens(prompt, max_new_tokens))
        self._board.jobs[number] = Job(number, tuple(prompt), max_new_tokens, sampling, frozenset(stop), pages)
        return number

    def abort(self, number: int) -> None:
        """End a request now, as `Engine.abort` does; a worker that has it is told, and drops it when it can."""
        if job := self._find_live(number):
            self._end(job, Finish.ABORTED)
        elif number not in self._board.done:
            raise RequestError(f"there is no request {number}")

    def step(self) -> tuple[Event, ...]:
        """Give out what can be given, wait until a worker says something or is overdue, and tell what came of it."""
        self._end_unservable()
        self._dispatch()
        if self._board.jobs and not self._board.events:
            for slot in self._wait():
                self._hear(slot)
        self._sweep()
        self.counters.retried = self._board.retried
        events, self._board.events = tuple(self._board.events), []
        return events

    def take(self, number: int) -> Completion:
        """What came of a finished request, which is forgotten."""
        if self._find_live(number):
            raise RequestError(f"request {number} is not finished")
        if number not in self._board.done:
            raise RequestError(f"there is no request {number}")
        return self._board.done.pop(number)

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        """Step until all requests are finished, and no worker has one; `on_event` is told each token when it comes."""
        while self.busy:
            for event in self.step():
                on_event(event)

    def report(self) -> HandoffReport:
        """What was done so far."""
        return self.counters.report(self._options.prefill_workers, self._options.decode_workers)

    def close(self) -> None:
        """End all workers, which have nothing to lose, and remove the segments."""
        for slot in self.slots:
            if slot.running:
                slot.kill()
        while self._segments:
            remove_segment(self._segments.popitem()[1])

    def _start(self) -> None:
        """Start all workers, and wait until they are ready and known to go together."""
        for slot in self.slots:
            slot.start(self._options.start_timeout)
        while not all(slot.ready for slot in self.slots):
            for slot in self._wait():
                _, error = slot.receive()
                if error:
                    raise error
        told = {slot.name: (slot.role, slot.ready) for slot in self.slots if slot.ready}
        for ours, (role, prefill) in told.items():
            for theirs, (other, decode) in told.items():
                if (role, other) == (Role.PREFILL, Role.DECODE):
                    check_peers(prefill.terms, decode.terms, (ours, theirs))
                    self.prefill, self.decode = prefill, decode
        self._board.room = self.decode.num_pages

    def _ready(self, role: Role) -> list[Slot]:
        return [slot for slot in self.slots if slot.role is role and slot.running and slot.ready]

    def _find_live(self, number: int) -> Job | None:
        job = self._board.jobs.get(number)
        return None if job is None or job.ended else job

    def _end(self, job: Job, finish: Finish, error: QuantkitError | None = None) -> None:
        """End a request, and tell the worker that has it."""
        for slot in self.slots:
            if job in self._board.owed(**slot.key):
                slot.send(Drop(job.nonce))
        self._board.end(job, finish, error)

    def _end_unservable(self) -> None:
        """End the requests that need workers of a kind of which there are none any more."""
        for role in Role:
            if not any(slot.running for slot in self.slots if slot.role is role):
                for job in self._board.needing(role):
                    self._end(job, Finish.FAILED, self._gone[role])

    def _dispatch(self) -> None:
        """Give queued requests to idle prefill workers, and complete segments to decode workers."""
        decodes = {slot.index: slot for slot in self._ready(Role.DECODE)}
        for slot in self._ready(Role.PREFILL):
            if self._board.owed(**slot.key) or not (job := self._board.next_to_compute(slot.index, decodes)):
                continue
            try:
                self._segments[job.nonce] = make_segment(job.prompt, self.prefill)
            except HandoffError as error:
                self._board.put_back(job)
                if not self._segments:  # else it waits for their room
                    self._board.end(job, Finish.FAILED, error)
                break
            slot.send(Compute(job.ticket, self._segments[job.nonce].name))
        while job := self._board.next_to_open(decodes):
            assert job.decode is not None
            order = Open(job.ticket, self._segments[job.nonce].name, job.max_new_tokens, job.sampling, job.stop)
            decodes[job.decode].send(order)

    def _wait(self) -> list[Slot]:
        """The workers that have said something, or are overdue or gone."""
        running = [slot for slot in self.slots if slot.running]
        for slot in running:
            slot.expect(bool(self._board.owed(**slot.key)), self._options.timeout)
        deadlines = [slot.deadline for slot in running if slot.deadline is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        heard = connection.wait([slot.connection for slot in running], timeout)
        return [slot for slot in running if slot.connection in heard or slot.is_overdue]

    def _hear(self, slot: Slot) -> None:
        """Do as a worker says, and put another in its place if it is no more."""
        said, error = slot.receive()
        for message in said:
            self._heed(slot, message)
        if error is None:
            return
        lost = error if isinstance(error, WorkerError) else WorkerError(str(error), hint=error.hint)
        self.counters.lost[slot.role] += 1
        self._board.lost(lost, **slot.key)
        self._gone[slot.role] = lost
        while slot.starts and not slot.running:
            try:
                slot.start(self._options.start_timeout)
                self.counters.restarted += 1
            except WorkerError as none:
                self._gone[slot.role] = none

    def _heed(self, slot: Slot, message: Said) -> None:
        self.counters.add(slot.role, message)
        if isinstance(message, Produced):
            for event in message.events:
                if job := self._board.find(event.request):
                    self._board.produced(job, event)
                    if job.ended and not event.finish:
                        slot.send(Drop(event.request))
        elif isinstance(message, Exported | Opened | Refused):
            job = self._board.find(message.nonce)
            assert job is not None, "an attempt whose worker is there is over only when that worker says so"
            if isinstance(message, Exported):
                self._board.exported(job)
            elif isinstance(message, Opened):
                self._board.opened(job)
            else:
                self._board.failed(job, message.error)

    def _sweep(self) -> None:
        """Remove the segments that no worker has to do with any more."""
        for nonce in self._segments.keys() - self._board.nonces:
            remove_segment(self._segments.pop(nonce))

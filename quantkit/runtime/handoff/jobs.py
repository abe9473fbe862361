"""Which request is where, and what becomes of it when a worker is lost. No processes: only what is known of them.

    queued --> computing --> exported --> opening --> decoding --> gone
      ^            |                         |           |
      +------------+-------------------------+-----------+   its worker died, hung, or refused the pages: a new attempt

A request may end anywhere, with what is `done`. One that a worker computes or opens stays until that worker has
answered or is gone, and its segment with it.

A request is given to a prefill worker only once a decode worker has room for all of its tokens, in order of arrival.
So there are no more segments than the decode pools have room for, and no decode worker ever has to preempt a request,
which it could only compute again with the wrong weights.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from quantkit.errors import HandoffError, IntegrityError, QuantkitError, WorkerError
from quantkit.runtime.handoff.segment import Ticket, tokens_sha256
from quantkit.runtime.handoff.worker import Role
from quantkit.runtime.requests import Completion, Event, Finish
from quantkit.runtime.sampling import Sampling

_RETRIED = (HandoffError, IntegrityError, WorkerError)


class Stage(StrEnum):
    """How far a request is."""

    QUEUED = "queued"
    COMPUTING = "computing"
    EXPORTED = "exported"
    OPENING = "opening"
    DECODING = "decoding"


@dataclass
class Job:
    """A request.

    pages     of a decode worker that all its tokens take
    nonce     of the attempt; 0 while it is queued
    attempts  so far
    prefill   the worker that computes the prompt
    decode    the worker that has room for it
    tokens    that were told
    produced  how many of them this attempt has produced
    ended     whether it only waits for the answer of a worker
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    pages: int
    stage: Stage = Stage.QUEUED
    nonce: int = 0
    attempts: int = 0
    prefill: int | None = None
    decode: int | None = None
    tokens: list[int] = field(default_factory=list)
    produced: int = 0
    ended: bool = False

    @property
    def ticket(self) -> Ticket:
        """Of this attempt's hand-off."""
        return Ticket(self.number, self.nonce, len(self.prompt), tokens_sha256(self.prompt))


class Board:
    """All requests, each of which has so many `attempts`.

    jobs     that are here, by number, in order of arrival
    done     what came of those that have ended, until it is taken
    room     pages of each decode worker
    events   that are to be told
    retried  attempts that came to nothing and were made again
    """

    def __init__(self, attempts: int) -> None:
        self.jobs: dict[int, Job] = {}
        self.done: dict[int, Completion] = {}
        self.room = 0
        self.events: list[Event] = []
        self.retried = 0
        self._attempts = attempts

    @property
    def nonces(self) -> set[int]:
        """Of attempts whose segments are still needed."""
        kept = (Stage.COMPUTING, Stage.EXPORTED, Stage.OPENING)
        return {job.nonce for job in self.jobs.values() if job.stage in kept}

    def find(self, nonce: int) -> Job | None:
        """The request of an attempt; None if that attempt is over."""
        return next((job for job in self.jobs.values() if job.nonce == nonce), None)

    def owed(self, *, prefill: int | None = None, decode: int | None = None) -> list[Job]:
        """The requests that a worker has to get on with."""
        jobs = self.jobs.values()
        if prefill is not None:
            return [job for job in jobs if job.stage is Stage.COMPUTING and job.prefill == prefill]
        return [job for job in jobs if job.stage in (Stage.OPENING, Stage.DECODING) and job.decode == decode]

    def needing(self, role: Role) -> list[Job]:
        """The requests that cannot be served without workers of a kind."""
        left = (Stage.EXPORTED, Stage.OPENING, Stage.DECODING) if role is Role.PREFILL else ()
        return [job for job in self.jobs.values() if not job.ended and job.stage not in left]

    def next_to_compute(self, prefill: int, decodes: Iterable[int]) -> Job | None:
        """The oldest request that waits, now an attempt of `prefill`, if one of `decodes` has room for it, and for
        older ones whose decode worker was lost.
        """
        for job in self.jobs.values():
            if job.ended or job.decode is not None:
                continue
            job.decode = self._with_room(job, decodes)
            if job.decode is None:
                return None
            if job.stage is Stage.QUEUED:
                job.stage, job.prefill, job.produced = Stage.COMPUTING, prefill, 0
                job.nonce, job.attempts = secrets.randbits(63) or 1, job.attempts + 1
                return job
        return None

    def next_to_open(self, decodes: Iterable[int]) -> Job | None:
        """A request whose pages are to be opened now, by its `decode`, one of `decodes`: each opens one at a time."""
        opening = {job.decode for job in self.jobs.values() if job.stage is Stage.OPENING}
        free = [decode for decode in decodes if decode not in opening]
        for job in self.jobs.values():
            if job.stage is Stage.EXPORTED:
                if job.decode is None:
                    job.decode = self._with_room(job, free)
                if job.decode in free:
                    job.stage = Stage.OPENING
                    return job
        return None

    def exported(self, job: Job) -> None:
        """The request's segment is complete."""
        self._move(job, Stage.EXPORTED)

    def opened(self, job: Job) -> None:
        """The decode worker has the request's pages."""
        self._move(job, Stage.DECODING)

    def produced(self, job: Job, event: Event) -> None:
        """A decode worker made a token of a request, or ended it. Tokens of a new attempt are told only once."""
        if event.error:
            self.failed(job, event.error)
            return
        assert event.token is not None
        job.produced += 1
        if job.produced <= len(job.tokens):
            if job.tokens[job.produced - 1] != event.token:
                message = f"request {job.number} lost its worker, and came out differently when it was computed again"
                hint = "Only the reference mode repeats itself exactly."
                self.end(job, Finish.FAILED, WorkerError(message, hint=hint))
            return
        job.tokens.append(event.token)
        if event.finish:
            self.end(job, event.finish, token=event.token)
        else:
            self.events.append(replace(event, request=job.number))

    def failed(self, job: Job, error: QuantkitError) -> None:
        """An attempt came to nothing, and no worker has it: try again, or end the request with the error."""
        self._move(job, Stage.QUEUED)
        if job.ended:
            return
        if isinstance(error, _RETRIED) and job.attempts < self._attempts:
            self.retried += 1
        else:
            self.end(job, Finish.FAILED, error)

    def put_back(self, job: Job) -> None:
        """An attempt was not begun after all."""
        job.attempts -= 1
        self._move(job, Stage.QUEUED)

    def end(self, job: Job, finish: Finish, error: QuantkitError | None = None, token: int | None = None) -> None:
        """End a request now; it goes once no worker computes or opens it."""
        self.events.append(Event(job.number, token, finish, error))
        self.done[job.number] = Completion(tuple(job.tokens), finish, error)
        job.ended = True
        if job.stage is Stage.COMPUTING:
            job.decode = None  # it needs no room
        elif job.stage is not Stage.OPENING:
            del self.jobs[job.number]

    def lost(self, error: QuantkitError, *, prefill: int | None = None, decode: int | None = None) -> None:
        """A worker is no more; what it had to do has failed, and what waits for it needs another."""
        for job in self.owed(prefill=prefill, decode=decode):
            self.failed(job, error)
        for job in self.jobs.values():
            if decode is not None and job.decode == decode:
                job.decode = None

    def _with_room(self, job: Job, decodes: Iterable[int]) -> int | None:
        """Of `decodes`, the one with the most room left, if that is enough."""
        jobs = self.jobs.values()
        left = {decode: self.room - sum(job.pages for job in jobs if job.decode == decode) for decode in decodes}
        best = max(left, key=left.__getitem__, default=None)
        return best if best is not None and left[best] >= job.pages else None

    def _move(self, job: Job, stage: Stage) -> None:
        """No worker computes or opens the request any more."""
        job.stage = stage
        if stage is Stage.QUEUED:
            job.nonce, job.prefill, job.decode = 0, None, None
        if job.ended:
            del self.jobs[job.number]

"""A coordinator whose workers are no processes: what each does next, and which of them dies, is the test's choice."""

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from quantkit.errors import HandoffError, QuantkitError, RequestError, WorkerError
from quantkit.families.config import DsaConfig, MlaConfig
from quantkit.runtime import EngineOptions, Event, Finish, cache_spec, uniform_scales, unscaled
from quantkit.runtime.cache_options import CacheOptions
from quantkit.runtime.handoff import Coordinator, CoordinatorOptions, Identity, Role, WorkerSettings
from quantkit.runtime.handoff import coordinator as module
from quantkit.runtime.handoff.messages import Alive, Compute, Drop, Exported, Open, Opened, Produced, Ready, Refused
from quantkit.runtime.handoff.slot import Slot
from quantkit.runtime.handoff.terms import terms_of
from quantkit.runtime.pages import FP8
from support.counting_model import CONFIG

DSA = DsaConfig(2, 4, 8, True, (True, False))
MLA = replace(CONFIG, layers=2, attention=MlaConfig(4, 8, 8, 8, 4, 8, False), dsa=DSA)
SOURCE = cache_spec(MLA, torch.bfloat16, 4, unscaled(2), "space")
TARGET = cache_spec(MLA, FP8, 8, uniform_scales(2, 0.5), "space")
SENT, WANTED = terms_of("model", SOURCE), terms_of("model", TARGET)
PAGES = 4  # of a decode worker: two requests of two pages
PROMPT = tuple(range(3, 14))
COUNT = 5


class FakeWorker(Slot):
    """Says what a worker would say, when it is told to act; a segment that it was told of must be there."""

    unstartable, dead = 0, False

    def start(self, timeout: float) -> None:
        """A process, unless there are none to be had."""
        self.starts -= 1
        if FakeWorker.unstartable:
            FakeWorker.unstartable -= 1
            raise WorkerError("no process")
        terms, spec = (SENT, SOURCE) if self.role is Role.PREFILL else (WANTED, TARGET)
        self.running, self.ready, self.dead, self.connection = True, None, False, self  # type: ignore[assignment]
        self.told: list[Any] = []
        self.said: list[Any] = [Ready(terms, MLA, spec, PAGES, False)]
        self.holds: dict[int, list[int]] = {}  # tokens left, by nonce
        self.current: Compute | None = None

    def send(self, message: Any) -> None:
        """Into the pipe, whoever reads it."""
        self.told.append(message)

    def receive(self) -> tuple[list[Any], QuantkitError | None]:
        """All that was said before the worker died."""
        said, self.said = self.said, []
        self.ready = next((one for one in said if isinstance(one, Ready)), self.ready)
        if self.dead:
            self.running = False
        messages = [one for one in said if not isinstance(one, Ready)]
        return messages, WorkerError(f"{self.name} died") if self.dead else None

    def kill(self) -> None:
        """Nothing is left of it."""
        self.running = False

    @property
    def has_work(self) -> bool:
        """Whether it would do something by itself."""
        return self.running and not self.dead and bool(self.told or self.holds or self.current)

    @property
    def has_news(self) -> bool:
        """Whether the coordinator would hear of it."""
        return self.running and bool(self.said or self.dead)

    def act(self, refuses: bool = False) -> None:
        """Do the next thing."""
        if self.role is Role.PREFILL:
            self._compute(refuses)
        else:
            self._decode(refuses)

    def _compute(self, refuses: bool) -> None:
        if self.current is None:
            if isinstance(order := self.told.pop(0), Compute):
                self.current = order
                self.said.append(Alive())
            return
        nonce = self.current.ticket.nonce
        require(self.current.segment)
        self.current = None
        if self.told:
            assert self.told.pop(0) == Drop(nonce)
            self.said.append(Refused(nonce, RequestError("aborted")))
        else:
            self.said.append(Refused(nonce, HandoffError("bad", cause="digest")) if refuses else Exported(nonce))

    def _decode(self, refuses: bool) -> None:
        order = self.told.pop(0) if self.told else None
        if isinstance(order, Drop):
            if order.nonce in self.holds:
                self.holds[order.nonce] = []
        elif isinstance(order, Open):
            require(order.segment)
            nonce = order.ticket.nonce
            if refuses:
                self.said.append(Refused(nonce, HandoffError("bad", cause="digest")))
                return
            assert sum(bool(tokens) for tokens in self.holds.values()) < PAGES // 2, "more than there is room for"
            self.holds[nonce] = list(range(20, 20 + order.max_new_tokens))
            self.said.append(Opened(nonce, 3, 2, 1))
        else:
            self.said.append(Produced(tuple(self._step(nonce) for nonce in list(self.holds))))

    def _step(self, nonce: int) -> Event:
        tokens = self.holds[nonce]
        token = tokens.pop(0) if tokens else None
        if not tokens:
            del self.holds[nonce]
            return Event(nonce, token, Finish.ABORTED if token is None else Finish.LENGTH)
        return Event(nonce, token)


class World:
    """The coordinator and its workers.

    random   who is next, where the test does not say
    refuses  how often a worker refuses what it is given, where it could
    room     segments that shared memory holds
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, random: Random, **options: Any) -> None:
        self.random, self.refuses, self.room = random, 0.0, 100
        FakeWorker.unstartable = 0
        monkeypatch.setattr(module, "Slot", FakeWorker)
        monkeypatch.setattr(connection, "wait", self._wait)
        monkeypatch.setattr(os, "posix_fallocate", self._reserve)
        prefill, decode = (
            WorkerSettings(role, Path(), Identity("m", "k"), CacheOptions(), EngineOptions())
            for role in (Role.PREFILL, Role.DECODE)
        )
        self.before = segments()
        self.coordinator = Coordinator(prefill, decode, CoordinatorOptions(**options))
        self.workers: list[FakeWorker] = self.coordinator.slots  # type: ignore[assignment]
        self.events: list[Event] = []

    def of(self, role: Role) -> FakeWorker:
        """The first worker of a kind."""
        return next(worker for worker in self.workers if worker.role is role)

    def submit(self) -> int:
        """A request; its number."""
        return self.coordinator.submit(PROMPT, COUNT)

    def step(self) -> None:
        """One step of the coordinator, which waits for workers."""
        self.events += self.coordinator.step()

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.coordinator.busy:
            self.step()

    def act(self) -> None:
        """One worker does one thing, if there is anything to do."""
        if able := [worker for worker in self.workers if worker.has_work]:
            self.random.choice(able).act(self.random.random() < self.refuses)

    def _wait(self, connections: Sequence[FakeWorker], timeout: float | None) -> list[FakeWorker]:
        while not any(one.has_news for one in connections):
            assert any(one.has_work for one in connections), "the coordinator waits for nothing"
            self.act()
        return [one for one in connections if one.has_news]

    def _reserve(self, *_: int) -> None:
        if len(segments() - self.before) > self.room:
            raise OSError(28, "No space left on device")


def require(name: str) -> None:
    """A worker may be about to write there."""
    assert name in os.listdir("/dev/shm"), "a segment was removed under a worker"


def segments() -> set[str]:
    """The segments of shared memory that this process has made."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"quantkit-{os.getpid()}-")}

"""A worker process: it loads a checkpoint, says so, and does what it is told until the coordinator is gone.

A prefill worker computes all tokens of a prompt but the last one. A decode worker computes the last one too, with its
own weights, and samples the first token as it samples the others.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch

from quantkit.errors import HandoffError, QuantkitError, RequestError, WorkerError
from quantkit.models.decoder import Decoder
from quantkit.models.loading import load
from quantkit.runtime.allocator import NOTHING
from quantkit.runtime.cache_options import CacheOptions, open_cache
from quantkit.runtime.engine import Engine, EngineOptions
from quantkit.runtime.handoff.conversion import convert_pages
from quantkit.runtime.handoff.messages import (
    Alive,
    Compute,
    Drop,
    Exported,
    Failed,
    Open,
    Opened,
    Produced,
    Ready,
    Refused,
    Said,
)
from quantkit.runtime.handoff.segment import Hook, digests_of, read_pages, read_tokens, write_pages
from quantkit.runtime.handoff.terms import Identity, terms_of
from quantkit.runtime.integrity.causes import Cause
from quantkit.runtime.integrity.retries import RetryBudget
from quantkit.runtime.page_set import PageSet
from quantkit.runtime.pages import PagePool


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


def _pass_by(point: str) -> None:
    """The hook that does nothing; pickled by name."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with.

    identity  of the checkpoint in `folder`
    threads   of torch
    hook      is told each point that the worker reaches, by name, and may do anything there; for tests
    """

    role: Role
    folder: Path
    identity: Identity
    cache: CacheOptions
    engine: EngineOptions
    threads: int = 1
    hook: Hook = field(default=_pass_by)


def serve(settings: WorkerSettings, connection: Connection) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(settings.threads)
    settings.hook("started")
    try:
        decoder = load(settings.folder)
        pool = open_cache(decoder, settings.cache, settings.identity.kv_space_id)
        terms = terms_of(settings.identity.model, pool.spec)
        connection.send(Ready(terms, decoder.config, pool.spec, pool.num_pages, bool(decoder.kv_scales)))
        settings.hook("ready")
        kind = Prefill if settings.role is Role.PREFILL else Decode
        worker = kind(settings, decoder, pool, connection)
        while True:
            worker.advance()
    except (EOFError, ConnectionError):
        return  # the coordinator is gone
    except QuantkitError as error:
        connection.send(Failed(error))
    except Exception as error:
        connection.send(Failed(WorkerError(f"{type(error).__name__}: {error}")))
        raise


def _end_with_parent() -> None:
    """Leave when the coordinator's process is gone, whatever the worker does: shared memory is removed after that."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Worker:
    """What both kinds have: an engine, and a pipe to the coordinator."""

    def __init__(self, settings: WorkerSettings, decoder: Decoder, pool: PagePool, connection: Connection) -> None:
        self._terms, self._pool = terms_of(settings.identity.model, pool.spec), pool
        self._engine = Engine(decoder, pool, settings.engine)
        self._connection, self._hook = connection, settings.hook

    def _say(self, message: Said) -> None:
        """Tell the coordinator, with what was counted since the last time."""
        tracker = self._engine.tracker
        checked = tracker.counters.drain(tracker.level) if tracker else None
        saturated, nan, _ = self._pool.counts.tolist()
        self._pool.counts.zero_()
        self._connection.send(replace(message, checked=checked, saturated=saturated, nan=nan))


class Prefill(_Worker):
    """Computes prompts, one at a time."""

    def advance(self) -> None:
        """Wait for a prompt and compute it."""
        order: Compute | Drop = self._connection.recv()
        if isinstance(order, Drop):
            return  # it crossed the answer
        self._hook("received")
        try:
            with _attached(order.segment) as buffer:
                tokens = read_tokens(buffer, self._terms, self._pool.spec, order.ticket)
                pages = compute_pages(self._engine, tokens, self._tell)
                self._hook("computed")
                write_pages(buffer, self._terms, order.ticket, pages, self._hook)
                self._hook("complete")
        except QuantkitError as error:
            self._say(Refused(order.ticket.nonce, error))
            return
        self._say(Exported(order.ticket.nonce))
        self._hook("told")

    def _tell(self) -> None:
        self._say(Alive())
        self._hook("chunk")
        if self._connection.poll():  # before the answer, nothing but this attempt's `Drop` can come
            self._connection.recv()
            raise RequestError("the request was aborted")


class Decode(_Worker):
    """Goes on from the pages of prefill workers, many requests at a time."""

    def __init__(self, settings: WorkerSettings, decoder: Decoder, pool: PagePool, connection: Connection) -> None:
        alone = replace(settings, engine=replace(settings.engine, share_prefixes=False))
        super().__init__(alone, decoder, pool, connection)
        if self._engine.tracker:
            self._engine.tracker.budget = RetryBudget(each=0)  # its own weights would not make the same pages again
        self._config = decoder.config
        self._nonces: dict[int, int] = {}

    def advance(self) -> None:
        """Do what there is to do: what the coordinator says first, else a step."""
        if self._engine.busy and not self._connection.poll():
            self._step()
            return
        order: Open | Drop = self._connection.recv()
        if isinstance(order, Drop):
            for number in [number for number, nonce in self._nonces.items() if nonce == order.nonce]:
                self._engine.abort(number)
            return
        self._hook("received")
        try:
            opened = self._open(order)
        except QuantkitError as error:
            self._say(Refused(order.ticket.nonce, error))
            return
        self._say(opened)
        self._hook("acknowledged")

    def _open(self, order: Open) -> Opened:
        with _attached(order.segment) as buffer:
            pages, tokens = read_pages(buffer, order.ticket, self._terms, self._pool.spec)
        self._hook("checked")
        converted, counts = convert_pages(pages, self._pool.spec, self._config)
        self._pool.counts += counts
        self._hook("converted")
        if self._engine.tracker and self._engine.tracker.contents:
            converted.digests = _in_transit(converted)
        given = converted if converted.tokens else None
        number = self._engine.submit(tokens, order.max_new_tokens, order.sampling, order.stop, given)
        self._nonces[number] = order.ticket.nonce
        self._hook("opened")
        count = len(pages.tokens)
        sizes = pages.spec.pages_for(count), converted.spec.pages_for(count)
        return Opened(order.ticket.nonce, *sizes, sizes[0] * pages.spec.page_bytes)

    def _step(self) -> None:
        self._hook("step")
        events = self._engine.step()
        assert not self._engine.counters.preempted, "the coordinator gave more requests than the pool has room for"
        told = tuple(replace(event, request=self._nonces[event.request]) for event in events)
        for event in events:
            if event.finish:
                self._engine.take(event.request)
                del self._nonces[event.request]
        self._hook("stepped")
        self._say(Produced(told))
        self._hook("sent")


def compute_pages(engine: Engine, tokens: tuple[int, ...], tell: Callable[[], None] = lambda: None) -> PageSet:
    """The pages of all `tokens` but the last one; `tell` is called after each step. The engine has nothing else to do.

    Raises RequestError for a prompt that the engine refuses, or that its model makes no numbers of.
    """
    if len(tokens) == 1:
        pages = PageSet(engine.pool.spec, ())
        pages.seal()
        return pages
    number = engine.submit(tokens[:-1], max_new_tokens=2)  # after one token it still has its pages
    try:
        while not (events := engine.step()):
            tell()
        if error := events[0].error:
            raise error
        pages = engine.export(number)
    finally:
        engine.abort(number)
        engine.run()
        engine.take(number)
    if pages.digests is not None and _in_transit(pages) != pages.digests:
        raise HandoffError("pages of a prompt do not hold what was written to them", cause=Cause.CONTENT)
    return pages


def _in_transit(pages: PageSet) -> tuple[int, ...]:
    """What `PageSet.digests` has to be by the bytes."""
    return tuple(digests_of(pages, pages.spec.digest, NOTHING).tolist())


@contextmanager
def _attached(name: str) -> Iterator[memoryview]:
    """The bytes of a segment of the coordinator, which alone removes it. Raises HandoffError if it is not there."""
    try:
        segment = SharedMemory(name)
    except OSError as error:
        raise HandoffError(f"the hand-off's shared memory is gone: {error.strerror}", cause="missing") from error
    assert segment.buf is not None
    try:
        yield segment.buf
    finally:
        segment.close()

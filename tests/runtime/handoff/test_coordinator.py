"""The coordinator with workers that are no processes: any order of answers, deaths, refusals, aborts, full memory."""

from collections.abc import Callable
from multiprocessing import Pipe
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import HandoffError, RequestError, SourceError, WorkerError
from quantkit.runtime import Event, Finish
from quantkit.runtime.handoff import Role
from quantkit.runtime.handoff.jobs import Stage
from quantkit.runtime.handoff.messages import Drop, Failed
from quantkit.runtime.handoff.slot import Slot
from quantkit.runtime.requests import Completion
from support.handoff_world import COUNT, FakeWorker, World, segments

WHOLE = Completion(tuple(range(20, 20 + COUNT)), Finish.LENGTH)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """One worker of each kind, which can be started again once."""
    return World(monkeypatch, Random(0), restarts=1)


def stage_of(world: World, number: int) -> Stage:
    """How far a request is."""
    return world.coordinator._board.jobs[number].stage


def test_abort_means_what_it_means_to_an_engine(world: World) -> None:
    """A request ends at once and tells so; one that is finished stays so; others go on; unknown numbers are refused."""
    first, second = world.submit(), world.submit()
    world.coordinator.abort(second)
    assert world.coordinator.take(second) == Completion((), Finish.ABORTED)
    world.run()
    world.coordinator.abort(first)
    assert world.coordinator.take(first) == WHOLE
    assert [event for event in world.events if event.finish] == [
        Event(second, finish=Finish.ABORTED),
        Event(first, WHOLE.tokens[-1], Finish.LENGTH),
    ]
    for number in (first, second, 99):
        with pytest.raises(RequestError, match=f"there is no request {number}"):
            world.coordinator.abort(number)


def test_take_forgets(world: World) -> None:
    """A finished request is taken once, and nothing of it is kept; numbers are not used again."""
    number = world.submit()
    with pytest.raises(RequestError, match="request 0 is not finished"):
        world.coordinator.take(number)
    world.run()

    assert world.coordinator.take(number) == WHOLE
    with pytest.raises(RequestError, match="there is no request 0"):
        world.coordinator.take(number)
    assert world.submit() == 1
    assert list(world.coordinator._board.jobs) == [1]
    assert not world.coordinator._board.done


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("dies", [False, True])
def test_abort_in_any_stage(world: World, stage: Stage, dies: bool) -> None:
    """Wherever a request is aborted, its worker forgets it, whether it lives or dies of it, its segment stays until
    then and no longer, and another request is served.
    """
    number = world.submit()
    prefill, decode = world.of(Role.PREFILL), world.of(Role.DECODE)
    while stage_of(world, number) is not stage:
        world.coordinator._dispatch()
        if stage_of(world, number) is stage:
            break
        (prefill if stage_of(world, number) is Stage.COMPUTING else decode).act()
        for worker in world.workers:
            world.coordinator._hear(worker)
    world.coordinator.abort(number)
    other = world.submit()
    assert len(segments() - world.before) == (stage is not Stage.QUEUED)
    if dies:
        prefill.dead = decode.dead = True
    world.run()

    assert world.coordinator.take(number).finish is Finish.ABORTED
    assert world.coordinator.take(other) == WHOLE
    assert [event.finish for event in world.events if event.request == number][-1] is Finish.ABORTED
    assert segments() == world.before
    while decode.has_work:
        decode.act()
    assert not decode.holds


def test_request_taken_before_its_worker_answers(world: World) -> None:
    """An aborted request that was taken keeps its segment until the worker has answered."""
    number = world.submit()
    world.coordinator._dispatch()
    world.coordinator.abort(number)
    world.coordinator.take(number)
    world.step()
    assert len(segments() - world.before) == 1
    world.run()

    assert segments() == world.before


def test_request_that_comes_out_differently_is_dropped(world: World) -> None:
    """A request that ends because another attempt said something else is taken from its worker."""
    number = world.submit()
    while not world.events:
        world.step()
    world.of(Role.DECODE).dead = True
    while not world.of(Role.DECODE).holds or world.of(Role.DECODE).dead:
        world.step()
    next(iter(world.of(Role.DECODE).holds.values()))[0] = 99
    world.run()

    assert "came out differently" in str(world.coordinator.take(number).error)
    assert Drop in map(type, world.of(Role.DECODE).told)


def test_full_shared_memory_waits_for_its_segments(world: World) -> None:
    """Where shared memory holds but one segment, a complete one is opened nevertheless, and all requests are served at
    the first attempt.
    """
    world.room = 1
    numbers = [world.submit() for _ in range(3)]
    while world.coordinator.busy:
        world.step()
        assert all(job.attempts <= 1 for job in world.coordinator._board.jobs.values())

    assert [world.coordinator.take(number) for number in numbers] == [WHOLE] * 3


def test_decode_workers_gone_while_a_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end when the last decode worker dies for good, the next ones too; the prefill worker is told to stop,
    and its answer harms nobody.
    """
    world = World(monkeypatch, Random(0), restarts=0)
    first = world.submit()
    world.coordinator._dispatch()
    world.of(Role.DECODE).dead = True
    world.step()
    world.step()
    assert Drop(world.coordinator._board.jobs[first].nonce) in world.of(Role.PREFILL).told
    second = world.submit()
    world.run()

    for number in (first, second):
        done = world.coordinator.take(number)
        assert (done.finish, str(done.error)) == (Finish.FAILED, "decode worker 0 died")
    assert segments() == world.before


def test_refused_pages_without_prefill_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are refused once no worker is left to compute them again end in an error, and not in waiting."""
    world = World(monkeypatch, Random(0), restarts=0)
    number = world.submit()
    while stage_of(world, number) is not Stage.EXPORTED:
        world.step()
    world.of(Role.PREFILL).dead = True
    world.refuses = 1.0
    world.run()

    assert str(world.coordinator.take(number).error) == "prefill worker 0 died"


@pytest.mark.parametrize("failures", [1, 2])
def test_process_that_cannot_be_started(world: World, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has no process for a lost worker costs a start; without one left, requests end with that error."""
    monkeypatch.setattr(world.of(Role.DECODE), "starts", 2)
    number = world.submit()
    FakeWorker.unstartable = failures
    world.of(Role.DECODE).dead = True
    world.run()

    done = world.coordinator.take(number)
    assert (done == WHOLE) is (failures == 1)
    assert str(done.error) == ("None" if failures == 1 else "no process")


def test_closed_coordinator_serves_nobody(world: World) -> None:
    """What is asked of a coordinator whose workers have been ended ends with an error."""
    number = world.submit()
    world.coordinator.close()
    world.run()

    assert isinstance(world.coordinator.take(number).error, WorkerError)


def test_worker_that_failed_is_not_waited_for() -> None:
    """A worker that says that it cannot go on is ended, even if its process would stay."""

    class Process:
        exitcode = None
        join = kill = lambda *_: None

    slot = Slot.__new__(Slot)
    slot.connection, theirs = Pipe()
    slot.role, slot.index, slot.running, slot.deadline = Role.PREFILL, 0, True, None
    slot._process = Process()  # type: ignore[assignment]
    theirs.send(Failed(SourceError("no weights")))
    said, error = slot.receive()

    assert (said, type(error), str(error)) == ([], SourceError, "prefill worker 0: no weights")
    assert not slot.running


def test_system_without_processes_is_a_typed_error() -> None:
    """What the system says when it has no process or pipe left becomes an error that names the worker."""

    class Full:
        def Pipe(self) -> tuple[Any, Any]:
            raise OSError(24, "Too many open files")

    slot = Slot.__new__(Slot)
    slot.role, slot.index, slot.starts, slot._context = Role.PREFILL, 0, 1, Full()  # type: ignore[assignment]
    with pytest.raises(WorkerError, match=r"prefill worker 0 cannot be started: .*Too many open files"):
        slot.start(1.0)


@given(st.integers())
def test_any_order_of_events(seed: int) -> None:
    """Whatever workers do and when they die, whoever is aborted and taken, and however full shared memory is: every
    request ends once, with all of its tokens unless it was aborted or has an error; no segment goes early or stays,
    and no worker keeps a request.
    """
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch, random, prefill_workers=2, decode_workers=2, restarts=random.choice((0, 1, 50)))
        ends: dict[int, Completion] = {}
        live: list[int] = []
        aborted: set[int] = set()

        def take(number: int) -> None:
            if number in world.coordinator._board.done:
                live.remove(number)
                ends[number] = world.coordinator.take(number)

        def abort(number: int) -> None:
            aborted.add(number)
            world.coordinator.abort(number)

        def die(_: int) -> None:
            random.choice(world.workers).dead = True

        def fill(_: int) -> None:
            world.room = random.choice((0, 1, 2, 100))

        def step(_: int) -> None:
            if world.coordinator.busy:
                world.step()

        def refuse(_: int) -> None:
            world.refuses = random.choice((0.0, 0.5))

        acts: list[Callable[[int], Any]] = [
            step,
            step,
            step,
            step,
            lambda _: world.act(),
            take,
            abort,
            die,
            fill,
            refuse,
        ]
        for _ in range(random.randrange(60)):
            if not live or random.random() < 0.2:
                live.append(world.submit())
            random.choice(acts)(random.choice(live))
        world.run()
        for number in tuple(live):
            take(number)
        check(world, ends, aborted)
        world.coordinator.close()


def check(world: World, ends: dict[int, Completion], aborted: set[int]) -> None:
    """What must be true when all is over."""
    board, told = world.coordinator._board, {number: [] for number in ends}  # type: ignore[var-annotated]
    assert (board.jobs, board.done, board.events) == ({}, {}, [])
    assert segments() == world.before
    for event in world.events:
        assert not [one for one in told[event.request] if one.finish], "told something after its end"
        told[event.request].append(event)
    for number, done in ends.items():
        assert told[number][-1].finish is done.finish
        assert tuple(one.token for one in told[number] if one.token is not None) == done.tokens
        assert done.tokens == WHOLE.tokens[: len(done.tokens)]
        assert (done.finish is Finish.LENGTH) is (done == WHOLE)
        assert done.finish is not Finish.ABORTED or number in aborted
        assert isinstance(done.error, WorkerError | HandoffError) is (done.finish is Finish.FAILED)
    for worker in world.workers:
        while worker.has_work:
            worker.act()
        assert worker.dead or not worker.running or not worker.holds

"""Prefill and decode workers as processes: killed at every point, aborts, damage, counts, two of each, the command."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quantkit.choices import IntegrityLevel, KvDtype
from quantkit.errors import CacheError, HandoffError, RequestError, SourceError, WorkerError
from quantkit.models import load
from quantkit.runtime import Engine, EngineOptions, Event, Finish, Sampling
from quantkit.runtime.cache_options import CacheOptions, open_cache
from quantkit.runtime.generation import GenerationReport
from quantkit.runtime.handoff import (
    Coordinator,
    CoordinatorOptions,
    Identity,
    Role,
    WorkerSettings,
    compute_pages,
    convert_pages,
)
from quantkit.runtime.handoff.jobs import Job, Stage
from quantkit.runtime.handoff.messages import Alive, Compute, Drop, Exported, Open, Opened, Produced, Ready
from quantkit.runtime.handoff.segment import Ticket, tokens_sha256
from quantkit.runtime.handoff.shared import make_segment, remove_segment
from quantkit.runtime.handoff.terms import terms_of
from quantkit.runtime.handoff.worker import Decode, Prefill
from support.families import write_family
from support.generating import PROMPT, report_of
from support.handoff_faults import POINTS, Trap
from support.program import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

IDENTITY = Identity("model", "space")
OPTIONS = EngineOptions(8, share_prefixes=False)
BF16 = CacheOptions(memory=1 << 20, page_size=4)
FP8 = CacheOptions(KvDtype.FP8, 1.0, memory=1 << 20, page_size=8)
PROMPTS = (tuple(range(10, 30)), (7,), tuple(range(40, 47)))
COUNT = 3


def settings(role: Role, folder: Path, cache: CacheOptions, **changes: Any) -> WorkerSettings:
    """A worker."""
    return replace(WorkerSettings(role, folder, IDENTITY, cache, OPTIONS), **changes)


def engine(folder: Path, cache: CacheOptions) -> Engine:
    """What a worker has."""
    decoder = load(folder)
    return Engine(decoder, open_cache(decoder, cache, IDENTITY.kv_space_id), OPTIONS)


def in_one_process(
    source: Engine, target: Engine, prompts: Sequence[Sequence[int]], count: int, **sampling: Any
) -> list[tuple[int, ...]]:
    """The tokens with the pages handed over, and converted, within this process."""
    answers = []
    for prompt in prompts:
        pages, _ = convert_pages(compute_pages(source, tuple(prompt)), target.pool.spec, target._config)
        number = target.submit(prompt, count, Sampling(**sampling), pages=pages if pages.tokens else None)
        target.run()
        answers.append(target.take(number).tokens)
    return answers


def segments() -> set[str]:
    """The segments of shared memory that this process has made."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"quantkit-{os.getpid()}-")}


# --- one worker of each kind, killed again and again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with MLA and indexers."""
    return write_family(tmp_path_factory.mktemp("family") / "glm", "glm-5.2-bf16")


@pytest.fixture(scope="module")
def answers(folder: Path, one_thread: None) -> list[tuple[int, ...]]:
    """What the workers have to say."""
    return in_one_process(engine(folder, BF16), engine(folder, FP8), PROMPTS, COUNT)


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    """Strikes a worker."""
    return Trap("", tmp_path_factory.mktemp("trap") / "trap")


@pytest.fixture(scope="module")
def pair(folder: Path, trap: Trap) -> Iterator[Coordinator]:
    """A coordinator of two workers, each of which is started again as often as need be."""
    before = segments()
    prefill = settings(Role.PREFILL, folder, BF16, hook=replace(trap, role="prefill"))
    decode = settings(Role.DECODE, folder, FP8, hook=replace(trap, role="decode"))
    with Coordinator(prefill, decode, CoordinatorOptions(restarts=1000)) as coordinator:
        yield coordinator
    assert segments() == before


def ask(coordinator: Coordinator) -> list[tuple[int, ...]]:
    """The answers to all prompts; each must have one, and each token is told once."""
    told: dict[int, list[int | None]] = {}
    numbers = [coordinator.submit(prompt, COUNT) for prompt in PROMPTS]
    coordinator.run(lambda event: told.setdefault(event.request, []).append(event.token))
    done = [coordinator.take(number) for number in numbers]
    assert [one.error for one in done] == [None] * len(PROMPTS)
    assert [tuple(told[number]) for number in numbers] == [one.tokens for one in done]
    return [one.tokens for one in done]


def slot_pid(coordinator: Coordinator, role: str) -> int:
    """The process of the worker of a kind."""
    pid = next(slot.pid for slot in coordinator.slots if slot.role == role)
    assert pid is not None
    return pid


@pytest.mark.parametrize(("role", "point"), [(role, point) for role, points in POINTS.items() for point in points])
def test_killed_worker_costs_no_answer(
    pair: Coordinator, trap: Trap, answers: list[tuple[int, ...]], role: str, point: str
) -> None:
    """A worker that dies at any point, starting included, is replaced; every request has its answer, and no segment
    stays.
    """
    before, lost = segments(), pair.counters.lost[role]
    trap.set(role, point, "SIGTERM" if point == "received" else "SIGKILL")
    if point in ("started", "ready"):
        os.kill(slot_pid(pair, role), signal.SIGKILL)
    assert ask(pair) == answers
    assert not trap.file.exists()
    assert pair.counters.lost[role] > lost
    assert segments() == before


@pytest.mark.parametrize(("role", "point"), [("prefill", "computed"), ("decode", "step")])
def test_worker_that_hangs_is_replaced(
    pair: Coordinator,
    trap: Trap,
    answers: list[tuple[int, ...]],
    role: str,
    point: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has work and gives no sign of life is ended, and its requests are computed again."""
    monkeypatch.setattr(pair, "_options", replace(pair._options, timeout=3.0))
    trap.set(role, point, "hang")

    assert ask(pair) == answers
    assert not trap.file.exists()


@pytest.mark.parametrize("seed", range(3))
def test_workers_killed_at_random(pair: Coordinator, answers: list[tuple[int, ...]], seed: int) -> None:
    """Kills between any two steps of the coordinator cost no answer."""
    random, numbers = Random(seed), [pair.submit(prompt, COUNT) for prompt in PROMPTS]
    left = 2
    while pair.busy:
        pair.step()
        if left and random.random() < 0.2:
            left -= 1
            os.kill(slot_pid(pair, random.choice(list(POINTS))), signal.SIGKILL)
    done = [pair.take(number) for number in numbers]

    assert [one.tokens for one in done] == answers


def test_damaged_handoff_is_made_again(
    pair: Coordinator, answers: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips in shared memory is noticed and counted, and the prompt is computed again."""
    struck: list[int] = []

    def flip(job: Job) -> None:
        if not struck:
            struck.append(job.number)
            buffer = pair._segments[job.nonce].buf
            assert buffer is not None
            buffer[-1024] ^= 4
        exported(job)

    exported = pair._board.exported
    monkeypatch.setattr(pair._board, "exported", flip)
    before = pair.counters.faults["digest"]

    assert ask(pair) == answers
    assert pair.counters.faults["digest"] == before + 1
    assert 'quantkit_handoff_faults_total{cause="digest"}' in pair.counters.to_prometheus()


def test_handoff_to_the_wrong_request_ends_in_an_error(pair: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gets an earlier request's pages every time ends with an error; the next ones are served."""
    kept: list[bytes] = []

    def swap(job: Job) -> None:
        buffer = pair._segments[job.nonce].buf
        assert buffer is not None
        if kept:
            buffer[:] = kept[0]
        else:
            kept.append(bytes(buffer))
        exported(job)

    exported = pair._board.exported
    monkeypatch.setattr(pair._board, "exported", swap)
    numbers = [pair.submit(PROMPTS[0], COUNT) for _ in range(2)]
    pair.run()
    first, second = (pair.take(number) for number in numbers)
    assert first.finish is Finish.LENGTH
    assert (second.finish, second.tokens) == (Finish.FAILED, ())
    assert isinstance(second.error, HandoffError)
    assert f"is request {numbers[0]}'s, and not {numbers[1]}'s" in str(second.error)


def test_segment_that_others_remove_is_made_again(
    pair: Coordinator, answers: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that is gone, as when a system cleans up after a user, costs an attempt, and neither worker."""

    def remove(job: Job) -> None:
        if not struck:
            struck.append(job.number)
            os.unlink(f"/dev/shm/{pair._segments[job.nonce].name}")
        exported(job)

    struck: list[int] = []
    exported = pair._board.exported
    monkeypatch.setattr(pair._board, "exported", remove)
    faults, lost = pair.counters.faults["missing"], pair.counters.lost.total()

    assert ask(pair) == answers
    assert pair.counters.faults["missing"] == faults + 1
    assert pair.counters.lost.total() == lost


# --- what a request leaves behind that is aborted

PAUSES = {Stage.COMPUTING: ("prefill", "chunk"), Stage.OPENING: ("decode", "received")}


def submit_and_reach(pair: Coordinator, trap: Trap, stage: Stage) -> int:
    """A request of as many tokens as the decode pool holds beside another one, in this stage."""
    if stage in PAUSES:
        trap.set(*PAUSES[stage], "pause")
    number = pair.submit(PROMPTS[0], (pair.decode.num_pages - 4) * pair.decode.spec.page_size - len(PROMPTS[0]))
    pair.submit(PROMPTS[0], COUNT)
    while pair._board.jobs[number].stage is not stage:
        pair.step()
    while stage in PAUSES and trap.file.exists():
        time.sleep(0.01)  # until the worker pauses
    return number


@pytest.mark.parametrize("stage", Stage)
def test_aborted_request_leaves_nothing_behind(
    pair: Coordinator, trap: Trap, answers: list[tuple[int, ...]], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a request is aborted the prefill worker stops between chunks and the decode worker gives the pages back:
    it ends with what was told, and without a segment; others are answered.
    """
    before, lost, steps = segments(), pair.counters.lost.total(), checked(pair, "decode", "steps")
    number = submit_and_reach(pair, trap, stage)
    complete, exported = [], pair._board.exported

    def note(job: Job) -> None:
        complete.append(job.number)
        exported(job)

    monkeypatch.setattr(pair._board, "exported", note)
    pair.abort(number)
    trap.let_go()
    pair.run()

    done, other = pair.take(number), pair.take(number + 1)
    assert (done.finish, done.tokens) == (Finish.ABORTED, answers[0][: len(done.tokens)])
    assert other.tokens == answers[0]
    assert number not in complete
    assert segments() == before
    decode = next(slot for slot in pair.slots if slot.role is Role.DECODE)
    while decode.connection.poll(0.2):
        pair._hear(decode)
    assert checked(pair, "decode", "steps") - steps < 100
    assert pair.counters.lost.total() == lost


def test_worker_that_dies_with_an_aborted_request(
    pair: Coordinator, trap: Trap, answers: list[tuple[int, ...]]
) -> None:
    """The segment of a request that was aborted stays while its worker may write there, and goes when that dies."""
    before = segments()
    number = submit_and_reach(pair, trap, Stage.COMPUTING)
    pair.abort(number)
    pair.step()
    assert len(segments() - before) == 1
    os.kill(slot_pid(pair, "prefill"), signal.SIGKILL)
    pair.run()

    assert segments() == before
    assert pair.take(number).finish is Finish.ABORTED
    assert pair.take(number + 1).tokens == answers[0]


# --- what workers count


def checked(pair: Coordinator, kind: str, name: str) -> int:
    """A number of what the workers of a kind have checked so far."""
    report = pair.report().checked.get(kind)
    return int(getattr(report, name)) if report else 0


def test_checks_of_workers_come_back(pair: Coordinator, folder: Path, answers: list[tuple[int, ...]]) -> None:
    """Pages and steps that workers checked are counted by kind, as many as in one process; a worker that dies takes
    none of them with it.
    """
    source, target = engine(folder, BF16), engine(folder, FP8)
    in_one_process(source, target, PROMPTS[:1], COUNT)
    kept = {"prefill": source, "decode": target}
    before = {(kind, name): checked(pair, kind, name) for kind in kept for name in ("steps", "pages")}
    pair.submit(PROMPTS[0], COUNT)
    pair.run()

    for (kind, name), count in before.items():
        tracker = kept[kind].tracker
        assert tracker is not None
        assert checked(pair, kind, name) - count == getattr(tracker.counters, name) > 0
        os.kill(slot_pid(pair, kind), signal.SIGKILL)
    counts = {(kind, name): checked(pair, kind, name) for kind, name in before}
    assert ask(pair) == answers
    assert all(checked(pair, *one) > count for one, count in counts.items())
    for kind in kept:
        assert f'quantkit_integrity_pages_total{{kind="{kind}"}}' in pair.counters.to_prometheus()


@pytest.mark.parametrize(("role", "point"), [("prefill", "chunk"), ("decode", "step")])
def test_fault_in_a_worker_is_counted_once(
    pair: Coordinator, trap: Trap, answers: list[tuple[int, ...]], role: str, point: str
) -> None:
    """A page that is not sound is one fault of its worker's kind, and none of the hand-off's; a prefill worker computes
    it again by itself, a decode worker leaves that to a new attempt.
    """
    names = ("retries", "retries_refused", "num_faults")
    before, counts = pair.report(), [checked(pair, role, name) for name in names]
    trap.set(role, point, "smudge")
    number = pair.submit(PROMPTS[0], COUNT)
    pair.run()
    after = pair.report()

    assert pair.take(number).tokens == answers[0]
    again = role == "prefill"
    found = [checked(pair, role, name) - count for name, count in zip(names, counts, strict=True)]
    assert found == [again, not again, 1]
    assert after.checked[role].faults["tag_mismatch"] > 0
    assert (after.num_faults, after.faults) == (before.num_faults + 1, before.faults)
    assert after.retried - before.retried == (not again)


def test_unservable_requests_are_refused(pair: Coordinator) -> None:
    """What neither pool nor model could ever hold is refused at once, with the sizes."""
    with pytest.raises(RequestError, match="a prompt of one token or more"):
        pair.submit((), 1)
    with pytest.raises(RequestError, match=r"token 128 is not one of the model's 128"):
        pair.submit((5, 128), 1)
    with pytest.raises(RequestError, match=r"tokens of prompt and 9,999,999 new ones are more than"):
        pair.submit((5,), 9_999_999)


def test_lack_of_shared_memory_is_told(pair: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose pages do not fit into shared memory ends with an error instead of a worker's SIGBUS."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = segments()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        number = pair.submit(PROMPTS[0], COUNT)
        pair.run()
    error = pair.take(number).error
    assert isinstance(error, HandoffError)
    assert error.hint is not None
    assert "--shm-size" in error.hint
    assert segments() == before


# --- workers within this process


def worker(kind: type[Prefill | Decode], folder: Path, cache: CacheOptions) -> tuple[Any, Connection, Ready]:
    """A worker, the coordinator's end of its pipe, and what it would say first."""
    ours, theirs = Pipe()
    decoder = load(folder)
    pool = open_cache(decoder, cache, IDENTITY.kv_space_id)
    ready = Ready(terms_of(IDENTITY.model, pool.spec), decoder.config, pool.spec, pool.num_pages, False)
    return kind(settings(Role.PREFILL, folder, cache), decoder, pool, theirs), ours, ready


def said(connection: Connection) -> list[Any]:
    """All that a worker has said."""
    messages = []
    while connection.poll():
        messages.append(connection.recv())
    return messages


def test_prefill_worker_says_what_it_clamped(folder: Path) -> None:
    """Values that a prefill worker clamps as it writes its own FP8 pages are told once."""
    prefill, connection, ready = worker(Prefill, folder, replace(FP8, scale=1e-4))
    segment = make_segment(PROMPTS[0], ready)
    counts = []
    try:
        for nonce in (1, 2):
            connection.send(Compute(Ticket(0, nonce, len(PROMPTS[0]), tokens_sha256(PROMPTS[0])), segment.name))
            prefill.advance()
            counts.append(sum(one.saturated for one in said(connection)))
    finally:
        remove_segment(segment)

    assert counts[0] == counts[1] > 0


def test_drop_may_cross_an_answer(folder: Path) -> None:
    """A worker that is told to drop what it does not have goes on."""
    ticket = Ticket(0, 7, len(PROMPTS[0]), tokens_sha256(PROMPTS[0]))
    prefill, connection, ready = worker(Prefill, folder, BF16)
    decode, other, _ = worker(Decode, folder, FP8)
    segment = make_segment(PROMPTS[0], ready)
    try:
        connection.send(Drop(6))
        prefill.advance()
        assert said(connection) == []
        connection.send(Compute(ticket, segment.name))
        prefill.advance()
        assert [type(one) for one in said(connection)] == [Alive, Alive, Exported]
        for order in (Drop(7), Open(ticket, segment.name, COUNT, Sampling(), frozenset()), Drop(6)):
            other.send(order)
            decode.advance()
        decode.advance()
        assert [type(one) for one in said(other)] == [Opened, Produced]
    finally:
        remove_segment(segment)


# --- workers that do not come back, or never come up


def test_request_without_workers_ends_in_an_error(folder: Path) -> None:
    """A decode worker that dies for good leaves its requests a typed error, with how it died."""
    options = CoordinatorOptions(restarts=0)
    events: list[Event] = []
    with Coordinator(settings(Role.PREFILL, folder, BF16), settings(Role.DECODE, folder, FP8), options) as coordinator:
        numbers = [coordinator.submit(prompt, 50) for prompt in PROMPTS]

        def kill(event: Event) -> None:
            if not events:
                os.kill(slot_pid(coordinator, "decode"), signal.SIGKILL)
            events.append(event)

        coordinator.run(kill)
        done = [coordinator.take(number) for number in numbers]
        late = coordinator.submit(PROMPTS[0], COUNT)
        coordinator.run()
        assert isinstance(coordinator.take(late).error, WorkerError)

    assert [(one.finish, type(one.error)) for one in done] == [(Finish.FAILED, WorkerError)] * len(PROMPTS)
    assert "decode worker 0 was ended by SIGKILL" in str(done[0].error)
    assert sorted(event.request for event in events if event.finish) == numbers


KILLED = """
import os, pickle, signal, sys
from quantkit.runtime.handoff import Coordinator

coordinator = Coordinator(*pickle.load(sys.stdin.buffer))
coordinator.submit(range(100), 1)
coordinator.step()
print(*(slot.pid for slot in coordinator.slots), *(one.name for one in coordinator._segments.values()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_killed_coordinator_leaves_nothing_behind(folder: Path) -> None:
    """When the coordinator is killed its workers end, and its segments go."""
    pair = pickle.dumps((settings(Role.PREFILL, folder, BF16), settings(Role.DECODE, folder, FP8)))
    done = subprocess.run([sys.executable, "-c", KILLED], input=pair, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, segment = done.stdout.decode().split()
    left = [*(f"/proc/{pid}" for pid in pids), f"/dev/shm/{segment}"]
    deadline = time.monotonic() + 60
    while (there := [path for path in left if os.path.exists(path)]) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert (len(pids), there) == (2, [])


def test_worker_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    """The error of a worker's own is raised, with the worker's name; no process and no segment stays."""
    decode = settings(Role.DECODE, folder, FP8)
    with pytest.raises(SourceError, match=r"prefill worker 0: .*nowhere: no such folder"):
        Coordinator(settings(Role.PREFILL, tmp_path / "nowhere", BF16), decode)
    with pytest.raises(CacheError, match="decode worker 0: the checkpoint: layer 0 has no k_scale"):
        Coordinator(settings(Role.PREFILL, folder, BF16), settings(Role.DECODE, folder, replace(FP8, scale=None)))
    with pytest.raises(
        HandoffError, match=r"prefill worker 0's dtype is torch.float8_e4m3fn, and the decode worker 0's"
    ):
        Coordinator(settings(Role.PREFILL, folder, FP8), settings(Role.DECODE, folder, BF16))
    with pytest.raises(HandoffError, match="kv_space_id is space, and the decode checkpoint's other"):
        Coordinator(settings(Role.PREFILL, tmp_path, BF16), replace(decode, identity=Identity("model", "other")))


# --- FP8 weights before INT4 weights


def test_two_of_each_say_what_one_process_says(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """FP8 weights with a BF16 cache hand over to INT4 weights with an FP8 cache, two workers each, every byte checked:
    the tokens are those of one process.
    """
    int4 = glm_tiny_converted["glm-5.2-int4"]
    prompts = [range(20 + 3 * number, 20 + 3 * number + length) for number, length in enumerate((30, 1, 9, 17, 25))]
    checked = replace(OPTIONS, integrity=IntegrityLevel.CONTENT)
    prefill = settings(Role.PREFILL, glm_tiny, BF16, engine=checked)
    decode = settings(Role.DECODE, int4, FP8, engine=checked)
    options = CoordinatorOptions(prefill_workers=2, decode_workers=2)
    sampling = Sampling(temperature=1.0, seed=3)
    with Coordinator(prefill, decode, options) as coordinator:
        numbers = [coordinator.submit(prompt, 4, sampling) for prompt in prompts]
        coordinator.run()
        got = [coordinator.take(number).tokens for number in numbers]
        report = coordinator.report()

    assert got == in_one_process(engine(glm_tiny, BF16), engine(int4, FP8), prompts, 4, temperature=1.0, seed=3)
    assert (report.handoffs, report.source_pages, report.pages) == (5, 20, 10)
    assert (report.lost, report.faults, report.retried) == ({}, {}, 0)


def test_command(run_generate: Runner, glm_tiny: Path, glm_tiny_converted: dict[str, Path], folder: Path) -> None:
    """`generate --prefill-from` answers, says what the workers did, and refuses a checkpoint of another model."""
    int4 = glm_tiny_converted["glm-5.2-int4"]
    apart = (PROMPT, "--prefill-from", glm_tiny, "--kv", "fp8", "--kv-scale", "1.0")
    code, out, err = run_generate(*apart, checkpoint=int4)
    assert code == 0
    assert out.strip()
    assert "1 prefill and 1 decode workers: 1 hand-offs, 1 pages of 86,016 bytes became 1, 0 values clamped" in err
    assert ", 1 pages checked in prefill, 6 pages checked in decode\n" in err
    result = run_generate(*apart, "--decode-workers", "2", "--json", checkpoint=int4)
    report = report_of(result)
    assert GenerationReport.from_json(result[1]).to_json() == result[1]
    assert report["completions"][0]["text"] == out[:-1]
    assert report["kv_scales"] == [{"key": 1.0, "value": 1.0, "latent": [], "rope": []}] * 4
    assert {kind: one["pages"] for kind, one in report["handoff"]["checked"].items()} == {"prefill": 1, "decode": 6}
    assert (report["handoff"]["prefill"], report["handoff"]["decode"], report["handoff"]["handoffs"]) == (1, 2, 1)

    code, _, err = run_generate(PROMPT, "--prefill-from", folder, checkpoint=int4)
    assert code == 1
    assert "the prefill checkpoint's model is " in err.replace("\n", " ")

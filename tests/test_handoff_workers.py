"""Prefill and decode workers as processes: killed at every point, damaged hand-offs, two of each, the command."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from families import write_family
from handoff_faults import POINTS, Trap
from test_runtime_generate import PROMPT, Runner, report_of
from test_runtime_generate import run as run

from quantkit.capacity.layouts import IntegrityLevel, KvDtype
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
from quantkit.runtime.handoff.jobs import Job

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


def in_one_process(
    prefill: Path, decode: Path, prompts: Sequence[Sequence[int]], count: int, **sampling: Any
) -> list[tuple[int, ...]]:
    """The tokens with the pages handed over, and converted, within this process."""
    first, second = load(prefill), load(decode)
    source = Engine(first, open_cache(first, BF16, IDENTITY.kv_space_id), OPTIONS)
    target = Engine(second, open_cache(second, FP8, IDENTITY.kv_space_id), OPTIONS)
    answers = []
    for prompt in prompts:
        pages, _ = convert_pages(compute_pages(source, tuple(prompt)), target.pool.spec, second.config)
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
    return in_one_process(folder, folder, PROMPTS, COUNT)


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

    assert [(one.finish, type(one.error)) for one in done] == [(Finish.FAILED, WorkerError)] * len(PROMPTS)
    assert "decode worker 0 was ended by SIGKILL" in str(done[0].error)
    assert sorted(event.request for event in events if event.finish) == numbers


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

    assert got == in_one_process(glm_tiny, int4, prompts, 4, temperature=1.0, seed=3)
    assert (report.handoffs, report.source_pages, report.pages) == (5, 20, 10)
    assert (report.lost, report.faults, report.retried) == ({}, {}, 0)


def test_command(run: Runner, glm_tiny: Path, glm_tiny_converted: dict[str, Path], folder: Path) -> None:
    """`generate --prefill-from` answers, says what the workers did, and refuses a checkpoint of another model."""
    int4 = glm_tiny_converted["glm-5.2-int4"]
    apart = (PROMPT, "--prefill-from", glm_tiny, "--kv", "fp8", "--kv-scale", "1.0")
    code, out, err = run(*apart, checkpoint=int4)
    assert code == 0
    assert out.strip()
    assert "1 prefill and 1 decode workers: 1 hand-offs, 1 pages of 86,016 bytes became 1, 0 values clamped" in err
    result = run(*apart, "--decode-workers", "2", "--json", checkpoint=int4)
    report = report_of(result)
    assert GenerationReport.from_json(result[1]).to_json() == result[1]
    assert report["completions"][0]["text"] == out[:-1]
    assert report["kv_scales"] == [{"key": 1.0, "value": 1.0, "latent": [], "rope": []}] * 4
    assert (report["handoff"]["prefill"], report["handoff"]["decode"], report["handoff"]["handoffs"]) == (1, 2, 1)

    code, _, err = run(PROMPT, "--prefill-from", folder, checkpoint=int4)
    assert code == 1
    assert "the prefill checkpoint's model is " in err.replace("\n", " ")

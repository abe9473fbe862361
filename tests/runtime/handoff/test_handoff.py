"""Hand-offs without processes: terms, what lies in shared memory, conversion, and which request is where."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quantkit.errors import HandoffError, IntegrityError, QuantkitError, RequestError, WorkerError
from quantkit.runtime import GREEDY, Event, Finish, KvScales, PagePool, cache_spec, unscaled
from quantkit.runtime.handoff import convert_pages
from quantkit.runtime.handoff.jobs import Board, Job, Stage
from quantkit.runtime.handoff.segment import (
    Ticket,
    read_pages,
    read_tokens,
    size_of,
    tokens_sha256,
    write_pages,
    write_tokens,
)
from quantkit.runtime.handoff.terms import Identity, Terms, check_identity, check_peers
from quantkit.runtime.handoff.worker import Role
from quantkit.runtime.page_set import PageSet, export_pages
from quantkit.runtime.pages import FP8, CacheSpec
from quantkit.runtime.requests import Completion
from quantkit.runtime.scales import LayerScales
from support.counting_model import CONFIG
from support.handoff_world import MLA, SENT, SOURCE, TARGET, WANTED

GQA = replace(CONFIG, layers=2)
PROMPT = tuple(range(3, 14))  # 10 rows: two pages of 4, and a half


def ticket(request: int = 1, nonce: int = 77, prompt: tuple[int, ...] = PROMPT) -> Ticket:
    """A hand-off."""
    return Ticket(request, nonce, len(prompt), tokens_sha256(prompt))


def filled(spec: CacheSpec, prompt: tuple[int, ...] = PROMPT, seed: int = 0, size: float = 1.0) -> PageSet:
    """Random pages of all tokens of a prompt but the last."""
    generator = torch.Generator().manual_seed(seed)
    count = spec.pages_for(len(prompt) - 1)
    pool = PagePool(spec, max(1, count))
    for tensor in pool.tensors.values():
        tensor.copy_(size * torch.randn(tensor.shape, generator=generator))
    return export_pages(pool, range(count), prompt[:-1])


def written(given: Ticket, prompt: tuple[int, ...] = PROMPT, seed: int = 0) -> bytearray:
    """The bytes of a hand-off of random pages."""
    buffer = bytearray(size_of(SENT, SOURCE, len(prompt)))
    write_tokens(memoryview(buffer), SENT, SOURCE, prompt)
    write_pages(memoryview(buffer), SENT, given, filled(SOURCE, prompt, seed))
    return buffer


def read(buffer: bytearray, given: Ticket) -> tuple[PageSet, tuple[int, ...]]:
    """What a decode worker makes of it."""
    return read_pages(memoryview(buffer), given, WANTED, TARGET)


@contextmanager
def refused(cause: str) -> Iterator[None]:
    """A hand-off is refused for this cause."""
    with pytest.raises(HandoffError) as raised:
        yield
    assert raised.value.cause == cause


# --- terms


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 64}, None),
        ({"dtype": str(FP8)}, None),
        ({"dtype": str(FP8), "scales": "s2"}, None),
        ({"model": "m2"}, "the prefill worker's model is m, and the decode worker's m2"),
        ({"kv_space_id": "k2"}, "kv_space_id is k, and the decode worker's k2"),
        ({"layout": "0.key 1x2"}, "layout is 0.latent 96, and the decode worker's 0.key 1x2"),
        ({"dtype": "torch.float32"}, "dtype is torch.bfloat16, and the decode worker's torch.float32"),
    ],
)
def test_peers_must_agree(changes: dict[str, str], message: str | None) -> None:
    """Page sizes may differ, and BF16 may become FP8; anything else is refused with both values."""
    ours = Terms("m", "k", "0.latent 96", "torch.bfloat16", 16, "s")
    if message is None:
        check_peers(ours, replace(ours, **changes))  # type: ignore[arg-type]
        return
    with pytest.raises(HandoffError, match=message):
        check_peers(ours, replace(ours, **changes))  # type: ignore[arg-type]


def test_fp8_pages_stay_as_they_are() -> None:
    """FP8 pages neither become BF16 ones nor FP8 ones of other scales."""
    ours = Terms("m", "k", "l", str(FP8), 16, "s")

    check_peers(ours, replace(ours, page_size=32))
    with pytest.raises(HandoffError, match=r"dtype is torch.float8_e4m3fn, and the decode worker's torch.bfloat16"):
        check_peers(ours, replace(ours, dtype=str(torch.bfloat16)))
    with pytest.raises(HandoffError, match="digest of KV scales is s, and the decode worker's s2"):
        check_peers(ours, replace(ours, scales="s2"))


def test_checkpoints_must_be_of_one_model() -> None:
    """Two checkpoints are compared before any worker starts."""
    check_identity(Identity("m", "k"), Identity("m", "k"))
    with pytest.raises(HandoffError, match="prefill checkpoint's kv_space_id is k, and the decode checkpoint's k2"):
        check_identity(Identity("m", "k"), Identity("m", "k2"))


# --- segments


def test_pages_cross_shared_memory() -> None:
    """What one side writes into a segment the other one reads from it, byte for byte, and nothing holds it open."""
    pages = filled(SOURCE)
    ours = SharedMemory(create=True, size=size_of(SENT, SOURCE, len(PROMPT)))
    theirs = SharedMemory(ours.name)
    try:
        assert ours.buf is not None
        assert theirs.buf is not None
        write_tokens(ours.buf, SENT, SOURCE, PROMPT)
        assert read_tokens(theirs.buf, SENT, SOURCE, ticket()) == PROMPT
        write_pages(theirs.buf, SENT, ticket(), pages)
        got, prompt = read_pages(ours.buf, ticket(), WANTED, TARGET)
    finally:
        theirs.close()
        ours.close()
        ours.unlink()

    assert prompt == PROMPT
    assert (got.spec, got.tokens, got.complete) == (SOURCE, PROMPT[:-1], True)
    for place, tensor in pages.tensors.items():
        assert torch.equal(tensor.flatten(0, 1)[:10], got.tensors[place].flatten(0, 1)[:10])


def test_prompt_of_one_token_has_no_pages() -> None:
    """There is nothing to compute before the last token, and the hand-off says so."""
    buffer = written(ticket(prompt=(5,)), (5,))
    pages, prompt = read(buffer, ticket(prompt=(5,)))

    assert (prompt, pages.tokens) == ((5,), ())
    with refused("request"):
        read(buffer, ticket(request=2, prompt=(5,)))


@pytest.mark.exhaustive
def test_any_flipped_bit_is_noticed() -> None:
    """Each byte of a hand-off is either refused when it has changed, or is one that nobody looks at."""
    buffer = written(ticket())
    sound, _ = read(buffer, ticket())
    causes = set()
    unseen = 0
    for place in range(len(buffer)):
        buffer[place] ^= 1 << place % 8
        try:
            got, prompt = read(buffer, ticket())
            unseen += 1
            assert prompt == PROMPT
            assert all(torch.equal(rows(got)[key], tensor) for key, tensor in rows(sound).items())
        except HandoffError as error:
            causes.add(error.cause)
        buffer[place] ^= 1 << place % 8

    assert causes == {"header", "request", "tokens", "terms", "digest"}
    assert unseen < len(buffer) // 4


def rows(pages: PageSet) -> dict[tuple[int, str], torch.Tensor]:
    """The rows that are filled."""
    return {place: tensor.flatten(0, 1)[: len(pages.tokens)] for place, tensor in pages.tensors.items()}


@pytest.mark.parametrize("damage", [b'"page_size": 0', b'"page_sizf": 4', b"'page_size': 4"])
def test_damaged_terms_are_refused(damage: bytes) -> None:
    """Terms that are no terms are a damaged header, not a bug."""
    with refused("header"):
        read(written(ticket()).replace(b'"page_size": 4', damage), ticket())


@pytest.mark.parametrize("left", [0, 71, 200, 700, -1])
def test_cut_segment_is_refused(left: int) -> None:
    """A hand-off that ends early is never read beyond its end."""
    with pytest.raises(HandoffError) as raised:
        read(written(ticket())[:left], ticket())
    assert raised.value.cause in ("truncated", "header")


@pytest.mark.parametrize("point", ["half written", "written"])
def test_writer_that_stopped_left_nothing_to_read(point: str) -> None:
    """Until the very last write a hand-off is incomplete."""

    def stop(reached: str) -> None:
        if reached == point:
            raise InterruptedError

    buffer = bytearray(size_of(SENT, SOURCE, len(PROMPT)))
    write_tokens(memoryview(buffer), SENT, SOURCE, PROMPT)
    with pytest.raises(InterruptedError):
        write_pages(memoryview(buffer), SENT, ticket(), filled(SOURCE), stop)
    with refused("incomplete"):
        read(buffer, ticket())


def test_pages_of_another_request_are_refused() -> None:
    """Neither another request's hand-off, nor one of equal tokens, nor an earlier attempt's is taken."""
    with refused("request"):
        read(written(ticket(request=2)), ticket())
    with refused("replayed"):
        read(written(ticket(nonce=76)), ticket())
    with refused("tokens"):
        read(written(ticket(prompt=PROMPT[::-1])), ticket())
    with refused("tokens"):  # the writer believes that it has the right ones
        read(written(ticket(), PROMPT[::-1]), ticket())


@pytest.mark.parametrize("other", [ticket(nonce=76), ticket(prompt=PROMPT[::-1])])
def test_pages_under_another_header_are_refused(other: Ticket) -> None:
    """Pages and digests of another attempt, or of other tokens, do not become this one's with its header."""
    buffer, foreign = written(ticket()), written(other, PROMPT if other.nonce == 76 else PROMPT[::-1])
    begin = len(buffer) - 3 * SOURCE.page_bytes - 64
    buffer[begin:] = foreign[begin:]

    with refused("digest"):
        read(buffer, ticket())


def test_swapped_pages_are_refused() -> None:
    """A page in the place of another one, with its digest, is not that page."""
    buffer = written(ticket())
    digests = len(buffer) - 3 * SOURCE.page_bytes - 64
    first, second = struct.unpack_from("<qq", buffer, digests)
    struct.pack_into("<qq", buffer, digests, second, first)
    begin = digests + 64
    for part in SOURCE.parts:
        size = 4 * 2 * part.row[0]
        one, two = slice(begin, begin + size), slice(begin + size, begin + 2 * size)
        buffer[one], buffer[two] = buffer[two], buffer[one]
        begin += 3 * size

    with refused("digest"):
        read(buffer, ticket())


def test_errors_cross_processes() -> None:
    """An error arrives with its class, text, hint and cause, whatever its constructor asks for."""
    import pickle

    for error in (
        HandoffError("a", cause="digest", hint="b"),
        IntegrityError("a", cause="c", request=1, page=2, position=3),
        WorkerError("a"),
    ):
        arrived = pickle.loads(pickle.dumps(error))
        assert (type(arrived), str(arrived), vars(arrived)) == (type(error), "a", vars(error))


# --- conversion


def expected_fp8(values: torch.Tensor, scale: float) -> torch.Tensor:
    """The bytes of E4M3 numbers, by the definition."""
    return (values.float() / scale).clamp(-448, 448).to(FP8).view(torch.uint8)


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 4), (16, 3)])
def test_bf16_becomes_fp8_row_by_row(before: int, after: int) -> None:
    """Latents, index keys, keys and values are divided by the pool's scales, whatever the page sizes; clamps count."""
    scales = KvScales((LayerScales(0.5, 0.5), LayerScales(1.0, 1.0, (4.0,) * 8, (0.25,) * 4)), "test")
    pages = filled(cache_spec(MLA, torch.bfloat16, before, unscaled(2), "space"), size=200.0)
    got, counts = convert_pages(pages, cache_spec(MLA, FP8, after, scales, "space"), MLA)
    assert got.complete
    have, want = rows(got), {place: values.float() for place, values in rows(pages).items()}
    parts = torch.tensor([4.0] * 8 + [0.25] * 4)
    assert torch.equal(have[0, "latent"].view(torch.uint8), expected_fp8(want[0, "latent"], 0.5))
    assert torch.equal(have[1, "latent"].view(torch.uint8), expected_fp8(want[1, "latent"] / parts, 1.0))
    assert torch.equal(have[0, "index"].view(torch.uint8), expected_fp8(want[0, "index"], 1.0))
    clamped = sum(
        int((values.abs() > 448).sum())
        for values in (want[0, "latent"] / 0.5, want[1, "latent"] / parts, want[0, "index"])
    )
    assert counts.tolist() == [clamped, 0, 0]
    assert clamped > 0


def test_keys_and_values_have_their_own_scales() -> None:
    """The heads of GQA become FP8 by the scale of keys or values of their layer."""
    scales = KvScales((LayerScales(0.5, 2.0), LayerScales(1.0, 0.25)), "test")
    pages = filled(cache_spec(GQA, torch.bfloat16, 4, unscaled(2), "space"))
    got, _ = convert_pages(pages, cache_spec(GQA, FP8, 8, scales, "space"), GQA)

    for layer, one in enumerate(scales.layers):
        for name, scale in (("key", one.key), ("value", one.value)):
            assert torch.equal(rows(got)[layer, name].view(torch.uint8), expected_fp8(rows(pages)[layer, name], scale))


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_equal_dtypes_keep_their_bytes(dtype: torch.dtype) -> None:
    """Between page sizes every row keeps its bytes, FP8 ones too."""
    source, target = (cache_spec(MLA, dtype, size, unscaled(2), "space") for size in (4, 3))
    pages = filled(source, size=1e3)
    got, counts = convert_pages(pages, target, MLA)

    assert counts.tolist() == [0, 0, 0]
    for place, values in rows(pages).items():
        assert torch.equal(rows(got)[place].view(torch.uint8), values.view(torch.uint8))


# --- requests


def job(number: int, pages: int = 1) -> Job:
    """A request that generates up to three tokens."""
    return Job(number, (1, 2, 3), 3, GREEDY, frozenset(), pages)


def test_tokens_are_told_once() -> None:
    """A request that is computed again tells only what is new; if it comes out differently it ends with an error."""
    board = Board(attempts=3)
    board.room = 4
    board.jobs = {0: job(0)}

    def begin(*tokens: int) -> Job:
        one = board.next_to_compute(0, [0])
        assert one is not None
        board.exported(one)
        assert board.next_to_open([0]) is one
        board.opened(one)
        for token in tokens:
            board.produced(one, Event(one.nonce, token))
        return one

    begin(7, 8)
    board.lost(WorkerError("gone"), decode=0)
    one = begin(7, 8)
    board.produced(one, Event(one.nonce, 9, Finish.LENGTH))
    assert [(event.token, event.finish) for event in board.events] == [(7, None), (8, None), (9, Finish.LENGTH)]
    assert board.done.pop(0) == Completion((7, 8, 9), Finish.LENGTH)

    board.jobs[1] = job(1)
    begin(7)
    board.lost(WorkerError("gone"), decode=0)
    begin(6)
    done = board.done[1]
    assert (done.tokens, done.finish, type(done.error)) == ((7,), Finish.FAILED, WorkerError)
    assert "came out differently" in str(done.error)


def test_attempts_are_bounded() -> None:
    """After the last attempt a request ends with its error; one that no attempt could fix ends at once."""
    board = Board(attempts=2)
    board.room = 2
    board.jobs = {0: job(0), 1: job(1)}
    for error in (WorkerError("first"), HandoffError("second")):
        one = board.next_to_compute(0, [0])
        assert one is board.jobs[0]
        board.failed(one, error)
    assert (board.done[0].finish, str(board.done[0].error), board.retried) == (Finish.FAILED, "second", 1)

    other = board.next_to_compute(0, [0])
    assert other is board.jobs[1]
    board.failed(other, RequestError("never"))
    assert (str(board.done[1].error), board.retried, board.jobs) == ("never", 1, {})


def test_pages_go_to_another_decode_worker() -> None:
    """A prompt that was computed for a decode worker that is no more goes to another one with room."""
    board = Board(attempts=1)
    board.room = 2
    board.jobs = {0: job(0)}
    one = board.next_to_compute(0, [0])
    assert one is not None
    board.lost(WorkerError("gone"), decode=0)
    board.exported(one)

    assert board.next_to_open([1]) is one
    assert (one.decode, board.done) == (1, {})


def test_older_request_has_its_room_first() -> None:
    """A prompt whose decode worker was lost is not overtaken by requests that would fit in its stead."""
    board = Board(attempts=2)
    board.room = 2
    board.jobs = {0: job(0, pages=1), 1: job(1, pages=2), 2: job(2, pages=1)}
    first, second = (board.next_to_compute(prefill, [prefill]) for prefill in (0, 1))
    assert (first, second) == (board.jobs[0], board.jobs[1])
    board.lost(WorkerError("gone"), decode=1)
    assert second is not None
    board.exported(second)

    assert board.next_to_compute(1, [0]) is None
    assert first is not None
    board.failed(first, RequestError("never"))
    assert board.next_to_compute(1, [0]) is None
    assert board.next_to_open([0]) is second


@pytest.mark.parametrize("stage", Stage)
def test_request_ends_in_any_stage(stage: Stage) -> None:
    """A request that ends tells so at once and needs no room; while a worker computes or opens it, it keeps its
    segment, and whatever that worker says is the last of it.
    """
    held = stage in (Stage.COMPUTING, Stage.OPENING)
    for answer in (Board.exported, Board.opened, lambda board, one: board.failed(one, WorkerError("gone"))):
        board = Board(attempts=3)
        board.room = 1
        board.jobs = {0: job(0), 1: job(1)}
        one = board.jobs[0]
        if stage is not Stage.QUEUED:
            assert board.next_to_compute(0, [0]) is one
        if stage in (Stage.EXPORTED, Stage.OPENING, Stage.DECODING):
            board.exported(one)
        if stage in (Stage.OPENING, Stage.DECODING):
            assert board.next_to_open([0]) is one
        if stage is Stage.DECODING:
            board.opened(one)
            board.produced(one, Event(one.nonce, 7))
        board.end(one, Finish.ABORTED)

        tokens = (7,) if stage is Stage.DECODING else ()
        assert board.done == {0: Completion(tokens, Finish.ABORTED)}
        assert board.events[-1] == Event(0, finish=Finish.ABORTED)
        assert board.nonces == ({one.nonce} if held else set())
        if stage is not Stage.OPENING:
            assert board.next_to_compute(1, [0]) is board.jobs[1]
        if held:
            answer(board, one)
        assert list(board.jobs) == [1]
        assert len(board.events) == len(tokens) + 1
        assert board.retried == 0


ERRORS: tuple[QuantkitError, ...] = (HandoffError("h"), WorkerError("w"), RequestError("r"))


class BoardMachine(RuleBasedStateMachine):
    """Any order in which workers answer, die, refuse and come back, and requests end."""

    attempts, room, workers = 3, 5, (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.board = Board(self.attempts)
        self.board.room = self.room
        self.submitted = 0
        self.ended: set[int] = set()

    def at(self, *stages: Stage) -> list[Job]:
        """The requests in some stages, those included that have ended."""
        return [one for one in self.board.jobs.values() if one.stage in stages]

    @rule(pages=st.integers(1, room))
    def submit(self, pages: int) -> None:
        self.board.jobs[self.submitted] = job(self.submitted, pages)
        self.submitted += 1

    @rule(prefill=st.sampled_from(workers), decodes=st.sets(st.sampled_from(workers)))
    def compute(self, prefill: int, decodes: set[int]) -> None:
        if not self.board.owed(prefill=prefill):
            first = next(iter(self.at(Stage.QUEUED)), None)
            given = self.board.next_to_compute(prefill, decodes)
            assert given in (None, first)

    @precondition(lambda self: self.at(Stage.COMPUTING))
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        self.board.exported(data.draw(st.sampled_from(self.at(Stage.COMPUTING))))

    @rule(decodes=st.sets(st.sampled_from(workers)))
    def give(self, decodes: set[int]) -> None:
        given = self.board.next_to_open(decodes)
        assert given is None or given.decode in decodes

    @precondition(lambda self: self.at(Stage.OPENING))
    @rule(data=st.data())
    def opened(self, data: st.DataObject) -> None:
        self.board.opened(data.draw(st.sampled_from(self.at(Stage.OPENING))))

    @precondition(lambda self: self.at(Stage.DECODING))
    @rule(data=st.data())
    def produce(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.at(Stage.DECODING)))
        finish = Finish.LENGTH if one.produced == 2 else None
        self.board.produced(one, Event(one.nonce, 40 + one.produced, finish))

    @precondition(lambda self: self.at(Stage.COMPUTING, Stage.OPENING, Stage.DECODING))
    @rule(data=st.data(), error=st.sampled_from(ERRORS))
    def fail(self, data: st.DataObject, error: QuantkitError) -> None:
        self.board.failed(data.draw(st.sampled_from(self.at(Stage.COMPUTING, Stage.OPENING, Stage.DECODING))), error)

    @rule(worker=st.sampled_from(workers), role=st.sampled_from(Role))
    def lose(self, worker: int, role: Role) -> None:
        self.board.lost(WorkerError("gone"), **{str(role): worker})

    @rule(role=st.sampled_from(Role))
    def lose_all(self, role: Role) -> None:
        for one in self.board.needing(role):
            self.board.end(one, Finish.FAILED, WorkerError("gone"))
        live = [one for one in self.board.jobs.values() if not one.ended]
        kept = (Stage.EXPORTED, Stage.OPENING, Stage.DECODING) if role is Role.PREFILL else ()
        assert all(one.stage in kept for one in live)

    @precondition(lambda self: any(not one.ended for one in self.board.jobs.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [one for one in self.board.jobs.values() if not one.ended]
        self.board.end(data.draw(st.sampled_from(live)), Finish.ABORTED)

    @invariant()
    def nothing_is_lost(self) -> None:
        board = self.board
        for worker in self.workers:
            assert sum(one.pages for one in board.jobs.values() if one.decode == worker) <= self.room
            assert sum(one.prefill == worker for one in self.at(Stage.COMPUTING)) <= 1
            assert sum(one.decode == worker for one in self.at(Stage.OPENING)) <= 1
        for one in board.jobs.values():
            assert one.attempts <= self.attempts
            assert (one.nonce == 0) is (one.stage is Stage.QUEUED)
            assert one.decode is not None or one.stage in (Stage.QUEUED, Stage.COMPUTING, Stage.EXPORTED)
            assert not one.ended or one.stage in (Stage.COMPUTING, Stage.OPENING)
        for event in board.events:
            assert event.request not in self.ended, "a request tells something after its end"
            if event.finish:
                self.ended.add(event.request)
        board.events.clear()
        assert set(board.done) == self.ended
        live = {one.number for one in board.jobs.values() if not one.ended}
        assert live | self.ended == set(range(self.submitted))

    def teardown(self) -> None:
        for _ in range(20 * self.submitted):
            for prefill in self.workers:
                self.compute(prefill, set(self.workers))
            for one in self.at(Stage.COMPUTING):
                self.board.exported(one)
            self.give(set(self.workers))
            for one in self.at(Stage.OPENING):
                self.board.opened(one)
            for one in self.at(Stage.DECODING):
                finish = Finish.LENGTH if one.produced == 2 else None
                self.board.produced(one, Event(one.nonce, 40 + one.produced, finish))
            self.nothing_is_lost()
        assert not self.board.jobs
        for done in self.board.done.values():
            assert done.error or done.finish is Finish.ABORTED or done.tokens == (40, 41, 42)


BoardMachine.TestCase.settings = settings(suppress_health_check=list(HealthCheck))
TestBoard = BoardMachine.TestCase

"""Two arms that take turns on one machine, A B B A: their engines, what is timed, and whether both did the same work.

Each arm has a pool and an engine of its own for each number of requests, so nothing of an earlier run is found again.
Requests come in one after the other, and those before them generate on meanwhile; only when all are there, and after
one more step that is not timed, does the clock run: over steps in which every request gets one token.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from quantkit.eval.bench.decode_report import Speed, SpeedRow
from quantkit.runtime import Engine, EngineOptions, PagePool
from quantkit.runtime.engine import Model
from quantkit.runtime.pages import CacheSpec

_ORDER = (0, 1, 1, 0)


@dataclass(frozen=True)
class Arm:
    """What is timed: a model over pages of one kind; `name` says what the other arm has otherwise."""

    name: str
    model: Model
    spec: CacheSpec


@dataclass(frozen=True)
class Turns:
    """What both arms do.

    prompt_tokens  of each request
    new_tokens     of each request in a timed turn
    rounds         of four turns, A B B A
    seed           of the prompts
    """

    prompt_tokens: int = 16
    new_tokens: int = 4
    rounds: int = 2
    seed: int = 0
    engine: EngineOptions = field(default_factory=lambda: EngineOptions(batched=True, share_prefixes=False))

    @property
    def passes(self) -> int:
        """In which a prompt is computed."""
        return -(-self.prompt_tokens // self.engine.chunk_size)

    def most_tokens(self, requests: int) -> int:
        """That a request can get to: the first one generates while the others' prompts are computed."""
        return self.prompt_tokens + requests * self.passes + 2 * self.rounds * self.new_tokens + 1

    def pages(self, spec: CacheSpec, requests: int, *, at_the_end: bool) -> int:
        """That `requests` have when the last prompt is computed, or in the end; the k-th waited for k - 1 prompts."""
        timed = 2 * self.rounds * self.new_tokens + 1 if at_the_end else 0
        lengths = (self.prompt_tokens + waited * self.passes + timed for waited in range(requests))
        return sum(spec.pages_for(length) for length in lengths)

    def pages_enough(self, spec: CacheSpec, requests: int) -> int:
        """That let `requests` come in, for which an engine keeps one free for each, and stay to the end."""
        coming = self.pages(spec, requests, at_the_end=False) + requests
        alone = spec.pages_for(self.most_tokens(requests))
        return max(coming, self.pages(spec, requests, at_the_end=True), alone)


@dataclass(frozen=True)
class Compared:
    """What both arms' turns came to, and why it is not to be used, if so."""

    row: SpeedRow
    problems: tuple[str, ...]


def compare_decode(arms: tuple[Arm, Arm], pages: tuple[int, int], requests: int, turns: Turns) -> Compared:
    """Tokens per second of `requests` that all generate, in pools of so many `pages`."""
    batches = tuple(_Batch(arm, count, requests, turns) for arm, count in zip(arms, pages, strict=True))
    for batch in batches:
        batch.fill()
    for place in _ORDER * turns.rounds:
        if batches[place].fits:
            batches[place].take_turn()
    problems = [problem for batch in batches for problem in batch.problems()]
    expected = requests * turns.new_tokens * 2 * turns.rounds
    if all(batch.fits for batch in batches) and {batch.tokens for batch in batches} != {expected}:
        made = ", ".join(f"{batch.name} made {batch.tokens:,} tokens" for batch in batches)
        problems.append(f"{made}, and both should have made {expected:,}")
    row = make_row(requests, *(batch.speed for batch in batches))
    return Compared(row, tuple(f"decode, {requests} requests: {problem}" for problem in problems))


def compare_prefill(arms: tuple[Arm, Arm], turns: Turns) -> Compared:
    """Tokens per second of one prompt, another one in each turn; the first turn of each arm is not counted."""
    rates: tuple[list[float], list[float]] = ([], [])
    problems: list[str] = []
    for turn, place in enumerate((0, 1, *_ORDER * turns.rounds)):
        arm = arms[place]
        batch = _Batch(arm, turns.pages_enough(arm.spec, 1), 1, turns, seed=turn // 2)
        begin = time.perf_counter()
        batch.fill(warm_up=False)
        seconds = time.perf_counter() - begin
        problems += batch.problems()
        if turn > 1:
            rates[place].append(turns.prompt_tokens / seconds)
    speeds = (Speed(1, turns.prompt_tokens * len(rate), tuple(rate)) for rate in rates)
    return Compared(make_row(1, *speeds), tuple(f"prefill: {problem}" for problem in dict.fromkeys(problems)))


def make_row(requests: int, baseline: Speed, candidate: Speed) -> SpeedRow:
    """Both arms' turns and their ratios by round: two turns of one arm over two of the other."""
    both = baseline.turns + candidate.turns
    if len(baseline.turns) != len(candidate.turns) or not all(both):
        return SpeedRow(requests, baseline, candidate, ())
    seconds = [
        [1 / one + 1 / two for one, two in zip(speed.turns[::2], speed.turns[1::2], strict=True)]
        for speed in (baseline, candidate)
    ]
    return SpeedRow(requests, baseline, candidate, tuple(a / b for a, b in zip(*seconds, strict=True)))


class _Batch:
    """One arm's engine, with requests whose prompts are random; the same ones for both arms."""

    def __init__(self, arm: Arm, pages: int, requests: int, turns: Turns, seed: int = 0) -> None:
        self.name, self.tokens = arm.name, 0
        self._requests, self._turns = requests, turns
        self._rates: list[float] = []
        self._error = ""
        self._engine = Engine(arm.model, PagePool(arm.spec, pages), turns.engine)
        generator = torch.Generator().manual_seed(turns.seed + 1_000 * requests + seed)
        prompts = torch.randint(arm.model.config.vocab, (requests, turns.prompt_tokens), generator=generator)
        self._prompts: list[list[int]] = prompts.tolist()
        self._running = 0

    @property
    def fits(self) -> bool:
        """Whether every request got its pages."""
        return self._running == self._requests

    @property
    def speed(self) -> Speed:
        """The turns so far."""
        return Speed(self._running, self.tokens, tuple(self._rates))

    def fill(self, warm_up: bool = True) -> None:
        """Compute the prompts, until one gets no pages; then, if all have some, one step that is not timed."""
        counters = self._engine.counters
        new_tokens = self._turns.most_tokens(self._requests) - self._turns.prompt_tokens + 1
        for prompt in self._prompts:
            before = counters.prefill_tokens
            self._engine.submit(prompt, new_tokens)
            for _ in range(self._turns.passes):
                self._step()
            if counters.preempted or counters.prefill_tokens == before:
                break
        self._running = self._engine.num_running + counters.failed  # a request that failed did have pages
        if warm_up and self.fits:
            self._step()

    def take_turn(self) -> None:
        """Time steps in which every request gets a token."""
        begin = time.perf_counter()
        tokens = sum(self._step() for _ in range(self._turns.new_tokens))
        self._rates.append(tokens / (time.perf_counter() - begin))
        self.tokens += tokens

    def problems(self) -> Iterator[str]:
        """What makes its figures useless."""
        counters, prompts = self._engine.counters, self._requests * self._turns.prompt_tokens
        if counters.failed:
            yield f"{self.name}: {counters.failed} requests failed, the first because {self._error}"
        if counters.shared_tokens:
            share = counters.shared_tokens / prompts
            yield f"{self.name}: {share:.0%} of the prompts' tokens were found in a warm prefix cache"
        if self._rates and counters.preempted:
            yield f"{self.name}: requests gave their pages back {counters.preempted} times"

    def _step(self) -> int:
        """One step of the engine; how many tokens it made."""
        events = self._engine.step()
        self._error = self._error or next((str(event.error) for event in events if event.error), "")
        return sum(event.token is not None for event in events)

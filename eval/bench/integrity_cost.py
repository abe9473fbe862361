"""`quantkit bench integrity`: what checking pages costs a decode step, in one process and, for `tags`, in one engine.

In each round the engine takes a step with `off` and one with `tags`, whose tracker is out of the engine for the other,
in random order; in every fourth round one more with `off`. Each step gives each request one token; requests that get
near their end are replaced between rounds. `tags` over `off` is the cost, the second `off` over the first the noise.
Where a step gives a request a page, that changes what `tags` expects, and the next step with `tags` takes it in: here
that is every step for two that do, so the cost comes out rather too high.

`content` must see every write, so it has an engine of its own, beside one with `off`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import NotComparable, UsageError
from quantkit.eval.bench.bootstrap import Ratio, Resampling, Series, p95, ratio, total
from quantkit.eval.bench.integrity_report import Cost, CostRow, Costs, IntegrityCostReport
from quantkit.eval.bench.random_model import Shape, write_random
from quantkit.models import load
from quantkit.runtime import Engine, EngineOptions, Event, Finish, PagePool, cache_spec, unscaled
from quantkit.runtime.engine import Model
from quantkit.runtime.integrity import StepTracker

Tell = Callable[[str], None]

SHAPE = Shape(
    hidden=1024,
    intermediate=4096,
    sparse_layers=1,
    experts=16,
    expert_intermediate=768,
    heads=4,
    q_rank=128,
    kv_rank=128,
    index_heads=2,
    vocab=512,
)
_OFF_EVERY = 4  # rounds
_LONGEST_LIFE = 512  # tokens that a request generates before it is replaced
_WARM_UP = 20  # rounds that are not counted
_FAMILY = 0.05  # the chance that any comparison of `off` with itself is found to differ


@dataclass(frozen=True)
class Options:
    """What is timed.

    requests       at the same time, one row each
    pairs          of steps with `tags` and with `off`, for each row
    content_pairs  the same for `content`; 0 leaves it out
    prompt_tokens  of each request, less up to a page, so that not all get pages in the same step
    page_size      tokens of a page
    threads        of torch
    """

    requests: tuple[int, ...] = (1, 2, 4, 8)
    pairs: int = 20_000
    content_pairs: int = 200
    prompt_tokens: int = 1_500
    page_size: int = 16
    threads: int = 1
    seed: int = 0
    resampling: Resampling = field(default_factory=Resampling)
    chunk_size: int = 256

    def __post_init__(self) -> None:
        if not self.requests or min(self.requests) < 1 or self.pairs < 1:
            raise UsageError("one request and one pair of steps at least are timed", hint="Write --requests 1,2,4,8.")
        if self.prompt_tokens <= self.page_size:
            raise UsageError(f"a prompt must be longer than a page of {self.page_size} tokens")


def bench_integrity(
    checkpoint: Path | None, options: Options | None = None, tell: Tell = lambda what: None
) -> IntegrityCostReport:
    """Time the checkpoint in a folder, or a made-up GLM of two layers: a check is as long with many, a step is not.

    Raises SourceError for one that cannot be run, UsageError for prompts that it has no room for.
    """
    options = options or Options()
    torch.set_num_threads(options.threads)
    if checkpoint is not None:
        return measure(load(checkpoint), checkpoint.resolve().name, options, tell)
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = Path(parent) / "fp8"
        write_random(folder, SHAPE.config)
        return measure(load(folder), "made-up GLM of two layers", options, tell)


def measure(model: Model, name: str, options: Options, tell: Tell) -> IntegrityCostReport:
    """Time a model."""
    rows = []
    for requests in options.requests:
        tell(f"{requests} requests, {options.pairs:,} pairs")
        rows.append(row := _measure_row(model, requests, options))
        costs = (("tags", row.tags), ("off", row.off), *([("content", row.content)] if row.content else []))
        tell(f"{requests} requests: " + ", ".join(f"{level} {100 * found.cpu.value:+.2f} %" for level, found in costs))
    problems = tuple(problem for row in rows for problem in row.problems())
    settings = {
        "prompt_tokens": options.prompt_tokens,
        "page_size": options.page_size,
        "threads": options.threads,
        "block": options.resampling.block,
        "draws": options.resampling.draws,
        "seed": options.seed,
    }
    return IntegrityCostReport(name, not problems, problems, tuple(rows), settings)


def _measure_row(model: Model, requests: int, options: Options) -> CostRow:
    batch = _Batch(model, requests, IntegrityLevel.TAGS, options)
    arms = _Arm(batch), _Arm(batch, batch.tracker), _Arm(batch, every=_OFF_EVERY)
    cpu, wall = _take_turns(arms, options.pairs, options.seed)
    again = np.ix_([2, 0], range(0, options.pairs, _OFF_EVERY))
    alone = 1 - _FAMILY / (2 * len(options.requests))
    above, below = cpu[again]
    noise = [ratio(statistic, above, below, options.resampling) for statistic in (total, p95)]
    return CostRow(
        requests=requests,
        pages=batch.pages,
        cpu=float(np.median(cpu[0])),
        wall=float(np.median(wall[0])),
        tags=_costs(cpu[1::-1], wall[1::-1], options),
        off=_costs(cpu[again], wall[again], options),
        off_holds=all(low <= 1 <= high for low, high in (one.interval(alone) for one in noise)),
        content=_measure_content(model, requests, options) if options.content_pairs else None,
    )


def _measure_content(model: Model, requests: int, options: Options) -> Costs:
    batches = [_Batch(model, requests, level, options) for level in (IntegrityLevel.OFF, IntegrityLevel.CONTENT)]
    cpu, wall = _take_turns([_Arm(batch, batch.tracker) for batch in batches], options.content_pairs, options.seed)
    return _costs(cpu[::-1], wall[::-1], options)


def _costs(cpu: Series, wall: Series, options: Options) -> Costs:
    """Of the first row of each clock over the second: [2, pairs]."""
    found = (_cost(ratio(one, clock[0], clock[1], options.resampling)) for clock in (cpu, wall) for one in (total, p95))
    return Costs(cpu.shape[1], *found)


def _cost(found: Ratio) -> Cost:
    low, high = found.interval()
    return Cost(found.value - 1, low - 1, high - 1)


class _Batch:
    """An engine whose requests all generate, and go on to; at an integrity level."""

    def __init__(self, model: Model, requests: int, level: IntegrityLevel, options: Options) -> None:
        passes = -(-options.prompt_tokens // options.chunk_size)
        self._spare = requests * (passes + 1) + 3  # tokens of steps that are not timed, and of a last round
        longest = model.config.max_length or options.prompt_tokens + _LONGEST_LIFE + self._spare
        self._life = min(_LONGEST_LIFE, longest - options.prompt_tokens - self._spare)
        if self._life < self._spare:
            raise UsageError(
                f"{requests} prompts of {options.prompt_tokens:,} tokens leave no room to generate",
                hint=f"The model has {longest:,} tokens: ask for shorter prompts.",
            )
        spec = cache_spec(model.config, torch.bfloat16, options.page_size, unscaled(model.config.layers))
        self._each = spec.pages_for(options.prompt_tokens + self._life + self._spare)
        pool = PagePool(spec, (requests + 1) * (self._each + 1))
        self.engine = Engine(model, pool, EngineOptions(options.chunk_size, batched=True, integrity=level))
        self.tracker = self.engine.tracker
        self._left: dict[int, int] = {}
        self._prompts: dict[int, Sequence[int]] = {}
        for prompt in _prompts(model, requests, options):
            self._submit(prompt)

    @property
    def pages(self) -> int:
        """That all requests have at most."""
        return self._each * len(self._left)

    def renew(self, steps: int) -> None:
        """Replace requests that have not so many tokens left, until all generate."""
        self.engine.tracker = self.tracker
        while due := [number for number, left in self._left.items() if left < steps]:
            for number in due:
                self.engine.abort(number)
                self.engine.take(number)
                del self._left[number]
                self._submit(self._prompts.pop(number))
        while max(self._left.values()) == self._life:
            self._count(self.engine.step())

    def step(self, tracker: StepTracker | None) -> tuple[float, float]:
        """Seconds of CPU time and of the wall clock that a step takes, in which every request gets a token."""
        self.engine.tracker = tracker
        wall, cpu = time.perf_counter(), time.process_time()
        events = self.engine.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if self._count(events) != len(self._left):
            raise NotComparable("a step did not give each request one token")
        return cpu, wall

    def _submit(self, prompt: Sequence[int]) -> None:
        number = self.engine.submit(prompt, self._life + self._spare)
        self._left[number], self._prompts[number] = self._life, prompt

    def _count(self, events: Sequence[Event]) -> int:
        """How many tokens came."""
        for event in events:
            if event.finish not in (None, Finish.ABORTED):
                raise NotComparable(f"request {event.request} ended: {event.error or event.finish}")
            if event.token is not None:
                self._left[event.request] -= 1
        return sum(event.token is not None for event in events)


@dataclass(frozen=True)
class _Arm:
    """Steps of one kind: of an engine, with its tracker or without, once in `every` rounds."""

    batch: _Batch
    tracker: StepTracker | None = None
    every: int = 1


def _take_turns(arms: Sequence[_Arm], rounds: int, seed: int) -> Series:
    """Each arm takes a step in its rounds, in random order: seconds of CPU time and wall, [2, arms, rounds], or NaN."""
    batches = list(dict.fromkeys(arm.batch for arm in arms))
    generator = np.random.default_rng(seed)
    seconds = np.full((2, len(arms), rounds), np.nan)
    for count in range(-_WARM_UP, rounds):
        for batch in batches:
            batch.renew(len(arms))
        for place in generator.permutation(len(arms)):
            arm = arms[place]
            if count % arm.every == 0:
                taken = arm.batch.step(arm.tracker)
                if count >= 0:
                    seconds[:, place, count] = taken
    return seconds


def _prompts(model: Model, requests: int, options: Options) -> list[list[int]]:
    generator = np.random.default_rng([options.seed, requests])
    lengths = (
        options.prompt_tokens - generator.permutation(max(requests, options.page_size))[:requests] % options.page_size
    )
    return [generator.integers(model.config.vocab, size=length).tolist() for length in lengths]

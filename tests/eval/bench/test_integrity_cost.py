"""`quantkit bench integrity`: what is timed, in which order, and when it fails; and the intervals of ratios."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import NotComparable, UsageError
from quantkit.eval.bench import integrity_cost
from quantkit.eval.bench.bootstrap import Resampling, Series, p95, ratio, total
from quantkit.eval.bench.integrity_cost import Options, bench_integrity, measure
from quantkit.eval.bench.integrity_report import Cost, CostRow, Costs, IntegrityCostReport
from quantkit.eval.bench.random_model import Shape
from quantkit.models import Cache
from quantkit.runtime import Engine
from quantkit.runtime.integrity.steps import StepTracker
from quantkit.tables import markdown
from support import counting_model as stub
from support.program import Result, Runner
from support.tiers import exhaustive

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options((1, 3), 40, 3, prompt_tokens=20, page_size=4, resampling=Resampling(10, 100), chunk_size=8)


class Model(stub.CountingModel):
    """Counts, in at most 90 tokens; beyond the position `last` it gives NaN. `ticks` is the time that it took."""

    def __init__(self, last: int = 10_000) -> None:
        super().__init__()
        self.config = replace(stub.CONFIG, max_length=90)
        self.last, self.ticks = last, 0.0

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        self.ticks += 1
        hidden = super().forward(tokens, positions, cache)
        return hidden.masked_fill((positions > self.last)[:, None], torch.nan)


Clocked = Callable[[float], Model]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """A model, and clocks that tick once with each of its passes, and as often as is said with each check of pages."""

    def make(check: float) -> Model:
        model, ask = Model(), StepTracker.check

        def checked(self: StepTracker, *arguments: Any) -> Any:
            model.ticks += check
            return ask(self, *arguments)

        monkeypatch.setattr(StepTracker, "check", checked)
        for clock in ("perf_counter", "process_time"):
            monkeypatch.setattr(integrity_cost.time, clock, lambda: model.ticks)
        return model

    return make


# --- what is timed


def test_cost_is_that_of_a_check(clocked: Clocked) -> None:
    """By a clock of passes and checks a step with `off` takes one pass, and `tags` cost the check. Nothing else is
    timed, neither prompts nor requests that are replaced."""
    report = measure(clocked(0.25), "model", OPTIONS, print)

    exact = Cost(0.25, 0.25, 0.25)
    for row in report.rows:
        assert (row.cpu, row.wall) == (1.0, 1.0)
        assert row.tags == Costs(40, exact, exact, exact, exact)
        assert row.off == Costs(10, *[Cost(0, 0, 0)] * 4)
        assert row.content is not None
        assert (row.content.pairs, row.content.cpu) == (3, exact)
        assert row.off_holds
    assert [row.requests for row in report.rows] == [1, 3]


def test_steps_alternate_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has one step with and one without a tracker, every fourth another without; the first is either."""
    order: list[bool] = []
    step = integrity_cost._Batch.step
    monkeypatch.setattr(
        integrity_cost._Batch, "step", lambda self, tracker: (order.append(tracker is not None), step(self, tracker))[1]
    )

    measure(Model(), "model", replace(OPTIONS, requests=(2,), content_pairs=0), print)

    firsts = set()
    for count in range(integrity_cost._WARM_UP + OPTIONS.pairs):
        taken, order = (order[:3], order[3:]) if count % 4 == 0 else (order[:2], order[2:])
        assert sorted(taken) == [False] * (len(taken) - 1) + [True]
        firsts.add(taken[0])
    assert (firsts, order) == ({False, True}, [])


def test_timed_steps_give_each_request_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a timed step every request gets one token and none ends; requests are replaced, all in one engine."""
    engines, replaced = set(), 0
    step, submit = Engine.step, Engine.submit

    def counted(self: Engine, *arguments: Any) -> int:
        nonlocal replaced
        replaced += 1
        return submit(self, *arguments)

    def stepped(self: Engine) -> Any:
        engines.add(self)
        return step(self)

    monkeypatch.setattr(Engine, "submit", counted)
    monkeypatch.setattr(Engine, "step", stepped)
    measure(Model(), "model", replace(OPTIONS, requests=(3,), content_pairs=0), print)

    (engine,) = engines
    assert replaced > 2 * 3
    assert engine.counters.shared_tokens > 0  # a prompt is computed once
    assert (engine.counters.finished, engine.counters.failed, engine.counters.preempted) == (0, 0, 0)


def test_prompts_end_at_different_places_of_a_page() -> None:
    """Prompts differ, and so do their lengths, by less than a page: not all requests get pages in the same step."""
    prompts = integrity_cost._prompts(Model(), 4, OPTIONS)

    assert sorted(map(len, prompts)) == [17, 18, 19, 20]
    assert len(set(map(tuple, prompts))) == 4


def test_a_model_that_fails_is_an_error() -> None:
    """Steps in which a request ends are not compared with others."""
    with pytest.raises(NotComparable, match="request 0 ended: request 0: the logits after token 30"):
        measure(Model(last=29), "model", OPTIONS, print)


def test_prompts_without_room_are_refused() -> None:
    """A model that holds no more than the prompts is refused with its length, and so are options that mean nothing."""
    with pytest.raises(UsageError, match="3 prompts of 60 tokens leave no room") as refused:
        measure(Model(), "model", replace(OPTIONS, requests=(3,), prompt_tokens=60), print)
    assert refused.value.hint == "The model has 90 tokens: ask for shorter prompts."
    with pytest.raises(UsageError, match="one request"):
        Options(requests=())
    with pytest.raises(UsageError, match="longer than a page of 16"):
        Options(prompt_tokens=16)


def test_made_up_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint a GLM with latent pages and an indexer is made up, and its steps are timed."""
    monkeypatch.setattr(integrity_cost, "SHAPE", Shape(256, 256, 0, 16, 128, 2, 128, 128, 2, 16, 512))
    report = bench_integrity(None, replace(OPTIONS, requests=(2,), pairs=4))

    (row,) = report.rows
    assert row.cpu > 0 < row.wall
    assert row.pages == 2 * -(-(20 + 512 + 2 * 4 + 3) // 4)


# --- the verdict

GOOD = Cost(0.002, 0.001, 0.009)
BAD = Cost(0.002, 0.001, 0.01)


@pytest.mark.parametrize(
    ("costs", "holds", "problems"),
    [
        (Costs(9, GOOD, GOOD, BAD, BAD), True, []),
        (Costs(9, BAD, GOOD, GOOD, GOOD), True, ["4 requests: tags cost up to 1.00% of throughput"]),
        (Costs(9, GOOD, BAD, GOOD, GOOD), True, ["4 requests: tags cost up to 1.00% of p95"]),
        (Costs(9, GOOD, GOOD, GOOD, GOOD), False, ["4 requests: steps with `off` differ from steps with `off`"]),
    ],
)
def test_verdict(costs: Costs, holds: bool, problems: list[str]) -> None:
    """Both upper bounds in CPU time must be below 1 %, and `off` equal to itself, whatever the wall clock says."""
    row = CostRow(4, 100, 0.01, 0.01, costs, costs, holds, None)

    assert [problem.split(", and")[0].split(": the")[0] for problem in row.problems()] == problems


def test_tables(clocked: Clocked) -> None:
    """A line for each kind of step with its four costs; what is wrong comes after them."""
    report = measure(clocked(0.5), "counting", OPTIONS, print)

    costs, why = report.tables()
    assert costs.title.startswith("counting: ")
    assert costs.title.endswith("prompts of 20 tokens, pages of 4, 1 threads: FAILED")
    assert costs.rows[1] == ("", "", "", "tags", "40", *["+50.00% [+50.00%, +50.00%]"] * 4)
    assert [row[3] for row in costs.rows] == ["off", "tags", "content"] * 2
    assert [row[0] for row in why.rows] == list(report.problems)
    assert len(report.problems) == 4


# --- the command


@pytest.fixture
def run(quantkit: Runner, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs `quantkit bench integrity` on a model with few pairs: exit code, stdout and stderr."""

    def bench(model: Model, *arguments: str | Path) -> Result:
        monkeypatch.setattr(integrity_cost, "load", lambda folder: model)
        few = ("--requests", "2", "--pairs", "8", "--content-pairs", "0", "--prompt-tokens", "20", "--page-size", "4")
        return quantkit("bench", "integrity", "folder", *few, *arguments)

    return bench


def test_command_passes(run: Runner, clocked: Clocked, tmp_path: Path) -> None:
    """A check of half a percent: one JSON object on stdout, the same in report.json, and its table in report.md."""
    code, out, err = run(clocked(0.005), "--json", "--output", tmp_path)

    assert (code, err) == (0, "")
    assert (tmp_path / "report.json").read_text() == out
    report = IntegrityCostReport.from_json(out)
    assert (report.passed, report.model, report.rows[0].content) == (True, "folder", None)
    assert report.rows[0].tags.cpu.value == pytest.approx(0.005)
    assert (tmp_path / "report.md").read_text() == markdown(report.tables()) + "\n"


def test_command_fails_where_tags_cost_too_much(run: Runner, clocked: Clocked) -> None:
    """A check of one percent: the report as ever, the reason on stderr, and exit code 3."""
    code, out, err = run(clocked(0.0101), "--json")

    assert code == 3
    assert json.loads(out)["passed"] is False
    assert "2 requests: tags cost up to 1.01% of throughput, and must cost less than 1%" in err


# --- intervals


def series(generator: np.random.Generator, count: int) -> Series:
    """Positive numbers of which neighbours resemble each other."""
    values = generator.normal(size=count)
    for place in range(1, count):
        values[place] += 0.8 * values[place - 1]
    return np.exp(0.2 * values)


def covered(statistic: Callable[[Series], Series], block: int, truth: float = 1.1) -> float:
    """How many of 150 intervals hold the true ratio: of two series each, which are disturbed together, too."""
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(150):
        common = series(generator, 600)
        above, below = truth * common * series(generator, 600), common * series(generator, 600)
        low, high = ratio(statistic, above, below, Resampling(block, 200, seed)).interval()
        hits += low <= truth <= high
    return hits / 150


@pytest.mark.parametrize("statistic", [total, exhaustive(p95)])
def test_intervals_cover_the_truth(statistic: Callable[[Series], Series]) -> None:
    """95 % intervals hold the true ratio nearly that often though neighbours resemble each other; drawn one by one they
    would not."""
    assert covered(statistic, 30) >= 0.85
    assert covered(statistic, 30) > covered(statistic, 1) + 0.05


def test_what_disturbs_both_cancels() -> None:
    """A series and the same by 1.02 have that ratio in every draw."""
    below = series(np.random.default_rng(0), 500)

    for statistic in (total, p95):
        found = ratio(statistic, 1.02 * below, below, Resampling(20, 50))
        assert found.value == pytest.approx(1.02)
        assert found.interval() == pytest.approx((1.02, 1.02))
        assert found.draws.shape == (50,)


def test_draws_are_blocks() -> None:
    """Each draw has as many places as the series, in runs of neighbours that go on at the beginning, all over it."""
    places = np.concatenate(list(Resampling(7, 300, 1).places(200)))

    assert places.shape == (300, 200)
    runs = places[:, :196].reshape(300, -1, 7)
    assert ((runs[:, :, 1:] - runs[:, :, :-1]) % 200 == 1).all()
    assert np.bincount(places.ravel(), minlength=200).min() > 200


def test_short_series_have_short_blocks() -> None:
    """Where a block would be most of a series, there are 20 blocks nevertheless, so that draws differ."""
    (places,) = Resampling(100, 50).places(60)

    assert len(np.unique(places[:, 0])) > 10
    assert ((places[:, 1:3] - places[:, :2]) % 60 == 1).all()
    assert not ((places[:, 3] - places[:, 2]) % 60 == 1).all()

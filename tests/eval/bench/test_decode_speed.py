"""`quantkit bench decode`: what is timed, when a run is INVALID, where a pool runs out, and what a token reads."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.source import open_source
from quantkit.cli import main
from quantkit.errors import NotComparable, OutputError, UsageError
from quantkit.eval.bench import decode_speed, decode_turns
from quantkit.eval.bench.decode_report import DecodeReport, Speed, WeightBytes
from quantkit.eval.bench.decode_speed import Options, bench_decode, measure, random_checkpoints, weigh
from quantkit.eval.bench.decode_turns import Arm, Turns, compare_decode, compare_prefill, make_row
from quantkit.eval.bench.random_model import Shape, shape_of_size, write_random
from quantkit.families.inventory import inventory
from quantkit.models import Cache, load
from quantkit.runtime import EngineOptions, cache_spec, unscaled
from quantkit.tables import markdown
from support import counting_model as stub

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Shape(256, 256, 1, 16, 128, 2, 128, 128, 2, 16, 512)
TURNS = Turns(6, 2, 1, engine=EngineOptions(4, batched=True, share_prefixes=False))
OPTIONS = Options((1, 4, 8), TURNS, 20, page_size=4)
WEIGHTS = WeightBytes("one", "fp8", 100, 68), WeightBytes("other", "int4", 60, 50)
SPEC = cache_spec(stub.CONFIG, torch.float32, 4, unscaled(1))


class Model(stub.CountingModel):
    """Counts as ever, and notes the tokens of each pass; beyond the position `last` it gives NaN."""

    def __init__(self, vocab: int = stub.VOCAB, last: int = 10_000) -> None:
        super().__init__()
        self.config = replace(stub.CONFIG, vocab=vocab)
        self.tokens: list[list[int]] = []
        self.last = last

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        self.tokens.append(tokens.tolist())
        hidden = super().forward(tokens, positions, cache)
        return hidden.masked_fill((positions > self.last)[:, None], torch.nan)


def arms(*models: Model) -> tuple[Arm, Arm]:
    """Arms named after their place."""
    one, other = (Arm(name, model, SPEC) for name, model in zip(("first", "second"), models, strict=True))
    return one, other


def enough(requests: int, turns: Turns = TURNS) -> tuple[int, int]:
    """Pages of both pools."""
    pages = turns.pages_enough(SPEC, requests)
    return pages, pages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Model]:
    """Two models, and a clock that ticks with each pass through either of them instead of seconds."""
    models = Model(), Model()
    monkeypatch.setattr(decode_turns.time, "perf_counter", lambda: float(sum(len(model.passes) for model in models)))
    return models


# --- what is timed


@pytest.mark.parametrize("requests", [1, 3, 8])
def test_only_steps_in_which_all_generate_are_timed(clock: tuple[Model, Model], requests: int) -> None:
    """A timed step is one pass in which every request gets a token: by passes, each turn's speed is their number."""
    found = compare_decode(arms(*clock), enough(requests), requests, TURNS)

    assert found.problems == ()
    expected = Speed(requests, requests * 2 * 2, (float(requests), float(requests)))
    assert (found.row.baseline, found.row.candidate) == (expected, expected)
    assert found.row.ratios == (1.0,)


def test_prefill_is_timed_by_chunks(clock: tuple[Model, Model]) -> None:
    """A prompt of 20 tokens in chunks of 4 is 5 passes, and nothing else is timed."""
    found = compare_prefill(arms(*clock), replace(TURNS, prompt_tokens=20, rounds=2))

    assert found.problems == ()
    assert found.row.baseline == found.row.candidate == Speed(1, 80, (4.0,) * 4)


def test_arms_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms are filled and warm before the first timed turn; then come A B B A, as often as there are rounds."""
    order: list[str] = []
    take = decode_turns._Batch.take_turn
    fill = decode_turns._Batch.fill
    monkeypatch.setattr(decode_turns._Batch, "take_turn", lambda self: (order.append(self.name), take(self))[1])
    monkeypatch.setattr(decode_turns._Batch, "fill", lambda self: (order.append("fill"), fill(self))[1])

    turns = replace(TURNS, rounds=2)
    compare_decode(arms(Model(), Model()), enough(2, turns), 2, turns)

    assert order == ["fill", "fill", *("first", "second", "second", "first") * 2]


def test_prompts_differ(clock: tuple[Model, Model]) -> None:
    """No two requests of an arm have the same prompt, and both arms have the same ones."""
    for requests in (3, 8):
        compare_decode(arms(*clock), enough(requests), requests, TURNS)
    compare_prefill(arms(*clock), TURNS)

    first, second = (prompts(model) for model in clock)
    assert len(set(first)) == len(first) == 3 + 8 + 3
    assert first == second


def prompts(model: Model) -> list[tuple[int, ...]]:
    """The first chunk of each prompt that was computed, in order."""
    passes = zip(model.tokens, model.passes, strict=True)
    return [tuple(tokens) for tokens, positions in passes if positions == [0, 1, 2, 3]]


def test_ratio_is_that_of_a_round() -> None:
    """Two turns of the candidate over two of the baseline in the same round: the time of equal tokens."""
    row = make_row(1, Speed(1, 8, (2.0, 2.0, 4.0, 12.0)), Speed(1, 8, (4.0, 4.0, 6.0, 6.0)))

    assert row.ratios == (2.0, 1.0)


# --- INVALID


def test_arm_that_stops_early_is_invalid() -> None:
    """An arm whose requests end before the others' made fewer tokens, so its tokens per second mean nothing."""
    report = measure((Model(), Model(last=8)), WEIGHTS, OPTIONS, print)

    assert not report.valid
    assert "first because request 0: the logits" in report.problems[0]
    assert report.problems[0].startswith("decode, 1 requests: INT4: 1 requests failed")
    assert "decode, 1 requests: FP8 made 4 tokens, INT4 made 2 tokens, and both should have made 4" in report.problems
    assert "INVALID: decode" in markdown(report.tables())


def test_warm_prefix_cache_is_invalid() -> None:
    """Where equal prompts share pages, part of the work is found instead of done; the share is told."""
    sharing = replace(TURNS, engine=EngineOptions(4, batched=True, share_prefixes=True))
    models = Model(vocab=1), Model(vocab=1)  # so all prompts are equal
    found = compare_decode(arms(*models), enough(4), 4, sharing)
    cold = compare_decode(arms(*models), enough(4), 4, TURNS)

    assert found.problems[0] == (
        "decode, 4 requests: first: 50% of the prompts' tokens were found in a warm prefix cache"
    )
    assert cold.problems == ()


def test_preemption_in_a_timed_turn_is_invalid() -> None:
    """A pool that holds all requests when they begin, and not when they have grown, makes them give pages back."""
    turns = replace(TURNS, new_tokens=6)
    spare = turns.pages(SPEC, 4, at_the_end=False) + 4
    found = compare_decode(arms(Model(), Model()), (enough(4, turns)[0], spare), 4, turns)

    assert spare < turns.pages(SPEC, 4, at_the_end=True)
    assert found.problems[0].startswith("decode, 4 requests: second: requests gave their pages back")
    assert "made" in found.problems[1]


def test_other_models_are_not_compared() -> None:
    """Checkpoints of models that differ are refused, with what differs."""
    with pytest.raises(NotComparable, match="one and other are not the same model: their configs differ in vocab"):
        measure((Model(), Model(vocab=50)), WEIGHTS, OPTIONS, print)


# --- kinds of pages


def test_pool_that_runs_out_is_a_row() -> None:
    """FP8 pages hold exactly twice the tokens in the same bytes; BF16 pages run out in the last row, and it is said."""
    report = measure((Model(), Model()), WEIGHTS, OPTIONS, print)

    assert report.valid
    assert report.kv.fp8_tokens == 2 * report.kv.bf16_tokens
    assert [row.requests for row in report.kv.rows] == [1, 4, 8]
    assert [row.candidate.running for row in report.kv.rows] == [1, 4, 8]
    assert [row.baseline.running for row in report.kv.rows[:2]] == [1, 4]
    last = report.kv.rows[2]
    assert 4 < last.baseline.running < 8
    assert (last.baseline.turns, last.ratios) == ((), ())
    assert len(last.candidate.turns) == 2
    assert f"| out of memory ({last.baseline.running} of 8 fit) |" in markdown(report.tables())


@pytest.mark.parametrize("rounds", [1, 24])
@pytest.mark.parametrize("requests", [(1,), (8,), (2, 3), (1, 8, 16, 32, 64)])
def test_pool_fits_the_rows(requests: tuple[int, ...], rounds: int) -> None:
    """By default FP8 pages are enough for every row, and BF16 pages for all but the last, and for one of its requests:
    an engine refuses what can never fit.
    """
    turns = replace(TURNS, rounds=rounds)
    options = replace(OPTIONS, requests=requests, turns=turns)
    specs = decode_speed._specs(Model(), options.page_size)
    pages = decode_speed._pool_pages(specs, options)

    assert 2 * pages >= turns.pages_enough(specs.fp8, requests[-1])
    assert all(pages >= turns.pages_enough(specs.bf16, before) for before in requests[:-1])
    assert pages >= specs.bf16.pages_for(turns.most_tokens(requests[-1]))


def test_memory_is_whole_bf16_pages() -> None:
    """A given number of bytes is rounded down to whole BF16 pages, so that FP8 pages hold exactly twice."""
    page_bytes = decode_speed._specs(Model(), 4).bf16.page_bytes
    report = measure((Model(), Model()), WEIGHTS, replace(OPTIONS, requests=(1,), memory=8 * page_bytes - 1), print)

    assert report.kv.pool_bytes == 7 * page_bytes
    assert (report.kv.bf16_tokens, report.kv.fp8_tokens) == (28, 56)
    assert report.valid


# --- made-up and given checkpoints


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A small made-up GLM in FP8, and its conversion to INT4."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_speed, "shape_of_size", lambda nbytes: SMALL)
        with random_checkpoints(folder, 1, keep=True) as folders:
            yield folders


def test_size_of_a_made_up_checkpoint() -> None:
    """It has as many bytes as were asked for, and not those of one layer more."""
    sizes = [inventory("x", json.dumps(Shape(sparse_layers=count).config)).nbytes for count in range(1, 8)]
    for asked in (sizes[0], sizes[0] + 1, 1_000_000_000, sizes[5], 2_000_000_000):
        assert sizes[shape_of_size(asked).sparse_layers - 1] == min(size for size in sizes if size >= asked)

    assert shape_of_size(1) == Shape(sparse_layers=1)


def test_made_up_tokens_choose_different_experts(made_up: tuple[Path, Path]) -> None:
    """The next tokens of different requests differ, and no expert is left out by all: they read what real ones do."""
    decoder = load(made_up[0])
    moe: Any = decoder.layers[1].mlp
    x = decoder.embedding[:64].float()
    ids = moe.router(x / x.square().mean(1, keepdim=True).sqrt()).ids

    assert len(ids.unique()) == SMALL.experts
    assert len({tuple(row) for row in ids.tolist()}) > 48


def test_bytes_of_a_token(made_up: tuple[Path, Path]) -> None:
    """A token reads all weights once, 8 of 16 experts and one row of the embedding; kv_b_proj is decoded to BF16."""
    for folder, expert_bits in zip(made_up, (8 + 32 / 128**2, 4 + 16 / 32), strict=True):
        tensors = open_source(folder).tensors
        sizes = {name: stored.spec.nbytes for name, stored in tensors.items()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name and "_shape" not in name)
        latent = sum(size for name, size in sizes.items() if "kv_b_proj" in name)
        decoded = 2 * SMALL.heads * (192 + 256) * SMALL.kv_rank * 2
        embedding, row = 512 * 256 * 2, 256 * 2
        shapes = sum(size for name, size in sizes.items() if "_shape" in name)
        rest = sum(sizes.values()) - experts - latent - embedding - shapes + decoded

        found = weigh(load(folder), "x")
        assert experts == 16 * 3 * 256 * 128 * expert_bits / 8
        assert found == WeightBytes("x", found.format, rest + experts + embedding, rest + experts // 2 + row)


def test_formats_are_told(made_up: tuple[Path, Path]) -> None:
    """A checkpoint's format is that of most of its numbers."""
    assert [weigh(load(folder), "x").format for folder in made_up] == ["fp8", "int4"]


def test_checkpoints_are_timed(made_up: tuple[Path, Path]) -> None:
    """Both are loaded at once and run; the report holds every row and survives JSON."""
    source, converted = made_up
    report = bench_decode(converted, source, replace(OPTIONS, requests=(1, 2), threads=1))

    assert report.valid
    assert [row.requests for row in report.decode] == [row.requests for row in report.kv.rows] == [1, 2]
    assert all(min(row.baseline.turns + row.candidate.turns) > 0 for row in (*report.decode, report.prefill))
    assert report.bytes_ratio == report.baseline.token_bytes / report.candidate.token_bytes > 1
    assert DecodeReport.from_json(report.to_json()) == report


def test_made_up_checkpoints_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --keep nothing stays, also after an error; with it, nothing that is there is written over."""
    monkeypatch.setattr(decode_speed, "shape_of_size", lambda nbytes: replace(SMALL, experts=8))
    with suppress(KeyError), random_checkpoints(tmp_path, 1, keep=False) as (source, converted):
        assert (source.name, converted.name) == ("fp8", "int4")
        raise KeyError
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "fp8").mkdir()
    with pytest.raises(OutputError, match="fp8 is there already"), random_checkpoints(tmp_path, 1, keep=True):
        pass
    with pytest.raises(UsageError, match="kept"), random_checkpoints(None, 1, keep=True):
        pass


def test_experts_share_of_what_a_token_reads() -> None:
    """In the default shape two thirds of the bytes that a token reads are experts'; in GLM-5.2 it is six tenths."""
    shape = Shape()
    config = shape.config
    sizes = {name: stored.spec.nbytes for name, stored in inventory("x", json.dumps(config)).tensors.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name) * 8 / shape.experts
    rest = sum(size for name, size in sizes.items() if ".experts." not in name and "embed" not in name)

    assert experts / (experts + rest) == pytest.approx(2 / 3, abs=0.03)


# --- the command


Runner = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs `quantkit bench decode` with few requests: exit code, stdout and stderr."""

    def bench(*arguments: str | Path) -> tuple[int, str, str]:
        few = ("--prompt-tokens", "3", "--new-tokens", "1", "--rounds", "1", "--prefill-tokens", "8")
        monkeypatch.setattr(sys, "argv", ["quantkit", "bench", "decode", *map(str, arguments), *few])
        with pytest.raises(SystemExit) as leaving:
            main()
        printed = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return leaving.value.code, printed.out, printed.err

    return bench


def test_command_writes_its_report(run: Runner, made_up: tuple[Path, Path], tmp_path: Path) -> None:
    """One JSON object on stdout, the same in report.json, and its tables in report.md."""
    source, converted = made_up
    code, out, err = run(converted, "--baseline", source, "--requests", "1,2", "--json", "--output", tmp_path)

    assert (code, err) == (0, "")
    assert (tmp_path / "report.json").read_text() == out
    report = DecodeReport.from_json(out)
    assert (report.baseline.name, report.candidate.name) == ("fp8", "int4")
    assert (tmp_path / "report.md").read_text() == markdown(report.tables()) + "\n"


def test_command_makes_a_model(run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without checkpoints a made-up one is timed, in tables; its folders are gone afterwards."""
    monkeypatch.setattr(decode_speed, "shape_of_size", lambda nbytes: replace(SMALL, experts=8))
    code, out, err = run("--requests", "1", "--folder", tmp_path)

    assert (code, err) == (0, "")
    assert "decode, tokens per second, BF16 pages" in out
    assert "KV formats in" in out
    assert "prefill, tokens per second: 8 tokens" in out
    assert list(tmp_path.iterdir()) == []


def test_invalid_run_is_exit_code_1(run: Runner, made_up: tuple[Path, Path], tmp_path: Path) -> None:
    """A candidate whose requests fail makes the run INVALID: the report is printed all the same, and says so."""
    broken = tmp_path / "broken"
    shutil.copytree(made_up[1], broken)
    place = open_source(broken).tensors["model.norm.weight"]
    with (broken / place.shard).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\xff" * place.spec.nbytes)
    code, out, err = run(broken, "--baseline", made_up[0], "--requests", "1")

    assert code == 1
    assert "INVALID: decode" in out
    assert err.startswith("error: the run is INVALID: decode, 1 requests: INT4: 1 requests failed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int4",), "a checkpoint and its baseline are needed, or neither"),
        (("--baseline", "fp8"), "a checkpoint and its baseline are needed, or neither"),
        (("--requests", "one"), "--requests one: not numbers"),
        (("--requests", "8,1"), "the numbers of requests must rise"),
        (("--requests", "0,1"), "the numbers of requests must rise"),
        (("--memory", "much"), "--memory much: not a number of bytes"),
        (("--keep", "--requests", "1"), "where are the made-up checkpoints to be kept?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors(run: Runner, arguments: tuple[str, ...], message: str) -> None:
    """What contradicts itself is exit code 2, before anything is made."""
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_made_up_checkpoint_is_as_its_index_says(tmp_path: Path) -> None:
    """`write_random` returns the bytes of its tensors, as the index does."""
    nbytes = write_random(tmp_path / "x", replace(SMALL, experts=8).config)

    assert open_source(tmp_path / "x").nbytes == nbytes

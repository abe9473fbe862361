"""Scales are chosen by the error that they leave, in both modes and with headroom, and only where 1 is worse."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.calibration.choosing import (
    Part,
    Sample,
    candidate_exponents,
    measure,
    measure_values,
    needed_exponent,
    pick,
    stored,
)
from quantkit.calibration.judging import judge
from quantkit.calibration.report import LayerCalibration
from quantkit.calibration.statistics import Spread
from quantkit.calibration.streaming import Observation
from quantkit.errors import CheckFailed, SourceError
from quantkit.families.config import GqaConfig, MlaConfig, ModelConfig, RopeConfig

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, RANK, ROPE, ROWS, QUERIES = 2, 24, 8, 96, 6
CONFIG = ModelConfig(
    *("deepseek_v3", "", 1, 0, 64, 64, 100, 1e-6, False, False, None),
    rope=RopeConfig(ROPE, "default", {"rope_theta": 1e4}, interleaved=True),
    attention=MlaConfig(HEADS, None, RANK, 16, ROPE, 16, False),
)
GQA = replace(CONFIG, attention=GqaConfig(4, 2, 12, False, False, False))


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Float32 numbers of standard deviation 1."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def observe(
    latent: Any = 1.0, rope: Any = 1.0, q_latent: Any = 1.0, q_rope: Any = 1.0, metric: Any = 1.0
) -> Observation:
    """A layer with MLA whose parts are normal numbers times these factors, one or one for each channel."""
    parts = {
        "latent": normal(0, ROWS, RANK) * latent,
        "rope": normal(1, ROWS, ROPE) * rope,
        "q_latent": normal(2, QUERIES, HEADS, RANK) * q_latent,
        "q_rope": normal(3, QUERIES, HEADS, ROPE) * q_rope,
    }
    spreads = {name: Spread(name) for name in parts}
    for name, numbers in parts.items():
        spreads[name].add(numbers)
    visible = torch.arange(ROWS) <= torch.linspace(ROWS // 2, ROWS - 1, QUERIES).long()[:, None]
    pairs = [Part(parts[f"q_{name}"].flatten(0, 1)[None], parts[name][None]) for name in ("latent", "rope")]
    sample = Sample((pairs[0], pairs[1]), visible.repeat_interleave(HEADS, dim=0), pairs[0].key)
    return Observation(spreads, [sample], torch.diag(torch.ones(RANK) * metric)[None], None)


def chosen(observation: Observation, per_channel: bool = False, config: ModelConfig = CONFIG) -> LayerCalibration:
    """What is chosen for a layer."""
    return judge(0, observation, config, ROWS, per_channel)


def test_errors_of_combinations_are_measured() -> None:
    """Every entry of the tables is what storing rows, and casting queries, does to logits and values."""
    observation = observe(rope=300.0, q_rope=0.01, metric=normal(4, RANK).abs())
    (sample,) = observation.samples
    (latent, rope), seen = sample.parts, sample.visible
    scales = [torch.tensor(2.0**exponent) for exponent in (-4, 0, 3)]

    tables = measure([sample, sample], observation.metric, (scales, scales))

    def centred(logits: torch.Tensor) -> torch.Tensor:
        rows = [row[mask] - row[mask].mean() for row, mask in zip(logits[0].double(), seen, strict=True)]
        return torch.cat(rows)

    exact = centred(latent.query @ latent.key.mT + rope.query @ rope.key.mT)
    for row, c in enumerate(scales):
        for column, r in enumerate(scales):
            keys = stored(latent.key, c), stored(rope.key, r)
            plain = latent.query @ keys[0].mT + rope.query @ keys[1].mT
            cast = stored(latent.query * c, 1.0) / c @ keys[0].mT + stored(rope.query * r, 1.0) / r @ keys[1].mT
            for table, logits in ((tables.logits_k, plain), (tables.logits_kq, cast)):
                expected = (centred(logits) - exact).square().sum() / exact.square().sum()
                assert float(table[row, column]) == pytest.approx(float(expected), rel=1e-4)
        difference = (stored(sample.values, c) - sample.values).double()
        weights = observation.metric[0].diagonal().double()
        expected = (difference.square() * weights).sum() / (sample.values.double().square() * weights).sum()
        assert float(tables.values[row]) == pytest.approx(float(expected), rel=1e-5)


def test_what_all_rows_share_does_not_count() -> None:
    """A channel with the same large number in each row shifts all logits of a query alike, which softmax ignores."""
    observation = observe()
    (sample,) = observation.samples
    key = sample.parts[0].key.clone()
    key[..., 0] = 300.0  # stored as 288 at scale 1
    constant = replace(sample, parts=(Part(sample.parts[0].query, key), sample.parts[1]))
    one = [torch.tensor(1.0)]

    assert stored(key, 1.0)[0, 0, 0] == 288
    assert float(measure([constant], observation.metric, (one, one)).logits_k[0, 0]) < 2e-3


def test_nothing_to_do() -> None:
    """Numbers well inside E4M3's range keep scale 1, for the parts and for the row."""
    layer = chosen(observe())

    assert layer.scales == {}
    assert layer.row_scale == 1
    assert layer.verdict == "nothing to do"
    assert layer.losses["one"] == layer.losses["chosen"]
    assert not layer.notes


@pytest.mark.parametrize("seed", range(3))
def test_two_parts_recover_what_one_scale_cannot(seed: int) -> None:
    """A latent of .004 beside a rope part of 2,000, queries the other way round: a common scale loses one of them."""
    factors = torch.exp2(normal(seed, RANK)) * 0.004
    layer = chosen(observe(latent=factors, q_latent=1 / factors, rope=700.0, q_rope=1 / 700, metric=1 / factors**2))
    easy = chosen(observe())

    assert layer.losses["chosen"].total < 1.3 * easy.losses["one"].total
    assert layer.losses["one"].total > 100 * layer.losses["chosen"].total
    assert layer.losses["row"].total > 100 * layer.losses["chosen"].total
    assert layer.losses["row"].total <= layer.losses["one"].total
    assert layer.row_gap == layer.losses["row"].total / layer.losses["chosen"].total
    assert layer.scales["latent"][0] <= 2**-4
    assert layer.scales["rope"][0] >= 16
    assert layer.verdict == f"latent 1/{1 / layer.scales['latent'][0]:g}, rope {layer.scales['rope'][0]:g}"
    assert layer.gain == layer.losses["one"].total / layer.losses["chosen"].total


def test_values_count_as_the_model_uses_them() -> None:
    """Small channels whose weights in kv_b are large by the same factor decide, though the latent's sum hides them."""
    factors = torch.ones(RANK)
    factors[::2] = 0.001
    hidden = chosen(observe(latent=factors, q_latent=factors, metric=1.0))
    used = chosen(observe(latent=factors, q_latent=factors, metric=factors**-2))

    assert hidden.scales == {}
    assert used.scales["latent"][0] <= 2**-4


def test_queries_decide_where_keys_do_not_care() -> None:
    """Queries of .003 would be cast to a few steps; a larger scale for the keys makes them larger."""
    layer = chosen(observe(q_latent=0.003, q_rope=0.003))

    assert layer.scales["latent"][0] >= 4
    assert layer.scales["rope"][0] >= 4
    assert layer.losses["chosen"].logits_k < 1.1 * layer.losses["one"].logits_k
    assert layer.losses["chosen"].logits_kq < 0.5 * layer.losses["one"].logits_kq


def test_a_fold_does_not_move_the_problem_to_the_queries() -> None:
    """Latents of .004 alone ask for a small scale; with queries of .004, too, there is none that suits both."""
    alone = chosen(observe(latent=0.004, q_latent=50.0, q_rope=0.0, metric=0.0))
    both = chosen(observe(latent=0.004, q_latent=0.004, q_rope=0.0, metric=0.0))

    assert alone.scales["latent"][0] <= 1 / 8
    assert both.losses["chosen"].total <= both.losses["one"].total
    assert both.scales.get("latent", (1.0,))[0] > alone.scales["latent"][0]


@pytest.mark.parametrize("factor", [1e-7, 0.01, 30.0, 300.0, 1e6])
def test_two_bits_are_left(factor: float) -> None:
    """Chosen scales leave the largest number of each part at 112 or less."""
    layer = chosen(observe(latent=factor, rope=2 * factor, q_latent=1 / factor, q_rope=1 / factor))

    for part, scales in layer.scales.items():
        assert layer.range(part).amax / scales[0] <= 112
    assert layer.row_gap < 1.05
    row = max(layer.range(part).amax for part in ("latent", "rope"))
    assert layer.row_scale == 1 or row / (layer.row_scale or 0) <= 112
    assert layer.scales or row <= 448


def test_exponents() -> None:
    """Powers of two are the smallest that leave two bits; what is worth trying reaches from there, and 1 is in it."""
    assert [needed_exponent(amax) for amax in (112, 113, 56, 448, 0)] == [0, 1, -1, 2, 0]
    assert candidate_exponents(448.0, 1.75) == list(range(-6, 11))
    assert 0 in candidate_exponents(1e-6, 1e-6)


def test_five_percent_are_not_worth_an_edit() -> None:
    """1 stays within 5 % of the best; else fewer changed parts go before smaller ones, and those before less error."""
    exponents = [-1, 0, 1]

    def table(**errors: float) -> torch.Tensor:
        total = torch.full((3, 3), 9.0)
        for place, error in errors.items():
            total[int(place[1]), int(place[2])] = error
        return total

    small = (1.0, 1.0)
    assert pick(table(_11=1.04, _00=1.0), exponents, small) == (1, 1)
    assert pick(table(_11=1.06, _00=1.0), exponents, small) == (0, 0)
    assert pick(table(_11=2.0, _00=1.0, _01=1.03), exponents, small) == (0, 1)
    assert pick(table(_11=1.0, _22=3.0, _12=2.0), exponents, (200.0, 1.0)) == (1, 1)  # 1 clips nothing
    assert pick(table(_11=1.0, _22=3.0, _12=2.0), exponents, (500.0 / 4, 500.0 / 4)) == (1, 1)


def test_clipping_is_an_edit() -> None:
    """One number of 1,200 among many small ones: 1 clips it, so 1 is out, whatever the sampled rows say."""
    observation = observe()
    observation.spreads["latent"].add(torch.full((1, RANK), 1200.0))

    layer = judge(0, observation, CONFIG, ROWS + 1, False)

    assert layer.scales["latent"] == (16.0,)
    assert layer.scales["rope"] == (1.0,)
    assert layer.absmax_scales["latent"] == pytest.approx(2.68, abs=0.01)
    assert layer.range("latent").clipped == pytest.approx(1 / (ROWS + 1))


def test_little_headroom_at_one_is_told() -> None:
    """Where 1 stays and the largest number is above 112, or a fold would clip queries, a note says so."""
    kept, folded = chosen(observe(latent=60.0)), chosen(observe(rope=700.0, q_rope=20.0))

    assert kept.scales == {}
    assert [note.split(",")[0] for note in kept.notes] == ["the largest number of latent"]
    assert folded.scales["rope"][0] >= 16
    assert [note.split(",")[0] for note in folded.notes] == ["the largest number of q_rope"]


@pytest.mark.parametrize("interleaved", [True, False])
def test_by_channel(interleaved: bool) -> None:
    """Channels from 2^-16 to 2^8 of the others' size: one scale for all cannot hold them, one for each can.

    Rotated pairs share a scale, listed pair by pair.
    """
    config = replace(CONFIG, rope=replace(CONFIG.rope, interleaved=interleaved))
    latent = torch.exp2(torch.linspace(-16, 8, RANK))
    pairs = torch.tensor([1e-4, 1.0, 50.0, 3000.0])
    rope = pairs.repeat_interleave(2) if interleaved else pairs.repeat(2)
    observation = observe(latent, rope, 1 / latent, 1 / rope, metric=latent**-2)

    common, each = chosen(observation, False, config), chosen(observation, True, config)

    assert len(each.scales["latent"]) == RANK
    assert len(each.scales["rope"]) == ROPE // 2
    assert each.losses["chosen"].total < 1.2 * chosen(observe()).losses["one"].total
    assert common.losses["chosen"].total > 20 * each.losses["chosen"].total
    assert list(each.scales["rope"]) == sorted(each.scales["rope"])
    stretched = torch.tensor(each.scales["rope"]).repeat_interleave(2)
    if not interleaved:
        stretched = torch.tensor(each.scales["rope"]).repeat(2)
    room = observation.spreads["rope"].channels / stretched
    assert room.max() <= 112
    assert " to " in each.verdict


def test_by_channel_only_where_it_helps() -> None:
    """Where one scale for each part is as good, there is one; where nothing is to do, nothing is done."""
    assert chosen(observe(), per_channel=True).scales == {}
    hard = observe(rope=700.0, q_rope=1 / 700)
    assert chosen(hard, per_channel=True).scales == chosen(hard).scales


def observe_gqa(key: float, value: float, query: float) -> Observation:
    """A layer with two kv heads and four queries."""
    parts = {
        "key": normal(5, ROWS, 2, 12) * key,
        "value": normal(6, ROWS, 2, 12) * value,
        "query": normal(7, QUERIES, 4, 12) * query,
    }
    spreads = {name: Spread(name) for name in parts}
    for name, numbers in parts.items():
        spreads[name].add(numbers)
    query_rows = parts["query"].view(QUERIES, 2, 2, 12).transpose(0, 1).flatten(1, 2)
    keys, values = (parts[part].transpose(0, 1) for part in ("key", "value"))
    sample = Sample((Part(query_rows, keys),), torch.ones(2 * QUERIES, ROWS, dtype=torch.bool), values)
    return Observation(spreads, [sample], torch.eye(12).expand(2, 12, 12), None)


def test_keys_and_values_are_apart() -> None:
    """GQA has a scale for keys and one for values, each only where it helps, and no row."""
    assert chosen(observe_gqa(1, 1, 1), config=GQA).scales == {}
    layer = chosen(observe_gqa(1000.0, 1.0, 0.001), config=GQA)
    assert list(layer.scales) == ["key"]
    assert layer.row_scale is None
    assert layer.losses["chosen"].logits_kq < 0.01 * layer.losses["one"].logits_kq
    layer = chosen(observe_gqa(1.0, 0.003, 1.0), config=GQA)
    assert list(layer.scales) == ["value"]
    assert layer.scales["value"][0] <= 1 / 8
    expected = measure_values(observe_gqa(1.0, 0.003, 1.0).samples, torch.eye(12), [torch.tensor(1.0)])
    assert layer.losses["one"].values == pytest.approx(float(expected[0]))


def test_what_was_not_seen_is_an_error() -> None:
    """No values, fewer tokens than asked, and experts that got fewer than were routed are errors, by layer."""
    empty = observe()
    empty.spreads["rope"] = Spread("rope")
    with pytest.raises(SourceError, match=r"layer 0: .*no values \(rope\)"):
        chosen(empty)
    with pytest.raises(CheckFailed, match="layer 0: attention kept 96 tokens, and 97"):
        judge(0, observe(), CONFIG, ROWS + 1, False)
    with pytest.raises(SourceError, match="1 numbers that are not finite"):
        Spread("latent").add(torch.tensor([[1.0, torch.nan]]))

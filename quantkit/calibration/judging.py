"""From what a layer's pass showed to its scales, with the errors before and after, and a verdict in words."""

from collections.abc import Mapping, Sequence

import torch

from quantkit.calibration.channels import choose_channels
from quantkit.calibration.choosing import (
    HEADROOM,
    TOLERANCE,
    Tables,
    candidate_exponents,
    measure,
    measure_values,
    needed_exponent,
    pick,
)
from quantkit.calibration.report import LayerCalibration, Loss
from quantkit.calibration.statistics import LARGEST, Spread
from quantkit.calibration.streaming import Observation
from quantkit.errors import CheckFailed, SourceError
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.models.rope import spread_pairs


def judge(
    number: int, observation: Observation, config: ModelConfig, tokens: int, per_channel: bool
) -> LayerCalibration:
    """The scales of layer `number`, of which `tokens` were asked for.

    Raises CheckFailed if attention or experts saw another number of tokens, and SourceError, naming the layer, if some
    numbers are not finite.
    """
    spreads = observation.spreads
    mla = isinstance(config.attention, MlaConfig)
    try:
        ranges = tuple(spread.range() for spread in spreads.values())
    except SourceError as error:
        raise SourceError(f"layer {number}: {error}", hint=error.hint) from error
    seen = ranges[0].values // _width(config)
    _check_counts(number, seen, observation.experts, config, tokens)
    chosen = (_judge_mla if mla else _judge_gqa)(observation, config, per_channel)
    kept = ("latent", "rope") if mla else ("key", "value")
    absmax = {part: spreads[part].amax / LARGEST for part in kept}
    if mla:
        absmax["row"] = max(absmax.values())
    scales, row_scale, losses = chosen
    return LayerCalibration(
        layer=number,
        attention=f"{config.prefix}model.layers.{number}.self_attn",
        tokens=seen,
        ranges=ranges,
        scales=scales,
        row_scale=row_scale,
        absmax_scales=absmax,
        losses=losses,
        verdict=_verdict(scales),
        notes=tuple(_notes(spreads, scales)),
        experts=() if observation.experts is None else tuple(observation.experts.tolist()),
    )


def _width(config: ModelConfig) -> int:
    attention = config.attention
    return attention.kv_rank if isinstance(attention, MlaConfig) else attention.kv_heads * attention.head_dim


def _check_counts(number: int, seen: int, experts: torch.Tensor | None, config: ModelConfig, tokens: int) -> None:
    if seen != tokens:
        raise CheckFailed(f"layer {number}: attention kept {seen:,} tokens, and {tokens:,} were to be seen")
    if experts is not None and config.moe and int(experts.sum()) != tokens * config.moe.top_k:
        routed = tokens * config.moe.top_k
        raise CheckFailed(f"layer {number}: experts were given {int(experts.sum()):,} tokens of {routed:,}")


Judged = tuple[dict[str, tuple[float, ...]], float | None, dict[str, Loss]]


def _judge_mla(observation: Observation, config: ModelConfig, per_channel: bool) -> Judged:
    latent, rope = observation.spreads["latent"], observation.spreads["rope"]
    amaxes = latent.amax, rope.amax
    exponents = candidate_exponents(*amaxes)
    numbers = [torch.tensor(2.0**exponent) for exponent in exponents]
    tables = measure(observation.samples, observation.metric, (numbers, numbers))
    place = pick(tables.total, exponents, amaxes)
    row = _pick_row(tables.total.diagonal(), exponents, max(amaxes))
    one = exponents.index(0)
    losses = {"one": tables.loss(one, one), "chosen": tables.loss(*place), "row": tables.loss(row, row)}
    chosen = tuple(exponents[index] for index in place)
    scales: dict[str, tuple[float, ...]] = {"latent": (2.0 ** chosen[0],), "rope": (2.0 ** chosen[1],)}
    if per_channel:
        scales, losses["chosen"] = _by_channel(observation, config, exponents, chosen, scales, losses["chosen"])
    changed = any(number != 1 for part in scales.values() for number in part)
    return scales if changed else {}, 2.0 ** exponents[row], losses


def _pick_row(total: torch.Tensor, exponents: Sequence[int], amax: float) -> int:
    """One scale for both parts: where headroom for the larger part would ruin the smaller one, without it."""
    row = pick(total, exponents, (amax,))[0]
    return row if total[row] <= TOLERANCE * total.min() else pick(total, exponents, (amax,), headroom=False)[0]


def _by_channel(
    observation: Observation,
    config: ModelConfig,
    exponents: Sequence[int],
    chosen: Sequence[int],
    scales: Mapping[str, tuple[float, ...]],
    loss: Loss,
) -> tuple[dict[str, tuple[float, ...]], Loss]:
    """A scale for each latent channel, each rotated pair, or both, if that is more than the tolerance better."""
    spreads, samples = observation.spreads, observation.samples
    latent, rope = spreads["latent"].channels, spreads["rope"].channels
    assert latent is not None
    assert rope is not None
    pairs = torch.tensor(spread_pairs(tuple(range(len(rope) // 2)), config.rope.interleaved)).long()
    grid = sorted({*exponents, *range(min(map(needed_exponent, latent.tolist())), max(exponents) + 1)})
    weights = observation.metric[0].diagonal().double()
    channels = choose_channels(samples, 0, weights, grid, chosen[0], latent, torch.arange(len(latent)))
    rotated = choose_channels(samples, 1, None, grid, chosen[1], rope, pairs)
    candidates = [[torch.tensor(2.0 ** chosen[0]), channels], [torch.tensor(2.0 ** chosen[1]), rotated]]
    tables: Tables = measure(samples, observation.metric, candidates)
    bound = TOLERANCE * float(tables.total.min())
    place = next(place for place in ((0, 0), (1, 0), (0, 1), (1, 1)) if float(tables.total[place]) <= bound)
    if place == (0, 0):
        return dict(scales), loss
    by_pair = rotated[torch.tensor([int((pairs == pair).nonzero()[0]) for pair in range(len(rope) // 2)])]
    found = {"latent": (scales["latent"], tuple(channels.tolist())), "rope": (scales["rope"], tuple(by_pair.tolist()))}
    return {part: found[part][index] for part, index in zip(found, place, strict=True)}, tables.loss(*place)


def _judge_gqa(observation: Observation, config: ModelConfig, per_channel: bool) -> Judged:
    """Keys and values have nothing to do with each other; `per_channel` is for MLA."""
    amaxes = {part: observation.spreads[part].amax for part in ("key", "value")}
    exponents = candidate_exponents(*amaxes.values())
    numbers = [torch.tensor(2.0**exponent) for exponent in exponents]
    tables = measure(observation.samples, observation.metric, (numbers,))
    values = measure_values(observation.samples, observation.metric, numbers)
    totals = {"key": tables.logits_k + tables.logits_kq, "value": values}
    places = {part: pick(total, exponents, (amaxes[part],))[0] for part, total in totals.items()}

    def loss(key: int, value: int) -> Loss:
        return Loss(float(tables.logits_k[key]), float(tables.logits_kq[key]), float(values[value]))

    one = exponents.index(0)
    scales: dict[str, tuple[float, ...]] = {
        part: (2.0 ** exponents[place],) for part, place in places.items() if exponents[place]
    }
    return scales, None, {"one": loss(one, one), "chosen": loss(places["key"], places["value"])}


def _verdict(scales: Mapping[str, tuple[float, ...]]) -> str:
    if not scales:
        return "nothing to do"
    words = []
    for part, numbers in scales.items():
        if len(numbers) > 1:
            words.append(f"{part} {_power(min(numbers))} to {_power(max(numbers))}")
        elif numbers != (1.0,):
            words.append(f"{part} {_power(numbers[0])}")
    return ", ".join(words)


def _power(number: float) -> str:
    return f"{number:g}" if number >= 1 else f"1/{1 / number:g}"


def _notes(spreads: Mapping[str, Spread], scales: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Parts that stay as they are with less headroom than a scale would leave, and queries that a fold clips."""
    notes = []
    for part, spread in spreads.items():
        if part.startswith("q"):
            scale = max(scales.get(part.removeprefix("q_") if part != "query" else "key", (1.0,)))
            if spread.amax * scale > LARGEST:
                notes.append(f"the largest number of {part}, {spread.amax * scale:.4g} after the fold, is beyond 448")
        elif part not in scales and spread.amax > LARGEST / HEADROOM:
            notes.append(f"the largest number of {part}, {spread.amax:.4g}, leaves less than two bits below 448")
    return notes

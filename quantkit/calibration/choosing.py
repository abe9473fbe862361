"""Powers of two for the parts of a cached row, by the error that they leave on real queries and rows of the layer.

    stored    E4M3(number / scale), clamped to 448; it stands for stored * scale
    K         keys stored, queries exact
    K and Q   queries in E4M3, too, after the fold has moved the scale into them: E4M3(query * scale)

E4M3 is a floating format: its error hardly depends on a scale unless numbers overflow or become subnormal. So a scale
has to be far from both, on both sides of the product, and where 1 is as good as any other it stays.

The logits' error is linear in the errors of the parts, so the products of all candidates' errors with each other give
the error of every combination exactly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.calibration.report import Loss
from quantkit.calibration.statistics import LARGEST

TOLERANCE = 1.05  # of the best error: what is within needs no further change
HEADROOM = 4.0  # what the largest number seen must leave below 448
_REACH = 8  # powers of two beyond the smallest scale that leaves the headroom


@dataclass(frozen=True)
class Part:
    """Queries [G, m, d] and keys [G, k, d] whose products add to logits; G kv heads, of which MLA has one."""

    query: torch.Tensor
    key: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """Some queries and rows of one sequence, float32.

    parts    MLA: latent and rope; GQA: the key alone
    visible  bool [m, k]: which rows a query attends to
    values   [G, k, d]: MLA's latents, or the values
    """

    parts: tuple[Part, ...]
    visible: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Tables:
    """Relative squared errors of candidates, float64.

    logits_k, logits_kq  [C], or [C, R] for every combination of the two parts' candidates
    values               [C]
    """

    logits_k: torch.Tensor
    logits_kq: torch.Tensor
    values: torch.Tensor

    def loss(self, *place: int) -> Loss:
        """One combination's."""
        return Loss(float(self.logits_k[place]), float(self.logits_kq[place]), float(self.values[place[0]]))

    @property
    def total(self) -> torch.Tensor:
        """`Loss.total` of every combination."""
        values = self.values if self.logits_k.dim() == 1 else self.values[:, None]
        return self.logits_k + self.logits_kq + 2 * values


def stored(numbers: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """What a cache gives back of float32 `numbers`, float32; `scale` is one number or one for each channel."""
    return (numbers / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def needed_exponent(amax: float) -> int:
    """The smallest power of two that leaves the headroom; 0 for nothing but zeros."""
    return math.ceil(math.log2(amax * HEADROOM / LARGEST)) if amax else 0


def candidate_exponents(*amaxes: float) -> list[int]:
    """The powers of two worth trying for parts with these largest numbers, 1 among them."""
    needed = [needed_exponent(amax) for amax in amaxes]
    return sorted({0, *range(min(needed), max(needed) + _REACH + 1)})


def measure(
    samples: Sequence[Sample], metric: torch.Tensor, scales: Sequence[Sequence[torch.Tensor]], value_scales: int = 0
) -> Tables:
    """The errors of all combinations of `scales`, a list of candidates (one number, or [d]) for each part of a sample.

    metric        [G, d, d]: values' squared error is e M e^T
    value_scales  the list that the values are stored with
    """
    logits_k, logits_kq = (_logit_table(samples, scales, queries) for queries in (False, True))
    errors = torch.zeros(len(scales[value_scales]), dtype=torch.float64)
    exact = 0.0
    for sample in samples:
        exact += _weighed(sample.values, metric)
        errors += torch.tensor(
            [_weighed(stored(sample.values, scale) - sample.values, metric) for scale in scales[value_scales]]
        )
    return Tables(logits_k, logits_kq, _relative(errors, exact))


def measure_values(samples: Sequence[Sample], metric: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values' relative squared error under each scale, where keys do not share it: float64 [C]."""
    exact = sum(_weighed(sample.values, metric) for sample in samples)
    errors = [
        sum(_weighed(stored(sample.values, scale) - sample.values, metric) for sample in samples) for scale in scales
    ]
    return _relative(torch.tensor(errors, dtype=torch.float64), exact)


def _weighed(values: torch.Tensor, metric: torch.Tensor) -> float:
    return float(((values @ metric) * values).double().sum())


def _relative(errors: torch.Tensor, exact: float) -> torch.Tensor:
    """Nothing has no error."""
    return errors / exact if exact else errors


def _logit_table(samples: Sequence[Sample], scales: Sequence[Sequence[torch.Tensor]], queries: bool) -> torch.Tensor:
    counts = [len(candidates) for candidates in scales]
    products = torch.zeros(sum(counts), sum(counts), dtype=torch.float64)
    exact = 0.0
    for sample in samples:
        logits = sum((part.query @ part.key.mT for part in sample.parts), torch.zeros(()))
        exact += float(_centred(logits, sample.visible).double().square().sum())
        rows = [
            _centred(error, sample.visible).flatten()
            for part, candidates in zip(sample.parts, scales, strict=True)
            for error in _errors(part, candidates, queries)
        ]
        stacked = torch.stack(rows).double()
        products += stacked @ stacked.T
    own, first = products.diagonal(), counts[0]
    if len(counts) == 1:
        return _relative(own, exact)
    return _relative(own[:first, None] + own[first:] + 2 * products[:first, first:], exact)


def _errors(part: Part, scales: Sequence[torch.Tensor], queries: bool) -> Iterator[torch.Tensor]:
    """What each scale does to the part's share of the logits [G, m, k]."""
    exact = part.query @ part.key.mT
    for scale in scales:
        query = stored(part.query, 1 / scale) if queries else part.query
        yield query @ stored(part.key, scale).mT - exact


def _centred(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Logits without the mean over the rows that a query sees, 0 for the others."""
    seen = logits * visible
    return (seen - seen.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)) * visible


def pick(
    total: torch.Tensor, exponents: Sequence[int], amaxes: Sequence[float], *, headroom: bool = True
) -> tuple[int, ...]:
    """The combination with the fewest and smallest changes among those within the tolerance of the best error.

    total   [C] or [C, R], whose axes are `exponents`; amaxes has an entry for each axis

    With `headroom`, a combination must leave it to every part; all scales 1 must only not have clipped anything seen.
    """
    places = torch.cartesian_prod(*(torch.arange(len(exponents)),) * len(amaxes)).view(-1, len(amaxes)).tolist()
    needed = [needed_exponent(amax) for amax in amaxes]

    def allowed(place: list[int]) -> bool:
        chosen = [exponents[index] for index in place]
        if not headroom:
            return True
        if not any(chosen):
            return max(amaxes) <= LARGEST
        return all(exponent >= least for exponent, least in zip(chosen, needed, strict=True))

    found = {tuple(place): float(total[tuple(place)]) for place in places if allowed(place)}
    bound = TOLERANCE * min(found.values())

    def change(place: tuple[int, ...]) -> tuple[float, ...]:
        chosen = [exponents[index] for index in place]
        return sum(map(bool, chosen)), sum(map(abs, chosen)), found[place]

    return min((place for place, error in found.items() if error <= bound), key=change)

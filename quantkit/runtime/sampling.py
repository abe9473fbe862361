"""From logits to a token, by numbers that depend on the request alone.

The random number of a request's n-th token is that of a counter-based generator (Philox) for (seed, n): it depends
neither on other requests nor on what was computed twice.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from quantkit.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    temperature  0: always the most probable token
    top_p        only the fewest most probable tokens that have this much probability together
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature {self.temperature} is not a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} is not above 0 and at most 1")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"seed {self.seed} is not in 0 to 2^64 - 1")


GREEDY = Sampling()


def choose(logits: torch.Tensor, sampling: Sampling, number: int) -> int:
    """The request's token `number` (from 0 on) from `logits` [vocab]; of equally probable ones the first."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double().cpu() / sampling.temperature
    ordered = torch.softmax(scaled, dim=0).sort(descending=True, stable=True)
    cumulative = ordered.values.cumsum(0)
    kept = min(int((cumulative < sampling.top_p).sum()) + 1, len(cumulative))
    uniform = np.random.Generator(np.random.Philox(key=sampling.seed, counter=number)).random()
    target = uniform * float(cumulative[kept - 1])
    place = int((cumulative <= target).sum())
    return int(ordered.indices[min(place, kept - 1)])

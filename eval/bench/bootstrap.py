"""Intervals for ratios of two series that were measured side by side, by drawing blocks of neighbours.

Timings that follow each other resemble each other, so whole blocks are drawn, at every place with the same chance
(Kuensch 1989), and the series goes on at its beginning (Politis and Romano 1992). Both series are drawn at the same
places: what disturbed them at the same time cancels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]
Statistic = Callable[[Series], Series]  # over the last axis

_FEWEST = 20  # blocks
_SLICE = 4_000_000  # numbers that are drawn at once


@dataclass(frozen=True)
class Resampling:
    """How series are drawn again: `draws` times, in blocks of `block` neighbours, fewer in short series."""

    block: int = 100
    draws: int = 2_000
    seed: int = 0

    def places(self, count: int) -> Iterator[npt.NDArray[np.intp]]:
        """For series of `count` numbers the places of each draw, [draws, count] in slices of the first axis."""
        block = max(1, min(self.block, count // _FEWEST))
        generator = np.random.default_rng(self.seed)
        starts = generator.integers(count, size=(self.draws, -(-count // block)))
        for part in np.array_split(starts, -(-self.draws * count // _SLICE)):
            blocks = part[:, :, None] + np.arange(block)
            yield blocks.reshape(len(part), -1)[:, :count] % count


@dataclass(frozen=True)
class Ratio:
    """A ratio as observed, and that of each draw: float64 [draws]."""

    value: float
    draws: Series = field(repr=False)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The percentiles of the draws that have the share `level` of them between them."""
        low, high = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def ratio(statistic: Statistic, above: Series, below: Series, resampling: Resampling) -> Ratio:
    """`statistic` of `above` over that of `below`, two series [count] that were measured pair by pair."""
    draws = [statistic(above[places]) / statistic(below[places]) for places in resampling.places(len(above))]
    return Ratio(float(statistic(above) / statistic(below)), np.concatenate(draws))


def total(series: Series) -> Series:
    """The sum."""
    return np.asarray(series.sum(axis=-1))


def p95(series: Series) -> Series:
    """What 95 of 100 do not exceed."""
    return np.asarray(np.quantile(series, 0.95, axis=-1))

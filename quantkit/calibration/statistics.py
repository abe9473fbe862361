"""Magnitudes of many numbers, taken as they come.

Percentiles are read from counts of the upper sixteen bits of float32, sign apart: 128 steps from one power of two to
the next. Sums are float64; the counts of subnormal and clipped numbers are exact.
"""

import math

import torch

from quantkit.calibration.report import Range
from quantkit.errors import SourceError

LARGEST = 448.0  # of E4M3
_SMALLEST_NORMAL = 2.0**-6
_BINS = 1 << 15
_NOT_FINITE = 0x7F80


class Spread:
    """The magnitudes of one part, over all that `add` was given, and the largest of each channel."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.channels: torch.Tensor | None = None  # float32 [C]
        self._bins = torch.zeros(_BINS, dtype=torch.int64)
        self._squares = 0.0
        self._subnormal = self._clipped = 0

    def add(self, values: torch.Tensor) -> None:
        """Take in values [..., C] of a layer. Raises SourceError for one that is not finite."""
        wide = values.detach().reshape(-1, values.shape[-1]).float().abs()
        bins = torch.bincount((wide.view(torch.int32) >> 16).flatten(), minlength=_BINS).cpu()
        if bins[_NOT_FINITE:].any():
            raise SourceError(
                f"the model computes {int(bins[_NOT_FINITE:].sum()):,} numbers that are not finite ({self.part})",
                hint="Check the checkpoint with quantkit verify.",
            )
        self._bins += bins
        self._squares += float(torch.linalg.vector_norm(wide, dtype=torch.float64)) ** 2
        self._subnormal += int(((wide < _SMALLEST_NORMAL) & (wide > 0)).sum())
        self._clipped += int((wide > LARGEST).sum())
        largest = wide.amax(0).cpu()
        self.channels = largest if self.channels is None else torch.maximum(self.channels, largest)

    @property
    def amax(self) -> float:
        """The largest magnitude; 0 of nothing."""
        return 0.0 if self.channels is None else float(self.channels.max())

    def range(self) -> Range:
        """All figures. Raises SourceError if there were no values at all."""
        count = int(self._bins.sum())
        if not count:
            raise SourceError(f"calibration saw no values ({self.part}), and there is nothing to choose a scale by")
        return Range(
            part=self.part,
            values=count,
            amax=self.amax,
            p50=self._percentile(0.5),
            p99=self._percentile(0.99),
            p999=self._percentile(0.999),
            rms=math.sqrt(self._squares / count),
            subnormal=self._subnormal / count,
            clipped=self._clipped / count,
        )

    def _percentile(self, share: float) -> float:
        """The middle of the bin that the share ends in, but no more than the largest."""
        below = self._bins.cumsum(0)
        place = int(torch.searchsorted(below, math.ceil(share * int(below[-1]))))
        middle = torch.tensor([(place << 16) | (0x8000 if place else 0)], dtype=torch.int32).view(torch.float32)
        return min(float(middle), self.amax)

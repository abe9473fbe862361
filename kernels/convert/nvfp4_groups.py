"""What the NVFP4 loops share: the numbers of E2M1, the plain scale of a group, and the counts of groups out of range.

In the loops weights are divided by the tensor's global scale, a power of two, and a scale is its E4M3 byte.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import VALUES

GROUP_SIZE = 16
SMALLEST, LARGEST = 0x08, 0x7E  # the bytes of 2^-6 and 448, between which all scales lie
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDPOINTS = (NUMBERS[:-1] + NUMBERS[1:]) / 2
SEARCHED = 8  # scales that a search tries; the first is one below the plain one
FULL_RANGE = 6 * VALUES[LARGEST]  # the largest magnitude that does not saturate
HALFWAY = 3 * (VALUES[:LARGEST] + VALUES[1 : LARGEST + 1])  # [126]: the largest magnitude between scales i and i + 1


def _candidates() -> npt.NDArray[np.float64]:
    scales = np.arange(SMALLEST - 1, LARGEST + 1)[:, None] + np.arange(SEARCHED)
    sound = (scales >= SMALLEST) & (scales <= LARGEST)
    steps = np.where(sound, VALUES[scales.clip(SMALLEST, LARGEST)], 1)
    return np.stack((steps, 1 / steps, np.where(sound, 0, np.inf)), axis=1).reshape(-1)


# For each first scale, from SMALLEST - 1: it and the seven after it, their reciprocals, and what their errors begin
# with, which is infinity for what is no scale.
CANDIDATES = _candidates()  # [120 * CANDIDATES_ROW]
CANDIDATES_ROW = 3 * SEARCHED


class Nvfp4Counts(NamedTuple):
    """Where a quantization met a NaN, and the counts of `quantkit.formats.nvfp4.GroupCounts`."""

    bad: int | None
    clamped: int
    raised: int
    flushed: int


@numba.njit(nogil=True, cache=True)
def plain_scale(amax):  # type: ignore[no-untyped-def]
    """The scale nearest to `amax` / 6, ties to even, within SMALLEST..LARGEST."""
    low, high = SMALLEST, LARGEST
    while low < high:
        middle = (low + high) >> 1
        if amax > HALFWAY[middle] or (amax == HALFWAY[middle] and middle & 1):
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(nogil=True, cache=True)
def is_raised(amax):  # type: ignore[no-untyped-def]
    """Whether the nearest scale of a group that is not all zero would lie below SMALLEST."""
    return 0 < amax < HALFWAY[SMALLEST - 1]

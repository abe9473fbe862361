"""The search for an INT4 group's scale: the divisor of the smallest squared error, found in whole numbers.

    ratio     weight / the group's largest magnitude                                    units of 2^-14, int16
    step      divisor                                                                   units of 2^-11, int16
    place     (ratio * step) >> 16: where the weight lies among the codes               units of 2^-9
    distance  place - code, where the code is the nearest one, clamped to -8..7         units of 2^-9
    error     sum of distance^2 over the group, times `weight` = 1 / divisor^2          units of 2^-20

Whole numbers make the sums, and so the output's bytes, independent of order, vector width and device. The ideal scale
is judged, before it is rounded to BF16.
"""

from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.e4m3 import NAN_BYTE, VALUES
from quantkit.kernels.vectors import LANES, squared_distance

Divisor = tuple[int, int]
RATIO_ONE = 1 << 14
_NUMBER_BITS = 4  # of a candidate's number


class Candidates(NamedTuple):
    """Divisors as `choose` takes them: `steps` int16 [n] and `weights` int64 [n]."""

    steps: npt.NDArray[np.int16]
    weights: npt.NDArray[np.int64]


@cache
def candidates(divisors: tuple[Divisor, ...]) -> Candidates:
    """The divisors (numerator, denominator), all below 16, in the units above."""
    numbers = np.array([numerator / denominator for numerator, denominator in divisors])
    return Candidates(np.rint(numbers * 2**11).astype(np.int16), np.rint(2**20 / numbers**2).astype(np.int64))


@cache
def ratio_table() -> npt.NDArray[np.int16]:
    """Ratios [127, 256] by the group's largest magnitude byte and the weight's byte."""
    largest = np.maximum(VALUES[:NAN_BYTE], VALUES[1])[:, None]
    ratio = np.nan_to_num(VALUES)[None, :] / largest
    table: npt.NDArray[np.int16] = np.rint(np.clip(ratio, -1, 1) * RATIO_ONE).astype(np.int16)
    return table


@numba.njit(nogil=True, cache=True)
def choose(ratios, group_size, steps, weights, scores, choice):  # type: ignore[no-untyped-def]
    """Write the best candidate of each group, of equal ones the first, into `choice` int64 [groups].

    ratios  int16 [groups * group_size]; `group_size` is a multiple of 32 and at most 128
    scores  int64 [2, groups], whose content is overwritten: a candidate's errors with its number in the lowest bits,
            and the least of all until then. Least numbers are found without branches, which no processor could predict.
    """
    for candidate in range(len(steps)):
        step, weight = steps[candidate], weights[candidate] << _NUMBER_BITS
        position = np.uint64(0)
        for group in range(np.uint64(choice.size)):
            total = np.int32(0)
            for _ in range(group_size // LANES):
                total = np.int32(total + squared_distance(ratios, position, step))  # type: ignore[call-arg]
                position += np.uint64(LANES)
            scores[0, group] = total * weight + candidate
        for group in range(np.uint64(choice.size)):
            least = min(scores[0, group], scores[1, group])
            scores[1, group] = least if candidate else scores[0, group]
    for group in range(np.uint64(choice.size)):
        choice[group] = scores[1, group] & ((1 << _NUMBER_BITS) - 1)

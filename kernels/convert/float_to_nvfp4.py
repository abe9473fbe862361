"""Float weights to packed NVFP4, for sources that are not FP8 blocks and for groups that do not lie in one.

The result is that of `quantkit.formats.nvfp4.quantize` on the same numbers, byte for byte: comparisons are exact, and
errors are added in the same order.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.nvfp4_groups import (
    CANDIDATES,
    CANDIDATES_ROW,
    FULL_RANGE,
    GROUP_SIZE,
    SMALLEST,
    Nvfp4Counts,
    is_raised,
    plain_scale,
)
from quantkit.kernels.convert.nvfp4_vectors import best_by_value, largest_value, pack_values
from quantkit.kernels.e4m3 import VALUES


def float_to_nvfp4(
    weight: npt.NDArray[np.float32] | npt.NDArray[np.float64],
    exponent: int,
    search: bool,
    packed: npt.NDArray[np.uint8],
    out_scale: npt.NDArray[np.uint8],
) -> Nvfp4Counts:
    """Quantize `weight` float32 or float64 [N, K] into `packed` [N, K / 2] and `out_scale` E4M3 bytes [N, K / 16].

    `exponent` and `search` as in `fp8_block_to_nvfp4`. 16 divides K. `bad` of the result is None, or the flat position
    of the first group with a NaN, an infinity, or a magnitude above 2^127; the arrays and counts are then incomplete.
    """
    bad, counts = _quantize(weight, 2.0**-exponent, search, CANDIDATES, packed.view(np.uint64), out_scale)
    return Nvfp4Counts(None if bad < 0 else bad, *counts.tolist())


@numba.njit(nogil=True, cache=True)
def _quantize(weight, unit, search, candidates, words, out_scale):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    values = np.empty(columns, np.float64)
    counts = np.zeros(3, np.int64)
    for row in range(rows):
        source, row_words, row_scale = weight[row], words[row], out_scale[row]
        for column in range(np.uint64(columns)):
            values[column] = np.float64(source[column]) * unit
        for group in range(np.uint64(columns // GROUP_SIZE)):
            position = group * np.uint64(GROUP_SIZE)
            amax = largest_value(values, position)  # type: ignore[call-arg,var-annotated]
            if not amax <= 2.0**127 * unit:
                return row * columns + np.int64(position), counts
            scale = plain_scale(amax)
            if search:
                begin = np.uint64((scale - SMALLEST) * CANDIDATES_ROW)
                scale += best_by_value(values, position, candidates, begin) - 1
            row_scale[group] = scale
            word = pack_values(values, position, VALUES[scale])
            row_words[group] = word
            counts[0] += amax > FULL_RANGE
            counts[1] += is_raised(amax)
            counts[2] += word == 0 and amax > 0
    return -1, counts

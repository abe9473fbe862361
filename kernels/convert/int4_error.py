"""What an INT4 weight lost against its FP8 source, and whether each code is a nearest one under its stored scale.

Plain arithmetic in float64, sharing nothing with the tables that made the codes. All numbers are exact there: an FP8
number times its float32 scale has 28 significant bits, a code times its BF16 scale 11, and both terms of the comparison
are differences of such numbers at nearly the same exponent.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.int4_groups import CODES_PER_WORD
from quantkit.kernels.convert.weight_error import WeightError
from quantkit.kernels.e4m3 import VALUES


def int4_error(
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    block: tuple[int, int],
    packed: npt.NDArray[np.uint32],
    out_scale: npt.NDArray[np.uint16],
) -> WeightError:
    """Compare FP8 `weight` [N, K] and `scale` float32 [ceil(N/rows), ceil(K/columns)] with INT4 `packed` [N, K/8] and
    `out_scale` BF16 bits [N, K/g]."""
    stored = (out_scale.astype(np.uint32) << 16).view(np.float32)
    return WeightError(*_compare(weight, scale, block[0], block[1], packed, stored))


@numba.njit(nogil=True, cache=True)
def _compare(weight, scale, block_rows, block_columns, packed, out_scale):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    group_size = columns // out_scale.shape[1]
    column_scale = np.empty(columns, np.float64)
    squared_error, squared_weight = 0.0, 0.0
    not_nearest, bad_scales = 0, 0
    for row in range(rows):
        if row % block_rows == 0:
            for column in range(columns):
                column_scale[column] = scale[row // block_rows, column // block_columns]
        for group in range(out_scale.shape[1]):
            step = np.float64(out_scale[row, group])
            if not (2.0**-126 <= abs(step) < np.inf):
                bad_scales += 1
                continue
            begin, end = group * group_size, (group + 1) * group_size
            words = packed[row, begin // CODES_PER_WORD : end // CODES_PER_WORD]
            sums = _compare_group(weight[row, begin:end], column_scale[begin:end], words, step)
            squared_error += sums[0]
            squared_weight += sums[1]
            not_nearest += sums[2]
    return squared_error, squared_weight, not_nearest, bad_scales


@numba.njit(nogil=True, cache=True)
def _compare_group(source, column_scale, words, step):  # type: ignore[no-untyped-def]
    squared_error, squared_weight, not_nearest = 0.0, 0.0, 0
    for index in range(np.uint64(words.size)):
        word = words[index]
        for position in range(np.uint64(CODES_PER_WORD)):
            column = index * np.uint64(CODES_PER_WORD) + position
            exact = VALUES[source[column]] * column_scale[column]
            code = np.float64(np.int64(word & np.uint32(0xF)) - 8)
            word >>= np.uint32(4)
            error = exact - code * step
            squared_error += error * error
            squared_weight += exact * exact
            steps = error / step  # of a negative scale, too, the code 7 is the end that a positive error lies beyond
            beyond = (code == 7.0 and steps > 0) or (code == -8.0 and steps < 0)
            not_nearest += not (abs(error) <= abs(step) / 2 or beyond)
    return squared_error, squared_weight, not_nearest

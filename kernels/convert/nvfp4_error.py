"""What an NVFP4 weight lost against its source, and whether each code is a nearest one under its stored scale.

Plain arithmetic in float64, sharing nothing with the loops that made the codes: an FP8 number times its float32 scale
has 28 significant bits there, and a midpoint of E2M1 times an E4M3 number and a power of two has seven.
"""

import numba
import numpy as np
import numpy.typing as npt

from quantkit.kernels.convert.weight_error import WeightError
from quantkit.kernels.e4m3 import VALUES

_GROUP_SIZE = 16
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_LOWEST = np.array([-0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])  # what lies between is nearest to a magnitude
_HIGHEST = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, np.inf])
_NUMBERS, _FROM, _TO = (  # [16] by code
    np.concatenate(halves) for halves in ((_MAGNITUDES, -_MAGNITUDES), (_LOWEST, -_HIGHEST), (_HIGHEST, -_LOWEST))
)


def nvfp4_error(
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    block: tuple[int, int],
    packed: npt.NDArray[np.uint8],
    out_scale: npt.NDArray[np.uint8],
    multiplier: float,
) -> WeightError:
    """Compare FP8 `weight` [N, K] and `scale` float32 [ceil(N/rows), ceil(K/columns)], of any block, with NVFP4
    `packed` [N, K/2], `out_scale` E4M3 bytes [N, K/16] and a global scale that multiplies."""
    return WeightError(*_compare_fp8(weight, scale, block[0], block[1], packed, out_scale, multiplier))


def float_nvfp4_error(
    weight: npt.NDArray[np.float32] | npt.NDArray[np.float64],
    packed: npt.NDArray[np.uint8],
    out_scale: npt.NDArray[np.uint8],
    multiplier: float,
    slack: float,
) -> WeightError:
    """Compare floats `weight` [N, K], which may be off by `slack` relatively, with NVFP4 as in `nvfp4_error`."""
    return WeightError(*_compare_floats(weight, packed, out_scale, multiplier, slack))


@numba.njit(nogil=True, cache=True)
def _compare_fp8(weight, scale, block_rows, block_columns, packed, out_scale, unit):  # type: ignore[no-untyped-def]
    columns = weight.shape[1]
    column_scale, exact = np.empty(columns, np.float64), np.empty(columns, np.float64)
    sums, counts = np.zeros(2, np.float64), np.zeros(2, np.int64)
    for row in range(weight.shape[0]):
        if row % block_rows == 0:
            for column in range(columns):
                column_scale[column] = scale[row // block_rows, column // block_columns]
        source = weight[row]
        for column in range(np.uint64(columns)):
            exact[column] = VALUES[source[column]] * column_scale[column]
        _compare_row(exact, packed[row], out_scale[row], unit, 0.0, sums, counts)
    return sums[0], sums[1], counts[0], counts[1]


@numba.njit(nogil=True, cache=True)
def _compare_floats(weight, packed, out_scale, unit, slack):  # type: ignore[no-untyped-def]
    sums, counts = np.zeros(2, np.float64), np.zeros(2, np.int64)
    for row in range(weight.shape[0]):
        _compare_row(weight[row].astype(np.float64), packed[row], out_scale[row], unit, slack, sums, counts)
    return sums[0], sums[1], counts[0], counts[1]


@numba.njit(nogil=True, cache=True)
def _compare_row(exact, packed, out_scale, unit, slack, sums, counts):  # type: ignore[no-untyped-def]
    """Add to `sums` (squared error and weight) and to `counts` (codes that are not nearest, bad scales)."""
    squared_error, squared_weight, not_nearest = 0.0, 0.0, 0
    for group in range(np.uint64(out_scale.size)):
        begin = group * np.uint64(_GROUP_SIZE)
        step = VALUES[out_scale[group]] * unit
        if not step > 0 and (out_scale[group] != 0 or not _is_zero(exact, packed, begin)):
            counts[1] += 1
            continue
        for position in range(begin, begin + np.uint64(_GROUP_SIZE)):
            code = packed[position >> np.uint64(1)] >> np.uint8((position & np.uint64(1)) << np.uint64(2))
            code = np.uint64(code & np.uint8(0xF))
            value = exact[position]
            error = value - _NUMBERS[code] * step
            margin = slack * abs(value)
            squared_error += error * error
            squared_weight += value * value
            not_nearest += not (_FROM[code] * step - margin <= value <= _TO[code] * step + margin)
    sums += np.array((squared_error, squared_weight))
    counts[0] += not_nearest


@numba.njit(nogil=True, cache=True)
def _is_zero(exact, packed, begin):  # type: ignore[no-untyped-def]
    """Whether the weights and codes of the group that begins at `begin` are all zero."""
    for position in range(begin, begin + np.uint64(_GROUP_SIZE)):
        if exact[position] != 0 or packed[position >> np.uint64(1)] & np.uint8(0x77):
            return False
    return True

"""What low-bit weights lost against their source: sums over a piece of one."""

from typing import NamedTuple


class WeightError(NamedTuple):
    """Sums over the weights of a piece.

    squared_error   sum of (source - decoded)^2
    squared_weight  sum of source^2
    not_nearest     codes for which another code lies nearer to the source
    bad_scales      groups whose scale is NaN or infinite, or, of NVFP4, negative, or zero although a weight or a code
                    is not; their codes count in nothing else
    """

    squared_error: float
    squared_weight: float
    not_nearest: int
    bad_scales: int

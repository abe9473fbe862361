"""Whether all pages of a batch have the generations that are expected of them: a loop for CPUs."""

import numba
import numpy as np
import numpy.typing as npt


@numba.njit(nogil=True, cache=True)
def has_generations(
    block_table: npt.NDArray[np.int32], expected: npt.NDArray[np.int64], generations: npt.NDArray[np.int64]
) -> bool:
    """Whether `expected` [B * max_pages] are the `generations` [num_pages] of a `block_table` [B, max_pages].

    False where one of them is no page.
    """
    place = 0
    for row in range(block_table.shape[0]):
        for column in range(block_table.shape[1]):
            page = block_table[row, column]
            if page < 0 or page >= len(generations) or generations[page] != expected[place]:
                return False
            place += 1
    return True

"""The product with 4-bit weights, by the kernel that suits the number of rows: `w4a16_gemv` or `w4a16_matmul`."""

import torch

from quantkit.kernels.gpu.w4a16_gemv import w4a16_gemv
from quantkit.kernels.gpu.w4a16_matmul import route, w4a16_matmul

GEMV_ROWS = 1
GEMV_PAIRS = 16  # up to about two tokens of eight choices nearly all pairs have experts of their own


def w4a16(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times 4-bit weights [N, K]: [M, N] of x's type. Layouts and errors: `w4a16_matmul`."""
    kernel = w4a16_gemv if len(x) <= GEMV_ROWS else w4a16_matmul
    return kernel(x, packed, scale, multiplier)


def w4a16_experts(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    multiplier: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [tokens or pairs, K] times the weights [E, N, K] of experts `ids` [tokens, choices]: [pairs, N] of x's type.

    An id outside 0..E-1 gives zeros. Layouts and errors: `w4a16_matmul`. For two products with the same ids, call
    `route` once and `w4a16_matmul` twice.
    """
    if ids.numel() <= GEMV_PAIRS:
        return w4a16_gemv(x, packed, scale, multiplier, ids)
    return w4a16_matmul(x, packed, scale, multiplier, route(ids, len(packed)))

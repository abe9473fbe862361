"""FP8 E4M3 weights with one FP32 scale for each block of rows and columns (DeepSeek and GLM checkpoints).

    weight  [N, K]                             float8_e4m3fn
    scale   [ceil(N / rows), ceil(K / columns)] float32, multiplies: value = weight * scale

The last block of either axis may be ragged: 576 rows in blocks of 128 have 5 scale rows, the last of which covers 64.
"""

import torch

E4M3_MAX = 448.0


def quantize(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `weight` [N, K] as the publishers do: scale = amax / 448 of the block, or 1 for a block of zeros.

    Returns the float8_e4m3fn weight [N, K] and the float32 scale [ceil(N / block[0]), ceil(K / block[1])].
    """
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    padded = weight.new_zeros((grid[0] * block[0], grid[1] * block[1]), dtype=torch.float32)
    padded[:rows, :columns] = weight
    amax = padded.abs().reshape(grid[0], block[0], grid[1], block[1]).amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    scaled = weight.float() / expand_scale(scale, weight.shape, block)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Decode `weight` [N, K] with `scale` [ceil(N / block[0]), ceil(K / block[1])] to `dtype` [N, K].

    The product is rounded to float32 first, as the engines do. For float64 it is exact (28 significant bits).
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (weight.to(wide) * expand_scale(scale.to(wide), weight.shape, block)).to(dtype)


def expand_scale(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Repeat each block's scale over its rows and columns, cut to `shape` [N, K]."""
    full = scale.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return full[: shape[0], : shape[1]]

"""y = x @ W^T on a CPU with weights that stay packed: x is BF16 [M, K], W [N, K] INT4, NVFP4 or FP8 in blocks.

INT4 goes through torch's own kernel, for which `pack_int4` brings the weights into its order once. It reads half a byte
a weight and multiplies as it unpacks. NVFP4 and FP8 are decoded to BF16, a tile of rows at a time, which stays in the
cache until torch has multiplied it; decoding looks bytes up in tables (`nvfp4_to_bf16`, `fp8_block_to_bf16`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantkit.formats import int4
from quantkit.kernels.fp8_block_to_bf16 import fp8_block_to_bf16
from quantkit.kernels.nvfp4_to_bf16 import nvfp4_to_bf16

_GROUPS = (256, 128, 64, 32)  # that torch's kernel knows
_ROWS = 16  # a multiple of which it wants
_TILE_BYTES = 1 << 22

Decode = Callable[[int, int, npt.NDArray[np.uint16]], None]


@dataclass(frozen=True)
class Int4Weight:
    """INT4 weights [N, K] in the order of torch's CPU kernel, N rounded up to a multiple of 16.

    packed  uint8 [N, K / 2]           in an order of torch's own, which depends on the CPU: not for files
    scale   bfloat16 [K / g, N, 2]     the scale, and a zero point of 0
    """

    packed: torch.Tensor
    scale: torch.Tensor
    group_size: int
    rows: int


def pack_int4(packed: torch.Tensor, scale: torch.Tensor) -> Int4Weight:
    """Reorder `packed` int32 [N, K / 8] with `scale` bfloat16 [N, K / g], g a multiple of 32, as checkpoints hold them.

    Takes 5 bytes a weight for a moment. Raises ValueError for another g or another type of scales.
    """
    rows, words = packed.shape
    group_size = words * 8 // scale.shape[1]
    if group_size % _GROUPS[-1] or scale.dtype != torch.bfloat16:
        raise ValueError(f"groups of {group_size} with {scale.dtype} scales; torch takes multiples of 32 with bfloat16")
    known = next(size for size in _GROUPS if group_size % size == 0)
    fill = -rows % _ROWS
    codes = torch.nn.functional.pad(int4.unpack(packed).to(torch.int32) + 8, (0, 0, 0, fill))
    groups = torch.nn.functional.pad(scale.repeat_interleave(group_size // known, dim=1), (0, 0, 0, fill)).T
    ordered = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return Int4Weight(ordered, torch.stack((groups, torch.zeros_like(groups)), dim=2), known, rows)


def int4_linear(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """x [M, K] bfloat16 times `weight`: [M, N] bfloat16, sums in float32. Raises ValueError for another type of x."""
    _require_bf16(x)
    if len(x) == 0:
        return x.new_empty(0, weight.rows)
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.packed, weight.group_size, weight.scale)
    return y[:, : weight.rows]


def nvfp4_linear(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, multiplier: float) -> torch.Tensor:
    """x [M, K] bfloat16 times `packed` uint8 [N, K / 2] with `scale` float8_e4m3fn [N, K / 16]: [M, N] bfloat16."""
    bytes_, scales = packed.numpy(), scale.view(torch.uint8).numpy()

    def decode(begin: int, end: int, out: npt.NDArray[np.uint16]) -> None:
        nvfp4_to_bf16(bytes_[begin:end], scales[begin:end], multiplier, out)

    return _by_tiles(x, len(packed), decode, step=1)


def fp8_block_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """x [M, K] bfloat16 times `weight` float8_e4m3fn [N, K] with `scale` float32: [M, N] bfloat16.

    Raises ValueError where the weight has a NaN.
    """
    bytes_, scales = weight.view(torch.uint8).numpy(), scale.numpy()

    def decode(begin: int, end: int, out: npt.NDArray[np.uint16]) -> None:
        nan = fp8_block_to_bf16(bytes_[begin:end], scales[begin // block[0] :], block, out)
        if nan >= 0:
            raise ValueError(f"the weight is NaN at {list(divmod(begin * weight.shape[1] + nan, weight.shape[1]))}")

    return _by_tiles(x, len(weight), decode, step=block[0])


def _by_tiles(x: torch.Tensor, rows: int, decode: Decode, step: int) -> torch.Tensor:
    """x times `rows` rows of weights, which `decode` decodes from one row to another, multiples of `step` at a time."""
    _require_bf16(x)
    columns = x.shape[1]
    tile = max(1, _TILE_BYTES // (2 * columns * step)) * step
    buffer = np.empty((min(tile, rows), columns), np.uint16)
    weights = torch.from_numpy(buffer).view(torch.bfloat16)
    y = x.new_empty(len(x), rows)
    for begin in range(0, rows, tile):
        end = min(begin + tile, rows)
        decode(begin, end, buffer[: end - begin])
        y[:, begin:end] = x @ weights[: end - begin].T
    return y


def _require_bf16(x: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}; these products take bfloat16")

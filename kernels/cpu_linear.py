"""y = x @ W^T on a CPU with weights as checkpoints store them, dense or for routed experts.

    x      [M, K]                         BF16 or float32
    ids    [tokens, choices] int64        for experts: weights then have one axis more in front, and x a row for each
                                          token, or one for each pair of a token and a choice
    y      [M, N], or [pairs, N]          x's type; sums are float32, weights are not rounded

A row of y is the same bits whatever other rows are computed with it, and however many threads there are. The exception
are dense products of more than 64 rows: they decode weights to float32, a tile that stays in the cache at a time, which
torch multiplies nearly twice as fast as the loops here (`packed_rows`) do.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kernels import cpu_decode, packed_rows
from quantkit.kernels.dot_vectors import AT
from quantkit.kernels.packed_rows import Layout, Pairs

_DECODED = 64  # more rows of x than these meet decoded weights
_TILE_BYTES = 1 << 21
_SHARED = 1 << 21  # products of numbers that are worth a second thread

Decode = Callable[[int, int], torch.Tensor]


class _Weights(NamedTuple):
    """Matrices as the loops want them: flat arrays, a factor of each, and how x is to be made for them."""

    layout: Layout
    codes: npt.NDArray[np.generic]
    scale: npt.NDArray[np.generic]
    factors: npt.NDArray[np.float64]
    arrange: Callable[[npt.NDArray[np.float32]], tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]]


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times `weight` float8_e4m3fn [N, K] with `scale` float32 [ceil(N/rows), ceil(K/columns)].

    A NaN in a row of the weight makes its results NaN.
    """
    rows, columns = weight.shape[-2:]

    def decode(begin: int, end: int) -> torch.Tensor:
        return fp8_block_decode(weight[begin:end], scale[begin // block[0] :], block)

    if ids is None and len(x) > _DECODED:
        return _by_tiles(x, (rows, columns), decode, step=block[0])
    layout = packed_rows.natural(rows, columns, *block)
    return _multiply(
        x, _Weights(layout, _flat(weight, np.uint8), _flat(scale, np.float32), _ones(weight), _normalize), ids
    )


def int4_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """x times `packed` int32 [N, K / 8] with `scale` bfloat16 [N, K / g]. Raises ValueError if 8 does not divide g."""
    rows, columns = packed.shape[-2], packed.shape[-1] * 8
    if ids is None and len(x) > _DECODED:
        return _by_tiles(x, (rows, columns), lambda begin, end: int4_decode(packed[begin:end], scale[begin:end]))
    group = columns // scale.shape[-1]
    if group % 8:
        raise ValueError(f"groups of {group}; a word holds 8 weights, which must have one scale")
    if group % 64 == 0:
        layout, scales = packed_rows.by_words(rows, columns, group, 1), _flat(scale, np.uint16)
    elif group == 32:
        layout, scales = packed_rows.by_words(rows, columns, group, 2), _flat(scale, np.int16)
    else:
        layout = packed_rows.by_words(rows, columns, group, 8)
        scales = _flat(scale.float().repeat_interleave(group // 8, dim=-1), np.float32)
    return _multiply(x, _Weights(layout, _flat(packed, np.uint32), scales, _ones(packed), _interleave_int4), ids)


def nvfp4_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times `packed` uint8 [N, K / 2] with `scale` float8_e4m3fn [N, K / 16] and `multiplier` float32, [] or [E].

    16 divides K. A NaN scale makes its row's results NaN.
    """
    rows, columns = packed.shape[-2], packed.shape[-1] * 2
    if ids is None and len(x) > _DECODED:
        number = float(multiplier)
        return _by_tiles(
            x, (rows, columns), lambda begin, end: nvfp4_decode(packed[begin:end], scale[begin:end], number)
        )
    layout, factors = packed_rows.by_words(rows, columns, 16, 4), multiplier.double().reshape(-1).numpy()
    weights = _Weights(layout, _flat(packed, np.uint32), _flat(scale, np.uint8), factors, _interleave_nvfp4)
    return _multiply(x, weights, ids)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """x times `weight` bfloat16 [N, K]."""
    rows, columns = weight.shape[-2:]
    if ids is None and len(x) > _DECODED:
        return _by_tiles(x, (rows, columns), lambda begin, end: weight[begin:end].float())
    codes, factors = _flat(weight, np.uint16), _ones(weight)
    layout = packed_rows.natural(rows, columns, rows, columns)
    return _multiply(x, _Weights(layout, codes, np.ones(len(factors), np.float32), factors, _as_it_is), ids)


def fp8_block_decode(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The numbers of an FP8 matrix, float32 [N, K]."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    cpu_decode.fp8_to_float32(weight.view(torch.uint8).numpy(), scale.numpy(), block, out.numpy())
    return out


def int4_decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers of an INT4 matrix, float32 [N, K]."""
    out = torch.empty(len(packed), packed.shape[1] * 8)
    cpu_decode.int4_to_float32(packed.numpy().view(np.uint32), scale.view(torch.uint16).numpy(), out.numpy())
    return out


def nvfp4_decode(packed: torch.Tensor, scale: torch.Tensor, multiplier: float) -> torch.Tensor:
    """The numbers of an NVFP4 matrix, float32 [N, K]."""
    out = torch.empty(len(packed), packed.shape[1] * 2)
    cpu_decode.nvfp4_to_float32(packed.numpy(), scale.view(torch.uint8).numpy(), multiplier, out.numpy())
    return out


def _by_tiles(x: torch.Tensor, shape: tuple[int, int], decode: Decode, step: int = 1) -> torch.Tensor:
    """x times the weights of `shape`, which `decode` decodes from one row, a multiple of `step`, to another."""
    wide, y = x.float(), x.new_empty(len(x), shape[0])
    tile = max(1, _TILE_BYTES // (4 * shape[1] * step)) * step
    for begin in range(0, shape[0], tile):
        end = min(begin + tile, shape[0])
        y[:, begin:end] = wide @ decode(begin, end).T
    return y


def _multiply(x: torch.Tensor, weights: _Weights, ids: torch.Tensor | None) -> torch.Tensor:
    layout = weights.layout
    if x.dtype not in (torch.bfloat16, torch.float32) or x.shape[1] != layout.columns:
        raise ValueError(f"x is {x.dtype} {[*x.shape]}; it must be bfloat16 or float32 with {layout.columns} columns")
    count = len(x) if ids is None else ids.numel()
    y = np.empty((count, layout.rows), np.float32)
    if count and layout.rows:
        pairs = _all_rows(count) if ids is None else _sorted(ids, count // len(x), len(weights.factors))
        arranged, x_factors = weights.arrange(x.float().contiguous().numpy())
        segments = packed_rows.cut(layout)

        def multiply(begin: int, end: int) -> None:
            arrays = weights.codes, weights.scale, weights.factors, arranged, x_factors
            packed_rows.multiply(*segments, *arrays, *pairs, begin, end, np.empty(packed_rows.ROOM, np.uint8), y)

        _share(multiply, len(pairs.experts) * layout.rows, count * layout.rows * layout.columns)
    return torch.from_numpy(y).to(x.dtype)


def _share(work: Callable[[int, int], None], rows: int, size: int) -> None:
    """Do `work` for all rows, in parts of whole tiles on as many threads as torch has, where it has the `size`."""
    threads = min(torch.get_num_threads(), max(1, size // _SHARED))
    bounds = [rows * part // threads // AT * AT for part in range(threads)] + [rows]
    parts = [*itertools.pairwise(bounds)]
    others = [_pool(os.getpid()).submit(work, *part) for part in parts[1:]]
    work(*parts[0])
    for other in others:
        other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="quantkit-linear")


@functools.cache
def _all_rows(count: int) -> Pairs:
    rows = np.arange(count)
    return Pairs(np.zeros(1, np.int64), np.array([0, count]), rows, rows)


def _sorted(ids: torch.Tensor, rows_per_x: int, experts: int) -> Pairs:
    """The pairs of `ids` by expert, in their order."""
    chosen = ids.flatten().numpy()
    if chosen.min() < 0 or chosen.max() >= experts:
        raise ValueError(f"an expert of {chosen.min()}..{chosen.max()}, and there are {experts}")
    places, ends = packed_rows.sort(chosen, experts)
    used = np.flatnonzero(ends[1:] > ends[:-1])
    return Pairs(used, np.append(ends[used], len(places)), places // rows_per_x, places)


def _normalize(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    arranged, factors = np.empty_like(x), np.empty(len(x))
    packed_rows.normalize(x, arranged, factors)
    return arranged, factors


def _interleave_int4(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    return packed_rows.interleave(x, -8.0, 4), np.ones(len(x))


def _interleave_nvfp4(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    return packed_rows.interleave(x, -12.0, 8), np.full(len(x), 0.5)


def _as_it_is(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    return x, np.ones(len(x))


def _flat(tensor: torch.Tensor, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """A contiguous tensor's bytes as a flat array of `dtype`."""
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype)


def _ones(weight: torch.Tensor) -> npt.NDArray[np.float64]:
    return np.ones(len(weight) if weight.dim() == 3 else 1)

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

from quantkit.kernels.cpu import arranging, decoding, packed_rows
from quantkit.kernels.cpu.dot_vectors import AT
from quantkit.kernels.cpu.packed_rows import Layout, Pairs, Segments

_DECODED = 64  # more rows of x than these meet decoded weights
_TILE_BYTES = 1 << 21
_SHARED = 1 << 21  # products of numbers that are worth a second thread

Decode = Callable[[int, int], torch.Tensor]
Array = npt.NDArray[np.generic]


class Weights(NamedTuple):
    """Matrices as the loops want them, in the memory of the tensors that they are made of.

    factors  float64, of each matrix
    how      x is to be arranged: `arranging.arrange`
    decode   from one row, a multiple of `step`, to another: float32, of a matrix that is alone
    """

    layout: Layout
    segments: Segments
    codes: Array
    scale: Array
    factors: npt.NDArray[np.float64]
    how: int
    decode: Decode
    step: int = 1


def fp8_block_weights(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)) -> Weights:
    """`weight` float8_e4m3fn [N, K] with `scale` float32 [ceil(N/rows), ceil(K/columns)].

    A NaN in a row of the weight makes its results NaN.
    """
    layout = packed_rows.natural(weight.shape[-2], weight.shape[-1], *block)
    arrays = _flat(weight, np.uint8), _flat(scale, np.float32), _ones(weight)

    def decode(begin: int, end: int) -> torch.Tensor:
        return fp8_block_decode(weight[begin:end], scale[begin // block[0] :], block)

    return Weights(layout, packed_rows.cut(layout), *arrays, arranging.NORMALIZED, decode, block[0])


def int4_weights(packed: torch.Tensor, scale: torch.Tensor) -> Weights:
    """`packed` int32 [N, K / 8] with `scale` bfloat16 [N, K / g]. Raises ValueError if 8 does not divide g."""
    rows, columns = packed.shape[-2], packed.shape[-1] * 8
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

    def decode(begin: int, end: int) -> torch.Tensor:
        return int4_decode(packed[begin:end], scale[begin:end])

    arrays = _flat(packed, np.uint32), scales, _ones(packed)
    return Weights(layout, packed_rows.cut(layout), *arrays, 8, decode)


def nvfp4_weights(packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor) -> Weights:
    """`packed` uint8 [N, K / 2] with `scale` float8_e4m3fn [N, K / 16] and `multiplier` float32, [] or [E].

    16 divides K. A NaN scale makes its row's results NaN.
    """
    layout = packed_rows.by_words(packed.shape[-2], packed.shape[-1] * 2, 16, 4)
    factors = multiplier.double().reshape(-1).numpy() / 2  # codes are twice the numbers
    arrays = _flat(packed, np.uint32), _flat(scale, np.uint8), factors

    def decode(begin: int, end: int) -> torch.Tensor:
        return nvfp4_decode(packed[begin:end], scale[begin:end], float(multiplier))

    return Weights(layout, packed_rows.cut(layout), *arrays, 12, decode)


def plain_weights(weight: torch.Tensor) -> Weights:
    """`weight` bfloat16 [N, K]."""
    rows, columns = weight.shape[-2:]
    layout, factors = packed_rows.natural(rows, columns, rows, columns), _ones(weight)
    arrays = _flat(weight, np.uint16), np.ones(len(factors), np.float32), factors
    return Weights(
        layout, packed_rows.cut(layout), *arrays, arranging.AS_IT_IS, lambda begin, end: weight[begin:end].float()
    )


def multiply(x: torch.Tensor, weights: Weights, ids: torch.Tensor | None = None) -> torch.Tensor:
    """x times the weights, or those of the experts `ids`."""
    if ids is None and x.shape[0] > _DECODED:
        return _by_tiles(x, weights)
    count = x.shape[0] if ids is None else ids.numel()
    if ids is None or not count:
        return _multiply(x, weights, _all_rows(count))
    return _multiply(x, weights, _sorted(ids, count // x.shape[0], len(weights.factors)))


def multiply_each(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """x [T, E, K] times one matrix for each of E: [T, E, N]."""
    return _multiply(x.flatten(0, 1), weights, _one_each(*x.shape[:2])).view(*x.shape[:2], -1)


def _multiply(x: torch.Tensor, weights: Weights, pairs: Pairs) -> torch.Tensor:
    layout = weights.layout
    if x.dtype not in (torch.bfloat16, torch.float32) or x.shape[1] != layout.columns:
        raise ValueError(f"x is {x.dtype} {[*x.shape]}; it must be bfloat16 or float32 with {layout.columns} columns")
    y = x.new_empty(len(pairs.places), layout.rows)
    if y.numel():
        _write(_array(x.contiguous()), weights, pairs, _array(y))
    return y


def _write(x: Array, weights: Weights, pairs: Pairs, out: Array) -> None:
    """Write products with x into `out`, both float32 or the bits of BF16; with threads where it is worth it."""
    layout, arrays = weights.layout, (*weights.segments, *weights[2:5])
    threads = min(torch.get_num_threads(), len(out) * layout.rows * layout.columns // _SHARED)
    if threads <= 1:
        packed_rows.product(*arrays, weights.how, *pairs, x, out)
        return
    arranged, y = arranging.arrange(x, weights.how), np.empty(out.shape, np.float32)

    def work(begin: int, end: int) -> None:
        room = np.empty(packed_rows.ROOM, np.uint8)
        packed_rows.multiply(*arrays, *arranged, *pairs, begin, end, room, y)  # type: ignore[call-arg]

    _share(work, len(pairs.experts) * layout.rows, threads)
    arranging.give(y, out)


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times what `fp8_block_weights` takes."""
    return multiply(x, fp8_block_weights(weight, scale, block), ids)


def int4_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """x times what `int4_weights` takes."""
    return multiply(x, int4_weights(packed, scale), ids)


def nvfp4_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times what `nvfp4_weights` takes."""
    return multiply(x, nvfp4_weights(packed, scale, multiplier), ids)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """x times what `plain_weights` takes."""
    return multiply(x, plain_weights(weight), ids)


def fp8_block_decode(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The numbers of an FP8 matrix, float32 [N, K]."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    decoding.fp8_to_float32(weight.view(torch.uint8).numpy(), scale.numpy(), block, out.numpy())
    return out


def int4_decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers of an INT4 matrix, float32 [N, K]."""
    out = torch.empty(len(packed), packed.shape[1] * 8)
    decoding.int4_to_float32(packed.numpy().view(np.uint32), scale.view(torch.uint16).numpy(), out.numpy())
    return out


def nvfp4_decode(packed: torch.Tensor, scale: torch.Tensor, multiplier: float) -> torch.Tensor:
    """The numbers of an NVFP4 matrix, float32 [N, K]."""
    out = torch.empty(len(packed), packed.shape[1] * 2)
    decoding.nvfp4_to_float32(packed.numpy(), scale.view(torch.uint8).numpy(), multiplier, out.numpy())
    return out


def _by_tiles(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    rows, columns = weights.layout.rows, weights.layout.columns
    wide, y = x.float(), x.new_empty(len(x), rows)
    tile = max(1, _TILE_BYTES // (4 * columns * weights.step)) * weights.step
    for begin in range(0, rows, tile):
        end = min(begin + tile, rows)
        y[:, begin:end] = wide @ weights.decode(begin, end).T
    return y


def _share(work: Callable[[int, int], None], rows: int, threads: int) -> None:
    """Do `work` for all rows, in parts of whole tiles on so many threads."""
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


@functools.lru_cache(_DECODED)
def _one_each(tokens: int, matrices: int) -> Pairs:
    places = np.arange(tokens * matrices).reshape(tokens, matrices).T.flatten()
    return Pairs(np.arange(matrices), np.arange(0, len(places) + 1, tokens), places, places)


def _sorted(ids: torch.Tensor, rows_per_x: int, experts: int) -> Pairs:
    """The pairs of `ids` by expert, in their order."""
    chosen = ids.flatten().numpy()
    pairs = Pairs(*packed_rows.sort(chosen, experts, rows_per_x))
    if not len(pairs.experts):
        raise ValueError(f"an expert of {chosen.min()}..{chosen.max()}, and there are {experts}")
    return pairs


def _array(tensor: torch.Tensor) -> Array:
    """A tensor's numbers, of BF16 the bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _flat(tensor: torch.Tensor, dtype: type[np.generic]) -> Array:
    """A contiguous tensor's bytes as a flat array of `dtype`."""
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype)


def _ones(weight: torch.Tensor) -> npt.NDArray[np.float64]:
    return np.ones(len(weight) if weight.dim() == 3 else 1)

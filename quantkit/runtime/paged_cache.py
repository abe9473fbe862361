"""A forward pass over pages: what `quantkit.models.Cache` asks for, over the pool.

Passes with one row for each request use the paged decode of `quantkit.ops.pages`. A chunk of a prompt reads its
request's pages into contiguous rows and attends as `PlainCache` does. Either way rows are attended to as they are
stored, those of the pass itself included, and nothing depends on which pages a request has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import CacheError
from quantkit.models.cache import Cache, PlainCache
from quantkit.ops import pages as ops
from quantkit.runtime.pages import FP8, PagePool

_LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Segment:
    """Rows of one request in a pass: its tokens `start` to `stop`, not included, and all its pages."""

    pages: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Guard:
    """What a check before the pass found, and what its writes go through.

    hit    bool [B]: segments that were hit, whose rows are not written; None where it is known already that none was
    admit  slots int64 [T] -> the same, -1 for rows whose page has become another's since
    """

    hit: torch.Tensor | None
    admit: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Rows:
    """A segment, its rows in the pass, and the slots of all tokens that it sees, int64 [stop]."""

    rows: slice
    slots: torch.Tensor
    seen: torch.Tensor


class PagedCache(Cache):
    """The cache of one pass, whose rows are those of `segments`, in order.

    `table` int32 [B, pages] names the pages that are read and written, where they were looked at before; else the
    segments do. Rows of a segment that `guard` found to be hit are not written.

    With `fp8_query`, queries are rounded to E4M3 before they meet the pages, as backends do that multiply in FP8; those
    beyond 448 are clamped. That is at scale 1: such backends have no other for queries.
    """

    def __init__(
        self,
        pool: PagePool,
        segments: Sequence[Segment],
        table: torch.Tensor | None = None,
        guard: Guard | None = None,
        fp8_query: bool = False,
    ) -> None:
        self._pool, self._guard, self._fp8_query = pool, guard, fp8_query
        self._segments: list[_Rows] = []
        written, first = [], 0
        for place, segment in enumerate(segments):
            if table is None:
                slots = pool.slots(segment.pages, 0, segment.stop)
            else:
                slots = pool.locate(table[place], 0, segment.stop)
            count = segment.stop - segment.start
            written.append(slots[segment.start :])
            seen = torch.arange(segment.stop, device=pool.device)
            self._segments.append(_Rows(slice(first, first + count), slots, seen))
            first += count
        self._written = torch.cat(written)
        self._decoding = first == len(segments)
        if self._decoding:
            self._lengths = torch.tensor([segment.stop for segment in segments], dtype=torch.int32, device=pool.device)
            self._table = _block_table(segments, pool) if table is None else table
        if guard is not None and guard.hit is not None:
            assert self._decoding or len(segments) == 1, "a guarded pass is of single rows, or of one request"
            self._written.masked_fill_(guard.hit, -1)

    def append_latent(self, layer: int, positions: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        scales = self._pool.spec.scales.layers[layer]
        if scales.latent:
            latent, rope = latent / _powers(scales.latent, latent), rope / _powers(scales.rope, rope)
        self._write_rows(layer, "latent", positions, (latent, rope), scales.row)

    def attend_latent(
        self,
        layer: int,
        positions: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        scale: float,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Where the parts of a row have scales, the query takes them, and the output the latent's."""
        scales = self._pool.spec.scales.layers[layer]
        if not scales.latent:
            queries = self._cast(q_latent), self._cast(q_rope)
            return self._attend_rows(layer, positions, *queries, scale, selected)
        latent = _powers(scales.latent, q_latent)
        queries = self._cast(q_latent * latent), self._cast(q_rope * _powers(scales.rope, q_rope))
        return self._attend_rows(layer, positions, *queries, scale, selected) * latent

    def _attend_rows(
        self,
        layer: int,
        positions: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        scale: float,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend_latent` over rows that have one scale."""
        if self._decoding:
            pages, kv_scale = self._pool.tensors[layer, "latent"], self._pool.spec.scales.layers[layer].row
            queries = q_latent.contiguous(), q_rope.contiguous()
            return ops.decode_mla(*queries, pages, self._table, self._lengths, scale, kv_scale, selected)

        def attend(segment: _Rows) -> torch.Tensor:
            plain, rows, width = PlainCache(), segment.rows, q_latent.shape[2]
            kept = self._read(segment, layer, "latent")
            plain.append_latent(layer, segment.seen, kept[:, :width], kept[:, width:])
            chosen = None if selected is None else selected[rows]
            return plain.attend_latent(layer, positions[rows], q_latent[rows], q_rope[rows], scale, chosen)

        return self._each(attend)

    def append_heads(self, layer: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._check(positions)
        pages, scales = self._pool.heads(layer), self._pool.spec.scales.layers[layer]
        rows = key.contiguous(), value.contiguous()
        ops.write_gqa(*rows, *pages, self._targets(), scales.key, scales.value, self._pool.counts)

    def attend_heads(self, layer: int, positions: torch.Tensor, query: torch.Tensor, scale: float) -> torch.Tensor:
        query = self._cast(query)
        if self._decoding:
            pages, scales = self._pool.heads(layer), self._pool.spec.scales.layers[layer]
            places = self._table, self._lengths
            return ops.decode_gqa(query.contiguous(), *pages, *places, scale, scales.key, scales.value)

        def attend(segment: _Rows) -> torch.Tensor:
            plain, rows = PlainCache(), segment.rows
            key, value = (self._read(segment, layer, name) for name in ("key", "value"))
            plain.append_heads(layer, segment.seen, key, value)
            return plain.attend_heads(layer, positions[rows], query[rows], scale)

        return self._each(attend)

    def append_index(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> None:
        self._write_rows(layer, "index", positions, key.chunk(2, dim=1), 1.0)

    def select(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, count: int
    ) -> torch.Tensor:
        """As `Cache` says."""

        def choose(segment: _Rows) -> torch.Tensor:
            plain, rows = PlainCache(), segment.rows
            plain.append_index(layer, segment.seen, self._read(segment, layer, "index"))
            return plain.select(layer, positions[rows], query[rows], weights[rows], count)

        chosen = [choose(segment) for segment in self._segments]
        width = max(part.shape[1] for part in chosen)
        padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in chosen]
        return torch.cat(padded)

    def _cast(self, query: torch.Tensor) -> torch.Tensor:
        """What attention multiplies with: the query, or the E4M3 numbers nearest to it."""
        return query.clamp(-_LARGEST, _LARGEST).to(FP8).to(query.dtype) if self._fp8_query else query

    def _each(self, attend: Callable[[_Rows], torch.Tensor]) -> torch.Tensor:
        return torch.cat([attend(segment) for segment in self._segments])

    def _write_rows(
        self, layer: int, name: str, positions: torch.Tensor, halves: Sequence[torch.Tensor], scale: float
    ) -> None:
        """Write rows that come in two parts, as MLA's do."""
        self._check(positions)
        left, right = (half.contiguous() for half in halves)
        ops.write_mla(left, right, self._pool.tensors[layer, name], self._targets(), scale, self._pool.counts)

    def _read(self, segment: _Rows, layer: int, name: str) -> torch.Tensor:
        """All rows that a segment sees: [stop, ...]."""
        scales = self._pool.spec.scales.layers[layer]
        scale = {"latent": scales.row, "key": scales.key, "value": scales.value, "index": 1.0}[name]
        return ops.read_rows(self._pool.tensors[layer, name], segment.slots, scale)

    def _targets(self) -> torch.Tensor:
        """The slots that the pass may write to: all, unless it is late."""
        return self._written if self._guard is None else self._guard.admit(self._written)

    def _check(self, positions: torch.Tensor) -> None:
        if len(positions) != len(self._written):
            raise CacheError(f"the pass has {len(positions)} rows, and its segments {len(self._written)}")


def _powers(parts: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Powers of two, which every dtype holds, as a tensor of the dtype and on the device of another one."""
    return torch.tensor(parts, dtype=like.dtype, device=like.device)


def _block_table(segments: Sequence[Segment], pool: PagePool) -> torch.Tensor:
    """The pages of each segment, int32 [B, most pages], filled up with the first page, which is not looked at."""
    longest = max(len(segment.pages) for segment in segments)
    rows = [[*segment.pages, *[0] * (longest - len(segment.pages))] for segment in segments]
    return torch.tensor(rows, dtype=torch.int32, device=pool.device)

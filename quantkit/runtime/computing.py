"""Computing a step: its passes' pages are checked, all passes go through the model, and the verdict is read.

In reference mode each pass goes alone. In batched mode those of one row go together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from quantkit.families.config import ModelConfig
from quantkit.models.cache import Cache
from quantkit.runtime.batch_table import BatchTables
from quantkit.runtime.integrity.steps import Hit, StepTracker
from quantkit.runtime.paged_cache import Guard, PagedCache
from quantkit.runtime.pages import PagePool
from quantkit.runtime.scheduler import Pass


class Model(Protocol):
    """What the engine runs; `quantkit.models.Decoder` is one."""

    @property
    def config(self) -> ModelConfig:
        """Its numbers."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Hidden states [T, hidden] of `tokens` at `positions`, int64 [T] each."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] for the next token."""


@dataclass(frozen=True)
class Computed:
    """What came of a pass.

    logits  [vocab] after its request's last token, if that is in it; not to be used where the pass was hit
    hit     the page that was not what it must be
    """

    done: Pass
    logits: torch.Tensor | None
    hit: Hit | None


class Computer:
    """Computes passes over `pool`; `fp8_query` as `PagedCache`."""

    def __init__(self, model: Model, pool: PagePool, batched: bool, fp8_query: bool = False) -> None:
        self._model, self._pool, self._batched, self._fp8_query = model, pool, batched, fp8_query
        self._tables = BatchTables(pool)

    def compute(self, passes: Sequence[Pass], tracker: StepTracker | None, step: int) -> Iterator[Computed]:
        """What comes of the passes of a step, which are all computed before the first of them is told."""
        table = self._tables.of([one.request.table.pages for one in passes], [one.stop for one in passes])
        pages = table.pages if table.is_sound else None
        checked = tracker.check(passes, table, step) if tracker else None
        results: list[tuple[int, torch.Tensor | None]] = []
        for places in self._grouped(passes):
            group, guard = [passes[place] for place in places], None
            if tracker and checked:
                pages, guard = checked.table, tracker.guard(checked, places, group)
            width = max(table.counts[place] for place in places)
            own = None if pages is None else pages[_selected(places)][:, :width].contiguous()
            results += zip(places, self._forward(group, own, guard), strict=True)
        hits: list[Hit | None] = [None] * len(passes)
        if tracker and checked and checked.hit is not None:
            hits = tracker.read(checked, passes)
        for place, logits in results:
            yield Computed(passes[place], logits, hits[place])

    def _grouped(self, passes: Sequence[Pass]) -> list[list[int]]:
        """The places of passes that go through the model together."""
        if not self._batched:
            return [[place] for place in range(len(passes))]
        decoding = [place for place, planned in enumerate(passes) if planned.is_decode]
        return [[place] for place, planned in enumerate(passes) if not planned.is_decode] + [decoding] * bool(decoding)

    def _forward(
        self, group: Sequence[Pass], table: torch.Tensor | None, guard: Guard | None
    ) -> list[torch.Tensor | None]:
        """The logits after the last row of each pass, where that is its request's last token."""
        device = self._pool.device
        tokens = [token for planned in group for token in planned.request.tokens[planned.start : planned.stop]]
        positions = [position for planned in group for position in range(planned.start, planned.stop)]
        cache = PagedCache(self._pool, [planned.segment for planned in group], table, guard, self._fp8_query)
        given = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        hidden = self._model.forward(*given, cache)
        ends = [planned.stop == len(planned.request.tokens) for planned in group]
        stops = accumulate(planned.stop - planned.start for planned in group)
        last = [stop - 1 for stop, end in zip(stops, ends, strict=True) if end]
        logits = iter(self._model.logits(hidden[last])) if last else iter(())
        return [next(logits) if end else None for end in ends]


def _selected(places: Sequence[int]) -> slice | list[int]:
    """The same, as what gives a view where they follow each other."""
    run = places[-1] - places[0] == len(places) - 1
    return slice(places[0], places[-1] + 1) if run else list(places)

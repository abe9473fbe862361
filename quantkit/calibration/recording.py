"""What calibration notes while attention runs: the spread of each part, a few queries and rows of some sequences."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quantkit.calibration.choosing import Part, Sample
from quantkit.calibration.statistics import Spread
from quantkit.models.cache import PlainCache

SEQUENCES, QUERIES, ROWS = 8, 8, 256  # of a sample: at most so many
MLA_PARTS, GQA_PARTS = ("latent", "rope", "q_latent", "q_rope"), ("key", "value", "query")


class Picks(NamedTuple):
    """The positions of a sequence that are sampled, int64."""

    queries: torch.Tensor
    rows: torch.Tensor


def pick_positions(lengths: Sequence[int]) -> dict[int, Picks]:
    """The sampled positions of some sequences, by their number: the longest one and others from end to end.

    Last and first positions are among them. The same lengths give the same positions.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    spread = torch.linspace(0, len(lengths) - 1, min(SEQUENCES, len(lengths))).long().tolist()
    numbers = sorted({longest, *spread})
    return {number: _positions(number, lengths[number]) for number in numbers if lengths[number] > 1}


def _positions(seed: int, length: int) -> Picks:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(length // 2, length, (QUERIES - 1,), generator=generator).tolist()
    rows = torch.randperm(length, generator=generator)[: ROWS - 1].tolist()
    return Picks(torch.tensor(sorted({*queries, length - 1})), torch.tensor(sorted({*rows, 0})))


class RecordingCache(PlainCache):
    """A plain cache of one sequence that adds what it is given to `spreads`, and keeps what `picks` says."""

    def __init__(self, spreads: dict[str, Spread], picks: Picks | None) -> None:
        super().__init__()
        self._spreads = spreads
        self._picks = picks
        self._rows: dict[str, list[torch.Tensor]] = {part: [] for part in spreads}
        self._visible: list[torch.Tensor] = []

    def append_latent(self, layer: int, positions: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        super().append_latent(layer, positions, latent, rope)
        self._note(positions, latent=latent, rope=rope)

    def attend_latent(
        self,
        layer: int,
        positions: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        scale: float,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        self._note(positions, q_latent=q_latent, q_rope=q_rope)
        self._see(positions, selected)
        return super().attend_latent(layer, positions, q_latent, q_rope, scale, selected)

    def append_heads(self, layer: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        super().append_heads(layer, positions, key, value)
        self._note(positions, key=key, value=value)

    def attend_heads(self, layer: int, positions: torch.Tensor, query: torch.Tensor, scale: float) -> torch.Tensor:
        self._note(positions, query=query)
        self._see(positions, None)
        return super().attend_heads(layer, positions, query, scale)

    def sample(self) -> Sample | None:
        """What was kept of the whole sequence, on the CPU; None where nothing was asked for."""
        if self._picks is None:
            return None
        kept = {part: torch.cat(rows) for part, rows in self._rows.items()}
        visible = torch.cat(self._visible)
        if "latent" in kept:
            latent, rope = (
                Part(kept[f"q_{part}"].flatten(0, 1)[None], kept[part][None]) for part in ("latent", "rope")
            )
            return Sample((latent, rope), visible.repeat_interleave(kept["q_latent"].shape[1], dim=0), latent.key)
        key, value = (kept[part].transpose(0, 1) for part in ("key", "value"))  # [kv_heads, k, head_dim]
        heads = kept["query"].shape[1] // len(key)  # of each kv head
        query = kept["query"].view(len(visible), len(key), heads, -1).transpose(0, 1).flatten(1, 2)
        return Sample((Part(query, key),), visible.repeat_interleave(heads, dim=0), value)

    def _note(self, positions: torch.Tensor, **parts: torch.Tensor) -> None:
        for part, numbers in parts.items():
            self._spreads[part].add(numbers)
            if self._picks:
                wanted = self._picks.queries if part.startswith("q") else self._picks.rows
                mask = torch.isin(positions, wanted.to(positions.device))
                self._rows[part].append(numbers[mask].float().cpu())

    def _see(self, positions: torch.Tensor, selected: torch.Tensor | None) -> None:
        """Which sampled rows the sampled queries among `positions` attend to."""
        if self._picks is None:
            return
        mask = torch.isin(positions, self._picks.queries.to(positions.device))
        visible = self._picks.rows <= positions[mask].cpu()[:, None]
        if selected is not None:
            visible &= (selected[mask].cpu()[:, :, None] == self._picks.rows).any(1)
        self._visible.append(visible)

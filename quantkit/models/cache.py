"""What attention keeps of every token: an interface that paged pools implement, and the plain implementation.

A forward pass has T rows, one for each new token. The cache knows to which request a row belongs, so the decoder runs a
chunk of one request and the next tokens of many alike. Row t of every argument is the token at `positions[t]` of its
request, int64. A layer appends its new rows before it attends; a row then sees its request's tokens up to its own.

    MLA    latent [T, kv_rank], after its norm, and key [T, rope], rotated; one row serves all heads
    GQA    key and value [T, kv_heads, head_dim], keys rotated
    DSA    index key [T, index_head_dim], normed and rotated, of layers with an indexer
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from quantkit.models.rope import Rotation


class Cache(Protocol):
    """Keeps the tokens of the requests of one forward pass."""

    def append_latent(self, layer: int, positions: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Keep latents [T, kv_rank] and roped keys [T, rope]."""

    def attend_latent(
        self,
        layer: int,
        positions: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        scale: float,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Absorbed attention of q_latent [T, heads, kv_rank] and q_rope [T, heads, rope]: [T, heads, kv_rank].

        scores = (q_latent . latent + q_rope . key) * scale, values = latents. `selected` int32 [T, count] restricts a
        row to the listed positions of its request; -1 is none.
        """

    def append_heads(self, layer: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep keys and values [T, kv_heads, head_dim]."""

    def attend_heads(self, layer: int, positions: torch.Tensor, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of query [T, heads, head_dim], heads a multiple of kv_heads: [T, heads, head_dim]."""

    def append_index(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> None:
        """Keep index keys [T, index_head_dim]."""

    def select(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, count: int
    ) -> torch.Tensor:
        """The `count` best positions for each row, int32 [T, at most count]; -1 where it sees fewer.

        score = sum over heads of weights [T, heads] * relu(query [T, heads, index_head_dim] . key); of equal ones the
        earlier position.
        """


@dataclass(frozen=True)
class Step:
    """What a forward pass tells its layers: `positions` int64 [T], their rotation, and the cache."""

    positions: torch.Tensor
    rotation: Rotation
    cache: Cache


class Attended(NamedTuple):
    """What attention returns: [T, hidden], and the positions that it attended to, for layers that share them."""

    output: torch.Tensor
    selected: torch.Tensor | None


class PlainCache(Cache):
    """One request's tokens in contiguous tensors, in the model's dtype. Scores, softmax and sums are float32.

    What was never written is NaN.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], torch.Tensor] = {}

    def append_latent(self, layer: int, positions: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        self._append(layer, "latent", positions, torch.cat((latent, rope), dim=-1))

    def attend_latent(
        self,
        layer: int,
        positions: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        scale: float,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        kept = self._seen(layer, "latent", positions)
        visible = _visible(positions, len(kept), selected)
        query = torch.cat((q_latent, q_rope), dim=-1).transpose(0, 1)  # [heads, T, ..]
        out = _attend(query, kept, kept[:, : q_latent.shape[2]], visible, scale)
        return out.transpose(0, 1).to(q_latent.dtype)

    def append_heads(self, layer: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._append(layer, "key", positions, key)
        self._append(layer, "value", positions, value)

    def attend_heads(self, layer: int, positions: torch.Tensor, query: torch.Tensor, scale: float) -> torch.Tensor:
        key, value = (self._seen(layer, name, positions).transpose(0, 1) for name in ("key", "value"))
        grouped = query.view(len(query), len(key), -1, query.shape[2]).permute(
            1, 2, 0, 3
        )  # [kv_heads, heads of each, T, head_dim]
        visible = _visible(positions, key.shape[1], None)
        out = _attend(grouped, key.unsqueeze(1), value.unsqueeze(1), visible, scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)

    def append_index(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> None:
        self._append(layer, "index", positions, key)

    def select(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, count: int
    ) -> torch.Tensor:
        key = self._seen(layer, "index", positions)
        products = torch.relu(query.float() @ key.float().T)  # [T, heads, S]
        scores = (weights.float().unsqueeze(1) @ products).squeeze(1)
        scores = scores.masked_fill(~_visible(positions, len(key), None), -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True)
        chosen = best.indices.masked_fill(best.values == -torch.inf, -1)
        return chosen[:, :count].int()

    def _append(self, layer: int, name: str, positions: torch.Tensor, rows: torch.Tensor) -> None:
        end = int(positions.max()) + 1
        kept = self._kept.get((layer, name), rows[:0])
        if end > len(kept):
            grown = rows.new_full((max(end, 2 * len(kept)), *rows.shape[1:]), torch.nan)
            grown[: len(kept)] = kept
            self._kept[layer, name] = kept = grown
        kept[positions] = rows

    def _seen(self, layer: int, name: str, positions: torch.Tensor) -> torch.Tensor:
        return self._kept[layer, name][: int(positions.max()) + 1]


def _visible(positions: torch.Tensor, length: int, selected: torch.Tensor | None) -> torch.Tensor:
    """Which of `length` tokens each row sees: bool [T, length]."""
    visible = torch.arange(length, device=positions.device) <= positions[:, None]
    if selected is None:
        return visible
    listed = torch.zeros(len(positions), length + 1, dtype=torch.bool, device=positions.device)
    listed.scatter_(1, selected.long().masked_fill((selected < 0) | (selected >= length), length), True)
    return visible & listed[:, :length]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of query [..., T, C] over key [..., S, C] and value [..., S, D]: float32 [..., T, D]."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ value.float()

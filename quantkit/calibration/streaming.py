"""Sequences through a checkpoint with one layer in memory at a time.

A layer runs on groups of sequences: attention on each sequence by itself, in chunks, with a cache that lives only as
long; then the MLP on all rows of the group, so that an expert is decoded once for many tokens. Layers that share the
selection of sparse attention get that of the last layer with an indexer; a sequence that fits into a selection needs
none, since it is selected as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from quantkit.calibration.budget import Budget
from quantkit.calibration.choosing import Sample
from quantkit.calibration.recording import GQA_PARTS, MLA_PARTS, RecordingCache, pick_positions
from quantkit.calibration.states import HiddenStates, RowFile, hash_states
from quantkit.calibration.statistics import Spread
from quantkit.families.config import MlaConfig
from quantkit.models.cache import Step
from quantkit.models.decoder import Layer
from quantkit.models.loading import LayerReader
from quantkit.models.mla import Mla
from quantkit.models.moe import Moe, Router, Routing
from quantkit.models.rope import make_rotation


@dataclass(frozen=True)
class Observation:
    """What one layer's pass showed.

    metric   [G, d, d] for the values: of e M e^T is the error's effect on what o_proj is given, by its columns' norms
    experts  int64 [E], tokens that each routed expert got; None for a dense layer
    """

    spreads: dict[str, Spread]
    samples: list[Sample]
    metric: torch.Tensor
    experts: torch.Tensor | None


@dataclass(frozen=True)
class CountingRouter(Router):
    """A router that counts the tokens of each expert."""

    counts: torch.Tensor

    def __call__(self, x: torch.Tensor) -> Routing:
        """As `Router` does."""
        routing = super().__call__(x)
        self.counts.add_(torch.bincount(routing.ids.flatten(), minlength=len(self.counts)).to(self.counts.device))
        return routing


@dataclass(frozen=True)
class _Span:
    """The rows of a sequence among all."""

    number: int
    begin: int
    end: int


class LayerStream:
    """All sequences, after as many layers as have run; `run` goes on by one.

    folder  for hidden states
    layers  that ran before, in a process that ended; their states are in `folder`
    """

    def __init__(
        self,
        reader: LayerReader,
        sequences: Sequence[Sequence[int]],
        folder: Path,
        budget: Budget,
        layers: int = 0,
    ) -> None:
        self._reader, self._folder, self._budget = reader, folder, budget
        ends = list(accumulate(map(len, sequences)))
        self._spans = [_Span(number, end - len(sequences[number]), end) for number, end in enumerate(ends)]
        self._picks = pick_positions([len(sequence) for sequence in sequences])
        self.states = HiddenStates(folder, layers, reader.config.hidden, reader.dtype, budget.held)
        self._choices = self._reopen_choices(layers)
        if layers:
            self.states.load_held()
            return
        for span, sequence in zip(self._spans, sequences, strict=True):
            self.states.begin(span.begin, reader.embed(torch.tensor(sequence)))

    @torch.inference_mode()
    def run(self) -> Observation:
        """Run the next layer; what it made counts once `keep` was called."""
        number = self.states.layers
        layer = self._reader.layer(number)
        counts = None
        if isinstance(layer.mlp, Moe):
            router = layer.mlp.router
            counts = torch.zeros(router.config.experts, dtype=torch.int64)
            counting = CountingRouter(router.config, router.weight, router.bias, counts)
            layer = replace(layer, mlp=replace(layer.mlp, router=counting))
        parts = MLA_PARTS if isinstance(layer.attention, Mla) else GQA_PARTS
        observation = Observation({part: Spread(part) for part in parts}, [], _metric(layer), counts)
        self._open_choices(number)
        for group in self._groups():
            begin, end = group[0].begin, group[-1].end
            x = self.states.read(begin, end).to(self._reader.device)
            for span in group:
                self._attend(layer, x[span.begin - begin : span.end - begin], span, observation)
            for start in range(0, len(x), self._budget.block):
                rows = x[start : start + self._budget.block]
                rows += layer.mlp(layer.mlp_norm(rows))
            self.states.write(begin, x)
        return observation

    def keep(self) -> dict[str, str]:
        """Wait until the disk has what `run` made, and return the sha256 of the files that the next layer begins with;
        `advance` may follow."""
        kept, dsa, following = [self.states.sync()], self._reader.config.dsa, self.states.layers + 1
        if self._choices:
            self._choices.sync()
            if dsa and following < len(dsa.full) and not dsa.full[following]:
                kept.append(self._choices.path)
        return {path.name: hash_states(path) for path in kept}

    def advance(self) -> None:
        """Go on to the next layer."""
        self.states.advance()

    def close(self) -> None:
        """Delete everything."""
        self.states.close()
        if self._choices:
            self._choices.close(remove=True)

    def _groups(self) -> Iterator[list[_Span]]:
        """Sequences in order, together as many rows as a block, or one that is longer."""
        group: list[_Span] = []
        for span in self._spans:
            if group and span.end - group[0].begin > self._budget.block:
                yield group
                group = []
            group.append(span)
        yield group

    def _attend(self, layer: Layer, x: torch.Tensor, span: _Span, observation: Observation) -> None:
        """Add attention to the rows x [T, hidden] of a sequence."""
        picks = self._picks.get(span.number)
        cache = RecordingCache(observation.spreads, picks)
        shared = self._shared(span)
        for begin in range(0, len(x), self._budget.chunk):
            rows = x[begin : begin + self._budget.chunk]
            positions = torch.arange(begin, begin + len(rows), device=x.device)
            step = Step(positions, make_rotation(self._reader.config.rope, positions), cache)
            selected = None if shared is None else shared[begin : begin + len(rows)]
            attended, selected = layer.attention.attend(layer.attention_norm(rows), step, selected)
            rows += attended
            if self._is_long(span) and self._choices and shared is None and selected is not None:
                width = self._choice_width() - selected.shape[1]
                padded = torch.nn.functional.pad(selected, (0, width), value=-1)
                self._choices.write(span.begin + begin, padded)
        if sample := cache.sample():
            observation.samples.append(sample)

    # --- the selection that layers share

    def _choice_width(self) -> int:
        assert self._reader.config.dsa
        return self._reader.config.dsa.top_k

    def _is_long(self, span: _Span) -> bool:
        return self._reader.config.dsa is not None and span.end - span.begin > self._choice_width()

    def _shared(self, span: _Span) -> torch.Tensor | None:
        """What an earlier layer selected for a sequence, where the layer that runs has no indexer and needs it."""
        dsa = self._reader.config.dsa
        if dsa is None or dsa.full[self.states.layers] or not self._is_long(span):
            return None
        assert self._choices
        return self._choices.read(span.begin, span.end).to(self._reader.device)

    def _open_choices(self, number: int) -> None:
        """Before a layer with an indexer runs, forget what the last one chose; keep what it chooses if it is shared."""
        dsa = self._reader.config.dsa
        if dsa is None or not dsa.full[number]:
            return
        if self._choices:
            self._choices.close(remove=True)
        shared = number + 1 < len(dsa.full) and not dsa.full[number + 1]
        self._choices = self._choice_file(number) if shared and any(map(self._is_long, self._spans)) else None

    def _reopen_choices(self, layers: int) -> RowFile | None:
        dsa = self._reader.config.dsa
        if dsa is None or layers in (0, len(dsa.full)) or dsa.full[layers] or not any(map(self._is_long, self._spans)):
            return None
        return self._choice_file(max(number for number in range(layers) if dsa.full[number]))

    def _choice_file(self, number: int) -> RowFile:
        return RowFile(self._folder / f"choices-{number}.bin", self._choice_width(), torch.int32)


def _metric(layer: Layer) -> torch.Tensor:
    """How errors of values count: by the norms of o_proj's columns; MLA's latents, what they become in all heads."""
    attention = layer.attention
    norms: torch.Tensor = torch.linalg.vector_norm(attention.output.weight.decode(torch.float32), dim=0).cpu()
    if isinstance(attention, Mla):
        values = attention.value_up.float().cpu() * norms.view(attention.config.heads, -1, 1)  # [heads, value, kv_rank]
        flat = values.flatten(0, 1)
        return (flat.T @ flat)[None]
    config = attention.config
    assert not isinstance(config, MlaConfig)
    return torch.diag_embed(norms.square().view(config.kv_heads, -1, config.head_dim).sum(1))

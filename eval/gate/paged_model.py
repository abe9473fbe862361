"""A decoder over pages in the place of transformers' model: what `distribution` and the harness ask a model for.

Everything is computed in float32, so that what weights and pages cost is not lost in the rounding of BF16 activations.
Weights are those that are stored. A request's rows are written to pages and attended to as they are stored, those of
the same pass included: a text that is scored in one pass meets the numbers that generating it token by token would.

Windows and prompts that are scored share passes, which changes last bits of float32. Answers are generated in the
engine's reference mode, one request at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from quantkit.errors import UsageError
from quantkit.models.decoder import Decoder
from quantkit.runtime.engine import Engine, EngineOptions
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import COUNTED, CacheSpec, PagePool
from quantkit.runtime.sampling import GREEDY, Sampling

_PASS_TOKENS = 2048  # of requests that share a pass
_CHUNK_TOKENS = 256  # of one that is longer: attention takes memory for each pair of tokens
_NO_MATTER = {"attention_mask", "pad_token_id", "use_cache"}  # of transformers' `generate`, for one prompt


class PagedModel:
    """`decoder` over pages of `spec`; `fp8_query` as `PagedCache`.

    counts             int64 [3], as `PagePool` has them, of all that was written since they were last taken
    config             how many tokens the model is for, where transformers' config says it
    generation_config  the tokens that end an answer
    """

    def __init__(self, decoder: Decoder, spec: CacheSpec, ends: Sequence[int], fp8_query: bool = False) -> None:
        self.config = SimpleNamespace(max_position_embeddings=decoder.config.max_length)
        self.generation_config = SimpleNamespace(eos_token_id=list(ends))
        self.device = decoder.device
        self._decoder, self._spec, self._fp8_query = decoder, spec, fp8_query
        self.counts = torch.zeros(COUNTED, dtype=torch.int64, device=decoder.device)

    def __call__(self, tokens: torch.Tensor) -> Any:
        """`logits` float32 [B, T, vocab] of the windows `tokens` [B, T], each a request of its own."""
        found = self.last_logits(tokens.tolist(), [tokens.shape[1]] * len(tokens))
        return SimpleNamespace(logits=torch.stack(list(found)))

    def last_logits(self, requests: Sequence[Sequence[int]], counts: Sequence[int]) -> Iterator[torch.Tensor]:
        """Float32 logits [count, vocab] after the last `count` tokens of each request, in order."""
        for group in _groups([len(tokens) for tokens in requests]):
            hidden = self._hidden([requests[number] for number in group])
            wanted = [counts[number] for number in group]
            rows = torch.cat([states[-count:] for states, count in zip(hidden, wanted, strict=True)])
            yield from self._decoder.logits(rows).split(wanted)

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        max_length: int,
        stopping_criteria: Callable[[torch.Tensor, Any], Any],
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        **others: Any,
    ) -> torch.Tensor:
        """One prompt [1, T] and its answer, int64 [1, at most max_length], as transformers' `generate` gives it.

        Raises UsageError for a way of sampling that the runtime does not know, RequestError for logits that are no
        numbers.
        """
        if unknown := sorted(others.keys() - _NO_MATTER):
            raise UsageError(
                f"a task generates with {', '.join(unknown)}, which the runtime does not know",
                hint="Use --backend hf, or other tasks.",
            )
        [prompt] = input_ids.tolist()
        sampling = Sampling(temperature, top_p, int(torch.randint(1 << 62, ()))) if do_sample else GREEDY
        pool = PagePool(self._spec, self._spec.pages_for(max_length), self.device)
        engine = Engine(self._decoder, pool, EngineOptions(fp8_query=self._fp8_query))
        number = engine.submit(prompt, max_length - len(prompt), sampling, self.generation_config.eos_token_id)
        while engine.busy:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                if event.token is not None:
                    input_ids = torch.cat([input_ids, input_ids.new_tensor([[event.token]])], dim=1)
                    if not event.finish and stopping_criteria(input_ids, None):
                        engine.abort(number)
        self.counts += pool.counts
        return input_ids

    def take_remarks(self) -> tuple[str, ...]:
        """What is to be said of the values written to pages since this was last asked."""
        saturated, nan, _ = self.counts.tolist()
        self.counts.zero_()
        remarks = (
            (saturated, "values written to the pages were beyond what FP8 holds with these KV scales: clamped"),
            (nan, "values written to the pages are not numbers"),
        )
        return tuple(f"{count:,} {what}" for count, what in remarks if count)

    def _hidden(self, requests: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The hidden states [T, hidden] of requests that fit into a pass, or of one that is longer."""
        sizes = [self._spec.pages_for(len(tokens)) for tokens in requests]
        pool = PagePool(self._spec, sum(sizes), self.device)
        pages = [tuple(part.tolist()) for part in torch.arange(sum(sizes)).split(sizes)]
        longest = max(map(len, requests))
        chunk = longest if longest <= _PASS_TOKENS else _CHUNK_TOKENS
        parts: list[list[torch.Tensor]] = [[] for _ in requests]
        for start in range(0, longest, chunk):
            here = [number for number, tokens in enumerate(requests) if start < len(tokens)]
            stops = [min(start + chunk, len(requests[number])) for number in here]
            given = [requests[number][start:stop] for number, stop in zip(here, stops, strict=True)]
            segments = [Segment(pages[number], start, stop) for number, stop in zip(here, stops, strict=True)]
            tokens = torch.tensor([token for row in given for token in row], device=self.device)
            positions = torch.cat([torch.arange(start, stop, device=self.device) for stop in stops])
            hidden = self._decoder.forward(tokens, positions, PagedCache(pool, segments, fp8_query=self._fp8_query))
            for number, part in zip(here, hidden.split([len(row) for row in given]), strict=True):
                parts[number].append(part)
        self.counts += pool.counts
        return [torch.cat(states) for states in parts]


def take_remarks(model: Any) -> tuple[str, ...]:
    """As `PagedModel.take_remarks`; a model of transformers has none."""
    return model.take_remarks() if isinstance(model, PagedModel) else ()


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of requests that share a pass, in order."""
    group: list[int] = []
    for number, length in enumerate(lengths):
        if group and sum(lengths[other] for other in group) + length > _PASS_TOKENS:
            yield group
            group = []
        group.append(number)
    if group:
        yield group

"""Every family in every storage that it is published in, and GLM-5.2 and Llama in all: the logits are transformers'."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.models import Decoder, PlainCache, load
from support.families import NAMES, PUBLISHED
from support.reference import reference_logits, reference_model, write_numbers
from support.runnable import Checkpoint, edit_config
from support.tiers import quick_if

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 40  # more than the 16 tokens that sparse attention selects
TOKENS = torch.randint(3, 100, (LENGTH,), generator=torch.Generator().manual_seed(0))
TIGHT = 1e-5  # of the largest logit; the bound is 1e-4


def run(decoder: Decoder, tokens: torch.Tensor, *chunks: int) -> torch.Tensor:
    """Logits [T, vocab] of one request in chunks of these sizes, by default all at once."""
    cache, begin, parts = PlainCache(), 0, []
    for size in chunks or (len(tokens),):
        positions = torch.arange(begin, begin + size)
        parts.append(decoder.logits(decoder.forward(tokens[positions], positions, cache)))
        begin += size
    assert begin == len(tokens)
    return torch.cat(parts)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest number."""
    assert actual.shape == expected.shape
    assert expected.std() > 0.1
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", quick_if(PUBLISHED.__contains__, NAMES))
def test_logits_are_those_of_transformers(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    """In float32, on weights decoded by numpy; ragged last blocks, all dialects and fused experts included."""
    folder = checkpoint(name)
    reference = reference_model(write_numbers(folder, tmp_path / "numbers"))

    assert distance(run(load(folder, torch.float32), TOKENS), reference_logits(reference, TOKENS)) < TIGHT


@pytest.mark.parametrize("name", quick_if(PUBLISHED[::3].__contains__, PUBLISHED))
def test_token_by_token_equals_prefill(checkpoint: Checkpoint, name: str) -> None:
    """In float32; chunks of other sizes do, too."""
    decoder = load(checkpoint(name), torch.float32)
    whole = run(decoder, TOKENS)

    assert distance(run(decoder, TOKENS, *[1] * LENGTH), whole) < TIGHT
    assert distance(run(decoder, TOKENS, 7, 1, 32), whole) < TIGHT


@pytest.mark.parametrize("name", ["glm-5.2-fp8_block", "deepseek-v3-fp8_block", "llama-bf16"])
def test_equal_passes_give_equal_bits(checkpoint: Checkpoint, name: str) -> None:
    """A request's logits are the same bits whatever was run before, in both dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load(checkpoint(name), dtype)
        first = run(decoder, TOKENS, 16, 16, 8)
        run(decoder, TOKENS.flip(0))

        assert torch.equal(run(decoder, TOKENS, 16, 16, 8), first)


class TwoRequests:
    """A cache of two requests for a pass that holds rows of both; `first` says whose each row is."""

    def __init__(self, first: torch.Tensor) -> None:
        self.caches = (PlainCache(), PlainCache())
        self.rows = (first.nonzero().squeeze(1), (~first).nonzero().squeeze(1))

    def __getattr__(self, method: str) -> Any:
        def call(layer: int, positions: torch.Tensor, *args: Any) -> Any:
            results: list[Any] = []
            for cache, rows in zip(self.caches, self.rows, strict=True):
                own = [arg[rows] if isinstance(arg, torch.Tensor) else arg for arg in args]
                results.append(getattr(cache, method)(layer, positions[rows], *own))
            if results[0] is None:
                return None
            width = max(result.shape[1] for result in results)
            merged = results[0].new_full((len(positions), width, *results[0].shape[2:]), -1)
            for result, rows in zip(results, self.rows, strict=True):
                merged[rows, : result.shape[1]] = result
            return merged

        return call


@pytest.mark.parametrize("name", ["glm-5.2-fp8_block", "kimi-k2.5-int4", "glm-4.5-fp8_channel"])
def test_a_pass_may_hold_rows_of_several_requests(checkpoint: Checkpoint, name: str) -> None:
    """A chunk of one and a chunk of another, their rows mixed, are what each is alone."""
    decoder = load(checkpoint(name), torch.float32)
    other = TOKENS.flip(0)[:24]
    first = torch.rand(LENGTH + 24, generator=torch.Generator().manual_seed(1)).argsort() < LENGTH
    tokens, positions = torch.empty(2, LENGTH + 24, dtype=torch.int64)
    tokens[first], positions[first] = TOKENS, torch.arange(LENGTH)
    tokens[~first], positions[~first] = other, torch.arange(24)

    mixed = decoder.logits(decoder.forward(tokens, positions, TwoRequests(first)))

    assert distance(mixed[first], run(decoder, TOKENS)) < TIGHT
    assert distance(mixed[~first], run(decoder, other)) < TIGHT


class Recorded(PlainCache):
    """Notes which layers select, and what attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.selecting: list[int] = []
        self.given: list[torch.Tensor] = []

    def select(self, layer: int, *args: Any) -> torch.Tensor:
        self.selecting.append(layer)
        return super().select(layer, *args)

    def attend_latent(self, *args: Any) -> torch.Tensor:
        self.given.append(args[-1])
        return super().attend_latent(*args)


def test_shared_layers_reuse_the_last_selection(glm_tiny: Path) -> None:
    """Full, full, shared, full: only full layers keep index keys and select, 64 tokens a row and never a later one."""
    decoder = load(glm_tiny, torch.float32)
    cache, length = Recorded(), 100
    decoder.forward(torch.arange(8, 8 + length), torch.arange(length), cache)

    assert cache.selecting == [0, 1, 3]
    assert torch.equal(cache.given[2], cache.given[1])
    assert not torch.equal(cache.given[1], cache.given[0])
    for selected in cache.given:
        assert selected.dtype == torch.int32
        assert selected.shape == (length, 64)
        for row, places in enumerate(selected.tolist()):
            chosen = [place for place in places if place >= 0]
            assert len(set(chosen)) == len(chosen) == min(row + 1, 64)
            assert max(chosen) <= row


@pytest.mark.parametrize("name", ["glm-5.2-bf16", "deepseek-v3.2-bf16"])
def test_selection_changes_what_is_computed(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    """With room for all tokens the logits are others, but not those of the first tokens, which see all anyway."""
    folder = shutil.copytree(checkpoint(name), tmp_path / "dense")
    edit_config(folder, lambda config: config.update(index_topk=1000))
    sparse, dense = (run(load(path, torch.float32), TOKENS) for path in (checkpoint(name), folder))

    assert distance(sparse[:16], dense[:16]) < TIGHT
    assert distance(sparse[16:], dense[16:]) > 1e-3

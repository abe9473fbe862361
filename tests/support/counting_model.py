"""A model that counts: the next token depends on every token and position before it, and is known without a cache.

Its one layer keeps v(token, position) as a value, and its queries are zero: attention gives the mean of all values that
a row sees. Whatever row of another request, or of nobody, is read instead, the next token is another.
"""

import random
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from quantkit.families.config import GqaConfig, ModelConfig, RopeConfig
from quantkit.models.cache import Cache
from quantkit.runtime import GREEDY, Engine, EngineOptions, PagePool, Sampling, cache_spec, unscaled
from quantkit.runtime.sampling import choose

VOCAB = 97
CONFIG = ModelConfig(
    model_type="counting",
    prefix="",
    layers=1,
    hidden=1,
    intermediate=1,
    vocab=VOCAB,
    eps=0.0,
    tied=False,
    mlp_bias=False,
    max_length=500,
    mtp_layers=0,
    rope=RopeConfig(2, "default", {}, False),
    attention=GqaConfig(heads=1, kv_heads=1, head_dim=2, bias=False, output_bias=False, qk_norm=False),
)


class CountingModel:
    """Runs on any cache; notes the positions of each pass."""

    config = CONFIG

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The next token of each row, float32 [T, 1]."""
        self.passes.append(positions.tolist())
        value = _value(tokens, positions).float()[:, None, None].expand(-1, 1, 2)
        cache.append_heads(0, positions, torch.zeros(len(tokens), 1, 2), value)
        mean = cache.attend_heads(0, positions, torch.zeros(len(tokens), 1, 2), 1.0)[:, 0, :1]
        total = mean * (positions[:, None] + 1)
        return torch.where(mean.isnan(), mean, _next(total.nan_to_num().round().long()).float())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Certainty: 1 for the next token, else 0; NaN where NaN was read."""
        certain = F.one_hot(hidden.nan_to_num().long().squeeze(1), VOCAB).float()
        return torch.where(hidden.isnan(), hidden, certain)


def expected(
    prompt: Sequence[int], count: int, sampling: Sampling = GREEDY, generated: Sequence[int] = ()
) -> tuple[int, ...]:
    """The `count` tokens after a prompt, of which some may be `generated` already."""
    tokens = [*prompt, *generated]
    while len(tokens) < len(prompt) + count:
        certain = _next(_value(torch.tensor(tokens), torch.arange(len(tokens))).sum())
        tokens.append(choose(F.one_hot(certain, VOCAB).float(), sampling, len(tokens) - len(prompt)))
    return tuple(tokens[len(prompt) :])


def make_pool(num_pages: int, page_size: int) -> PagePool:
    """A pool for the model, full of NaN."""
    pool = PagePool(cache_spec(CONFIG, torch.float32, page_size, unscaled(1)), num_pages)
    for tensor in pool.tensors.values():
        tensor.fill_(torch.nan)
    return pool


def options(chunk_size: int = 4, batched: bool = False, share_prefixes: bool = True) -> EngineOptions:
    """Small chunks."""
    return EngineOptions(chunk_size, batched, share_prefixes)


def serve(engine: Engine, prompts: list[tuple[int, ...]], count: int = 8) -> list[tuple[int, ...]]:
    """The tokens of all prompts, as one batch."""
    numbers = [engine.submit(prompt, count) for prompt in prompts]
    engine.run()
    return [engine.take(number).tokens for number in numbers]


def make_prompts(count: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Random prompts, always the same."""
    rng = random.Random(0)
    return [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))) for _ in range(count)]


def _value(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (tokens * 31 + positions * 17 + 5) % 101


def _next(total: torch.Tensor) -> torch.Tensor:
    return (total * 7 + 3) % VOCAB

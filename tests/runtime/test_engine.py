"""The engine on real decoders: the same text as a loop without pages, whoever else is there and however it is cut."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from quantkit.models import Cache, Decoder, PlainCache, load
from quantkit.runtime import Engine, EngineOptions, PagePool, cache_spec, uniform_scales, unscaled
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import FP8
from quantkit.runtime.tokenizer import Tokenizer
from support.families import write_family
from support.tiers import quick_if

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("glm-5.2-fp8_block", "deepseek-v3-fp8_block", "kimi-k2.5-int4", "llama-bf16")
Loader = Callable[[str, torch.dtype], Decoder]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Random models of two layers and 128 tokens, each loaded once for each dtype."""
    known: dict[tuple[str, torch.dtype], Decoder] = {}

    def get(name: str, dtype: torch.dtype) -> Decoder:
        if (name, dtype) not in known:
            known[name, dtype] = load(write_family(tmp_path_factory.mktemp("models") / name, name), dtype)
        return known[name, dtype]

    return get


@pytest.fixture(scope="module")
def trained(glm_tiny: Path) -> Decoder:
    """The trained model of this repository, in BF16."""
    return load(glm_tiny)


@pytest.fixture(scope="module")
def text(glm_tiny: Path) -> list[int]:
    """Tokens that the trained model has not seen."""
    return Tokenizer(glm_tiny).encode((glm_tiny / "heldout.txt").read_text()[:8000])


class Recording:
    """A decoder that notes a digest of each row of logits."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.digests: list[str] = []

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The decoder's."""
        return self.decoder.forward(tokens, positions, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The decoder's, noted."""
        logits = self.decoder.logits(hidden)
        self.digests += [hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest() for row in logits]
        return logits


def make_pool(decoder: Decoder, num_pages: int, page_size: int = 16, kv: torch.dtype | None = None) -> PagePool:
    """Pages in the decoder's dtype, or `kv` (FP8 at scale 0.25), full of NaN."""
    dtype = kv or decoder.dtype
    scales = uniform_scales(decoder.config.layers, 0.25) if dtype is FP8 else unscaled(decoder.config.layers)
    pool = PagePool(cache_spec(decoder.config, dtype, page_size, scales), num_pages)
    for tensor in pool.tensors.values():
        tensor.view(torch.uint8).fill_(0x7F if dtype is FP8 else 0xFF)
    return pool


def make_prompts(decoder: Decoder, *lengths: int) -> list[list[int]]:
    """Random prompts, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(decoder.config.vocab, (length,), generator=generator).tolist() for length in lengths]


def serve(model: Any, pool: PagePool, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
    """The engine's tokens for all prompts as one batch; no page is left in use, and nothing written was unsound."""
    engine = Engine(model, pool, EngineOptions(**{"chunk_size": 16} | options))
    numbers = [engine.submit(prompt, count) for prompt in prompts]
    engine.run()
    pool.allocator.check()
    assert not any(pool.allocator.references)
    assert pool.counts.tolist() == [0, 0, 0]
    return [list(engine.take(number).tokens) for number in numbers]


def naive(decoder: Decoder, prompt: Sequence[int], count: int, chunk: int) -> list[int]:
    """The most probable tokens after a prompt, by the plain cache."""
    cache = PlainCache()
    for begin in range(0, len(prompt), chunk):
        piece = torch.tensor(prompt[begin : begin + chunk])
        hidden = decoder.forward(piece, torch.arange(begin, begin + len(piece)), cache)
    tokens = [int(decoder.logits(hidden[-1:]).argmax())]
    for position in range(len(prompt), len(prompt) + count - 1):
        hidden = decoder.forward(torch.tensor(tokens[-1:]), torch.tensor([position]), cache)
        tokens.append(int(decoder.logits(hidden).argmax()))
    return tokens


def test_trained_model_says_what_a_plain_loop_says(trained: Decoder, text: list[int]) -> None:
    """In BF16, on BF16 pages, six prompts in a batch get the tokens of a loop without pages, also under preemption."""
    prompts = [text[begin : begin + length] for begin, length in ((0, 5), (300, 40), (700, 100), (1200, 130))]
    wanted = [naive(trained, prompt, 12, 32) for prompt in prompts]

    assert serve(trained, make_pool(trained, 40), prompts, 12, chunk_size=32) == wanted
    assert serve(trained, make_pool(trained, 10), prompts, 12, chunk_size=32) == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_what_a_plain_loop_says(loaded: Loader, name: str) -> None:
    """In float32 all attention kinds give a plain loop's tokens, whatever page size, chunk size and batching."""
    decoder = loaded(name, torch.float32)
    prompts = make_prompts(decoder, 1, 15, 16, 41)
    wanted = [naive(decoder, prompt, 6, 1000) for prompt in prompts]

    assert serve(decoder, make_pool(decoder, 100, 1), prompts, 6) == wanted
    assert serve(decoder, make_pool(decoder, 8, 16), prompts, 6, batched=True) == wanted
    assert serve(decoder, make_pool(decoder, 4, 64), prompts, 6, chunk_size=7) == wanted


@pytest.mark.parametrize(
    ("name", "kv"),
    quick_if(
        lambda name, kv: (name, kv) in (("glm-5.2-fp8_block", FP8), ("llama-bf16", torch.bfloat16)),
        itertools.product(FAMILIES, (torch.bfloat16, FP8)),
    ),
    ids=str,
)
def test_output_does_not_depend_on_the_batch(loaded: Loader, name: str, kv: torch.dtype) -> None:
    """Bit for bit, all logits of a request alone come again beside others, in any order, page size and memory."""
    decoder = loaded(name, torch.bfloat16)
    prompts = make_prompts(decoder, 40, 20, 17, 33)
    prompts[2] = prompts[0][:32] + prompts[2]  # which shares two chunks
    alone = Recording(decoder)
    tokens = [serve(alone, make_pool(decoder, 20, 16, kv), [prompt], 5)[0] for prompt in prompts]

    for num_pages, page_size, share in ((20, 16, True), (6, 16, True), (100, 1, True), (4, 64, False), (60, 4, False)):
        model = Recording(decoder)
        pool = make_pool(decoder, num_pages, page_size, kv)
        assert serve(model, pool, prompts[::-1], 5, share_prefixes=share) == tokens[::-1]
        assert sorted(model.digests) == sorted(alone.digests)


def test_shared_pages_change_no_bit(loaded: Loader) -> None:
    """A prompt whose beginning is found in another's pages gets the same logits as one that computes it."""
    decoder = loaded("glm-5.2-fp8_block", torch.bfloat16)
    prompt, other = make_prompts(decoder, 50, 3)
    alone, after = Recording(decoder), Recording(decoder)
    serve(alone, make_pool(decoder, 20), [prompt], 4)
    engine = Engine(after, make_pool(decoder, 20), EngineOptions(16))
    for tokens in (prompt[:36] + other, prompt):
        engine.submit(tokens, 4)
        engine.run()

    assert engine.counters.shared_tokens == 32
    assert after.digests[4:] == alone.digests


def test_fp8_pages_hold_twice_the_tokens(trained: Decoder) -> None:
    """At the same bytes, FP8 pages are twice as many as BF16 ones, index keys included."""
    scales = unscaled(4), uniform_scales(4, 1.0)
    plain, scaled = (
        cache_spec(trained.config, dtype, 64, scale) for dtype, scale in zip((torch.bfloat16, FP8), scales, strict=True)
    )

    assert plain.page_bytes == 2 * scaled.page_bytes
    assert plain.page_bytes == 64 * 2 * (4 * (128 + 16) + 3 * 32)
    pool = PagePool(plain, 10)
    assert sum(tensor.nbytes for tensor in pool.tensors.values()) == 10 * plain.page_bytes


def logits_over(decoder: Decoder, tokens: Sequence[int], pool: PagePool, borders: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens, float32 [T, vocab], computed in passes that end at `borders`."""
    pages = tuple(range(pool.spec.pages_for(len(tokens))))[::-1]
    rows = []
    for begin, end in zip((0, *borders), (*borders, len(tokens)), strict=True):
        cache = PagedCache(pool, [Segment(pages, begin, end)])
        hidden = decoder.forward(torch.tensor(tokens[begin:end]), torch.arange(begin, end), cache)
        rows.append(decoder.logits(hidden).float())
    return torch.cat(rows)


def test_fp8_pages_stay_close(glm_tiny: Path, text: list[int]) -> None:
    """On 500 unseen tokens FP8 pages cost the trained model less than 0.01 nats of KL divergence (0.008 measured), and
    BF16 pages less than 0.001; in float32, so that no rounding of the model itself is in it."""
    decoder, tokens, borders = load(glm_tiny, torch.float32), text[:500], range(100, 500, 100)
    exact, plain, scaled = (
        logits_over(decoder, tokens, make_pool(decoder, 40, 16, kv), borders).log_softmax(-1)
        for kv in (torch.float32, torch.bfloat16, FP8)
    )
    lost = [
        float(F.kl_div(other, exact, log_target=True, reduction="none").sum(-1).mean()) for other in (plain, scaled)
    ]

    assert 0 < lost[0] < 0.001
    assert lost[0] < lost[1] < 0.01


@pytest.mark.parametrize("kv", [torch.float32, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize("name", ["glm-5.2-fp8_block", "llama-bf16"])
def test_decode_agrees_with_prefill(loaded: Loader, name: str, kv: torch.dtype) -> None:
    """Tokens 90 to 130 and 250 to 260, given one by one, have the logits of a chunk, with no step at a page border."""
    decoder = loaded(name, torch.float32)
    tokens = make_prompts(decoder, 262)[0]
    whole = logits_over(decoder, tokens, make_pool(decoder, 5, 64, kv), [])
    borders = (*range(90, 131), *range(250, 261))
    pieces = logits_over(decoder, tokens, make_pool(decoder, 5, 64, kv), borders)
    worst = (whole - pieces).abs().amax(-1) / whole.abs().max()

    assert float(worst[90:].max()) < (1e-5 if kv is torch.float32 else 1e-2)

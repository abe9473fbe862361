"""Scales of an FP8 cache in a file and folded into the weights: the paged runtime computes the same bits with both."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit import folding
from quantkit.families.config import MlaConfig
from quantkit.models import Decoder, load
from quantkit.runtime import cache_spec, uniform_scales, unscaled
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import FP8, PagePool
from quantkit.runtime.scales import KvScales, Numbers, scales_by_layer
from support.runnable import edit_config, write_runnable
from support.tiers import exhaustive

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE, PROMPT, LENGTH = 4, 22, 26  # more than the 16 tokens that sparse attention selects
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(0))


def run(decoder: Decoder, scales: KvScales, dtype: torch.dtype = FP8) -> torch.Tensor:
    """Logits of a prompt in two chunks and of tokens one by one, through pages of `dtype`."""
    pool = PagePool(cache_spec(decoder.config, dtype, PAGE, scales), -(-LENGTH // PAGE))
    pages, begin, out = tuple(reversed(range(pool.num_pages))), 0, []
    for end in (15, PROMPT, *range(PROMPT + 1, LENGTH + 1)):
        cache = PagedCache(pool, [Segment(pages, begin, end)])
        out.append(decoder.logits(decoder.forward(TOKENS[begin:end], torch.arange(begin, end), cache)))
        begin = end
    assert pool.counts.tolist() == [0, 0, 0]
    return torch.cat(out)


def parts(decoder: Decoder, kind: str) -> dict[str, Numbers]:
    """Scales under the names of a file: numbers, or lists that differ from channel to channel and from pair to pair."""
    config = decoder.config
    named: dict[str, Numbers] = {}
    for layer in range(config.layers):
        prefix = f"{config.prefix}model.layers.{layer}.self_attn"
        named |= {f"{prefix}.k_scale": 0.25, f"{prefix}.v_scale": 0.25}
        if isinstance(config.attention, MlaConfig) and kind != "common":
            many = kind == "lists"
            latent = [2.0 ** -(channel % 5) for channel in range(config.attention.kv_rank)]
            rope = [2.0 ** (pair % 4 - 3) for pair in range(config.attention.rope // 2)]
            named[f"{prefix}.latent_scale"] = latent if many else 2.0 ** -(3 + layer)
            named[f"{prefix}.rope_scale"] = rope if many else 0.5
    return named


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, glm_tiny: Path) -> Callable[[str], Path]:
    """The folder of a checkpoint; `+halves` rotates channels i and i + width / 2 instead of neighbours."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        if name == "trained":
            return glm_tiny
        family, _, halves = name.partition("+")
        made = write_runnable(folder / name, family) if not (folder / name).exists() else folder / name
        return edit_config(made, lambda config: config.update(rope_interleave=False)) if halves else made

    return make


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("trained", "parts"),
        ("deepseek-v3-bf16+halves", "lists"),
        ("kimi-k2.5-int4", "lists"),
        ("glm-4.5-bf16", "common"),
        exhaustive("trained", "common"),
        exhaustive("glm-5.2-fp8_block", "parts"),
        exhaustive("glm-5.2-bf16", "lists"),
        exhaustive("deepseek-v3-fp8_block", "parts"),
        exhaustive("deepseek-v3-bf16", "lists"),
        exhaustive("deepseek-v3-fp8_block", "common"),
        exhaustive("glm-4.5-air-bf16", "common"),
        exhaustive("llama-fp8_block", "common"),
    ],
)
def test_folded_equals_the_file(checkpoint: Callable[[str], Path], name: str, kind: str, tmp_path: Path) -> None:
    """In FP8 pages, in both dtypes, prefill and decode: the same bits; and others than with scale 1."""
    folder = checkpoint(name)
    given = parts(load(folder), kind)
    folding.fold(folder, given, tmp_path / "folded")

    for dtype in DTYPES:
        plain, folded = load(folder, dtype), load(tmp_path / "folded", dtype)
        one = uniform_scales(plain.config.layers, 1.0)
        with_file = run(plain, scales_by_layer(plain.config, given, "the file"))
        assert torch.equal(run(folded, one), with_file)
        assert not torch.equal(run(plain, one), with_file)


@pytest.mark.parametrize("name", ["glm-4.5-bf16", "kimi-k2.5-int4", exhaustive("trained")])
def test_other_pages_are_the_same(checkpoint: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """In pages of the model's own dtype the folded checkpoint computes the bits of the unfolded one."""
    folder = checkpoint(name)
    folding.fold(folder, parts(load(folder), "parts"), tmp_path / "folded")

    for dtype in DTYPES:
        plain, folded = load(folder, dtype), load(tmp_path / "folded", dtype)
        none = unscaled(plain.config.layers)
        assert torch.equal(run(folded, none, dtype), run(plain, none, dtype))


def test_what_a_page_holds_is_divided_by_the_parts(checkpoint: Callable[[str], Path]) -> None:
    """The bytes of a row are those of latent / c and key / r, channel by channel."""
    decoder = load(checkpoint("deepseek-v3-bf16"), torch.float32)
    mla = decoder.config.attention
    assert isinstance(mla, MlaConfig)
    scales = scales_by_layer(decoder.config, parts(decoder, "lists"), "the file")
    pool = PagePool(cache_spec(decoder.config, FP8, PAGE, scales), 1)
    cache = PagedCache(pool, [Segment((0,), 0, 1)])
    latent, rope = torch.randn(1, mla.kv_rank), torch.randn(1, mla.rope)
    cache.append_latent(0, torch.tensor([0]), latent, rope)

    row = pool.tensors[0, "latent"][0, 0].float()
    by_channel = torch.tensor([2.0 ** -(channel % 5) for channel in range(mla.kv_rank)])
    by_pair = torch.tensor([2.0 ** (channel // 2 % 4 - 3) for channel in range(mla.rope)])
    expected = torch.cat((latent[0] / by_channel, rope[0] / by_pair)).to(torch.float8_e4m3fn).float()
    assert torch.equal(row, expected)

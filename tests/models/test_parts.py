"""The parts of the decoders one by one: rotary positions, routing, norms, products with packed weights, the cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.checkpoint.source import Source
from quantkit.families.config import MlaConfig, MoeConfig, RopeConfig
from quantkit.models import PlainCache, load, read_config
from quantkit.models.linear import Linear, expert_linear, linear
from quantkit.models.moe import Moe, Router
from quantkit.models.norm import RmsNorm
from quantkit.models.rope import amplitude, frequencies, make_rotation, rotate, rotate_front, score_factor
from quantkit.weights.encodings import PLAIN
from quantkit.weights.packed import Packed
from support.families import write_family
from support.paths import CONFIGS
from support.runnable import write_runnable
from support.truth import truth

pytestmark = pytest.mark.usefixtures("one_thread")


def published(name: str) -> Source:
    """A source of the published config `name`, without weights."""
    return Source(name, None, (CONFIGS / f"{name}.json").read_text(), {})


# --- rotary positions


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "kimi-k2-instruct", "kimi-k2.5", "glm-5.1", "glm-5.2"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """Of published configs: plain, llama3, yarn, also with beta_fast = beta_slow."""
    text = json.loads((CONFIGS / f"{name}.json").read_text())
    text = text.get("text_config", text)
    text.pop("quantization_config", None)
    kind = text["model_type"] if text["model_type"] != "kimi_k2" else "deepseek_v3"
    config = transformers.AutoConfig.for_model(**{**text, "model_type": kind})
    rope = read_config(published(name)).rope
    if rope.kind == "default":
        exponents = torch.arange(0, rope.width, 2).float() / rope.width
        expected, factor = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")

    assert rope.width == (64 if "llama" not in name else 128)
    torch.testing.assert_close(frequencies(rope), expected, rtol=3e-7, atol=0)
    assert amplitude(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "factor"), [("deepseek-v3", 1.8738), ("kimi-k2-instruct", 1.8133), ("kimi-k2.5", 2.0047), ("glm-5.2", 1.0)]
)
def test_yarn_sharpens_the_scores_of_mla(name: str, factor: float) -> None:
    """By (0.1 ln(factor) + 1)^2: 40 in DeepSeek-V3, 32 and 64 in Kimi K2.x; not at all without YaRN."""
    rope = read_config(published(name)).rope

    assert score_factor(rope) == pytest.approx(factor, abs=1e-4)
    assert amplitude(rope) == 1.0  # mscale and mscale_all_dim are equal, so cosine and sine are not scaled


@pytest.mark.parametrize(
    ("parameters", "factor"),
    [({}, 1.3466), ({"mscale": 0.5, "mscale_all_dim": 1.0}, 0.8713), ({"attention_factor": 1.25}, 1.25)],
)
def test_yarns_amplitude(parameters: dict[str, float], factor: float) -> None:
    """0.1 ln(32) + 1 by default, a quotient of mscales, or what the config says."""
    rope = RopeConfig(
        64, "yarn", {"rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 4096, **parameters}, True
    )

    assert amplitude(rope) == pytest.approx(factor, abs=1e-4)
    cos, sin = make_rotation(rope, torch.arange(9))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((9, 32), factor**2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_turns_pairs(interleaved: bool) -> None:
    """Channels 2i and 2i + 1, or i and i + width / 2, by position x frequency; the others stay where they are."""
    rope = RopeConfig(8, "default", {"rope_theta": 100.0}, interleaved)
    positions = torch.tensor([0, 3, 1000])
    x = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0))
    actual = rotate_front(x, make_rotation(rope, positions), interleaved)

    assert torch.equal(actual[..., 8:], x[..., 8:])
    assert torch.equal(actual[0], x[0])
    for pair in range(4):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        turn = torch.polar(torch.ones(3), positions.float() * 100.0 ** (-pair / 4))
        expected = torch.complex(x[..., first], x[..., second]) * turn[:, None]
        torch.testing.assert_close(torch.complex(actual[..., first], actual[..., second]), expected, rtol=0, atol=1e-5)


@given(first=st.integers(0, 2000), second=st.integers(0, 2000), shift=st.integers(0, 2000), interleaved=st.booleans())
def test_products_depend_on_distance(first: int, second: int, shift: int, interleaved: bool) -> None:
    """A query and a key that are moved together have the same product."""
    rope = RopeConfig(16, "default", {"rope_theta": 10000.0}, interleaved)
    query, key = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(first))

    def product(offset: int) -> torch.Tensor:
        places = torch.tensor([first + offset]), torch.tensor([second + offset])
        turned = [rotate(x, make_rotation(rope, at), interleaved) for x, at in zip((query, key), places, strict=True)]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(0), product(shift), rtol=0, atol=1e-2)


def test_conventions_of_the_families() -> None:
    """GLM-5.x and DeepSeek rotate neighbours, in the indexer DeepSeek-V3.2 halves; Llama rotates halves."""
    glm, llama = read_config(published("glm-5.2")), read_config(published("llama-3.1-8b"))
    text = json.dumps(
        json.loads((CONFIGS / "deepseek-v3.json").read_text())
        | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    )
    deepseek = read_config(Source("deepseek-v3.2", None, text, {}))

    assert glm.dsa
    assert deepseek.dsa
    assert (glm.rope.interleaved, glm.dsa.interleaved) == (True, True)
    assert (deepseek.rope.interleaved, deepseek.dsa.interleaved) == (True, False)
    assert llama.rope.interleaved is False
    assert sum(glm.dsa.full) == 21
    assert [layer for layer in range(78) if glm.dsa.full[layer]] == [0, 1, *range(2, 78, 4)]


# --- norms and routing


def test_norms_inside_mla_have_their_own_epsilon(glm_tiny: Path) -> None:
    """1e-6, where the config says 1e-5 for those of the layers."""
    decoder = load(glm_tiny)
    attention = decoder.layers[0].attention

    assert (decoder.norm.eps, decoder.layers[0].attention_norm.eps) == (1e-5, 1e-5)
    assert (attention.q_norm.eps, attention.kv_norm.eps, attention.indexer.norm.eps) == (1e-6, 1e-6, 1e-6)  # type: ignore[union-attr]


def test_epsilon_counts() -> None:
    """A norm of small numbers is not their direction alone."""
    x = torch.full((1, 4), 1e-3)

    torch.testing.assert_close(RmsNorm(torch.ones(4), 1e-6)(x), torch.full((1, 4), 0.5**0.5))
    torch.testing.assert_close(RmsNorm(torch.ones(4), 3e-6)(x), torch.full((1, 4), 0.5))


def make_router(bias: torch.Tensor, weight: torch.Tensor | None = None, **changes: Any) -> Router:
    """A router of as many experts as `bias` has; without `weight` all scores are one half."""
    experts = len(bias)
    numbers = {"top_k": 4, "groups": 1, "top_groups": 1, "normalize": True, "scale": 2.5} | changes
    config = MoeConfig(experts=experts, shared=1, intermediate=8, sparse=(True,), **numbers)
    codes = torch.zeros(experts, 8) if weight is None else weight
    return Router(config, Linear(Packed(PLAIN, (experts, 8), codes)), bias)


def test_the_routers_bias_stays_float32(tmp_path: Path) -> None:
    """238 different values between 6.82 and 7.06 order 238 experts; in BF16 they are eight."""
    bias = torch.linspace(6.82, 7.06, 238)[torch.randperm(238, generator=torch.Generator().manual_seed(0))]
    ids = make_router(bias)(torch.ones(1, 8, dtype=torch.bfloat16)).ids

    assert len(bias.bfloat16().unique()) < 10
    assert ids.tolist() == [bias.topk(4).indices.sort().values.tolist()]

    moe = load(write_runnable(tmp_path / "glm", "glm-5.2-fp8_block"), torch.bfloat16).layers[1].mlp
    assert isinstance(moe, Moe)
    assert moe.router.bias.dtype == torch.float32
    stored = truth(tmp_path / "glm")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert moe.router.bias.tolist() == stored.tolist()


def test_scores_are_float32_for_bf16_tokens() -> None:
    """Two experts whose scores differ by less than BF16 tells are told apart, and the sum of weights is exact."""
    weight = torch.zeros(6, 8)
    weight[:, 0] = torch.tensor([1.0, 1.001, 1.002, 1.003, 1.004, 1.005])
    routing = make_router(torch.zeros(6), weight)(torch.full((3, 8), 0.5, dtype=torch.bfloat16))

    assert routing.ids.tolist() == [[2, 3, 4, 5]] * 3
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights.sum(1), torch.full((3,), 2.5))


def test_the_bias_steers_the_choice_and_not_the_weights() -> None:
    """Weights come from the scores alone."""
    routing = make_router(torch.tensor([0.0, 9, 0, 9, 9, 0, 9]))(torch.ones(1, 8))
    plain = make_router(torch.tensor([0.0, 9, 0, 9, 9, 0, 9]), normalize=False)(torch.ones(1, 8))

    assert routing.ids.tolist() == [[1, 3, 4, 6]]
    torch.testing.assert_close(routing.weights, torch.full((1, 4), 2.5 / 4))
    torch.testing.assert_close(plain.weights, torch.full((1, 4), 2.5 / 2))


def test_groups_are_ranked_by_their_two_best() -> None:
    """The group of the best expert loses against one with two good ones; ties go to the lower expert."""
    bias = torch.tensor([9.0, 0, 0, 5, 5, 0, 4, 4, 4])
    router = make_router(bias, groups=3, top_groups=1, top_k=2)

    assert router(torch.ones(1, 8)).ids.tolist() == [[3, 4]]
    assert make_router(bias, groups=3, top_groups=2, top_k=3)(torch.ones(1, 8)).ids.tolist() == [[0, 3, 4]]
    assert make_router(torch.zeros(9))(torch.ones(1, 8)).ids.tolist() == [[0, 1, 2, 3]]


# --- products


@pytest.mark.parametrize("name", ["glm-5.2-int4", "glm-5.2-nvfp4", "glm-5.2-nvfp4_modelopt", "glm-5.2-fp8_block_e8m0"])
def test_products_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    """Of dense and of routed weights; each row of a token, or of a token and a choice, meets its own expert."""
    folder = write_runnable(tmp_path / "checkpoint", name)
    decoder, weights = load(folder, torch.float32), truth(folder)
    moe = decoder.layers[1].mlp
    assert isinstance(moe, Moe)
    ids = torch.tensor([[0, 3], [1, 2], [0, 1]])
    x, inner = torch.randn(3, 128), torch.randn(6, 256)

    def number(projection: str, expert: int) -> torch.Tensor:
        return torch.from_numpy(weights[f"model.layers.1.mlp.experts.{expert}.{projection}.weight"])

    up, down = expert_linear(x, moe.up, ids), expert_linear(inner, moe.down, ids)
    for pair, expert in enumerate(ids.flatten().tolist()):
        expected = number("up_proj", expert) @ x[pair // 2].double()
        torch.testing.assert_close(up[pair], expected.float(), rtol=1e-4, atol=1e-5)
        expected = number("down_proj", expert) @ inner[pair].double()
        torch.testing.assert_close(down[pair], expected.float(), rtol=1e-4, atol=1e-5)
    wide = linear(x, moe.shared.up.weight)
    expected = x.double() @ torch.from_numpy(weights["model.layers.1.mlp.shared_experts.up_proj.weight"]).T
    torch.testing.assert_close(wide, expected.float(), rtol=1e-4, atol=1e-5)


def test_a_ragged_block_has_its_own_scale(tmp_path: Path) -> None:
    """160 rows in blocks of 128 have two rows of scales; the last 32 rows take the second."""
    folder = write_family(tmp_path / "glm", "kimi-k2-instruct-fp8_block")
    decoder = load(folder)
    attention = decoder.layers[0].attention
    weight = attention.kv_a.weight  # type: ignore[union-attr]

    assert isinstance(decoder.config.attention, MlaConfig)
    assert weight.shape == (160, 128)
    assert weight.scale is not None
    assert weight.scale.shape == (2, 1)
    expected = torch.from_numpy(truth(folder)["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"])
    assert torch.equal(weight.decode(torch.float32), expected.float())
    assert torch.equal(weight.decode(torch.bfloat16), expected.float().bfloat16())


# --- the cache


def test_a_token_that_was_never_kept_is_nan() -> None:
    """A gap in what was appended is not read as zeros."""
    cache = PlainCache()
    cache.append_heads(0, torch.tensor([0, 2]), torch.ones(2, 1, 4), torch.ones(2, 1, 4))
    query = torch.ones(2, 2, 4)

    assert cache.attend_heads(0, torch.tensor([0, 0]), query, 0.5).isfinite().all()
    assert cache.attend_heads(0, torch.tensor([0, 2]), query, 0.5)[1].isnan().all()


def test_attention_over_a_selection() -> None:
    """Only the listed positions, -1 being none and later ones not seen, whatever their order."""
    generator = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(10, 8, generator=generator), torch.randn(10, 4, generator=generator)
    q_latent, q_rope = torch.randn(1, 3, 8, generator=generator), torch.randn(1, 3, 4, generator=generator)
    cache = PlainCache()
    cache.append_latent(0, torch.arange(10), latent, rope)

    actual = cache.attend_latent(
        0, torch.tensor([6]), q_latent, q_rope, 0.3, torch.tensor([[5, -1, 1, 9, 4]], dtype=torch.int32)
    )

    kept = torch.tensor([1, 4, 5])
    scores = (q_latent[0] @ latent[kept].T + q_rope[0] @ rope[kept].T) * 0.3
    torch.testing.assert_close(actual[0], scores.softmax(-1) @ latent[kept])


def test_selection_prefers_the_earlier_of_equal_tokens() -> None:
    """All scores are zero where no head fires; the first tokens are taken, and -1 where a row sees too few."""
    cache = PlainCache()
    cache.append_index(0, torch.arange(6), torch.ones(6, 4))

    selected = cache.select(0, torch.tensor([1, 5]), -torch.ones(2, 3, 4), torch.ones(2, 3), 4)

    assert selected.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]

"""Bytes of a cached token and bytes of a rank are those of hand calculations."""

import json
from itertools import product

import pytest

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import IndexCache, KvLayout
from quantkit.errors import SourceError, UsageError
from quantkit.families.attention import Attention
from quantkit.naming import Role
from quantkit.planning.resident import Parallelism, Part, parts, rank_bytes
from quantkit.recipe import find_alias
from support.paths import CONFIGS


def attention_of(model: str, *, mtp: bool = False) -> Attention:
    """The attention of a published model: an alias, or a file of the fixtures."""
    alias = find_alias(model)
    text = alias.config_text if alias else (CONFIGS / f"{model}.json").read_text()
    return Attention.of(Source(model, None, text, {}), mtp=mtp)


INDEXERS, ALL = IndexCache.INDEXERS, IndexCache.ALL


@pytest.mark.parametrize(
    ("model", "layout", "index_cache", "nbytes"),
    [
        ("glm-5.2", KvLayout.BF16, INDEXERS, 92_628),
        ("glm-5.2", KvLayout.BF16, ALL, 100_152),
        ("glm-5.2", KvLayout.FP8, INDEXERS, 47_700),
        ("glm-5.2", KvLayout.FP8, ALL, 55_224),
        ("glm-5.2", KvLayout.FP8_DS_MLA, INDEXERS, 53_940),
        ("glm-5.2", KvLayout.FP8_DS_MLA, ALL, 61_464),
        ("glm-5", KvLayout.FP8_DS_MLA, INDEXERS, 61_464),
        ("kimi-k2.6", KvLayout.BF16, INDEXERS, 70_272),
        ("kimi-k2.6", KvLayout.FP8, INDEXERS, 35_136),
        ("kimi-k2.6", KvLayout.FP8, ALL, 35_136),
        ("kimi-k2.6", KvLayout.FP8_DS_MLA, INDEXERS, 40_016),
        ("glm-4.5", KvLayout.BF16, INDEXERS, 376_832),
        ("glm-4.5", KvLayout.FP8, INDEXERS, 188_416),
    ],
)
def test_bytes_per_token_are_the_published_ones(
    model: str, layout: KvLayout, index_cache: IndexCache, nbytes: int
) -> None:
    """Each layout of each model takes exactly the published bytes per token."""
    assert attention_of(model).bytes_per_token(layout, index_cache) == nbytes


def test_a_published_pool_holds_the_published_tokens() -> None:
    """The bytes of 138,496 GLM-5.2 tokens on eight ranks are what vLLM stored, and Kimi's pool holds twice with FP8."""
    glm, kimi = attention_of("glm-5.2"), attention_of("kimi-k2.6")

    assert 8 * 138_496 * glm.bytes_per_token(KvLayout.FP8_DS_MLA) == 59_763_793_920
    pool = 686_000 * 70_272
    assert pool // kimi.bytes_per_token(KvLayout.BF16) == 686_000
    assert pool // kimi.bytes_per_token(KvLayout.FP8) == 1_372_000


def test_the_mtp_layer_has_a_cache_and_an_indexer() -> None:
    """Loading GLM-5.2's MTP layer adds one layer's KV and one index cache."""
    with_mtp = attention_of("glm-5.2", mtp=True)

    assert (with_mtp.layers, with_mtp.indexers) == (79, 22)
    assert with_mtp.bytes_per_token(KvLayout.BF16) == 92_628 + 1152 + 132


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_kv_heads_are_shared_out(ranks: int, heads: int) -> None:
    """A rank keeps its part of GQA's KV heads, started ones whole, and one at least; MLA is whole on every rank."""
    assert attention_of("glm-4.5").bytes_per_token(KvLayout.BF16, ranks=ranks) == 92 * 2 * heads * 128 * 2
    assert attention_of("kimi-k2.6").bytes_per_token(KvLayout.BF16, ranks=ranks) == 70_272


def test_fp8_ds_mla_is_for_mla() -> None:
    """A layout of MLA is refused for a model with KV heads, with the flag to change."""
    with pytest.raises(UsageError, match="--kv fp8_ds_mla") as caught:
        attention_of("glm-4.5").bytes_per_token(KvLayout.FP8_DS_MLA)

    assert caught.value.hint == "Give --kv fp8."


@pytest.mark.parametrize("key", ["qk_rope_head_dim", "v_head_dim", "index_topk", "num_attention_heads"])
def test_a_missing_key_of_the_kv_cache_is_named(key: str) -> None:
    """A config without a size that the KV cache needs is refused by that key's name."""
    config = json.loads((CONFIGS / "glm-5.json").read_text())
    del config[key]

    with pytest.raises(SourceError, match=f"toy: .*{key}"):
        Attention.of(Source("toy", None, json.dumps(config), {}))


def test_null_is_absent() -> None:
    """transformers writes null for what a config does not say: no KV heads of their own are all heads."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "kv_lora_rank", "index_n_heads"))

    found = Attention.of(Source("toy", None, json.dumps(config | nulls), {}))
    assert found == Attention(layers=2, heads=8, kv_heads=8, head_dim=8)


def test_sparse_attention_reads_topk_tokens_and_every_index() -> None:
    """Beyond 2048 tokens GLM-5.2 reads the KV of 2048 and the index cache of all; below, the KV of all."""
    glm = attention_of("glm-5.2")

    assert glm.read_bytes(KvLayout.BF16, 100_000) == 2048 * 78 * 1152 + 100_000 * 21 * 132
    assert glm.read_bytes(KvLayout.BF16, 1000) == 1000 * 92_628
    assert attention_of("kimi-k2.6").read_bytes(KvLayout.FP8, 100_000) == 100_000 * 35_136


@pytest.mark.parametrize("tokens", [1, 100, 2048, 2049, 9000])
def test_the_mean_of_attended_tokens_is_that_of_a_sum(tokens: int) -> None:
    """Over a prompt, the mean number of attended tokens is the sum's, to half a token."""
    glm = attention_of("glm-5.2")

    summed = sum(glm.attended(context) for context in range(tokens)) / tokens
    assert glm.mean_attended(tokens) == pytest.approx(summed, abs=0.5)


def test_attention_flops_are_those_of_its_products() -> None:
    """A multiply and an add for each dimension, head, layer and attended token; the indexer's for every token."""
    glm, kimi, glm_4 = (attention_of(model) for model in ("glm-5.2", "kimi-k2.6", "glm-4.5"))

    assert glm.flops(10, absorbed=True) == 2 * 78 * 64 * (512 + 64 + 512) * 10  # scores on 576, values of 512
    assert kimi.flops(10, absorbed=False) == 2 * 61 * 64 * (128 + 64 + 128) * 10
    assert glm_4.flops(10, absorbed=True) == glm_4.flops(10, absorbed=False) == 2 * 92 * 96 * (128 + 128) * 10
    assert (glm.index_flops(5000), kimi.index_flops(5000)) == (2 * 21 * 32 * 128 * 5000, 0)


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    """A tensor."""
    return TensorSpec(name, dtype, shape)


LAYER = "model.layers.0"
SPECS = (
    spec("model.embed_tokens.weight", 1000, 64),
    spec(f"{LAYER}.input_layernorm.weight", 64),
    spec(f"{LAYER}.self_attn.q_a_proj.weight", 32, 64, dtype="F8_E4M3"),
    spec(f"{LAYER}.self_attn.q_a_proj.weight_scale_inv", 1, 1, dtype="F32"),
    spec(f"{LAYER}.self_attn.o_proj.weight", 64, 80, dtype="F8_E4M3"),
    spec(f"{LAYER}.self_attn.o_proj.weight_scale_inv", 1, 1, dtype="F32"),
    spec(f"{LAYER}.mlp.gate.weight", 3, 64),
    spec(f"{LAYER}.mlp.shared_experts.up_proj.weight", 64, 64),
    *(spec(f"{LAYER}.mlp.experts.{e}.up_proj.weight_packed", 16, 8, dtype="I32") for e in range(3)),
    *(spec(f"{LAYER}.mlp.experts.{e}.up_proj.weight_scale", 16, 2) for e in range(3)),
    *(spec(f"{LAYER}.mlp.experts.{e}.up_proj.weight_shape", 2, dtype="I64") for e in range(3)),
    spec("model.layers.1.eh_proj.weight", 64, 128),
)


def by_role(found: tuple[Part, ...]) -> dict[tuple[Role, bool], Part]:
    """The parts by role and whether every rank holds them."""
    return {(part.role, part.replicated): part for part in found}


def test_parts_hold_every_byte_once() -> None:
    """Grouping loses no byte, counts weights without their scales, and knows formats and MTP layers."""
    found = by_role(parts(SPECS, 1))

    assert sum(part.nbytes for part in found.values()) == sum(spec.nbytes for spec in SPECS)
    experts = found[Role.ROUTED_EXPERT, False]
    assert experts == Part(Role.ROUTED_EXPERT, False, "int4", False, 3 * 16 * 64, 3 * (16 * 8 * 4 + 16 * 2 * 2 + 16), 9)
    assert found[Role.ATTENTION, True] == Part(Role.ATTENTION, False, "fp8", True, 32 * 64, 32 * 64 + 4, 2)
    assert found[Role.ATTENTION, False].nbytes == 64 * 80 + 4
    assert [part.role for part in found.values() if part.mtp] == [Role.MTP_PROJECTION]


@pytest.mark.parametrize(("ep", "dp_attention"), [*product((False, True), repeat=2)])
def test_a_rank_holds_its_share(ep: bool, dp_attention: bool) -> None:
    """Two ranks halve what is shared out and keep the rest; whole experts round up; DP attention keeps attention."""
    layout = Parallelism(2, 2, ep=ep, dp_attention=dp_attention)
    found = by_role(parts(SPECS, 1))
    sizes = {key: rank_bytes(part, layout, experts=3) for key, part in found.items()}

    experts, o_proj = found[Role.ROUTED_EXPERT, False].nbytes, found[Role.ATTENTION, False].nbytes
    assert sizes[Role.EMBEDDING, False] == 1000 * 64
    assert sizes[Role.ATTENTION, True] == found[Role.ATTENTION, True].nbytes
    assert sizes[Role.ROUTER, True] == 3 * 64 * 2
    assert sizes[Role.MTP_PROJECTION, True] == 64 * 128 * 2
    assert sizes[Role.ROUTED_EXPERT, False] == (experts * 2 // 3 if ep else experts // 2)
    assert sizes[Role.ATTENTION, False] == (o_proj if dp_attention else o_proj // 2)
    assert sizes[Role.SHARED_EXPERT, False] == (64 * 64 * 2 if ep and dp_attention else 64 * 64)


@pytest.mark.parametrize("tp", [3, 16, 0])
def test_ranks_divide_the_gpus(tp: int) -> None:
    """Replicas are whole, or the flag is named."""
    with pytest.raises(UsageError, match=f"--tp {tp} does not divide the 8 GPUs"):
        Parallelism(8, tp)

"""Bytes of a cached token, bytes of a rank, experts touched and rooflines are those of hand calculations."""

import json
import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from quantkit.capacity.attention import Attention
from quantkit.capacity.gpus import Gpu, load_gpus, parse_gpus
from quantkit.capacity.layouts import IndexCache, KvLayout
from quantkit.capacity.resident import Parallelism, Part, parts, rank_bytes
from quantkit.capacity.roofline import Model, Serving, price_per_million
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError, UsageError
from quantkit.naming import Role
from quantkit.recipe import find_alias

CONFIGS = Path(__file__).parent / "fixtures" / "configs"


def attention_of(model: str, *, mtp: bool = False) -> Attention:
    """The attention of a published model: an alias, or a file of the fixtures."""
    alias = find_alias(model)
    text = alias.config_text if alias else (CONFIGS / f"{model}.json").read_text()
    return Attention.of(Source(model, None, text, {}), mtp=mtp)


# --- bytes of a cached token

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


# --- bytes of a rank


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


# --- rooflines

EVEN = Gpu("even", memory_mib=1000, bandwidth_gb_s=1, bf16_tflops=1e-3, fp8_tflops=2e-3)  # 10^9 B/s, 10^9 FLOP/s
BODY = Part(Role.DENSE_MLP, False, "bf16", False, 1000, 2000, 1)
EXPERTS = Part(Role.ROUTED_EXPERT, False, "int4", False, 8000, 4000, 1)
HEAD = Part(Role.LM_HEAD, False, "fp8", False, 500, 500, 1)
UNREAD = (Part(Role.EMBEDDING, False, "bf16", False, 99, 99, 1), replace(BODY, mtp=True))
PLAIN = Attention(layers=1, heads=2, kv_heads=2, head_dim=4)
MODEL = Model((BODY, EXPERTS, HEAD, *UNREAD), PLAIN, experts=8, experts_per_token=2)


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 3, 2), (6, 2, 1)])
def test_experts_touched_is_the_expectation_over_all_choices(experts: int, chosen: int, tokens: int) -> None:
    """Counting the experts of every possible choice of every token gives the same mean."""
    choices = list(combinations(range(experts), chosen))
    touched = [len(set().union(*picked)) for picked in product(choices, repeat=tokens)]
    model = replace(MODEL, experts=experts, experts_per_token=chosen)

    assert model.experts_touched(tokens) == pytest.approx(sum(touched) / len(touched))


def test_weight_bytes_grow_from_the_chosen_experts_to_all() -> None:
    """One token reads its share of the experts and all else but the embedding; very many read all experts."""
    assert MODEL.weight_bytes(1) == 2000 + 4000 * 2 / 8 + 500
    assert MODEL.weight_bytes(1000) == pytest.approx(2000 + 4000 + 500)


def test_decode_is_the_slower_of_reading_and_computing() -> None:
    """With little to read a step takes its FLOPs' time, with a slow memory its bytes' time."""
    serving = Serving(MODEL, Parallelism(1, 1), EVEN, KvLayout.BF16)
    flops = 2 * (1000 + 8000 * 2 / 8) + 2 * 500 / 2  # the head in FP8, twice as fast
    attention = 2 * 2 * (2 * 4) * 10

    assert serving.decode_step(1, 10).seconds == pytest.approx((flops + attention) / 1e9)
    slow = replace(serving, gpu=replace(EVEN, bandwidth_gb_s=0.1))
    assert slow.decode_step(1, 10).seconds == pytest.approx((3500 + 10 * 2 * 2 * 4 * 2) / 1e8)


def test_prefill_leaves_the_head_out() -> None:
    """Only the last token of a prompt needs the head; attention is that of the mean position."""
    serving = Serving(MODEL, Parallelism(1, 1), EVEN, KvLayout.BF16)

    assert serving.prefill_step(100).seconds == pytest.approx(100 * (2 * 3000 + 2 * 2 * 8 * 50) / 1e9)


def test_ranks_share_the_work() -> None:
    """Two ranks take half the time where all is shared out; what every rank holds, every rank computes."""
    one, two = (Serving(MODEL, Parallelism(n, n), EVEN, KvLayout.BF16) for n in (1, 2))
    assert two.decode_step(4, 10).seconds == pytest.approx(one.decode_step(4, 10).seconds / 2)

    router = Part(Role.ROUTER, False, "bf16", True, 10**6, 0, 1)
    whole = replace(two, model=replace(MODEL, parts=(router,)))
    spread = replace(whole, parallelism=Parallelism(2, 2, dp_attention=True))
    assert whole.decode_step(4, 1).seconds == pytest.approx(2 * spread.decode_step(4, 1).seconds, rel=1e-3)


def test_dp_attention_reads_the_requests_of_the_fullest_rank() -> None:
    """Three requests on two ranks are two on one of them, with all KV heads."""
    serving = Serving(MODEL, Parallelism(2, 2, dp_attention=True), EVEN, KvLayout.BF16)

    assert serving.rank_kv_bytes(3, 10) == 2 * 10 * 2 * 2 * 4 * 2


def test_price_per_million() -> None:
    """Eight GPUs at 4.50 dollars that give 1000 tokens a second give a million in 1000 seconds, for 10 dollars."""
    assert price_per_million(4.5, 8, 1000) == pytest.approx(10)


# --- the table of GPUs


@pytest.mark.parametrize(("text", "count", "name"), [("8xH200", 8, "H200"), ("b200", 1, "B200"), ("16xh20", 16, "H20")])
def test_gpus_are_a_number_and_a_name(text: str, count: int, name: str) -> None:
    """Names are found in any case, and no number is one."""
    found, gpu = parse_gpus(text)

    assert (found, gpu.name) == (count, name)


@pytest.mark.parametrize("text", ["8xH900", "0xH200", "", "x", "8x", "-1xH200"])
def test_an_unknown_gpu_is_refused(text: str) -> None:
    """The hint names the known ones and the flag that adds others."""
    with pytest.raises(UsageError, match="no such GPU") as caught:
        parse_gpus(text)

    assert "H200" in str(caught.value.hint)
    assert "--gpu-table" in str(caught.value.hint)


def test_every_gpu_is_plausible() -> None:
    """Each format is at least as fast as the wider one, and the memory is read in 10 to 60 milliseconds."""
    for gpu in load_gpus().values():
        speeds = [gpu.flops("bf16"), gpu.flops("fp8"), max(gpu.flops("nvfp4"), gpu.flops("fp8"))]
        assert speeds == sorted(speeds), gpu.name
        assert 0.01 < gpu.memory_bytes / (gpu.bandwidth_gb_s * 1e9) < 0.06, gpu.name
    assert math.isclose(load_gpus()["H200"].memory_bytes / 2**30, 140.4, abs_tol=0.01)


def test_int4_runs_in_bf16_and_nvfp4_where_there_are_units() -> None:
    """Hopper decodes both 4-bit formats to BF16; Blackwell multiplies NVFP4 itself."""
    gpus = load_gpus()

    assert gpus["H200"].flops("int4") == gpus["H200"].flops("nvfp4") == 989e12
    assert (gpus["B200"].flops("int4"), gpus["B200"].flops("nvfp4")) == (2250e12, 9000e12)


def test_a_table_adds_and_replaces_gpus(tmp_path: Path) -> None:
    """A file of the user's wins over the built-in table and leaves its other entries."""
    table = tmp_path / "gpus.yaml"
    table.write_text(
        "H200: {memory_mib: 1, bandwidth_gb_s: 2, bf16_tflops: 3}\n"
        "X1: {memory_mib: 4, bandwidth_gb_s: 5, bf16_tflops: 6.5}\n"
    )

    assert parse_gpus("2xX1", table) == (2, Gpu("X1", 4, 5, 6.5))
    assert load_gpus(table)["H200"] == Gpu("H200", 1, 2, 3)
    assert "B200" in load_gpus(table)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "not a mapping"),
        ("X: 3", "X is not a mapping"),
        ("X: {memory_mib: 1}", "X has no bandwidth_gb_s, bf16_tflops"),
        ("X: {memory_mib: 1, bandwidth_gb_s: 1, bf16_tflops: 1, tdp: 700}", "X has the unknown key tdp"),
        ("X: {memory_mib: 1.5, bandwidth_gb_s: 1, bf16_tflops: 1}", "memory_mib of X is 1.5"),
        ("X: {memory_mib: 1, bandwidth_gb_s: -1, bf16_tflops: 1}", "bandwidth_gb_s of X is -1"),
        ("X: {memory_mib: 1, bandwidth_gb_s: yes, bf16_tflops: 1}", "bandwidth_gb_s of X is True"),
        ("X: [", "not valid YAML"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """The message names the file, the GPU and the key."""
    table = tmp_path / "mine.yaml"
    table.write_text(text)

    with pytest.raises(UsageError, match=f"mine.yaml: .*{words}"):
        load_gpus(table)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """So does that of a file that cannot be read."""
    with pytest.raises(UsageError, match=r"nowhere.yaml: cannot be read"):
        parse_gpus("H200", tmp_path / "nowhere.yaml")

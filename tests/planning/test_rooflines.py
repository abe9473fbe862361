"""Experts touched, rooflines and prices are those of hand calculations; GPUs come from a table."""

import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from quantkit.choices import KvLayout
from quantkit.errors import UsageError
from quantkit.families.attention import Attention
from quantkit.naming import Role
from quantkit.planning.gpus import Gpu, load_gpus, parse_gpus
from quantkit.planning.resident import Parallelism, Part
from quantkit.planning.roofline import Model, Serving, price_per_million

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

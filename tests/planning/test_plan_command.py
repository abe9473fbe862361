"""`plan` gives the published sizes, names what does not come out, and refuses by name what it cannot tell."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantkit.checkpoint.source import Source
from quantkit.choices import IndexCache, KvLayout, Mtp
from quantkit.cli import app
from quantkit.conversion import Options
from quantkit.errors import PlanError, QuantkitError, SourceError, UsageError
from quantkit.planning.fit import GIB, Deployment, describe, plan_serving, report
from quantkit.planning.published import int4_experts_only
from quantkit.planning.report import CapacityReport, PublishedFigures
from quantkit.planning.roofline import Model
from support.headers import published
from support.paths import CONFIGS
from support.tiers import exhaustive, quick_if

REFUSED = {
    "glm-4.7-flash": "its config has no n_shared_experts",
    "glm-5.3": "model type None",
    "glm-5.3-flash": "model type 'glm5_next'",
}
NVFP4 = "nvidia-glm-5.2-nvfp4"
EP_DP: dict[str, Any] = {"ep": True, "dp_attention": True}


Described = tuple[Source, Model]


def run(*arguments: str) -> str:
    """The stdout of `quantkit plan`, which must succeed."""
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@lru_cache
def described(model: str) -> Described:
    """A published model that several tests plan, counted once."""
    source = published(model)
    return source, describe(source)


def plan(model: str, gpus: str = "8xH200", **deployment: Any) -> CapacityReport:
    """The report on a model as published."""
    return report(*described(model), Deployment(gpus, **deployment))


@pytest.fixture(scope="module")
def figures() -> PublishedFigures:
    """What `--explain published --json` prints; it takes no model."""
    return PublishedFigures.from_json(run("--explain", "published", "--json"))


@pytest.fixture(scope="module")
def bf16_rest() -> CapacityReport:
    """GLM-5.2 with INT4 experts, all else BF16 and no MTP layer, after conversion."""
    recipe, options = "glm-5.2-int4-bf16rest", Options(mtp=Mtp.DROP)
    return plan_serving("glm-5.2", Deployment(**EP_DP), convert=True, recipe=recipe, options=options)


# --- published sizes


@pytest.mark.parametrize(
    ("model", "deployment", "gib"),
    [
        ("glm-5.2", {}, 88.18),
        ("glm-5.2", {"mtp": True}, 89.50),
        ("glm-5.2", {"mtp": True, **EP_DP}, 101.42),
        ("glm-5.2", {"mtp": True, "ep": True}, 89.50),
        exhaustive(NVFP4, {"mtp": True}, 56.84),
        exhaustive(NVFP4, {"mtp": True, **EP_DP}, 80.68),
        ("kimi-k2.6", {}, 71.83),
    ],
)
def test_one_rank_of_eight_holds_the_published_gib(model: str, deployment: dict[str, Any], gib: float) -> None:
    """FP8, NVFP4 and INT4 under TP8, and with DP attention: the sum of the roles, and to 10 MiB the published one."""
    planned = plan(model, **deployment)

    assert planned.rank_bytes == sum(role.rank_bytes for role in planned.roles)
    assert planned.rank_bytes / GIB == pytest.approx(gib, abs=0.01)


@pytest.mark.exhaustive
def test_a_conversion_is_planned_before_it_is_done(bf16_rest: CapacityReport) -> None:
    """INT4 experts with BF16 for the rest and no MTP layer are 444.9 GB, and 77.9 GiB on a rank with DP attention."""
    assert round(bf16_rest.checkpoint_bytes / 1e9, 1) == 444.9
    assert round(bf16_rest.rank_bytes / GIB, 1) == 77.9
    assert bf16_rest.recipe == "glm-5.2-int4-bf16rest"
    assert not any(role.mtp for role in bf16_rest.roles)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("group_size", "gb", "gib", "rank_gib", "spread_gib"),
    [(32, 438.35, 408.25, 52.56, 64.5), (64, 415.70, 387.15, 49.92, 61.9), (128, 404.38, 376.61, 48.61, 60.5)],
)
def test_int4_experts_have_the_published_sizes(
    group_size: int, gb: float, gib: float, rank_gib: float, spread_gib: float
) -> None:
    """Only the main layers' experts in INT4: the checkpoint, a rank of eight with MTP, and one with DP attention."""
    source, _ = described("glm-5.2")
    converted = describe(source, int4_experts_only(source, group_size))
    planned, spread = (report(source, converted, Deployment(mtp=True, **more)) for more in ({}, EP_DP))

    assert (round(planned.checkpoint_bytes / 1e9, 2), round(planned.checkpoint_bytes / GIB, 2)) == (gb, gib)
    assert (round(planned.rank_bytes / GIB, 2), round(spread.rank_bytes / GIB, 1)) == (rank_gib, spread_gib)
    if group_size == 128:
        assert round(planned.decode[0].weight_bytes / 1e9, 1) == 30.4


@pytest.mark.exhaustive
def test_a_bf16_rest_reads_more_than_fp8() -> None:
    """INT4 g=128 experts with BF16 for the rest and for MTP: 430.82 GB, and 47.0 GB read for a token, not 41.4."""
    options = Options(group_size=128, mtp=Mtp.KEEP)
    planned = plan_serving(
        "glm-5.2", Deployment(mtp=True), convert=True, recipe="glm-5.2-int4-bf16rest", options=options
    )

    assert (round(planned.checkpoint_bytes / 1e9, 2), round(planned.checkpoint_bytes / GIB, 2)) == (430.82, 401.23)
    assert round(planned.rank_bytes / GIB, 2) == 52.89
    assert round(planned.decode[0].weight_bytes / 1e9, 1) == 47.0


@pytest.mark.exhaustive
def test_the_published_nvfp4_checkpoint_has_its_size() -> None:
    """NVFP4 experts and BF16 for the rest are 464.8 GB."""
    nbytes = plan(NVFP4).checkpoint_bytes

    assert (round(nbytes / 1e9, 2), round(nbytes / GIB, 2)) == (464.80, 432.87)


@pytest.mark.parametrize(("model", "gigabytes"), [("glm-5.2", 41.4), exhaustive(NVFP4, 48.0)])
def test_one_request_reads_the_published_weights(model: str, gigabytes: float) -> None:
    """A token reads 41.4 GB of GLM-5.2 in FP8; with NVFP4 experts and a BF16 rest it reads more, 48.0 GB."""
    first = plan(model).decode[0]

    assert first.requests == 1
    assert first.experts_touched == pytest.approx(8)
    assert round(first.weight_bytes / 1e9, 1) == gigabytes


def test_parameters_are_the_published_ones() -> None:
    """GLM-5.2 has 40.30 B active parameters, and Kimi K2.6 1,026.88 B in all."""
    assert round(plan("glm-5.2").active_parameters / 1e9, 2) == 40.30
    assert round(plan("kimi-k2.6").parameters / 1e9, 2) == 1026.88


@pytest.mark.exhaustive
def test_published_figures_and_what_does_not_come_out(figures: PublishedFigures) -> None:
    """All figures are ours, too, but two of a vendor's: 421 is 420.5 here, and no layout gives 1.18 M tokens."""
    missed = [figure.published for figure in figures.figures if not figure.comes_out]
    assert missed == ["421", "1.18"]
    exact = {figure.own for figure in figures.figures if figure.unit == "bytes"}
    assert exact == {
        *("755,617,140,416", "595,148,192,736", "435,280,968,896"),
        *("92,628", "53,940", "61,464", "70,272", "35,136"),
    }
    own = {(figure.published, figure.unit): figure.own for figure in figures.figures}
    assert own["88.18", "GiB"].startswith("88.18")
    assert own["52", "GiB"] == "52.560"
    assert (own["0.686", "M tokens"], own["1.372", "M tokens"]) == ("0.686", "1.372")


# --- what fits


def test_memory_adds_up() -> None:
    """What the engine takes is weights, reserve and KV pool, and tokens and requests are whole ones of the pool."""
    planned = plan("kimi-k2.6", utilization=0.8, reserve_gib=3, context=5000, kv=KvLayout.FP8)

    assert planned.pool_bytes + planned.rank_bytes + 3 * GIB == int(0.8 * (143771 << 20))
    chosen = next(kv for kv in planned.kv if kv.chosen)
    assert (chosen.layout, chosen.tokens) == ("fp8", planned.pool_bytes // 35_136)
    assert chosen.requests == chosen.tokens // 5000
    assert planned.decode[-1].requests == chosen.requests


def test_replicas_and_dp_attention_multiply_the_pools() -> None:
    """Sixteen GPUs at TP8 are two pools of the same size; DP attention makes one of every rank."""
    one, two = plan("kimi-k2.6"), plan("kimi-k2.6", "16xH200", tp=8)
    assert two.rank_bytes == one.rank_bytes
    assert two.kv[0].tokens == 2 * one.kv[0].tokens
    assert two.decode[0].tokens_per_second == pytest.approx(2 * one.decode[0].tokens_per_second)

    spread = plan("kimi-k2.6", **EP_DP)
    assert spread.kv[0].tokens == 8 * (spread.pool_bytes // 70_272)


def test_layouts_of_a_model_are_all_shown() -> None:
    """A model with indexers has two index caches for each layout, one without has none, and one entry is chosen."""
    glm = plan("glm-5.2", kv=KvLayout.FP8_DS_MLA, index_cache=IndexCache.ALL)

    assert [kv.bytes_per_token for kv in glm.kv] == [92_628, 100_152, 47_700, 55_224, 53_940, 61_464]
    assert [kv.bytes_per_token for kv in glm.kv if kv.chosen] == [61_464]
    assert [kv.index_cache for kv in plan("kimi-k2.6", index_cache=IndexCache.ALL).kv] == ["", "", ""]


def test_what_does_not_fit_is_said() -> None:
    """Weights beyond the memory give no tokens, no rates and a warning with the flag; so does a context too long."""
    small = plan("glm-5.2", "8xH100")
    assert (small.pool_bytes < 0, {kv.tokens for kv in small.kv}, small.decode) == (True, {0}, ())
    assert ["--tp" in warning for warning in small.warnings] == [True]

    long = plan("glm-5.2", context=900_000)
    assert (long.pool_bytes > 0, long.decode) == (True, ())
    assert ["--context" in warning for warning in long.warnings] == [True]
    assert plan("glm-5.2").warnings == ()


def test_a_price_is_for_a_million_tokens() -> None:
    """Eight GPUs at 3 dollars an hour, divided by what they give in an hour; without a price there is none."""
    planned = plan("kimi-k2.6", price=3.0)

    for rate in (planned.decode[0], planned.prefill):
        assert rate.dollars_per_million == pytest.approx(24 / (rate.tokens_per_second * 3600) * 1e6)
    assert plan("kimi-k2.6").prefill.dollars_per_million is None


def test_a_report_is_json_and_back() -> None:
    """`from_json` gives what `to_json` wrote."""
    planned = plan("kimi-k2.6", price=3.0)

    assert CapacityReport.from_json(planned.to_json()) == planned


@pytest.mark.parametrize(
    ("deployment", "flag"),
    [
        ({"context": 0}, "--context is 0"),
        ({"utilization": 0.0}, "--utilization is 0"),
        ({"utilization": 1.1}, "--utilization is 1.1"),
        ({"reserve_gib": -1.0}, "--reserve-gib is -1"),
        ({"price": 0.0}, "--price is 0"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(deployment: dict[str, Any], flag: str) -> None:
    """The message names the flag and its value."""
    with pytest.raises(UsageError, match=flag):
        Deployment(**deployment)


# --- every published config


QUICK = {*REFUSED, "glm-4.5-air", "llama-3.1-8b"}


@pytest.mark.parametrize("model", quick_if(QUICK.__contains__, sorted(path.stem for path in CONFIGS.glob("*.json"))))
def test_every_config_plans_or_is_refused_by_name(model: str) -> None:
    """From config.json alone a model is planned, or a SourceError names the model and what is missing."""
    path = CONFIGS / f"{model}.json"
    if words := REFUSED.get(model):
        with pytest.raises(SourceError, match=words) as caught:
            plan_serving(path)
        assert str(path) in str(caught.value)
    else:
        planned = plan_serving(path, Deployment("16xB200"))
        assert planned.pool_bytes > 0
        assert planned.decode[0].tokens_per_second > 0
        assert planned.checkpoint_bytes == sum(role.checkpoint_bytes for role in planned.roles)


def test_a_config_without_experts_per_token_is_refused(tmp_path: Path) -> None:
    """The one key that only the reads of experts need is named, too."""
    config = json.loads((CONFIGS / "glm-4.5-air.json").read_text())
    del config["num_experts_per_tok"]
    path = tmp_path / "air.json"
    path.write_text(json.dumps(config))

    with pytest.raises(SourceError, match=r"air.json: its config has no num_experts_per_tok"):
        plan_serving(path)


@pytest.mark.exhaustive
def test_nvfp4_is_not_converted_again() -> None:
    """An INT4 conversion of an NVFP4 checkpoint would round its numbers twice."""
    with pytest.raises(PlanError, match="is nvfp4; made INT4 with g=32, it would be rounded twice"):
        plan_serving(CONFIGS / "nvidia-glm-5.2-nvfp4.json", convert=True)


def test_options_without_a_conversion_are_refused() -> None:
    """What changes a recipe needs one."""
    with pytest.raises(UsageError, match="change a conversion"):
        plan_serving("glm-5.2", options=Options(group_size=64))


# --- the command


AIR = str(CONFIGS / "glm-4.5-air.json")


def test_plan_prints_tables() -> None:
    """Roles in GB and GiB, memory of a rank, KV layouts and rates, for the GPUs that were asked for."""
    printed = run(AIR, "--gpus", "8xH100", "--tp", "4", "--kv", "fp8", "--price", "2")

    for words in ("220,937,661,440 bytes", "routed_expert", "8 x H100, TP 4", "fp8 *", "decode, 1 requests", "prefill"):
        assert words in printed


def test_plan_prints_json() -> None:
    """--json prints the report and every option reaches it."""
    options = ("--gpus", "16xH200", "--tp", "8", "--ep", "--dp-attention", "--speculate", "--context", "1000")
    planned = CapacityReport.from_json(run(AIR, *options, "--utilization", "0.8", "--reserve-gib", "4", "--json"))

    assert (planned.gpu, planned.gpus, planned.tp, planned.ep, planned.dp_attention) == ("H200", 16, 8, True, True)
    assert (planned.mtp, planned.context, planned.utilization, planned.reserve_bytes) == (True, 1000, 0.8, 4 * GIB)


@pytest.mark.exhaustive
def test_explain_published_prints_the_figures(monkeypatch: pytest.MonkeyPatch, figures: PublishedFigures) -> None:
    """--explain published prints each figure with its layout, and NO where it does not come out."""
    monkeypatch.setattr("quantkit.planning.published.published_figures", lambda: figures)
    printed = run("--explain", "published")

    assert all(figure.own in printed for figure in figures.figures)
    assert sum(" NO " in line for line in printed.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which model?"),
        ((AIR, "--int4", "--recipe", "bf16"), "exclude each other"),
        ((AIR, "--gpus", "8xH900"), "no such GPU"),
        ((AIR, "--tp", "3"), "--tp 3 does not divide"),
        ((AIR, "--kv", "fp8_ds_mla"), "--kv fp8_ds_mla"),
        ((AIR, "--group-size", "64"), "change a conversion"),
        (("./NOWHERE.json",), "no such folder"),
    ],
)
def test_a_contradiction_is_a_known_error(arguments: tuple[str, ...], words: str) -> None:
    """A command line that cannot be meant is refused in words."""
    result = CliRunner().invoke(app, ["plan", *arguments])

    assert isinstance(result.exception, QuantkitError)
    assert words in str(result.exception)

"""The phase plan prints no engine a command line that it refuses."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.choices import KvLayout
from quantkit.errors import UsageError
from quantkit.families.attention import Attention
from quantkit.planning.deployment import Launch
from quantkit.planning.fit import Deployment
from quantkit.planning.launch import Deployed, launches, stored_layout
from quantkit.planning.phase_report import PhasePlan
from quantkit.planning.phases import Target, plan_phases
from support.paths import CONFIGS
from support.phase_plans import NIXL

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

MLA = Attention(layers=4, heads=64, latent=512, rope=64)
SPARSE = replace(MLA, indexers=2)
GQA = Attention(layers=4, heads=96, kv_heads=8, head_dim=128)
# What the commands may hold: each flag with the values that its parser takes, None for a switch, ... for any value.
# vLLM 0.33.0, engine/arg_utils.py, config/cache.py, config/kv_transfer.py and entrypoints/common/cli_args.py; SGLang
# 0.5.23, srt/arg_groups/fields/*.py and choices.py; vllm-router 0.1.17 and sglang-router 0.3.2, router_args.py
FLAGS: dict[str, dict[str, Any]] = {
    "vllm serve": {
        "--served-model-name": ...,
        "--tensor-parallel-size": ...,
        "--data-parallel-size": ...,
        "--enable-expert-parallel": None,
        "--kv-cache-dtype": {"bfloat16", "fp8", "fp8_ds_mla"},
        "--max-model-len": ...,
        "--gpu-memory-utilization": ...,
        "--speculative-config": ...,
        "--kv-transfer-config": ...,
        "--revision": ...,
        "--trust-remote-code": None,
        "--host": ...,
        "--port": ...,
    },
    "python -m sglang.launch_server": {
        "--model-path": ...,
        "--served-model-name": ...,
        "--tp-size": ...,
        "--attn-dp-size": ...,
        "--ep-size": ...,
        "--kv-cache-dtype": {"bfloat16", "fp8_e4m3"},
        "--context-length": ...,
        "--mem-fraction-static": ...,
        "--disable-shared-experts-fusion": None,
        "--speculative-algorithm": {"EAGLE"},
        "--speculative-num-steps": ...,
        "--speculative-eagle-topk": ...,
        "--speculative-num-draft-tokens": ...,
        "--disaggregation-mode": {"prefill", "decode"},
        "--disaggregation-transfer-backend": {"mooncake"},
        "--disaggregation-bootstrap-port": ...,
        "--revision": ...,
        "--trust-remote-code": None,
        "--host": ...,
        "--port": ...,
    },
    "vllm-router": {
        "--vllm-pd-disaggregation": None,
        "--prefill": ...,
        "--decode": ...,
        "--host": ...,
        "--port": ...,
    },
    "python -m sglang_router.launch_router": {
        "--pd-disaggregation": None,
        "--prefill": ...,
        "--decode": ...,
        "--host": ...,
        "--port": ...,
    },
}


def with_changes(
    plan: PhasePlan, both: dict[str, Any], prefill: dict[str, Any] | None = None, attention: Attention = SPARSE
) -> Deployed:
    """The pools of a plan with other entries, as `launches` takes them."""
    first, second = (replace(pool, **both) for pool in plan.deployment.pools)
    return Deployed((replace(first, **(prefill or {})), second), attention, "glm", remote_code=False)


def flags(command: str) -> dict[str, list[str]]:
    """The flags of a command line, each with the words behind it; the words before are under the empty name."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[name := word] = []
        elif not (name == "" and "=" in word):  # an environment variable
            found[name].append(word)
    return found


def by_engine(found: tuple[Launch, ...]) -> dict[str, Launch]:
    """`vLLM` and `SGLang`, without their versions."""
    return {launch.engine.split()[0]: launch for launch in found}


@pytest.mark.parametrize("attention", [SPARSE, MLA, GQA], ids=["sparse", "mla", "gqa"])
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_layout": "bf16"},
        {"kv_layout": "fp8", "speculate": True, "revision": "main"},
        {"kv_layout": "fp8_ds_mla", "ep": True, "dp_attention": True, "prepare": "quantkit convert"},
        {"kv_layout": "fp8", "sm": 100, "replicas": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("phases", [2, 1])
def test_commands_hold_only_flags_that_the_parsers_know(
    tiny_plan: PhasePlan, attention: Attention, changes: dict[str, Any], phases: int
) -> None:
    """Every flag and value of every command is in the pinned table, and servers and router name each other's ports."""
    deployed = replace(with_changes(tiny_plan, changes, attention=attention), remote_code=True)
    if phases == 1:
        deployed = replace(deployed, pools=(replace(deployed.pools[0], phase="both"),))
    for launch in launches(deployed):
        assert launch.refusal is None
        assert list(launch.commands) == (["prefill", "decode", "router"] if phases == 2 else ["both"])
        for command in launch.commands.values():
            found = flags(command)
            known = next(table for start, table in FLAGS.items() if " ".join(found[""]).startswith(start))
            for flag, words in ((flag, words) for flag, words in found.items() if flag):
                values = known[flag]
                assert bool(words) is (values is not None), flag
                assert values in (..., None) or set(words) <= values, flag


def test_a_pair_of_pools_is_told_apart(tiny_plan: PhasePlan) -> None:
    """Roles, the hash that holds the model's path, fused experts, ports, and hosts of the router."""
    vllm, sglang = (by_engine(tiny_plan.deployment.launches)[name] for name in ("vLLM", "SGLang"))
    for phase, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer = json.loads(flags(vllm.commands[phase])["--kv-transfer-config"][0])
        assert transfer == {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"enforce_handshake_compat": False},
        }
        assert flags(sglang.commands[phase])["--disaggregation-mode"] == [phase]
    assert "--disable-shared-experts-fusion" not in sglang.commands["prefill"]
    assert "--disable-shared-experts-fusion" in sglang.commands["decode"]
    port = flags(sglang.commands["prefill"])["--disaggregation-bootstrap-port"]
    assert flags(sglang.commands["router"])["--prefill"] == ["http://$PREFILL_HOST:8000", *port]
    assert "enforce_handshake_compat" in " ".join(vllm.notes)

    same = with_changes(tiny_plan, {"checkpoint": "one"})
    assert "enforce_handshake_compat" not in by_engine(launches(same))["vLLM"].commands["decode"]


def test_parallelism_and_memory_reach_the_flags(tiny_plan: PhasePlan) -> None:
    """Attention over all ranks of its own, whole experts, MTP, memory: each engine in its own words."""
    changes = {"ep": True, "dp_attention": True, "speculate": True, "static_fraction": 0.8287}
    launched = by_engine(launches(with_changes(tiny_plan, changes)))
    vllm, sglang = (flags(launched[name].commands["decode"]) for name in ("vLLM", "SGLang"))

    assert (vllm["--tensor-parallel-size"], vllm["--data-parallel-size"]) == (["1"], ["8"])
    assert (sglang["--tp-size"], sglang["--attn-dp-size"], sglang["--ep-size"]) == (["8"], ["8"], ["8"])
    assert json.loads(vllm["--speculative-config"][0]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert sglang["--speculative-algorithm"] == ["EAGLE"]
    assert (vllm["--gpu-memory-utilization"], sglang["--mem-fraction-static"]) == (["0.9"], ["0.828"])
    assert (vllm["--max-model-len"], sglang["--context-length"]) == (["32768"], ["32768"])


BOTH = ("vLLM", "SGLang")


@pytest.mark.parametrize(
    ("both", "prefill", "attention", "refusing", "words", "source"),
    [
        ({}, {"kv_layout": "bf16"}, SPARSE, BOTH, "needs a patch: prefill fills a bf16 cache", NIXL),
        ({"sm": 100}, {"kv_layout": "fp8"}, SPARSE, BOTH, "needs a patch: prefill fills a fp8 cache", NIXL),
        ({"tp": 6}, {"tp": 4}, SPARSE, BOTH, "needs a patch: attention over 4 and over 6 ranks", None),
        ({"tp": 2}, {"tp": 8}, replace(GQA, kv_heads=4), ("vLLM",), "needs a patch: 8 prefill ranks repeat 4", NIXL),
        ({"sm": 80}, {}, MLA, BOTH, "no line: those for Hopper and Blackwell", None),
        ({"sm": None}, {}, MLA, BOTH, "no line: those for Hopper and Blackwell", None),
        ({"tp": 16}, {}, MLA, BOTH, "no line: more than 8 ranks", None),
        ({}, {"sm": 100}, MLA, BOTH, "no line: the attention backends of the two generations", None),
        ({"sm": 100}, {}, SPARSE, ("SGLang",), "no line: on Blackwell its FP8 cache", None),
    ],
)
def test_a_refused_pair_gets_no_command(
    tiny_plan: PhasePlan,
    both: dict[str, Any],
    prefill: dict[str, Any],
    attention: Attention,
    refusing: tuple[str, ...],
    words: str,
    source: str | None,
) -> None:
    """An engine that refuses has a reason, the file that refuses where there is one, and no command."""
    launched = by_engine(launches(with_changes(tiny_plan, both, prefill, attention)))

    for engine, launch in launched.items():
        assert bool(launch.commands) is (engine not in refusing)
        assert (launch.refusal is not None) is (engine in refusing)
    assert words in (launched[refusing[0]].refusal or "")
    assert source in (None, launched[refusing[0]].source)


@pytest.mark.parametrize("prefill_tp", [4, 8])
def test_mla_caches_go_between_different_tp(tiny_plan: PhasePlan, prefill_tp: int) -> None:
    """A cache that every rank has whole may come from more ranks or fewer."""
    assert all(launch.commands for launch in launches(with_changes(tiny_plan, {"tp": 2}, {"tp": prefill_tp}, MLA)))


def test_what_no_engine_can_load_is_refused() -> None:
    """fp8_ds_mla is for sparse attention, and MTP layers that are not there cannot be loaded."""
    assert stored_layout(KvLayout.FP8, SPARSE, 90) is KvLayout.FP8_DS_MLA
    assert stored_layout(KvLayout.FP8, SPARSE, 100) is stored_layout(KvLayout.FP8, MLA, 90) is KvLayout.FP8
    with pytest.raises(UsageError, match="fp8_ds_mla is stored for sparse attention only"):
        stored_layout(KvLayout.FP8_DS_MLA, MLA, 90)

    speculating = Deployment(mtp=True)
    with pytest.raises(UsageError, match=r"--speculate: glm-4.5-air.json holds no MTP layers"):
        plan_phases(without_mtp(CONFIGS / "glm-4.5-air.json"), target=Target(speculating, speculating))


def without_mtp(path: Path) -> Path:
    """A copy of a config that says that there are no MTP layers."""
    config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}
    copy = Path(path.name)
    copy.write_text(json.dumps(config))
    return copy

"""The phase plan gives each phase its format by the roofline, and no engine a command line that it refuses."""

import gc
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quantkit
from quantkit.capacity.attention import Attention
from quantkit.capacity.layouts import KvLayout
from quantkit.checkpoint.source import open_source
from quantkit.cli import app
from quantkit.conversion import Options
from quantkit.errors import OutputError, SourceError, UsageError
from quantkit.recipe import Mtp
from quantkit.serving.fingerprint import fingerprint
from quantkit.serving.fit import Deployment
from quantkit.serving.launch import Deployed, launches, stored_layout
from quantkit.serving.manifest import Candidate, Launch, PhasePlan, read_manifest
from quantkit.serving.phases import Target, plan_phases
from quantkit.serving.weighing import Choice, choose

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
FP8 = Deployment(kv=KvLayout.FP8)
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


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Published headers are half a million objects; looking for garbage in them takes longer than making them."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may write into the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def glm() -> PhasePlan:
    """GLM-5.2 and its INT4 conversion on 8 x H200 for each phase, with an FP8 cache."""
    return plan_phases("glm-5.2", target=Target(FP8, FP8), convert=True)


@pytest.fixture(scope="module")
def tiny(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> PhasePlan:
    """The trained checkpoint for prefill and its INT4 conversion for decode."""
    return plan_phases(glm_tiny, glm_tiny_converted["glm-5.2-int4"], Target(FP8, FP8))


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


# --- which format serves which phase


def test_fp8_serves_prefill_and_int4_decode(glm: PhasePlan) -> None:
    """Prefill waits for FLOPs and keeps FP8, decode for bytes and takes INT4; a lead is a ratio of two rooflines."""
    published, int4 = glm.candidates
    assert [pool.phase for pool in glm.deployment.pools] == ["prefill", "decode"]
    assert [pool.checkpoint for pool in glm.deployment.pools] == ["zai-org/GLM-5.2-FP8", "glm-5.2-int4"]
    assert (published.prefill.prefill.bound, int4.decode.decode[0].bound) == ("FLOPs", "bytes")

    rates = {rate.requests: rate.tokens_per_second for rate in published.decode.decode}
    ours = {rate.requests: rate.tokens_per_second for rate in int4.decode.decode}
    assert glm.leads["decode, 1 request"] == pytest.approx(ours[1] / rates[1] - 1)
    assert glm.leads["decode, 16 requests"] == pytest.approx(ours[16] / rates[16] - 1)
    assert glm.leads["decode, all that fit"] == pytest.approx(ours[max(ours)] / rates[max(rates)] - 1)
    speeds = [entry.prefill.prefill.tokens_per_second for entry in glm.candidates]
    assert glm.leads["prefill"] == pytest.approx(speeds[0] / speeds[1] - 1)
    assert min(glm.leads.values()) > 0.15


def test_the_reasons_say_bytes_flops_and_losses(glm: PhasePlan) -> None:
    """41.4 GB are read for a token in FP8; the units that INT4 loses, and what one format for both would lose."""
    prefill, decode, verdict = glm.reasons

    assert "prefill waits for FLOPs (4-bit weights are decoded to BF16 and lose the FP8 units)" in prefill
    assert "decode waits for bytes" in decode
    assert "not 41.4" in decode
    assert verdict.startswith("two pools: glm-5.2 as published for both would be ")
    assert "slower in decode, glm-5.2 by glm-5.2-int4 for both would be" in verdict


def test_pools_have_sizes_formats_and_what_makes_them(glm: PhasePlan) -> None:
    """Each pool has the bytes of its format, tokens of its cache, and decode the command that makes its checkpoint."""
    prefill, decode = glm.deployment.pools

    assert (prefill.checkpoint_bytes, decode.checkpoint_bytes) == (755_617_140_416, 435_280_968_896)
    assert (prefill.formats["routed_expert"], decode.formats["routed_expert"]) == ("fp8 128x128", "int4 g=32")
    assert decode.formats["routed_expert (MTP)"] == "int4 g=32"
    assert decode.kv_tokens == next(kv.tokens for kv in glm.candidates[1].decode.kv if kv.chosen)
    assert (prefill.prepare, decode.prepare) == (None, "quantkit convert glm-5.2 --int4 -o glm-5.2-int4")
    assert (prefill.digest, decode.digest, prefill.kv_space_id, glm.deployment.model.origin) == (None,) * 4
    assert (glm.deployment.model.repo, glm.deployment.model.revision) == ("zai-org/GLM-5.2-FP8", "main")


def test_sparse_attention_has_one_fp8_layout_on_hopper(glm: PhasePlan) -> None:
    """--kv fp8 is planned as what the engines store there, with 53,940 bytes a token, and it is said."""
    assert {(pool.kv_layout, pool.kv_bytes_per_token) for pool in glm.deployment.pools} == {("fp8_ds_mla", 53_940)}
    assert "on H200 the engines store the fp8 cache of this model as fp8_ds_mla" in glm.warnings


def faster(candidate: Candidate, *, prefill: float = 1.0, decode: float = 1.0) -> Candidate:
    """A candidate with other speeds; 0 stands for one that does not fit."""
    rate = candidate.prefill.prefill
    rate = replace(rate, tokens_per_second=rate.tokens_per_second * prefill)
    rates = [replace(rate, tokens_per_second=rate.tokens_per_second * decode) for rate in candidate.decode.decode]
    fits = candidate.prefill.decode if prefill else ()
    return Candidate(
        f"x{prefill:g} x{decode:g}",
        replace(candidate.prefill, prefill=rate, decode=fits),
        replace(candidate.decode, decode=tuple(rates) if decode else ()),
    )


@pytest.mark.parametrize(
    ("speeds", "chosen", "words"),
    [
        ({"prefill": 0.8, "decode": 1.5}, (0, 1), "two pools: x1 x1 for both would be 33.3% slower in decode"),
        ({"prefill": 1.2, "decode": 0.5}, (1, 0), "x1.2 x0.5 for both would be 50.0% slower in decode"),
        ({"prefill": 1.1, "decode": 1.5}, (1,), "one pool: x1.1 x1.5 is better in both phases"),
        ({"prefill": 0.98, "decode": 1.5}, (1,), "one pool, x0.98 x1.5: it loses only 2.0% in prefill"),
        ({"prefill": 0.7, "decode": 1.01}, (0,), "one pool, x1 x1: it loses only 1.0% in decode"),
        ({"prefill": 0.0, "decode": 1.5}, (0, 1), "x0 x1.5 for both would not fit in prefill"),
    ],
)
def test_two_pools_only_where_each_phase_has_a_leader(
    glm: PhasePlan, speeds: dict[str, float], chosen: tuple[int, ...], words: str
) -> None:
    """One format for both phases where it is better in both, or loses less than 5 % in one."""
    base = faster(glm.candidates[0])
    choice = choose((base, faster(base, **speeds)))

    assert choice.chosen == chosen
    assert words in choice.reasons[-1]


def test_what_fits_alone_is_said(glm: PhasePlan) -> None:
    """A format that does not fit in a phase has no lead there; if neither fits, that is an error with remedies."""
    base = glm.candidates[0]
    choice: Choice = choose((faster(base), faster(base, prefill=0)))
    assert choice.reasons[0] == "prefill: only x1 x1 fits"
    assert "prefill" not in choice.leads
    assert inf not in choice.leads.values()

    with pytest.raises(UsageError, match=r"prefill: no format of glm-5.2 fits on 8 x H200") as caught:
        choose((faster(base, prefill=0), faster(base, prefill=0)))
    assert "--context" in str(caught.value.hint)


def test_one_format_is_one_pool() -> None:
    """A config alone has a pool for both phases and no command lines, which need weights."""
    plan = plan_phases(CONFIGS / "glm-4.5-air.json", target=Target(FP8, FP8))

    assert [pool.phase for pool in plan.deployment.pools] == ["both"]
    assert (plan.leads, len(plan.candidates)) == ({}, 1)
    assert [(launch.refusal or "")[:30] for launch in plan.deployment.launches] == [
        "no line: a config has no weigh"
    ] * 2
    assert not any(launch.commands for launch in plan.deployment.launches)


def test_given_checkpoints_keep_their_phases(tiny: PhasePlan, glm_tiny: Path) -> None:
    """Two checkpoints are pools in their order, with digests; where the roofline says otherwise, that is a warning."""
    prefill, decode = tiny.deployment.pools

    assert (prefill.phase, prefill.checkpoint) == ("prefill", str(glm_tiny))
    assert (decode.phase, Path(decode.checkpoint).name) == ("decode", "glm-5.2-int4")
    assert prefill.digest != decode.digest
    assert (decode.recipe or {})["name"] == "glm-5.2-int4"
    assert tiny.reasons[-1] == "two pools, as given"
    assert any("the pools are as given; the roofline says one pool" in warning for warning in tiny.warnings)


# --- the meaning of a cache


def test_conversions_share_the_kv_space_of_their_source(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """FP8, INT4 and BF16 of the same weights mean the same by a cache of any dtype, known before they are made."""
    spaces = {fingerprint(open_source(folder)).kv_space_id for folder in (glm_tiny, *glm_tiny_converted.values())}
    plans = [plan_phases(glm_tiny, target=Target(kv, kv), convert=True) for kv in (FP8, Deployment())]

    assert len(spaces) == 1
    assert None not in spaces
    assert {pool.kv_space_id for plan in plans for pool in plan.deployment.pools} == spaces


def test_dropped_mtp_layers_leave_the_kv_space(
    glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path
) -> None:
    """A conversion that never read the MTP layers' shards means the same by a cache as one that did."""
    shutil.copytree(glm_tiny, source := tmp_path / "source")
    mtp_apart(source)
    for mtp in (Mtp.DROP, Mtp.QUANTIZE):
        quantkit.convert(source, tmp_path / mtp, options=Options(mtp=mtp))
    found = [fingerprint(open_source(tmp_path / name)) for name in ("source", Mtp.DROP, Mtp.QUANTIZE)]

    assert [entry.mtp for entry in found] == [True, False, True]
    assert len({entry.kv_space_id for entry in found}) == 1
    assert found[0].kv_space_id != fingerprint(open_source(glm_tiny)).kv_space_id  # other shards, another source


def mtp_apart(folder: Path) -> None:
    """Move the MTP layer of the trained checkpoint into a shard of its own."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}
    for shard, keep in ((shards[0], False), (shards[1], True)):
        held = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.4.") is keep}
        save_file(held, folder / shard, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(held, shard)
    (folder / shards[2]).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_other_weights_are_another_kv_space(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """Two checkpoints of other models, or of other weights of one model, are refused as a pair."""
    with pytest.raises(SourceError, match="are not one model: their configs differ"):
        plan_phases(glm_tiny, changed_copy(glm_tiny, "config.json", b'"vocab_size": 2048', b'"vocab_size": 2049'))
    other = changed_copy(glm_tiny, "model-00001-of-00003.safetensors", None, b"\x01")
    with pytest.raises(SourceError, match="do not mean the same by a KV cache"):
        plan_phases(other, glm_tiny_converted["glm-5.2-int4"])


def changed_copy(folder: Path, file: str, old: bytes | None, new: bytes) -> Path:
    """A copy of a checkpoint with other bytes in a file: `new` for `old`, or at its end."""
    shutil.copytree(folder, copy := Path(f"changed-{file.partition('.')[0]}"))
    data = (folder / file).read_bytes()
    assert old is None or old in data
    (copy / file).write_bytes(data[: -len(new)] + new if old is None else data.replace(old, new))
    return copy


# --- the command lines


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
    tiny: PhasePlan, attention: Attention, changes: dict[str, Any], phases: int
) -> None:
    """Every flag and value of every command is in the pinned table, and servers and router name each other's ports."""
    deployed = replace(with_changes(tiny, changes, attention=attention), remote_code=True)
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


def test_a_pair_of_pools_is_told_apart(tiny: PhasePlan) -> None:
    """Roles, the hash that holds the model's path, fused experts, ports, and hosts of the router."""
    vllm, sglang = (by_engine(tiny.deployment.launches)[name] for name in ("vLLM", "SGLang"))
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

    same = with_changes(tiny, {"checkpoint": "one"})
    assert "enforce_handshake_compat" not in by_engine(launches(same))["vLLM"].commands["decode"]


def test_parallelism_and_memory_reach_the_flags(tiny: PhasePlan) -> None:
    """Attention over all ranks of its own, whole experts, MTP, memory: each engine in its own words."""
    changes = {"ep": True, "dp_attention": True, "speculate": True, "static_fraction": 0.8287}
    launched = by_engine(launches(with_changes(tiny, changes)))
    vllm, sglang = (flags(launched[name].commands["decode"]) for name in ("vLLM", "SGLang"))

    assert (vllm["--tensor-parallel-size"], vllm["--data-parallel-size"]) == (["1"], ["8"])
    assert (sglang["--tp-size"], sglang["--attn-dp-size"], sglang["--ep-size"]) == (["8"], ["8"], ["8"])
    assert json.loads(vllm["--speculative-config"][0]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert sglang["--speculative-algorithm"] == ["EAGLE"]
    assert (vllm["--gpu-memory-utilization"], sglang["--mem-fraction-static"]) == (["0.9"], ["0.828"])
    assert (vllm["--max-model-len"], sglang["--context-length"]) == (["32768"], ["32768"])


BOTH = ("vLLM", "SGLang")
NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"


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
    tiny: PhasePlan,
    both: dict[str, Any],
    prefill: dict[str, Any],
    attention: Attention,
    refusing: tuple[str, ...],
    words: str,
    source: str | None,
) -> None:
    """An engine that refuses has a reason, the file that refuses where there is one, and no command."""
    launched = by_engine(launches(with_changes(tiny, both, prefill, attention)))

    for engine, launch in launched.items():
        assert bool(launch.commands) is (engine not in refusing)
        assert (launch.refusal is not None) is (engine in refusing)
    assert words in (launched[refusing[0]].refusal or "")
    assert source in (None, launched[refusing[0]].source)


@pytest.mark.parametrize("prefill_tp", [4, 8])
def test_mla_caches_go_between_different_tp(tiny: PhasePlan, prefill_tp: int) -> None:
    """A cache that every rank has whole may come from more ranks or fewer."""
    assert all(launch.commands for launch in launches(with_changes(tiny, {"tp": 2}, {"tp": prefill_tp}, MLA)))


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


# --- the command


def run(*arguments: str | Path) -> str:
    """The stdout of `quantkit plan`, which must succeed."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_prints_the_plan_and_writes_the_manifest(
    glm_tiny: Path, glm_tiny_converted: dict[str, Path]
) -> None:
    """Tables, reasons and whole command lines on stdout; -o writes what --json shows as the deployment."""
    pair = (glm_tiny, glm_tiny_converted["glm-5.2-int4"])
    printed = run(*pair, "--phases", "--kv", "fp8", "-o", "deployment.json")
    planned = PhasePlan.from_json(run(*pair, "--phases", "--kv", "fp8", "--json"))

    assert read_manifest(Path("deployment.json")) == planned.deployment
    lines = printed.splitlines()
    commands = [text for launch in planned.deployment.launches for text in launch.commands.values()]
    assert len(commands) == 6
    assert all(command in lines for command in commands)
    assert all(words in printed for words in ("rooflines of each pool", "two pools, as given"))
    for pool in planned.deployment.pools:
        assert pool.kv_space_id
        assert pool.kv_space_id[:12] in printed


def test_the_command_prints_no_line_for_a_refused_pair(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """A BF16 prefill cache with an FP8 decode cache: the patch that it needs, with the file, and nothing to start."""
    pair = (glm_tiny, glm_tiny_converted["glm-5.2-int4"])
    printed = run(*pair, "--phases", "--kv", "fp8", "--prefill-kv", "bf16", "-o", "deployment.json")

    assert printed.count("needs a patch: prefill fills a bf16 cache and decode reads fp8_ds_mla") == 2
    assert NIXL in printed
    assert "sglang/srt/disaggregation/common/conn.py" in printed
    assert not any(words in printed for words in ("vllm serve", "sglang.launch_server", "router"))
    manifest = json.loads(Path("deployment.json").read_text())
    assert (manifest["schema_version"], manifest["kind"]) == (1, "DeploymentManifest")
    assert [launch["commands"] for launch in manifest["launches"]] == [{}, {}]


def test_prefill_gpus_and_cache_reach_the_plan(glm_tiny: Path) -> None:
    """The prefill pool has GPUs and a cache of its own."""
    options = ("--int4", "--gpus", "2xH200", "--prefill-gpus", "4xB200", "--kv", "fp8_ds_mla", "--prefill-kv", "bf16")
    published, int4 = PhasePlan.from_json(run(glm_tiny, "--phases", *options, "--json")).candidates

    assert (published.prefill.gpus, published.prefill.gpu, int4.decode.gpus, int4.decode.gpu) == (4, "B200", 2, "H200")
    layouts = [next(kv.layout for kv in report.kv if kv.chosen) for report in (published.prefill, published.decode)]
    assert layouts == ["bf16", "fp8_ds_mla"]


def test_the_format_that_fits_alone_comes_with_its_command(glm_tiny: Path) -> None:
    """Where only the conversion fits, one pool serves it, and the command that makes it has the options of the plan."""
    options = Options(group_size=64, mtp=Mtp.DROP)
    one = Deployment("1xH200", context=1)
    sizes = [
        entry.decode.rank_bytes for entry in plan_phases(glm_tiny, target=Target(one, one), convert=True).candidates
    ]
    usable = int((143771 << 20) * one.utilization)
    tight = replace(one, reserve_gib=(usable - sum(sizes) / 2) / 2**30)
    plan = plan_phases(glm_tiny, target=Target(tight, tight), convert=True, options=options)

    (pool,) = plan.deployment.pools
    assert plan.reasons[1] == f"decode: only {glm_tiny} by glm-5.2-int4 fits"
    assert pool.prepare == (
        f"quantkit convert {glm_tiny} --int4 --group-size 64 --mtp drop -o glm-tiny-fp8-glm-5.2-int4"
    )
    assert pool.formats["routed_expert"] == "int4 g=64"
    assert (pool.mtp, pool.digest) == (False, None)
    assert all(launch.notes == (f"both: first `{pool.prepare}`",) for launch in plan.deployment.launches)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("glm-5.2", "kimi-k2.6"), "2 models are too many"),
        (("a", "b", "c", "--phases"), "3 models are too many"),
        (("glm-5.2", "--prefill-gpus", "8xH200"), "belong to --phases"),
        (("glm-5.2", "-o", "x.json"), "belong to --phases"),
        (("glm-5.2", "--quick"), "--quick to --check"),
        (("glm-5.2", "kimi-k2.6", "--int4", "--phases"), "two checkpoints are given, and a conversion"),
    ],
)
def test_a_contradiction_is_a_known_error(arguments: tuple[str, ...], words: str) -> None:
    """A command line that cannot be meant is refused in words."""
    result = CliRunner().invoke(app, ["plan", *arguments])

    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)


def test_a_manifest_that_cannot_be_written_is_an_error(glm_tiny: Path) -> None:
    """The message names the file."""
    result = CliRunner().invoke(app, ["plan", str(glm_tiny), "--phases", "-o", "nowhere/deployment.json"])

    assert isinstance(result.exception, OutputError)
    assert "nowhere/deployment.json: cannot be written" in str(result.exception)

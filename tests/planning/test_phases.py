"""The phase plan gives each phase its format by the roofline, and knows which caches mean the same."""

import json
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

import quantkit
from quantkit.checkpoint.source import open_source
from quantkit.choices import Mtp
from quantkit.conversion import Options
from quantkit.errors import SourceError, UsageError
from quantkit.planning.deployment import Candidate
from quantkit.planning.fingerprint import fingerprint
from quantkit.planning.fit import Deployment
from quantkit.planning.phase_report import PhasePlan
from quantkit.planning.phases import Target, plan_phases
from quantkit.planning.weighing import Choice, choose
from support.paths import CONFIGS
from support.phase_plans import FP8

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


@pytest.fixture(scope="module")
def glm() -> PhasePlan:
    """GLM-5.2 and its INT4 conversion on 8 x H200 for each phase, with an FP8 cache."""
    return plan_phases("glm-5.2", target=Target(FP8, FP8), convert=True)


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_the_reasons_say_bytes_flops_and_losses(glm: PhasePlan) -> None:
    """41.4 GB are read for a token in FP8; the units that INT4 loses, and what one format for both would lose."""
    prefill, decode, verdict = glm.reasons

    assert "prefill waits for FLOPs (4-bit weights are decoded to BF16 and lose the FP8 units)" in prefill
    assert "decode waits for bytes" in decode
    assert "not 41.4" in decode
    assert verdict.startswith("two pools: glm-5.2 as published for both would be ")
    assert "slower in decode, glm-5.2 by glm-5.2-int4 for both would be" in verdict


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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
@pytest.mark.exhaustive
def test_two_pools_only_where_each_phase_has_a_leader(
    glm: PhasePlan, speeds: dict[str, float], chosen: tuple[int, ...], words: str
) -> None:
    """One format for both phases where it is better in both, or loses less than 5 % in one."""
    base = faster(glm.candidates[0])
    choice = choose((base, faster(base, **speeds)))

    assert choice.chosen == chosen
    assert words in choice.reasons[-1]


@pytest.mark.exhaustive
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


def test_given_checkpoints_keep_their_phases(tiny_plan: PhasePlan, glm_tiny: Path) -> None:
    """Two checkpoints are pools in their order, with digests; where the roofline says otherwise, that is a warning."""
    prefill, decode = tiny_plan.deployment.pools

    assert (prefill.phase, prefill.checkpoint) == ("prefill", str(glm_tiny))
    assert (decode.phase, Path(decode.checkpoint).name) == ("decode", "glm-5.2-int4")
    assert prefill.digest != decode.digest
    assert (decode.recipe or {})["name"] == "glm-5.2-int4"
    assert tiny_plan.reasons[-1] == "two pools, as given"
    assert any("the pools are as given; the roofline says one pool" in warning for warning in tiny_plan.warnings)


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

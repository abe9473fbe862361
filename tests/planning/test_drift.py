"""`plan --check` accepts the checkpoints of a deployment, and names everything in which others are not they."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import quantkit
from quantkit.choices import KvLayout, Mtp, ScaleMethod
from quantkit.cli import app
from quantkit.conversion import Options
from quantkit.errors import CheckFailed, SourceError
from quantkit.planning.deployment import Origin, read_manifest
from quantkit.planning.drift import check_drift
from quantkit.planning.fit import Deployment
from quantkit.planning.phase_report import DriftReport
from quantkit.planning.phases import Target, plan_phases

TARGET = Target(Deployment(kv=KvLayout.FP8), Deployment(kv=KvLayout.FP8))
SHARD = "model-00002-of-00003.safetensors"
PEERS = "prefill and decode"
Pair = tuple[Path, Path]


@pytest.fixture
def pair(glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path) -> Pair:
    """Copies of the trained checkpoint and of its INT4 conversion, which may be changed."""
    folders = tmp_path / "fp8", tmp_path / "int4"
    for source, folder in zip((glm_tiny, glm_tiny_converted["glm-5.2-int4"]), folders, strict=True):
        shutil.copytree(source, folder)
    return folders


@pytest.fixture
def deployment(pair: Pair, tmp_path: Path) -> Path:
    """The manifest of the two: FP8 for prefill, INT4 for decode."""
    path = tmp_path / "deployment.json"
    path.write_text(plan_phases(*pair, TARGET).deployment.to_json())
    return path


def check(*arguments: str | Path) -> tuple[int, DriftReport]:
    """What `quantkit plan --check` returns and prints; 3 for the error that leaves with it."""
    result = CliRunner().invoke(app, ["plan", "--json", "--check", *map(str, arguments)])
    code = result.exception.exit_code if isinstance(result.exception, CheckFailed) else result.exit_code
    return code, DriftReport.from_json(result.stdout)


def fields(report: DriftReport) -> set[tuple[str, str]]:
    """The pools and fields that drifted."""
    return {(drift.pool, drift.field) for drift in report.drifts}


def flip_byte(path: Path) -> None:
    """Change the last byte of a file; its size stays."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text in a file that holds it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def convert(pair: Pair, options: Options) -> None:
    """Make the INT4 checkpoint again, with other options."""
    quantkit.convert(pair[0], pair[1], options=options, overwrite=True)


def record_fold(folder: Path) -> None:
    """Say in a checkpoint's quantkit.json that scales were folded into its weights."""
    made = json.loads((folder / "quantkit.json").read_text())
    origin = {name: made["source"][name] for name in ("config_sha256", "shards_sha256")}
    fold = {"digest": "1" * 64, "layers": {}, "origin": origin}
    (folder / "quantkit.json").write_text(json.dumps(made | {"fold": fold}))


def swap(pair: Pair) -> None:
    """Put each checkpoint into the other one's folder."""
    apart = pair[0].with_name("apart")
    pair[0].rename(apart)
    pair[1].rename(pair[0])
    apart.rename(pair[1])


def other_source(pair: Pair) -> None:
    """Make the INT4 checkpoint of other weights, whose config and codes are the same: only its source tells."""
    shutil.copytree(pair[0], other := pair[0].with_name("other"))
    flip_byte(other / SHARD)
    quantkit.convert(other, pair[1], overwrite=True)


# --- the whole story


@pytest.mark.parametrize("quick", [(), ("--quick",)])
def test_the_planned_checkpoints_pass_in_any_order(pair: Pair, deployment: Path, quick: Sequence[str]) -> None:
    """Each is found to be its pool's, wherever it lies."""
    moved = pair[1].rename(pair[1].with_name("elsewhere"))
    code, report = check(deployment, moved, pair[0], *quick)

    assert (code, report.passed, report.drifts) == (0, True, ())
    assert report.checkpoints == {"prefill": str(pair[0]), "decode": str(moved)}
    assert report.unchecked == (() if not quick else tuple(f"{pool}: {BYTES}" for pool in report.checkpoints))


BYTES = "the bytes of files that have their recorded size (--quick)"


@pytest.mark.parametrize(
    ("change", "drifted"),
    [
        (lambda pair: flip_byte(pair[1] / SHARD), {("decode", f"file {SHARD}")}),
        (
            lambda pair: flip_byte(pair[0] / SHARD),
            {
                ("prefill", f"file {SHARD}"),
                ("prefill", f"source shard {SHARD}"),
                ("prefill", "kv_space_id"),
                (PEERS, "kv_space_id"),
            },
        ),
        (
            lambda pair: flip_byte(pair[1] / "tokenizer.json"),
            {("decode", "file tokenizer.json"), (PEERS, "tokenizer file tokenizer.json")},
        ),
        (
            lambda pair: (pair[1] / "tokenizer_config.json").unlink(),
            {("decode", "file tokenizer_config.json"), (PEERS, "tokenizer file tokenizer_config.json")},
        ),
        (
            lambda pair: edit(pair[1] / "config.json", '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'),
            {("decode", "file config.json"), ("decode", "model config"), (PEERS, "model config")},
        ),
        (lambda pair: record_fold(pair[1]), {("decode", "kv_space_id"), (PEERS, "kv_space_id")}),
        (swap, {("prefill", "checkpoint"), ("decode", "checkpoint")}),
        (
            other_source,
            {("decode", f"source shard {SHARD}"), ("decode", "kv_space_id"), (PEERS, "kv_space_id")},
        ),
    ],
    ids=["shard", "source shard", "tokenizer", "no tokenizer", "config", "fold", "swapped", "other source"],
)
def test_each_drift_is_named(
    pair: Pair, deployment: Path, change: Callable[[Pair], None], drifted: set[tuple[str, str]]
) -> None:
    """Pool and field of everything that differs and of nothing else, both values, and exit code 3."""
    change(pair)
    code, report = check(deployment, *pair)

    assert (code, report.passed) == (3, False)
    assert fields(report) == drifted
    assert all(drift.expected != drift.found for drift in report.drifts)


@pytest.mark.parametrize(
    ("options", "among"),
    [
        (Options(group_size=64), {("decode", "format of routed_expert"), ("decode", "recipe's rules")}),
        (Options(scale=ScaleMethod.MINMAX), {("decode", "recipe's rules"), ("decode", f"file {SHARD}")}),
        (Options(mtp=Mtp.DROP), {("decode", "MTP layers"), ("decode", "format of routed_expert (MTP)")}),
    ],
    ids=["group size", "scale", "mtp"],
)
def test_another_recipe_is_named(pair: Pair, deployment: Path, options: Options, among: set[tuple[str, str]]) -> None:
    """Other formats, other rules with the same formats, or MTP layers left out; the cache still means the same."""
    convert(pair, options)
    code, report = check(deployment, *pair)

    assert code == 3
    assert among <= fields(report)
    assert "kv_space_id" not in {field for _, field in fields(report)}


def test_both_values_are_told(pair: Pair, deployment: Path) -> None:
    """A drift has what was planned and what is there."""
    convert(pair, Options(group_size=64))
    drifts = {drift.field: drift for drift in check(deployment, *pair)[1].drifts}

    assert (drifts["format of routed_expert"].expected, drifts["format of routed_expert"].found) == (
        "int4 g=32",
        "int4 g=64",
    )
    assert "'group_size': 64" in drifts["recipe's rules"].found


def test_a_missing_and_a_strange_checkpoint_are_named(
    pair: Pair, deployment: Path, glm_tiny_converted: dict[str, Path]
) -> None:
    """A pool without a checkpoint and a checkpoint without a pool, each with its name."""
    bf16 = glm_tiny_converted["bf16"]
    _, alone = check(deployment, pair[0])
    assert fields(alone) == {("decode", "checkpoint")}
    assert (alone.drifts[0].expected, alone.drifts[0].found) == (str(pair[1]), "nothing")

    code, strange = check(deployment, pair[0], pair[1], bf16)
    assert code == 3
    assert [(drift.pool, drift.expected) for drift in strange.drifts] == [("none of the pools", "nothing")]
    assert strange.drifts[0].found.startswith(f"{bf16}: attention bf16")


def test_quick_believes_sizes_and_says_so(pair: Pair, deployment: Path) -> None:
    """A byte that changed in place is for the full check; one more is seen at once."""
    flip_byte(pair[1] / SHARD)
    code, report = check(deployment, *pair, "--quick")
    assert code == 0
    assert f"decode: {BYTES}" in report.unchecked

    (pair[1] / "generation_config.json").write_text("{}")
    assert fields(check(deployment, *pair, "--quick")[1]) == {("decode", "file generation_config.json")}


# --- a deployment that was planned before its checkpoints were there


@pytest.fixture
def early(deployment: Path) -> Path:
    """The manifest with what is known from a config alone."""
    planned = read_manifest(deployment)
    pools = [replace(pool, digest=None, files={}, kv_space_id=None) for pool in planned.pools]
    planned = replace(planned, model=replace(planned.model, origin=None), pools=tuple(pools))
    deployment.write_text(planned.to_json())
    return deployment


def test_an_early_plan_is_checked_for_what_it_states(pair: Pair, early: Path) -> None:
    """What it could not know is said, and the checkpoint's own quantkit.json stands in for the files."""
    code, report = check(early, *pair)
    assert (code, report.drifts) == (0, ())
    assert [text.partition(",")[0] for text in report.unchecked] == [
        f"{pool}: {what}"
        for pool in ("prefill", "decode")
        for what in ("the files", "kv_space_id with the plan", "what it was made from")
    ]

    flip_byte(pair[1] / SHARD)
    assert fields(check(early, *pair)[1]) == {("decode", f"file {SHARD}")}


def test_peers_of_an_early_plan_must_share_the_kv_space(pair: Pair, early: Path) -> None:
    """Without an id in the manifest the two are compared with each other."""
    record_fold(pair[1])

    assert fields(check(early, *pair)[1]) == {(PEERS, "kv_space_id")}


def test_a_plan_of_a_conversion_knows_what_it_will_mean(pair: Pair) -> None:
    """A folder planned for conversion has the same origin and meaning as the checkpoint when it is made."""
    plan = plan_phases(pair[0], target=TARGET, convert=True)
    known = plan_phases(*pair, TARGET).deployment

    assert plan.deployment.model.origin == known.model.origin
    assert isinstance(known.model.origin, Origin)
    assert {pool.kv_space_id for pool in plan.deployment.pools} == {pool.kv_space_id for pool in known.pools}


# --- what cannot be read


def test_what_is_no_manifest_is_refused(pair: Pair, deployment: Path, tmp_path: Path) -> None:
    """A file that is not there, not JSON, of another kind, or of a damaged checkpoint: named, with exit code 1."""
    for text, words in (
        ("{", "no deployment manifest"),
        ('{"schema_version": 1, "kind": "Manifest"}', "a Manifest, not"),
    ):
        (path := tmp_path / "x.json").write_text(text)
        with pytest.raises(SourceError, match=f"x.json: .*{words}") as caught:
            check_drift(path, pair)
        assert caught.value.exit_code == 1
    with pytest.raises(SourceError, match=r"nowhere.json: cannot be read"):
        check_drift(tmp_path / "nowhere.json", pair)
    with pytest.raises(SourceError, match="no such folder"):
        check_drift(deployment, [tmp_path / "nowhere"])
    (pair[1] / "quantkit.json").write_text("{}")
    with pytest.raises(SourceError, match=r"quantkit.json: cannot be read"):
        check_drift(deployment, pair)


def test_the_command_prints_all_drifts(pair: Pair, deployment: Path) -> None:
    """A line with pool, field and both values for each, or the pools and that there is no drift."""
    good = CliRunner().invoke(app, ["plan", "--check", str(deployment), *map(str, pair)])
    assert good.exit_code == 0
    assert "no drift" in good.stdout
    assert all(str(folder) in good.stdout for folder in pair)

    flip_byte(pair[0] / "tokenizer.json")
    convert(pair, Options(group_size=64))
    bad = CliRunner().invoke(app, ["plan", "--check", str(deployment), *map(str, pair)])
    assert isinstance(bad.exception, CheckFailed)
    assert "DRIFT" in bad.stdout
    assert "decode, format of routed_expert: expected int4 g=32, found int4 g=64\n" in bad.stdout
    assert all(words in bad.stdout for words in ("prefill, file tokenizer.json: ", "decode, recipe's rules: "))

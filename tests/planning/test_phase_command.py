"""`quantkit plan --phases`: tables and command lines, the manifest, and what cannot be meant."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantkit.choices import Mtp
from quantkit.cli import app
from quantkit.conversion import Options
from quantkit.errors import OutputError, UsageError
from quantkit.planning.deployment import read_manifest
from quantkit.planning.fit import Deployment
from quantkit.planning.phase_report import PhasePlan
from quantkit.planning.phases import Target, plan_phases
from support.phase_plans import NIXL

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


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


def test_a_manifest_that_cannot_be_written_is_an_error(glm_tiny: Path, tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "taken").touch()
    output = tmp_path / "taken" / "deployment.json"
    result = CliRunner().invoke(app, ["plan", str(glm_tiny), "--phases", "-o", str(output)])

    assert isinstance(result.exception, OutputError)
    assert f"{output}: cannot be written" in str(result.exception)

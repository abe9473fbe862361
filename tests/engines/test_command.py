"""`quantkit engines`, `check_compatibility` and `verify` ask the rules of a whole checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quantkit
from quantkit.choices import ScaleMethod
from quantkit.cli import app
from quantkit.engines.check import check_compatibility
from quantkit.engines.report import Compatibility
from quantkit.engines.rules import RULES
from quantkit.errors import UsageError
from support.headers import config_of
from support.tiers import exhaustive


def config_file(folder: Path, model: str, **changes: Any) -> Path:
    """A published config with its `quantization_config` changed."""
    config = json.loads(config_of(model))
    config.get("text_config", config)["quantization_config"] |= changes
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def status_of(report: Compatibility, rule: str, engine: str) -> str:
    return next(found.status for found in report.results if (found.rule, found.engine) == (rule, engine))


@pytest.mark.parametrize("model", ["glm-5.2", exhaustive("kimi-k2.6"), exhaustive("nvidia-glm-5.2-nvfp4")])
def test_what_engines_serve_breaks_no_rule(model: str, tmp_path: Path) -> None:
    """Published checkpoints that vLLM and SGLang are known to serve at eight ranks."""
    report = check_compatibility(config_file(tmp_path, model), tp=8)

    assert report.passed
    assert [found.rule for found in report.results if found.status == "not ok"] == []
    assert len(report.results) == sum(len(rule.sources) for rule in RULES)


@pytest.mark.exhaustive
def test_a_list_that_hits_other_layers_is_broken_and_leaves_with_3(tmp_path: Path) -> None:
    """`model.layers.7` in NVIDIA's list: vLLM would take layers 70 to 77 for plain; --json says so, too."""
    config = json.loads(config_of("nvidia-glm-5.2-nvfp4"))
    excluded = [*config["quantization_config"]["ignore"], "model.layers.7"]
    path = config_file(tmp_path, "nvidia-glm-5.2-nvfp4", ignore=excluded)
    result = CliRunner().invoke(app, ["engines", str(path), "--json"])

    report = Compatibility.from_json(result.stdout)
    assert (type(result.exception).__name__, report.passed) == ("CheckFailed", False)
    assert getattr(result.exception, "exit_code", None) == 3
    assert status_of(report, "exclude-layers", "vLLM") == "not ok"
    assert status_of(report, "exclude-layers", "SGLang") == "ok"
    broken = next(found for found in report.results if found.rule == "exclude-layers" and found.engine == "vLLM")
    assert broken.module.startswith("model.layers.70.mlp.experts.")
    assert broken.modules == 8 * 256 * 3


def test_a_conversion_keeps_every_rule(toy_int4: Path) -> None:
    """A folder is judged by what is stored; the table has a row for each rule that applies."""
    report = check_compatibility(toy_int4, tp=1)

    assert report.passed
    rows = next(report.tables()).rows
    assert {row[0] for row in rows} >= {"modules-described", "kv-b", "top-level-format", "int4-groups"}
    assert all(row[1:4] != ("", "", "") for row in rows)
    assert list(report.lines()) == []


def test_the_command_prints_what_is_wrong_and_what_mends_it(toy_int4: Path) -> None:
    """Eight ranks cut the toy's FP8 blocks: with --tp 8 exit code 3; unasked, nobody would take so many."""
    unasked = CliRunner().invoke(app, ["engines", str(toy_int4)])
    asked = CliRunner().invoke(app, ["engines", str(toy_int4), "--tp", "8"])

    assert unasked.exit_code == 0
    assert "no rule is broken" in unasked.stdout
    assert getattr(asked.exception, "exit_code", None) == 3
    assert "8 ranks: NOT OK" in asked.stdout
    assert "fp8-blocks, not ok: model.layers.0.mlp." in asked.stdout
    assert "--rest bf16" in asked.stdout


def test_signed_scales_are_known_from_the_manifest(toy: Path, tmp_path: Path) -> None:
    """A conversion with `--scale signed` is warned of; a copy without the manifest cannot be."""
    quantkit.convert(toy, tmp_path / "out", options=quantkit.Options(scale=ScaleMethod.SIGNED))

    assert status_of(check_compatibility(tmp_path / "out"), "signed-scales", "vLLM") == "warning"
    (tmp_path / "out" / "quantkit.json").unlink()
    assert status_of(check_compatibility(tmp_path / "out"), "signed-scales", "vLLM") == "not applicable"


def test_no_ranks_are_a_usage_error(toy_int4: Path) -> None:
    """There is no half a rank."""
    with pytest.raises(UsageError, match="tp is 0"):
        check_compatibility(toy_int4, tp=0)


def test_verify_reports_a_broken_rule(toy_int4: Path, tmp_path: Path) -> None:
    """A top-level format that SGLang's experts refuse fails the check `engines`, with what fixes it."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in toy_int4.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "mixed-precision"
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))

    checks = {check.name: check for check in quantkit.verify(folder).checks}
    assert checks["engines"].problems == 1
    assert "SGLang: model.layers.2.mlp.experts." in checks["engines"].examples[0]
    assert '"format": "pack-quantized"' in checks["engines"].examples[0]


def test_verify_asks_no_rules_of_a_checkpoint_that_is_not_4_bit(toy: Path) -> None:
    """An FP8 source has no check `engines`."""
    assert "engines" not in {check.name for check in quantkit.verify(toy).checks}

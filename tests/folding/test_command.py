"""`quantkit fold`: each way to write, options that contradict each other, and what is printed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.errors import QuantkitError
from quantkit.runtime.scales import KvScaleFile
from support.folds import PARTS, SCALES, content, named
from support.truth import truth

pytestmark = pytest.mark.usefixtures("one_thread")


def invoke(*arguments: str | Path) -> tuple[int, Any, str]:
    """Exit code, the JSON on stdout if there is any, and the error."""
    result = CliRunner().invoke(app, ["fold", *map(str, arguments), "--json"])
    code = result.exception.exit_code if isinstance(result.exception, QuantkitError) else result.exit_code
    return code, json.loads(result.stdout) if result.stdout.startswith("{") else None, str(result.exception)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scales.json"
    path.write_text(KvScaleFile(SCALES).to_json())
    return path


@pytest.mark.exhaustive
def test_kimi_from_its_config_alone(tmp_path: Path) -> None:
    """0.31 % of Kimi K2.6's bytes, without a weight: the rows of 64 heads and of kv_a, all of kv_b and the norm."""
    path = tmp_path / "scales.json"
    path.write_text(KvScaleFile(named("kimi-k2.6", 61, **PARTS)).to_json())
    code, told, _ = invoke("kimi-k2.6", "--scales", path, "--dry-run")

    layer = 2 * (512 + 64 * 7168 + 64 * 64 * 1536 + 64 * 256 * 512)
    assert (code, told["edited_bytes"], told["total_bytes"]) == (0, 61 * layer, 595_148_192_736)
    assert 0.0030 < told["edited_bytes"] / told["total_bytes"] < 0.0032
    assert told["proof"] == "none: nothing was written"


def test_a_dry_run_says_what_a_run_does(tiny_fp8: Path, file: Path) -> None:
    """Of a folder that is there, its weights are tried, and nothing is written."""
    before = content(tiny_fp8)
    code, told, _ = invoke(tiny_fp8, "--scales", file, "--dry-run")

    assert (code, told["edited_bytes"], told["output"]) == (0, 2 * 280, None)
    assert content(tiny_fp8) == before


def test_the_command_folds_each_way(
    own_fp8: Path, tiny_fp8: Path, tiny_folded: Path, file: Path, tmp_path: Path
) -> None:
    """A copy, a patch, in place and back."""
    code, told, _ = invoke(tiny_fp8, "--scales", file, "-o", tmp_path / "copy")
    assert (code, told["way"], told["output"]) == (0, "copy", str(tmp_path / "copy"))
    assert content(tmp_path / "copy") == content(tiny_folded)
    assert invoke(tiny_fp8, "--scales", file, "--patch-only", tmp_path / "patch")[0] == 0
    assert invoke(own_fp8, "--scales", file, "--in-place")[0] == 0
    assert content(own_fp8) == content(tiny_folded)
    assert invoke(own_fp8, "--undo")[0] == 0
    assert content(own_fp8) == content(tiny_fp8)
    assert invoke(tiny_fp8, "--scales", file, "--embed", "-o", tmp_path / "embedded")[0] == 0
    assert truth(tmp_path / "embedded").keys() > truth(tiny_fp8).keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "where to"),
        (["--in-place", "--dry-run"], "where to"),
        (["-o", "x", "--patch-only", "y"], "where to"),
        (["--in-place", "--embed"], "--embed writes a copy"),
        (["--undo"], "--undo takes no --scales"),
    ],
)
def test_options_that_contradict_each_other(tiny_fp8: Path, file: Path, arguments: list[str], words: str) -> None:
    """Exit code 2, with what to give instead."""
    code, _, error = invoke(tiny_fp8, "--scales", file, *arguments)

    assert (code, words in error) == (2, True)


def test_scales_are_asked_for(tiny_fp8: Path, tmp_path: Path) -> None:
    """Without a file there is nothing to fold, and a file that is none is an error."""
    assert invoke(tiny_fp8, "--in-place")[0] == 2
    (tmp_path / "none.json").write_text("{}")
    code, _, error = invoke(tiny_fp8, "--scales", tmp_path / "none.json", "--dry-run")
    assert (code, "is no file of KV scales" in error) == (1, True)


@pytest.mark.parametrize("wrong", ["0.0", "-1.0", "NaN", "Infinity"])
def test_unsound_scales_are_refused_by_the_command(tiny_fp8: Path, file: Path, wrong: str) -> None:
    """In the file, as JSON has them."""
    file.write_text(file.read_text().replace(": 4.0", f": {wrong}", 1))
    code, _, error = invoke(tiny_fp8, "--scales", file, "--dry-run")

    assert (code, "latent_scale is" in error) == (1, True)


def test_tables_say_what_was_done(tiny_fp8: Path, file: Path, tmp_path: Path) -> None:
    """Layers with their scales and weights, the share of the bytes, the proof."""
    result = CliRunner().invoke(app, ["fold", str(tiny_fp8), "--scales", str(file), "-o", str(tmp_path / "out")])

    assert result.exit_code == 0
    for words in ("latent 4, rope 0.5", "kv_a_proj_with_mqa, q_b_proj", "the same bits in BF16", "MTP layer 2"):
        assert words in " ".join(result.stdout.split())

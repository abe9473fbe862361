"""`quantkit convert` writes what its options say, and to nothing that exists and is not its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpoints import contents, tree
from support.program import Runner, only_object


def test_dry_run_writes_nothing(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dry-run` says what would be written, to the byte, and touches neither the output nor the source."""
    monkeypatch.chdir(tmp_path)
    before = tree(toy)

    result = quantkit("convert", toy, "--dry-run", "-o", "output", "--json")

    planned, made = only_object(result.stdout), json.loads((toy_int4 / "quantkit.json").read_text())
    made["source"]["shards_sha256"] = {}  # nothing is read
    for key in ("source", "recipe", "quantization_config", "groups", "num_tensors", "total_bytes", "file_bytes"):
        assert planned[key] == made[key]
    assert planned["files"] == {}
    assert list(tmp_path.iterdir()) == []
    assert tree(toy) == before


@pytest.mark.parametrize("options", [(), ("--int4",), ("--recipe", "glm-5.2-int4")])
def test_int4_is_what_convert_does_by_itself(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """`convert` without a choice, `--int4` and the recipe's name give the same bytes; an empty folder will do."""
    (tmp_path / "output").mkdir()

    assert quantkit("convert", toy, *options, "-o", tmp_path / "output").exit_code == 0
    assert contents(tmp_path / "output") == contents(toy_int4)


def test_options_reach_the_recipe(quantkit: Runner, toy: Path) -> None:
    """--group-size, --scale and --rest change the recipe that the manifest records."""
    options = ("--group-size", "64", "--scale", "minmax", "--rest", "bf16")
    recipe = only_object(quantkit("convert", toy, *options, "--dry-run", "--json").stdout)["recipe"]

    assert {(rule.get("group_size"), rule.get("scale")) for rule in recipe["rules"] if rule["scheme"] == "int4"} == {
        (64, "minmax")
    }
    assert recipe["rules"][-1] == {"roles": "all", "scheme": "bf16"}


@pytest.mark.parametrize("there", ["folder", "own output", "file"])
def test_existing_output_is_refused(quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, there: str) -> None:
    """Without --overwrite nothing that exists is written to, not even an output of quantkit."""
    output = tmp_path / "output"
    if there == "own output":
        shutil.copytree(toy_int4, output)
    elif there == "folder":
        output.mkdir()
        (output / "notes.txt").write_text("mine")
    else:
        output.write_text("mine")
    before = tree(tmp_path)

    result = quantkit("convert", toy, "-o", output)

    assert result.exit_code == 1
    what = "is a file, and the output is a folder" if there == "file" else "exists and is not empty"
    assert result.stderr.startswith(f"error: {output} {what}\nhint: ")
    assert tree(tmp_path) == before


def test_overwrite_replaces_an_own_output(
    quantkit: Runner, toy: Path, toy_int4: Path, make_toy: Callable[..., Path], tmp_path: Path
) -> None:
    """--overwrite leaves nothing of the earlier output, which had more shards: as if the folder had been empty."""
    quantkit("convert", make_toy(num_shards=5), "--bf16", "-o", tmp_path / "output")

    result = quantkit("convert", toy, "-o", tmp_path / "output", "--overwrite")

    assert result.exit_code == 0
    assert contents(tmp_path / "output") == contents(toy_int4)


@pytest.mark.parametrize("there", ["folder", "file"])
def test_overwrite_refuses_what_is_not_ours(quantkit: Runner, toy: Path, tmp_path: Path, there: str) -> None:
    """--overwrite does not remove what quantkit did not write."""
    output = tmp_path / "output"
    if there == "folder":
        shutil.copytree(toy, output)
    else:
        output.write_text("mine")
    before = tree(tmp_path)

    result = quantkit("convert", toy, "-o", output, "--overwrite")

    assert result.exit_code == 1
    what = "is a file, and the output is a folder" if there == "file" else "was not written by quantkit"
    assert result.stderr.startswith(f"error: {output} {what}")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("options", [("--group-size", "48"), ("--recipe", "nothing"), ("--int4", "--bf16")])
def test_refused_conversion_leaves_an_own_output_alone(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """--overwrite removes the earlier output only when there will be a new one."""
    shutil.copytree(toy_int4, tmp_path / "output")
    before = tree(tmp_path)

    result = quantkit("convert", toy, *options, "-o", tmp_path / "output", "--overwrite")

    assert result.exit_code in (1, 2)
    assert tree(tmp_path) == before

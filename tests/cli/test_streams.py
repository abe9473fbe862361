"""The result goes to stdout, as tables or as one JSON object; talk and progress go to stderr."""

import json
import os
import pty
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from support.program import PROGRAM, Runner, environment, only_object, run_program


def damaged(checkpoint: Path, folder: Path) -> Path:
    """A copy of `checkpoint` with one byte of its first shard changed."""
    shutil.copytree(checkpoint, folder)
    shard = min(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Inspection", ("inspect", "TOY")),
        ("Manifest", ("convert", "TOY", "--dry-run")),
        ("Manifest", ("convert", "TOY", "-o", "OUTPUT")),
        ("Verification", ("verify", "INT4", "--against", "TOY")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_json_is_one_object(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, kind: str, arguments: tuple[str, ...]
) -> None:
    """`--json` prints one object with its schema version first and its kind, and nothing else anywhere."""
    paths = {"TOY": toy, "INT4": toy_int4, "OUTPUT": tmp_path / "output"}
    result = quantkit(*(paths.get(argument, argument) for argument in arguments), "--json")

    assert result.exit_code == 0
    assert result.stderr == ""
    report = only_object(result.stdout)
    assert list(report)[:2] == ["schema_version", "kind"]
    assert report["schema_version"] == 1
    assert report["kind"] == kind


def test_json_of_a_conversion_is_its_manifest(quantkit: Runner, toy: Path, tmp_path: Path) -> None:
    """What `convert --json` prints is what it wrote to quantkit.json."""
    result = quantkit("convert", toy, "-o", tmp_path / "output", "--json")

    assert result.stdout == (tmp_path / "output" / "quantkit.json").read_text()


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_warnings_are_talk(quantkit: Runner, make_toy: Callable[..., Path], form: tuple[str, ...]) -> None:
    """A warning is on stderr, whatever is on stdout; under --json the object holds it too."""
    source = make_toy()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))

    result = quantkit("inspect", source, *form)

    assert result.exit_code == 0
    assert result.stderr.startswith("warning: model.norm.weight")
    assert "warning:" not in result.stdout
    if form:
        assert "model.norm.weight" in only_object(result.stdout)["warnings"][0]


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_failed_check_is_exit_code_3(quantkit: Runner, toy_int4: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    """`verify` of a damaged checkpoint prints its report all the same, then names on stderr what failed, and is 3."""
    folder = damaged(toy_int4, tmp_path / "damaged")

    result = quantkit("verify", folder, *form)

    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {folder} failed: ")
    assert "manifest" in result.stderr.splitlines()[0]
    if form:
        assert not only_object(result.stdout)["passed"]
    else:
        assert "FAILED" in result.stdout


def test_conversion_without_a_terminal_prints_plain_text(toy: Path, tmp_path: Path) -> None:
    """In a pipe or a log file there are neither progress bars, nor colours, nor carriage returns; only the result."""
    result = run_program("convert", toy, "-o", tmp_path / "output")

    assert result.returncode == 0
    assert result.stderr == b""
    assert b"routed_expert" in result.stdout
    assert not {0x1B, 0x0D} & set(result.stdout)


def test_conversion_on_a_terminal_draws_progress_on_stderr(toy: Path, tmp_path: Path) -> None:
    """Progress is for the terminal that stderr is; stdout, which goes elsewhere, still is one JSON object."""
    terminal, stderr = pty.openpty()
    command: list[str | Path] = [PROGRAM, "convert", toy, "-o", tmp_path / "output", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment(TERM="xterm")) as process:
        os.close(stderr)
        drawn = b""
        with suppress(OSError):  # raised when the other end is closed
            while data := os.read(terminal, 65536):
                drawn += data
        os.close(terminal)
        assert process.stdout is not None
        printed = process.stdout.read()

    assert b"converting" in drawn
    assert b"\x1b" in drawn
    assert only_object(printed.decode())["kind"] == "Manifest"

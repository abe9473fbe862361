"""`fold --in-place`: behind a journal, taken back by --undo, and whole wherever it is killed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.errors import CheckFailed, FoldError, OutputError, SourceError, UsageError
from quantkit.folding import in_place
from quantkit.folding.report import FoldReport, Way
from quantkit.verification import verify
from support.folds import SCALES, content, manifest

pytestmark = pytest.mark.usefixtures("one_thread")


def fold_own(folder: Path) -> FoldReport:
    return folding.fold(folder, SCALES, way=Way.IN_PLACE)


def test_in_place_is_the_copy_and_is_taken_back(own_fp8: Path, tiny_fp8: Path, tiny_folded: Path) -> None:
    """The same bytes and manifest as a copy's; --undo brings back every byte, and a second fold is refused between."""
    report = fold_own(own_fp8)
    assert content(own_fp8) == content(tiny_folded)
    made, copied = manifest(own_fp8), manifest(tiny_folded)
    assert (made.files, made.fold, made.groups) == (copied.files, copied.fold, copied.groups)
    assert ".quantkit-fold" in report.notes[0]
    assert verify(own_fp8, tiny_fp8).passed
    with pytest.raises(FoldError, match="these KV scales folded in already"):
        fold_own(own_fp8)

    assert "was taken back" in folding.undo(own_fp8).notes[0]
    assert content(own_fp8) == content(tiny_fp8)
    assert sorted(path.name for path in own_fp8.iterdir()) == sorted(path.name for path in tiny_fp8.iterdir())
    with pytest.raises(UsageError, match="no fold to take back"):
        folding.undo(own_fp8)
    fold_own(own_fp8)
    assert content(own_fp8) == content(tiny_folded)


def test_undo_brings_back_a_manifest(tiny_fp8: Path, tmp_path: Path) -> None:
    """Of a converted checkpoint the manifest before the fold comes back, too."""
    import quantkit

    quantkit.convert(tiny_fp8, tmp_path / "int4")
    before, text = content(tmp_path / "int4"), (tmp_path / "int4" / "quantkit.json").read_text()
    fold_own(tmp_path / "int4")
    assert manifest(tmp_path / "int4").recipe["name"] == "glm-5.2-int4"
    assert content(tmp_path / "int4") != before

    folding.undo(tmp_path / "int4")
    assert content(tmp_path / "int4") == before
    assert (tmp_path / "int4" / "quantkit.json").read_text() == text


class Crash(BaseException):
    """The process is killed: nothing catches it."""


@contextmanager
def crash_at(number: int) -> Iterator[list[int]]:
    """Kill the process at the given step on the disk; the first piece of patches is written by half."""
    seen = [0]

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            seen[0] += 1
            if seen[0] == number:
                if name == "write_patches":
                    file, (patch,) = arguments
                    os.pwrite(file, patch.data.tobytes()[: patch.data.nbytes // 2], patch.begin)
                raise Crash
            return real(*arguments, **keywords)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_patches", "sync", "write_whole", "_move", "_finish", "_remove"):
            patch.setattr(in_place, name, dying(name, getattr(in_place, name)))
        for module, name in ((os, "rename"), (shutil, "rmtree")):
            patch.setattr(module, name, dying(name, getattr(module, name)))
        yield seen


def is_whole(folder: Path, states: list[dict[str, str]]) -> bool:
    """What loads is one of these states."""
    return not (folder / "config.json").exists() or content(folder) in states


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proof: it writes nothing, and is what takes the time."""
    monkeypatch.setattr(folding, "_prover", lambda plan, way: lambda changed: "not proved")


@pytest.mark.usefixtures("unproved")
def test_a_fold_may_be_killed_at_any_step(tiny_fp8: Path, tiny_folded: Path, tmp_path: Path) -> None:
    """Wherever it was killed: what loads is whole; the next fold, or --undo, gives the bytes of an undisturbed one."""
    states, number, steps = [content(tiny_fp8), content(tiny_folded)], 1, 2
    while number <= steps:
        own_fp8 = shutil.copytree(tiny_fp8, tmp_path / f"{number}")
        with crash_at(number) as seen:
            try:
                fold_own(own_fp8)
                steps = seen[0]
            except Crash:
                steps = number + 1
        assert is_whole(own_fp8, states), number
        if (own_fp8 / ".quantkit" / "config.json").exists():
            with pytest.raises(SourceError, match=r"config.json is missing") as caught:
                open_source(own_fp8)
            assert "--undo" in str(caught.value.hint)
        again = shutil.copytree(own_fp8, tmp_path / f"{number}-undone")
        with suppress(FoldError):  # folded in already
            fold_own(own_fp8)
        assert content(own_fp8) == states[1], number
        try:
            folding.undo(again)
        except UsageError:
            assert number < 4  # before the journal
        assert content(again) == states[0], number
        assert not list(again.glob(".quantkit*"))
        number += 1

    assert number > 20


@pytest.mark.usefixtures("unproved")
def test_an_undo_may_be_killed_at_any_step(tiny_fp8: Path, tiny_folded: Path, tmp_path: Path) -> None:
    """Likewise: the next --undo goes on with it."""
    states, number, steps = [content(tiny_fp8), content(tiny_folded)], 1, 2
    base = shutil.copytree(tiny_fp8, tmp_path / "base")
    fold_own(base)
    while number <= steps:
        own_fp8 = shutil.copytree(base, tmp_path / f"{number}")
        with crash_at(number) as seen:
            try:
                folding.undo(own_fp8)
                steps = seen[0]
            except Crash:
                steps = number + 1
        assert is_whole(own_fp8, states), number
        with suppress(UsageError):  # nothing left to take back
            folding.undo(own_fp8)
        assert content(own_fp8) == states[0], number
        assert not list(own_fp8.glob(".quantkit*"))
        number += 1

    assert number > 10


def test_a_full_disk_in_place_is_put_back(own_fp8: Path, tiny_fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of the edits, or a proof that fails, leaves the checkpoint as it was."""
    real, calls = in_place.write_patches, []

    def fail_once(file: int, patches: Any) -> None:
        calls.append(patches)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, patches)

    with monkeypatch.context() as patch:
        patch.setattr(in_place, "write_patches", fail_once)
        with pytest.raises(OutputError, match="No space left"):
            fold_own(own_fp8)
    assert content(own_fp8) == content(tiny_fp8)

    def disprove(plan: Any, before: Any, after: Any) -> str:
        raise CheckFailed("other bits")

    monkeypatch.setattr(folding, "compare", disprove)
    with pytest.raises(CheckFailed, match="other bits"):
        fold_own(own_fp8)
    assert content(own_fp8) == content(tiny_fp8)
    assert not list(own_fp8.glob(".quantkit*"))


def test_weights_that_changed_after_a_fold_are_not_undone(own_fp8: Path) -> None:
    """Old bytes under new ones would be a mixture."""
    fold_own(own_fp8)
    name = "model.layers.0.self_attn.kv_a_layernorm.weight"
    path = own_fp8 / open_source(own_fp8).tensors[name].shard
    tensors = load_file(path)
    tensors[name] += 1
    save_file(tensors, path)
    before = content(own_fp8)

    with pytest.raises(OutputError, match="not those that the fold wrote"):
        folding.undo(own_fp8)
    assert content(own_fp8) == before


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_linked_shards_are_not_edited(own_fp8: Path, tmp_path: Path, link: str) -> None:
    """Shards that another folder shares, as in the Hub's cache, are refused by name."""
    shard = min(own_fp8.glob("model-*.safetensors"))
    shard.rename(tmp_path / "blob")
    if link == "hard":
        os.link(tmp_path / "blob", shard)
    else:
        shard.symlink_to(tmp_path / "blob")
    with pytest.raises(OutputError, match=f"{shard.name} is a link") as caught:
        fold_own(own_fp8)
    assert "-o OUT" in str(caught.value.hint)


def test_another_run_in_the_folder_is_left_alone(own_fp8: Path) -> None:
    """The work folder of another command is not taken for an interrupted fold."""
    (own_fp8 / ".quantkit").mkdir()
    (own_fp8 / ".quantkit" / "journal.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match="interrupted run of another command"):
        fold_own(own_fp8)

    assert (own_fp8 / ".quantkit" / "journal.jsonl").exists()

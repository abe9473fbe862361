"""Killed at any step on the disk, the tidying up included, a run is finished by the next one, or that one says rightly
what to do; nothing of it is left in the end."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit import folding
from quantkit.calibration import DataOptions, Options, calibrate
from quantkit.errors import FoldError, OutputError, UsageError
from quantkit.folding.report import Way
from support.checkpoints import MLP, digests, normal, write
from support.folds import SCALES, content

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = ("mkdir", "rename", "unlink", "rmdir")


class Crash(BaseException):
    """The process is killed: nothing catches it."""


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """Kill the process before the given step on the disk; none of those that would clean up after it is done."""
    seen = [0]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            seen[0] += 1
            if seen[0] >= number:
                raise Crash
            return real(*arguments, **keywords)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, dying(getattr(os, name)))
        yield seen


def states(
    run: Callable[[Path], object], prepare: Callable[[Path], object], folder: Path, last: int | None = None
) -> Iterator[Path]:
    """The folder as `run` leaves it when it is killed before its first step, its second, and so on, or `last` ones."""
    prepare(folder / "whole")
    with killed_at(1 << 30) as seen:
        run(folder / "whole")
    for number in range(1 if last is None else seen[0] - last + 1, seen[0] + 1):
        prepare(output := folder / f"{number}")
        with killed_at(number), pytest.raises(Crash):
            run(output)
        yield output


def follow(run: Callable[..., object], output: Path, option: str, *others: str) -> None:
    """Run with an option, or none, and then with those of the others that the errors' hints name, until it is done."""
    for following in (*others, None):
        try:
            run(output, **({option: True} if option else {}))
            return
        except OutputError as error:
            hint = str(error.hint)
        option = next((name for name in others if f"--{name}" in hint), "")
        assert option, f"before {following}: {hint}"
    pytest.fail(hint)


def copies(output: Path, *names: str) -> Iterator[Path]:
    """Copies of the folder, if it is there, to go on with."""
    for name in names:
        copy = output.parent / f"{output.name}-{name}"
        if output.exists():
            shutil.copytree(output, copy)
        yield copy


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize("before", ["nothing", "an output"])
def test_convert(tmp_path: Path, before: str) -> None:
    """--resume and --overwrite end with the same bytes, wherever a run into a new or a used folder was killed."""
    shards = ({f"{MLP}.{part}_proj.weight": normal(128, 128)} for part in ("gate", "up"))
    run = partial(quantkit.convert, write(tmp_path / "source", *shards))
    run(undisturbed := tmp_path / "undisturbed")
    prepare = nothing if before == "nothing" else partial(shutil.copytree, undisturbed)
    killed = partial(run, overwrite=before != "nothing")
    for output in states(killed, prepare, tmp_path):
        resumed, anew, told = copies(output, "resumed", "anew", "told")
        follow(run, resumed, "resume", "overwrite")
        run(anew, overwrite=True)
        if before == "nothing" or digests(told) != digests(undisturbed):
            follow(run, told, "", "resume", "overwrite")
        for folder in (resumed, anew, told):
            assert digests(folder) == digests(undisturbed), folder


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proof: it writes nothing, and is what takes the time."""
    monkeypatch.setattr(folding, "_prover", lambda plan, way: lambda changed: "not proved")


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize("way", [Way.COPY, Way.PATCH])
def test_fold(tiny_fp8: Path, tmp_path: Path, way: Way) -> None:
    """A copy or patch is made anew, by itself or when --overwrite is given as the hint says."""

    def run(output: Path, **options: bool) -> None:
        folding.fold(tiny_fp8, SCALES, output, way=way, **options)

    for output in states(run, nothing, tmp_path):
        follow(run, output, "", "overwrite")
        assert digests(output) == digests(tmp_path / "whole"), output


@pytest.mark.usefixtures("unproved")
def test_fold_in_place(tiny_fp8: Path, tiny_folded: Path, tmp_path: Path) -> None:
    """The next --undo brings the old bytes back, the next --in-place the folded ones; neither is ever refused."""

    def run(folder: Path) -> None:
        folding.fold(folder, SCALES, way=Way.IN_PLACE)

    for folder in states(run, partial(shutil.copytree, tiny_fp8), tmp_path):
        undone, again = copies(folder, "undone", "again")
        try:
            folding.undo(undone)
        except UsageError:
            assert content(folder) == content(tiny_fp8)
        assert digests(undone) == digests(tiny_fp8), folder
        assert not list(undone.glob(".quantkit*"))
        with suppress(FoldError):  # folded in already
            run(again)
        assert content(again) == content(tiny_folded), folder
        assert not (again / ".quantkit").exists()


@pytest.mark.usefixtures("unproved")
def test_undo(tiny_fp8: Path, tiny_folded: Path, tmp_path: Path) -> None:
    """An undo is finished by the next one, which does not call it an error, and does not stand in a fold's way."""

    def prepare(folder: Path) -> None:
        shutil.copytree(tiny_fp8, folder)
        folding.fold(folder, SCALES, way=Way.IN_PLACE)

    for folder in states(folding.undo, prepare, tmp_path):
        undone, again = copies(folder, "undone", "again")
        folding.undo(undone)
        assert digests(undone) == digests(tiny_fp8), folder
        assert not list(undone.glob(".quantkit*"))
        with suppress(FoldError):  # folded in already
            folding.fold(again, SCALES, way=Way.IN_PLACE)
        assert content(again) == content(tiny_folded), folder
        assert not (again / ".quantkit").exists()


@pytest.mark.exhaustive
def test_calibrate(glm_tiny: Path, tmp_path: Path) -> None:
    """Scales and report are written, and the rest tidied up, without a layer being run again."""
    options = Options(DataOptions(tokens=64, length=32))

    def run(output: Path, **given: bool) -> list[int]:
        done: list[int] = []
        calibrate(glm_tiny, output, options, progress=lambda total: done.append, **given)
        return done

    finished = 0
    for output in states(run, nothing, tmp_path, last=9):
        if {path.name for path in output.glob(".quantkit/*")} <= {".lock"}:
            with pytest.raises(OutputError, match="holds scales already"):  # all is done, and is not begun anew
                run(output, resume=True)
        else:
            assert len(run(output, resume=True)) == 1, "a layer was run again"
            assert not (output / ".quantkit").exists()
            finished += 1
        assert sorted(digests(output).keys() - {".quantkit/.lock"}) == ["calibration.json", "kv_scales.json"]
    assert finished > 4


def test_calibrate_looks_at_what_it_takes_over(glm_tiny: Path, tmp_path: Path) -> None:
    """Hidden states that are damaged or gone are not gone on with."""
    options = Options(DataOptions(tokens=64, length=32))
    done: list[int] = []

    def stop(nbytes: int) -> None:
        done.append(nbytes)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(glm_tiny, tmp_path / "out", options, progress=lambda total: stop)
    (states,) = (tmp_path / "out" / ".quantkit").glob("hidden-*.bin")
    data = bytearray(states.read_bytes())
    data[100] ^= 1
    states.write_bytes(data)
    for words in ("damaged: sha256", "gone"):
        with pytest.raises(OutputError, match=rf"{states.name} is {words}") as caught:
            calibrate(glm_tiny, tmp_path / "out", options, resume=True)
        assert "--overwrite" in str(caught.value.hint)
        states.unlink(missing_ok=True)

    calibrate(glm_tiny, tmp_path / "out", options, overwrite=True)


def test_old_bytes_that_are_damaged_are_not_put_back(own_fp8: Path) -> None:
    """What an undo would write is compared with what the fold read."""
    folding.fold(own_fp8, SCALES, way=Way.IN_PLACE)
    old = own_fp8 / ".quantkit-fold" / "old"
    old.write_bytes(old.read_bytes()[:-1] + b"?")
    before = content(own_fp8)

    with pytest.raises(OutputError, match=r"old is damaged: sha256 .+ nothing is put back"):
        folding.undo(own_fp8)
    assert content(own_fp8) == before

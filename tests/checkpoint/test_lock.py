"""One run at a time writes into a folder; a lock is gone with its run, and leaves no trace."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import quantkit
from quantkit import folding
from quantkit.calibration import DataOptions, Options, calibrate
from quantkit.checkpoint import lock as locking
from quantkit.checkpoint.journal import CONVERT, Opening, append_line
from quantkit.checkpoint.lock import check_free, lock
from quantkit.errors import OutputError, QuantkitError
from quantkit.folding.report import Way
from support.checkpoints import tree
from support.folds import SCALES

HOLDING = """
import sys, time
from pathlib import Path
from quantkit.checkpoint.lock import lock
with lock(Path(sys.argv[1]), "convert"):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock of `folder` until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDING, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def commands(toy: Path, fp8: Path, glm: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Every command that writes a folder, into `out`."""
    options = Options(DataOptions(tokens=64, length=32))
    return {
        "convert": lambda: quantkit.convert(toy, out),
        "resume": lambda: quantkit.convert(toy, out, resume=True),
        "overwrite": lambda: quantkit.convert(toy, out, overwrite=True),
        "fold": lambda: folding.fold(fp8, SCALES, out),
        "patch": lambda: folding.fold(fp8, SCALES, out, way=Way.PATCH),
        "calibrate": lambda: calibrate(glm, out, options),
    }


def test_second_run_is_refused_until_the_first_is_killed(
    toy: Path, tiny_fp8: Path, glm_tiny: Path, toy_int4: Path, tmp_path: Path
) -> None:
    """Every command says who is at work, since when; a killed holder holds nothing, and its file is no run."""
    with hold(tmp_path / "out") as holder:
        before = tree(tmp_path)
        for run in commands(toy, tiny_fp8, glm_tiny, tmp_path / "out").values():
            with pytest.raises(
                OutputError, match=rf"in use by quantkit convert of .+ \(process {holder.pid}\) since 2"
            ):
                run()
            assert tree(tmp_path) == before
        holder.kill()
    assert (tmp_path / "out" / ".quantkit" / ".lock").exists()

    quantkit.convert(toy, tmp_path / "out")

    assert tree(tmp_path / "out").keys() == tree(toy_int4).keys()


def test_a_fold_in_place_excludes_others(own_fp8: Path, toy: Path) -> None:
    """Neither a second fold nor its undoing begins while somebody writes into the checkpoint."""
    before = tree(own_fp8)
    with lock(own_fp8, "fold --in-place"):
        for run in (lambda: folding.fold(own_fp8, SCALES, way=Way.IN_PLACE), lambda: folding.undo(own_fp8)):
            with pytest.raises(OutputError, match="in use by quantkit fold --in-place"):
                run()

    assert tree(own_fp8) == before


def test_an_open_run_is_not_called_interrupted(toy: Path, glm_tiny: Path, tmp_path: Path) -> None:
    """While a run is at work nobody is told to go on with it: its journal is looked at only when it has ended."""
    with lock(tmp_path / "out", "convert"):
        append_line(tmp_path / "out" / ".quantkit" / "journal.jsonl", Opening(CONVERT).to_line())
        with pytest.raises(OutputError, match="in use by quantkit convert"):
            quantkit.convert(toy, tmp_path / "out")
        with pytest.raises(OutputError, match="in use by quantkit convert"):
            calibrate(glm_tiny, tmp_path / "out", Options(DataOptions(tokens=64, length=32)))

    with pytest.raises(OutputError, match="holds an interrupted run"):
        quantkit.convert(toy, tmp_path / "out")


def test_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    """A run that begins while others look whether the folder is free is let in."""
    with lock(tmp_path / "out", "convert"):
        (tmp_path / "out" / "model.safetensors").touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            with suppress(OutputError):
                check_free(tmp_path / "out")
            time.sleep(0.001)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(100):
            with lock(tmp_path / "out", "convert"):
                pass
    finally:
        stop.set()
        for thread in lookers:
            thread.join()


def test_conversions_at_the_same_time_make_one(make_toy: Callable[..., Path], tmp_path: Path) -> None:
    """Of several that begin together in one folder, with other options each, the last to be let in wins whole."""
    source, errors = make_toy(num_shards=4), []

    def run(group_size: int) -> None:
        try:
            options = quantkit.conversion.Options(group_size=group_size)
            quantkit.convert(source, tmp_path / "out", options=options, overwrite=True)
        except QuantkitError as error:
            errors.append(str(error))

    for _ in range(4):
        threads = [threading.Thread(target=run, args=(size,)) for size in (32, 64, 128)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert quantkit.verify(tmp_path / "out", source).passed
    assert [error for error in errors if "in use by" not in error] == []


def test_refused_runs_leave_nothing(toy: Path, tmp_path: Path) -> None:
    """A plan or a source that is refused makes no folder, and none above it."""
    with pytest.raises(QuantkitError):
        quantkit.convert(toy, tmp_path / "a" / "b" / "out", options=quantkit.conversion.Options(group_size=48))
    with pytest.raises(QuantkitError):
        quantkit.convert(tmp_path / "missing", tmp_path / "a" / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(QuantkitError):
        quantkit.convert(tmp_path / "missing", tmp_path / "there")

    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())


def test_lock_says_who_holds_it(tmp_path: Path) -> None:
    """The file is JSON with user, host, process, time and command; afterwards file and folders are gone."""
    with lock(tmp_path / "new" / "out", "convert"):
        content = json.loads((tmp_path / "new" / "out" / ".quantkit" / ".lock").read_text())
        assert content.keys() == {"user", "host", "pid", "started", "command"}
        assert (content["pid"], content["command"]) == (os.getpid(), "convert")
        with pytest.raises(OutputError, match=r"convert of .+ on .+ since"), lock(tmp_path / "new" / "out", "fold"):
            pass
        with pytest.raises(OutputError), lock(tmp_path / "new" / "out", "fold"):
            pass

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, ValueError])
def test_lock_is_given_back_however_its_run_ends(tmp_path: Path, end: type[BaseException]) -> None:
    """An error or an interrupt leaves no lock."""
    with pytest.raises(end), lock(tmp_path / "out", "convert"):
        raise end
    with lock(tmp_path / "out", "convert"):
        pass

    assert not list(tmp_path.iterdir())


def test_lock_on_a_file_that_has_lost_its_name_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who locks the file that the run before took away at that moment locks the new one instead."""
    flock, taken = fcntl.flock, []

    def lose(file: int, operation: int) -> None:
        if len(taken) < 3:
            taken.append(file)
            shutil.rmtree(tmp_path / "out" / ".quantkit")
        flock(file, operation)

    monkeypatch.setattr(locking.fcntl, "flock", lose)
    with lock(tmp_path / "out", "convert"):
        monkeypatch.undo()
        with pytest.raises(OutputError, match="in use"), lock(tmp_path / "out", "fold"):
            pass
    assert len(taken) == 3


def test_many_that_come_and_go(tmp_path: Path) -> None:
    """However often the file is made and taken away, two never hold it together."""
    inside, overlaps, entered = [0], [], [0]

    def work() -> None:
        for _ in range(100):
            try:
                with lock(tmp_path / "out", "convert"):
                    inside[0] += 1
                    entered[0] += 1
                    overlaps.append(inside[0] > 1)
                    inside[0] -= 1
            except OutputError:
                pass

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert entered[0] > 6
    assert not any(overlaps)
    assert not (tmp_path / "out" / ".quantkit").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_locks_is_refused(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nothing is written where a second run could not be kept out; the message says what to do."""

    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locking.fcntl, "flock", refuse)
    with pytest.raises(OutputError, match="has no locks") as caught:
        quantkit.convert(toy, tmp_path / "out")

    assert "another disk" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A dangling link or a file in the way is named."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for place in ("link", "file/out"):
        with pytest.raises(OutputError, match="cannot be written"), lock(tmp_path / place, "convert"):
            pass

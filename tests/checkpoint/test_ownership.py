"""A folder is gone on with, or removed, only if all that is in it is quantkit's and of that command."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import quantkit
from quantkit import folding
from quantkit.calibration import DataOptions, Options, calibrate
from quantkit.checkpoint.journal import CALIBRATE, CONVERT, FOLD, IN_PLACE, PATCH, Command, Opening
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.output import Output
from quantkit.errors import OutputError
from quantkit.folding.patching import PATCH_FILE, FoldPatch
from quantkit.folding.report import Way
from support.checkpoints import tree
from support.folds import SCALES

BOUND = {"version": "0.1.0", "source config": "x", "source headers": "y"}
OLD_CONVERT = {**BOUND, "recipe": {"name": "int4"}}
OLD_CALIBRATE = {**BOUND, "source files": {}, "data": "z", "options": {}}
OLD_FOLD = {"digest": "d", "manifest": None, "new_sha256": "n", "spots": []}


def journal(command: Command, line: dict[str, object] | None = None, *files: str) -> Callable[[Path], None]:
    """Makes a folder that holds a journal with this first line, or that of the command, and the files beside it."""

    def make(folder: Path) -> None:
        (folder / ".quantkit").mkdir(parents=True, exist_ok=True)
        first = line or Opening(command, frozenset(files)).to_line()
        (folder / ".quantkit" / command.journal).write_text(json.dumps(first) + "\n")
        for name in files:
            (folder / name).write_text("a part of the run")

    return make


def both(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    """Makes a folder by all of these."""

    def make(folder: Path) -> None:
        for maker in makers:
            maker(folder)

    return make


def user_file(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "thesis.txt").write_text("the only copy")


def work(*names: str) -> Callable[[Path], None]:
    """Makes a work folder with files that have no journal."""

    def make(folder: Path) -> None:
        (folder / ".quantkit").mkdir(parents=True)
        for name in names:
            (folder / ".quantkit" / name).write_text("?")

    return make


def linked_work(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.mkdir()
    (folder / ".quantkit").symlink_to(folder.parent / "elsewhere")


def text_file(name: str, text: str) -> Callable[[Path], None]:
    """Makes a folder with a user's file, and one of this name and content."""

    def make(folder: Path) -> None:
        user_file(folder)
        (folder / name).write_text(text)

    return make


def any_bytes(folder: Path) -> None:
    """Add a file whose name is no UTF-8."""
    (folder / os.fsdecode(b"\xff")).touch()


def exchange_a(folder: Path) -> None:
    """Put a link to another file in the place of one."""
    (folder / "a").unlink()
    (folder / "a").symlink_to(folder / "b")


STRANGE = {
    "calibrate": (journal(CALIBRATE, None, "kv_scales.json"), "quantkit calibrate"),
    "calibrate of 0.1": (journal(CALIBRATE, OLD_CALIBRATE), "quantkit calibrate"),
    "fold in place": (both(user_file, journal(IN_PLACE)), "fold --in-place"),
    "fold in place of 0.1": (both(user_file, journal(IN_PLACE, OLD_FOLD)), "fold --in-place"),
    "fold in place that edited nothing": (both(work("old", "new"), user_file), "fold --in-place"),
    "fold": (journal(FOLD, None, "config.json"), "quantkit fold"),
    "patch": (journal(PATCH, None, PATCH_FILE), "fold --patch-only"),
    "empty work folder beside a user's file": (both(work(), user_file), "exists and is not empty|was not written by"),
    "a lock beside a user's file": (both(work(".lock"), user_file), "exists and is not empty|was not written by"),
    "files of no run": (work("model.safetensors"), "no journal"),
    "another journal": (journal(CONVERT, {"mine": 1}), "another command or version"),
    "an unknown command": (journal(CONVERT, {"command": "train", "files": []}), "another command or version"),
    "a wrong command": (journal(CONVERT, {"command": "calibrate", "files": []}), "another command or version"),
    "two journals": (both(journal(CALIBRATE), journal(CONVERT)), "journals of two runs"),
    "a link": (linked_work, "no folder of quantkit"),
    "own run and a user's file": (both(journal(CONVERT), user_file), "thesis.txt, which it did not write"),
    "a manifest that is a pipe": (
        both(user_file, lambda folder: os.mkfifo(folder / "quantkit.json")),
        "no file|not empty",
    ),
    "a journal that is a pipe": (
        both(work(), lambda folder: os.mkfifo(folder / ".quantkit" / "journal.jsonl")),
        "no file",
    ),
    "own run and a name of any bytes": (both(journal(CONVERT), any_bytes), r"\\udcff, which it did not write"),
    "own run and a link": (both(journal(CONVERT, None, "a", "b"), exchange_a), "a, which it did not write"),
    "manifest of nothing": (text_file("quantkit.json", "mine"), "no manifest|exists and is not empty"),
    "manifest of something": (
        text_file("quantkit.json", '{"kind": "Manifest"}'),
        "no manifest|exists and is not empty",
    ),
}


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}, {}], ids=["resume", "overwrite", "new"])
@pytest.mark.parametrize("name", STRANGE)
def test_convert_leaves_what_is_not_its_own(toy: Path, tmp_path: Path, name: str, how: dict[str, bool]) -> None:
    """Nothing is removed, changed or added, and the error says what is there and who may go on with it."""
    make, words = STRANGE[name]
    make(tmp_path / "out")
    before = tree(tmp_path)

    with pytest.raises(OutputError, match=words) as caught:
        quantkit.convert(toy, tmp_path / "out", **how)  # type: ignore[arg-type]

    assert caught.value.hint
    assert tree(tmp_path) == before


def refusal(output: Output) -> OutputError | None:
    """Why an output is refused; None if it is not."""
    try:
        output.check()
    except OutputError as error:
        return error
    return None


@pytest.mark.parametrize("command", [CONVERT, FOLD, PATCH], ids=lambda command: command.name)
@pytest.mark.parametrize("name", STRANGE)
def test_no_hint_proposes_what_is_refused(tmp_path: Path, name: str, command: Command) -> None:
    """--overwrite is named only for a folder that --overwrite takes."""
    STRANGE[name][0](tmp_path / "out")
    output = Output(tmp_path / "out", command, FoldPatch if command == PATCH else Manifest)

    overwriting = refusal(replace(output, overwrite=True))

    for refused in (overwriting, refusal(output), refusal(replace(output, resume=True))):
        if refused and overwriting:
            assert "--overwrite" not in str(refused.hint)


def add_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def add_weights(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"mine")


def add_folder(folder: Path) -> None:
    (folder / "notes").mkdir()


def add_deep_file(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("mine")


def edit_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("{", "{ ", 1))


def flip_in_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("glm", "gln", 1))


def exchange_for_link(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "tokenizer.json")


def cut_shard(folder: Path) -> None:
    os.truncate(folder / "model-00001-of-00002.safetensors", 9)


CHANGES = {
    add_file: "notes.txt",
    add_weights: "adapter.safetensors",
    add_folder: "notes/",
    add_deep_file: ".git/",
    edit_config: "config.json",
    flip_in_config: "config.json",
    exchange_for_link: "tokenizer.json",
    cut_shard: "model-00001-of-00002.safetensors",
}


@pytest.mark.parametrize(("change", "named"), CHANGES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_overwrite_removes_nothing_but_its_own_files(
    toy: Path, toy_int4: Path, tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    """A file that no run wrote, or that was changed since, is named, and stays with all others."""
    shutil.copytree(toy_int4, tmp_path / "out")
    change(tmp_path / "out")
    before = tree(tmp_path)

    with pytest.raises(OutputError, match=named):
        quantkit.convert(toy, tmp_path / "out", overwrite=True)
    with pytest.raises(OutputError, match="exists and is not empty") as caught:
        quantkit.convert(toy, tmp_path / "out")

    assert "--overwrite" not in str(caught.value.hint)
    assert tree(tmp_path) == before


def test_overwrite_takes_what_is_left_of_its_own(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """Files that are gone lose nothing; the gate's result is ours, too."""
    shutil.copytree(toy_int4, tmp_path / "out")
    (tmp_path / "out" / "model-00001-of-00002.safetensors").unlink()
    (tmp_path / "out" / "quantkit-gate.json").write_text("{}")

    quantkit.convert(toy, tmp_path / "out", overwrite=True)

    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in toy_int4.iterdir()}


def test_resume_of_a_finished_run_reads_every_byte(
    toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shard however large: one flipped bit is found."""
    monkeypatch.setattr("quantkit.checkpoint.occupancy._HASHED_BYTES", 0)
    path = shutil.copytree(toy_int4, tmp_path / "out") / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(OutputError, match=r"model-00002-of-00002.safetensors is another one"):
        quantkit.convert(toy, tmp_path / "out", resume=True)


def test_resume_of_a_finished_run_looks_at_its_files(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """A finished conversion whose shard or config is gone or changed is not called finished."""
    for change, words in ((cut_shard, "another one"), (lambda folder: (folder / "config.json").unlink(), "gone")):
        shutil.copytree(toy_int4, tmp_path / words)
        change(tmp_path / words)
        with pytest.raises(OutputError, match=words):
            quantkit.convert(toy, tmp_path / words, resume=True)


def test_weights_that_were_folded_in_place_are_not_removed(own_fp8: Path, toy: Path, tmp_path: Path) -> None:
    """A fold in place lists all files of a published checkpoint in its manifest; they are the user's all the same."""
    folding.fold(own_fp8, SCALES, way=Way.IN_PLACE)
    before = tree(own_fp8)
    for remove in (False, True):
        with pytest.raises(OutputError, match="weights that were there before"):
            quantkit.convert(toy, own_fp8, overwrite=True)
        assert tree(own_fp8) == before
        if not remove:
            shutil.rmtree(own_fp8 / ".quantkit-fold")
            before = tree(own_fp8)


def test_a_manifest_that_does_not_say_so_may_be_of_weights_folded_in_place(
    own_fp8: Path, toy: Path, tmp_path: Path
) -> None:
    """That of version 0.1: for a published checkpoint, the files may be the user's and are not removed."""
    folding.fold(own_fp8, SCALES, way=Way.IN_PLACE)
    shutil.rmtree(own_fp8 / ".quantkit-fold")
    manifest = json.loads((own_fp8 / "quantkit.json").read_text())
    del manifest["in_place"]
    (own_fp8 / "quantkit.json").write_text(json.dumps(manifest))

    with pytest.raises(OutputError, match="weights that were there before"):
        quantkit.convert(toy, own_fp8, overwrite=True)


def test_what_quantkit_converted_and_folded_in_place_is_its_own(tiny_fp8: Path, tmp_path: Path) -> None:
    """A conversion stays one when it is folded in place."""
    quantkit.convert(tiny_fp8, tmp_path / "int4")
    folding.fold(tmp_path / "int4", SCALES, way=Way.IN_PLACE)

    quantkit.convert(tiny_fp8, tmp_path / "int4", overwrite=True)

    assert quantkit.verify(tmp_path / "int4", tiny_fp8).passed
    assert not (tmp_path / "int4" / ".quantkit-fold").exists()


def test_convert_resumes_an_interrupted_run_of_an_earlier_version(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """A journal that does not say its command or its files is told by its form, and gone on with; what it left and did
    not list is not removed."""
    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(toy, tmp_path / "out", progress=lambda total: _interrupt)
    path = tmp_path / "out" / ".quantkit" / "journal.jsonl"
    line = json.loads(path.read_text())
    del line["command"], line["files"]
    path.write_text(json.dumps(line) + "\n")
    shutil.copy(toy / "tokenizer.json", tmp_path / "out")
    with pytest.raises(OutputError, match=r"tokenizer.json, which it did not write"):
        quantkit.convert(toy, tmp_path / "out", overwrite=True)

    quantkit.convert(toy, tmp_path / "out", resume=True)

    assert tree(tmp_path / "out").keys() == tree(toy_int4).keys()


def _interrupt(done: int) -> None:
    raise KeyboardInterrupt


# --- fold and calibrate


@pytest.mark.parametrize("way", [Way.COPY, Way.EMBED, Way.PATCH])
def test_fold_leaves_what_is_not_its_own(tiny_fp8: Path, toy_int4: Path, tmp_path: Path, way: Way) -> None:
    """An interrupted conversion or calibration is neither removed nor called something to overwrite; a patch is not
    put in a checkpoint's place, and a user's file stays."""

    def copied(folder: Path) -> None:
        shutil.copytree(toy_int4, folder)
        if way is not Way.PATCH:
            add_file(folder)

    makers = (
        journal(CONVERT),
        journal(CALIBRATE),
        both(journal(FOLD), user_file),
        both(journal(PATCH), user_file),
        copied,
    )
    for number, make in enumerate(makers):
        make(folder := tmp_path / str(number))
        before = tree(folder)
        for overwrite in (False, True):
            with pytest.raises(OutputError) as caught:
                folding.fold(tiny_fp8, SCALES, folder, way=way, overwrite=overwrite)
            assert "--overwrite" not in str(caught.value.hint)
        assert tree(folder) == before


def test_fold_overwrites_its_own(tiny_fp8: Path, tmp_path: Path) -> None:
    """An interrupted copy, a finished one and a patch are begun anew on request."""
    for way in (Way.COPY, Way.PATCH):
        folder = tmp_path / way
        journal(PATCH if way is Way.PATCH else FOLD, None, PATCH_FILE if way is Way.PATCH else "tokenizer.json")(folder)
        for _ in range(2):
            with pytest.raises(OutputError) as caught:
                folding.fold(tiny_fp8, SCALES, folder, way=way)
            assert "--overwrite" in str(caught.value.hint)
            folding.fold(tiny_fp8, SCALES, folder, way=way, overwrite=True)
        assert not (folder / ".quantkit").exists()


def test_in_place_leaves_runs_of_others(own_fp8: Path) -> None:
    """In a folder of an interrupted conversion nothing is folded, taken back, or tidied up."""
    journal(CONVERT)(own_fp8)
    before = tree(own_fp8)
    with pytest.raises(OutputError, match="quantkit convert"):
        folding.fold(own_fp8, SCALES, way=Way.IN_PLACE)
    with pytest.raises(OutputError, match="quantkit convert"):
        folding.undo(own_fp8)

    assert tree(own_fp8) == before


SHORT = Options(DataOptions(tokens=64, length=32))


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}, {}], ids=["resume", "overwrite", "new"])
def test_calibrate_leaves_what_is_not_its_own(glm_tiny: Path, tmp_path: Path, how: dict[str, bool]) -> None:
    """An interrupted conversion or fold, and files that only have the names of scales and report, stay."""
    hand_made = text_file("kv_scales.json", "{}")
    makers = {"quantkit convert": journal(CONVERT), "quantkit fold": journal(FOLD), "not written by": hand_made}
    for number, (words, make) in enumerate(makers.items()):
        make(folder := tmp_path / str(number))
        before = tree(folder)
        with pytest.raises(OutputError, match=words) as caught:
            calibrate(glm_tiny, folder, SHORT, **how)
        assert "--overwrite" not in str(caught.value.hint)
        assert tree(folder) == before


def test_an_interrupted_calibration_is_calibrates(glm_tiny: Path, toy: Path, tmp_path: Path) -> None:
    """Of a real one: convert refuses it, calibrate goes on with it beside a file of the user's."""
    with pytest.raises(KeyboardInterrupt):
        calibrate(glm_tiny, tmp_path / "out", SHORT, progress=lambda total: _interrupt)
    user_file(tmp_path / "out")
    for how in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError, match="quantkit calibrate") as caught:
            quantkit.convert(toy, tmp_path / "out", **how)  # type: ignore[arg-type]
        assert "calibrate --resume" in str(caught.value.hint)
    calibrate(glm_tiny, tmp_path / "out", SHORT, resume=True)
    with pytest.raises(OutputError, match="holds scales already"):
        calibrate(glm_tiny, tmp_path / "out", SHORT)

    calibrate(glm_tiny, tmp_path / "out", SHORT, overwrite=True)

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "calibration.json",
        "kv_scales.json",
        "thesis.txt",
    ]

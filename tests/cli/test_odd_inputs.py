"""Odd places and files: each gives an error that names what is wrong and how to fix it, and leaves nothing behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quantkit
from quantkit.calibration import DataOptions, Options, calibrate
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import INDEX_FILE, open_source
from quantkit.checkpoint.writer import write_whole
from quantkit.errors import OutputError, SourceError
from quantkit.folding import fold
from quantkit.folding.report import Way
from quantkit.verification import verify
from support.toys import ToyMaker

SCALES = {f"model.layers.{layer}.self_attn.k_scale": 2.0 for layer in range(4)}


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["n" * 300, "circle"])
def test_an_output_that_cannot_be(toy: Path, tmp_path: Path, name: str) -> None:
    """A name that is too long, and a link to itself."""
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OutputError, match=f"{name[:8]}.* cannot be written"):
        quantkit.convert(toy, tmp_path / name)


def test_a_file_is_no_folder(toy: Path, tmp_path: Path) -> None:
    """Neither as the output nor as the checkpoint."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file is a file, and the output is a folder"):
        quantkit.convert(toy, tmp_path / "file", overwrite=True)
    with pytest.raises(SourceError, match="file is a file, not the folder of a checkpoint"):
        quantkit.convert(tmp_path / "file", tmp_path / "out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_that_is_no_utf8_is_refused_first(make_toy: ToyMaker, tmp_path: Path) -> None:
    """The manifest could not hold it, so nothing is written."""
    folder = make_toy()
    (folder / os.fsdecode(b"side\xff.txt")).write_text("x")
    with pytest.raises(SourceError, match=r"side\\udcff\.txt") as caught:
        quantkit.convert(folder, tmp_path / "out")
    assert caught.value.hint == "Rename it."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("config.json", lambda text: text.replace("{", '{"vocab_size": 1,', 1), "'vocab_size' occurs twice"),
        (
            "config.json",
            lambda text: text.replace('"hidden_size": 256', '"hidden_size": NaN'),
            "hidden_size is nan, not a finite number",
        ),
        (INDEX_FILE, lambda text: text.replace("model-00001", "\\\\ud800-1", 1), "surrogates not allowed"),
        (INDEX_FILE, lambda text: "[1]", "has no weight_map"),
    ],
)
def test_loose_json_is_named(make_toy: ToyMaker, file: str, change: Callable[[str], str], told: str) -> None:
    """Names that occur twice, NaN, and names that no file can have; with the file's name and a remedy."""
    path = make_toy() / file
    path.write_text(change(path.read_text()).replace("\\\\", "\\"))
    with pytest.raises(SourceError, match=f"{file}.*{told}") as caught:
        open_source(path.parent)
    assert caught.value.hint == "Fix the file, or download it again."


def test_an_index_may_say_anything_beside_the_map(make_toy: ToyMaker) -> None:
    """`metadata` that is no mapping has no total_size, which `verify` tells."""
    folder = make_toy()
    edit_json(folder / INDEX_FILE, lambda index: index.update(metadata=[1]))
    found = {check.name: check for check in verify(folder).checks}
    assert found["index"].examples[0].startswith("total_size is None")


def test_verify_names_a_stray_file_that_is_damaged(make_toy: ToyMaker) -> None:
    """What is wrong with the checkpoint is in the result, not raised."""
    folder = make_toy()
    (folder / "stray.safetensors").write_text("x")
    found = {check.name: check for check in verify(folder).checks}
    assert any("stray.safetensors" in example for example in found["index"].examples)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda made: made.update(total_bytes="1"), r"Expected `int`, got `str` - at `\$\.total_bytes`"),
        (
            lambda made: made["source"].pop("shards_sha256"),
            r"Object missing required field `shards_sha256`",
        ),
        (lambda made: made.update(recipe={}), "recipe has no name, description and rules"),
        (lambda made: made["recipe"].update(engines="vLLM"), r"recipe\.engines is no list"),
        (lambda made: made.update(fold={"digest": "x"}), r"Object missing required field `layers` - at `\$\.fold`"),
        (lambda made: made["files"].update({"../x": {"nbytes": 1, "sha256": "x"}}), r"files names '\.\./x'"),
    ],
)
def test_a_damaged_manifest_is_refused_by_all(
    toy_int4: Path, toy: Path, tmp_path: Path, change: Callable[[dict[str, object]], object], told: str
) -> None:
    """One place reads it, so no command takes for granted what is not there; `verify` tells it as a problem."""
    folder = tmp_path / "int4"
    shutil.copytree(toy_int4, folder)
    edit_json(folder / "quantkit.json", change)
    with pytest.raises(SourceError, match=rf"quantkit\.json: cannot be read: {told}"):
        read_manifest(folder)
    result = verify(folder)
    assert not result.passed
    assert "quantkit.json" in result.checks[0].examples[0]


def test_a_checkpoint_keeps_calibration_out(glm_tiny: Path, tmp_path: Path) -> None:
    """Scales in the checkpoint's folder would become a part of it, and change its digest."""
    folder = tmp_path / "glm"
    shutil.copytree(glm_tiny, folder)
    for output in (folder, folder / "scales"):
        with pytest.raises(OutputError, match="lies in the checkpoint"):
            calibrate(folder, output, Options(DataOptions(tokens=16, length=8)))
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in glm_tiny.iterdir())


def test_an_interrupted_fold_in_place_is_taken_back(glm_tiny: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves the folder as it was, without another run."""
    folder = tmp_path / "glm"
    shutil.copytree(glm_tiny, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fold(folder, dict(SCALES), way=Way.IN_PLACE, progress=lambda total: interrupt)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_shard_that_goes_meanwhile_is_named(glm_tiny: Path, tmp_path: Path) -> None:
    """It could not be read; the output, which is written to, is not to blame."""
    folder = tmp_path / "glm"
    shutil.copytree(glm_tiny, folder)

    def delete(done: int) -> None:
        for shard in folder.glob("*.safetensors"):
            shard.unlink()

    with pytest.raises(SourceError, match=r"glm/model-.*cannot be read: No such file"):
        fold(folder, dict(SCALES), tmp_path / "out", workers=1, progress=lambda total: delete)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves what was there; links stay links, and what is no file is written to as it is."""
    path = tmp_path / "new" / "report.json"
    write_whole(path, b"first")
    (tmp_path / "link").symlink_to(path)
    write_whole(tmp_path / "link", b"second")
    assert ((tmp_path / "link").is_symlink(), path.read_bytes()) == (True, b"second")
    with pytest.raises(OutputError, match="/dev/full: cannot be written: No space left"):
        write_whole(Path("/dev/full"), b"x")

    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OutputError, match="No space left"):
        write_whole(path, b"third")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]
    assert path.read_bytes() == b"second"

"""The digest of a checkpoint: it changes with every byte that decides what the model says, and with nothing else."""

from pathlib import Path

import pytest

from quantkit.checkpoint.digest import GATE_FILE, checkpoint_digest, digest_of, hash_files, list_files
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.writer import File
from quantkit.errors import SourceError

FILES = {
    "config.json": "{}",
    "model.safetensors": "weights",
    "model.safetensors.index.json": "index",
    "chat_template.jinja": "template",
    "modeling_toy.py": "code",
    "tokenizer.json": "tokens",
    "encoding/vocabulary.txt": "words",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file of each kind."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_digest_changes_with_what_the_model_says(folder: Path, name: str) -> None:
    """Another byte, another name or a missing file gives another digest, whatever the file is."""
    path, digests = folder / name, {checkpoint_digest(folder)}

    path.write_text(FILES[name][::-1] + "!")
    digests.add(checkpoint_digest(folder))
    path.rename(path.with_name(f"other-{path.name}"))
    digests.add(checkpoint_digest(folder))
    path.with_name(f"other-{path.name}").unlink()
    digests.add(checkpoint_digest(folder))

    assert len(digests) == 4


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "NOTICE.txt", "quantkit.json", GATE_FILE, ".cache/x", ".git"])
def test_digest_ignores_what_is_about_the_model(folder: Path, name: str) -> None:
    """Documents, the manifest, the gate's result and hidden files say nothing to the model."""
    before = checkpoint_digest(folder)

    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("something")

    assert checkpoint_digest(folder) == before


def test_digest_is_that_of_the_manifest(toy_int4: Path, tmp_path: Path) -> None:
    """A conversion's manifest gives the same digest without reading the files, wherever the folder lies."""
    manifest = Manifest.from_json((toy_int4 / "quantkit.json").read_text())
    (tmp_path / "elsewhere").symlink_to(toy_int4)

    assert digest_of(manifest.files) == checkpoint_digest(toy_int4) == checkpoint_digest(tmp_path / "elsewhere")


def test_digest_is_this_one() -> None:
    """The digest never changes between versions: gate results and caches are found by it."""
    files = {"b": File(2, "22"), "a": File(1, "11"), "README.md": File(3, "33")}

    assert digest_of(files) == "f5ea3d201ae7eae6403d03f446b1accb814ca19a3f0326b634b4375d47896477"


def test_files_are_hashed_through_links_and_counted(folder: Path, tmp_path: Path) -> None:
    """Links, as the Hub's cache has them, are followed; progress adds up to all bytes."""
    (tmp_path / "link.json").symlink_to(folder / "config.json")
    counted: list[int] = []

    files = hash_files(list_files(folder), progress=counted.append)

    assert files["link.json"] == files["config.json"] == File(2, files["config.json"].sha256)
    assert sum(counted) == sum(file.nbytes for file in files.values())
    assert list(files) == sorted({*FILES, "link.json"})


def test_file_that_cannot_be_read_is_named(folder: Path) -> None:
    """What goes away meanwhile is a known error."""
    paths = list_files(folder)
    paths["tokenizer.json"].unlink()

    with pytest.raises(SourceError, match=r"tokenizer\.json: cannot be read"):
        hash_files(paths)

"""The wheel installs one import name, though kernels/, eval/ and recipes/ stand at the top of the repository.

They are reached through three links inside quantkit/. An `__init__.py` in one of them would make it importable under
its bare name from the repository's root, and `kernels` is the name of Hugging Face's package that transformers imports.
"""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

LINKED = ("kernels", "eval", "recipes")


@pytest.mark.parametrize("folder", LINKED)
def test_link_is_relative(folder: str) -> None:
    """quantkit/X is a committed relative link to ../X, so that a clone and an sdist carry it."""
    link = ROOT / "quantkit" / folder

    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


@pytest.mark.parametrize("folder", LINKED)
def test_no_init_in_linked_folders(folder: str) -> None:
    """No linked folder is a package under its bare name."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.exhaustive
def test_wheel_holds_one_import_name(tmp_path: Path) -> None:
    """The wheel's only top-level name is quantkit, and it ships the kernels, the evaluation and the recipes."""
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "tests", ".*_cache")
    tree = shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=ignored)  # setuptools leaves a build/ behind
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, tree]
    subprocess.run(command, check=True)

    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"quantkit"}
    sources = [path.relative_to(ROOT) for folder in LINKED for path in (ROOT / folder).rglob("*.[pyj]*")]
    assert {f"quantkit/{path}" for path in sources if "__pycache__" not in path.parts} <= set(names)
    assert "quantkit/py.typed" in names


def test_torch_is_pinned() -> None:
    """The constraints pin torch exactly: an unpinned one is a CUDA build of several GB."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    assert [line for line in lines if line.startswith("torch==")]


def test_every_dependency_has_a_lower_bound() -> None:
    """Each dependency says from which version on it works."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [entry for group in project["optional-dependencies"].values() for entry in group]

    assert [entry for entry in (*project["dependencies"], *extras) if ">=" not in entry] == []

"""The installed program in a process of its own, or in this one, which saves the time of loading it."""

import functools
import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from quantkit.cli import main

PROGRAM = Path(sysconfig.get_path("scripts")) / "quantkit"
Completed = subprocess.CompletedProcess[str]


class Result(NamedTuple):
    """How a run of the program ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str


Runner = Callable[..., Result]

_command = functools.cache(typer.main.get_command)  # the parsers of all commands, which are slower to make than to use


def run_here(*arguments: str | Path) -> Result:
    """Run the program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in ("QUANTKIT_DEBUG", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
        patch.setattr(typer.main, "get_command", _command)
        with pytest.raises(SystemExit) as leaving:
            main()
    assert isinstance(leaving.value.code, int)
    return Result(leaving.value.code, out.getvalue(), err.getvalue())


@pytest.fixture
def quantkit() -> Runner:
    """Runs the program in this process."""
    return run_here


@contextmanager
def told_of_hub(endpoint: str, home: Path) -> Iterator[None]:
    """This process knows the Hub at `endpoint`, its cache in `home`, and nothing else of this machine's settings of it.

    That is the environment, and what huggingface_hub read from it when it was imported.
    """
    from huggingface_hub import constants

    read = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
    read |= {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN_PATH": str(home / "token")}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HF_", "QUANTKIT_"))]:
            patch.delenv(name)
        patch.setenv("HF_TOKEN", "x")
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name, value in read.items():
            patch.setattr(constants, name, value)
        yield


def environment(**changes: str) -> dict[str, str]:
    """The environment for a process, without what would change the program's manners."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("QUANTKIT_")}
    ours.pop("FORCE_COLOR", None)
    return ours | changes


def hub_environment(endpoint: str, home: Path, **changes: str) -> dict[str, str]:
    """The same with the Hub at `endpoint`, its cache in `home`, and nothing else of this machine's settings of it."""
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "x", "HF_HUB_DISABLE_XET": "1"}
    variables = environment().items()
    ours = {
        name: value for name, value in variables if not name.startswith("HF_") and not name.lower().endswith("_proxy")
    }
    return ours | hub | {"HF_HUB_DISABLE_TELEMETRY": "1"} | changes


def run_program(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Run the installed program in a process of its own; `changes` go to its environment."""
    return subprocess.run([PROGRAM, *arguments], env=environment(**changes), capture_output=True, timeout=60)


def run_apart(*arguments: str | Path, endpoint: str, home: Path, **changes: str) -> Completed:
    """Run the installed program in a process of its own with the Hub at `endpoint` and its cache in `home`."""
    ours = hub_environment(endpoint, home, **changes)
    return subprocess.run([PROGRAM, *arguments], env=ours, capture_output=True, text=True, timeout=60)


def only_object(text: str) -> Any:
    """The one JSON object that `text` is, and nothing before or after it but a newline."""
    assert text.startswith("{")
    assert text.endswith("}\n")
    return json.loads(text)

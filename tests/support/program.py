"""The installed program in a process of its own, or in this one, which saves the time of loading it."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quantkit.cli import main

PROGRAM = Path(sysconfig.get_path("scripts")) / "quantkit"
Completed = subprocess.CompletedProcess[str]


class Result(NamedTuple):
    """How a run of the program ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str


Runner = Callable[..., Result]


@pytest.fixture
def quantkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs the program in this process."""
    for name in ("QUANTKIT_DEBUG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main()
        printed = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Result(leaving.value.code, printed.out, printed.err)

    return run


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


def only_object(text: str) -> Any:
    """The one JSON object that `text` is, and nothing before or after it but a newline."""
    assert text.startswith("{")
    assert text.endswith("}\n")
    return json.loads(text)

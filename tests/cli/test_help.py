"""`--help` explains everything, has examples that parse, and is quick; and what loads no heavy library."""

import json
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from quantkit.cli import app
from support.program import Result, Runner, environment, run_program

HEAVY = ("torch", "numpy", "numba", "transformers", "huggingface_hub")
ROOT: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {  # `recipes list` and the like come after `recipes`
    " ".join(words): command
    for name, group in ROOT.commands.items()
    for words, command in (
        ((name,), group),
        *(((name, action), command) for action, command in getattr(group, "commands", {}).items()),
    )
}


def run_python(code: str, *arguments: str | Path) -> Any:
    """Run `code` in a fresh interpreter and return the JSON value on the last line that it prints."""
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def examples(text: str) -> list[list[str]]:
    """The arguments of every command line in a help text."""
    return [line.split()[1:] for line in text.splitlines() if re.match(r"\s+quantkit \S", line)]


def test_help_of_the_program_has_examples(quantkit: Runner) -> None:
    """`quantkit --help` shows command lines to copy, each of which parses."""
    found = examples(quantkit("--help").stdout)

    assert found
    for command, *arguments in found:
        COMMANDS[command].make_context(command, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(quantkit: Runner, command: str) -> None:
    """The help of every command shows command lines of that command, each of which parses."""
    words = command.split()
    result = quantkit(*words, "--help")

    assert result.exit_code == 0
    assert result.stderr == ""
    found = examples(result.stdout)
    assert found
    for line in found:
        assert line[: len(words)] == words
        COMMANDS[command].make_context(command, line[len(words) :])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_parameter(command: str) -> None:
    """No argument or option is without a sentence of help that ends in a full stop."""
    for parameter in COMMANDS[command].params:
        assert (parameter.help or "").rstrip().endswith("."), parameter.name


def test_help_is_quick() -> None:
    """`quantkit --help` takes less than half a second, the best of five."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_program("--help").returncode == 0
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 0.5


def test_help_and_usage_errors_load_nothing_heavy() -> None:
    """Help, version and usage errors of every command come without torch, numpy, numba, transformers or the Hub's."""
    code = """if True:
        import json, sys
        from quantkit.cli import main
        names, *lines = sys.argv[1:]
        for line in lines:
            sys.argv = ["quantkit", *line.split()]
            try:
                main()
            except SystemExit:
                pass
        print(json.dumps([name for name in names.split(",") if name in sys.modules]))
    """
    complete = "recipes list", "bench decode", "bench integrity"  # which need nothing more
    incomplete = (name for name in COMMANDS if name not in complete)
    lines = ["", "--help", "--version", "nothing", *(f"{name} --help" for name in COMMANDS), *incomplete]

    assert run_python(code, ",".join(HEAVY), *lines) == []


def test_convert_and_verify_do_without_torch(toy: Path, tmp_path: Path) -> None:
    """Converting and verifying a folder loads neither torch, nor transformers, nor what speaks to the Hub."""
    code = """if True:
        import json, sys
        import quantkit
        source, output, names = sys.argv[1:]
        quantkit.convert(source, output)
        assert quantkit.verify(output, source).passed
        print(json.dumps([name for name in names.split(",") if name in sys.modules]))
    """

    assert run_python(code, toy, tmp_path / "output", "torch,transformers,safetensors,huggingface_hub") == []


def test_version(quantkit: Runner) -> None:
    """`--version` prints the version of the installed package."""
    assert quantkit("--version") == Result(0, f"quantkit {version('quantkit')}\n", "")

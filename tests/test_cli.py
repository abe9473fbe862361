"""The command line keeps its promises: exit codes, what goes to stdout and to stderr, a quick --help, safe outputs."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from quantkit.cli import app, main

PROGRAM = Path(sysconfig.get_path("scripts")) / "quantkit"
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


@dataclass(frozen=True)
class Result:
    """How a run of the program ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str


Runner = Callable[..., Result]


@pytest.fixture
def quantkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs the program in this process, which saves the time of loading it."""
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


def run_program(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Run the installed program in a process of its own; `changes` go to its environment."""
    return subprocess.run([PROGRAM, *arguments], env=environment(**changes), capture_output=True, timeout=60)


def run_python(code: str, *arguments: str | Path) -> Any:
    """Run `code` in a fresh interpreter and return the JSON value on the last line that it prints."""
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file below `folder`."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a converted checkpoint, but the manifest, which holds times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "quantkit.json"}


def only_object(text: str) -> Any:
    """The one JSON object that `text` is, and nothing before or after it but a newline."""
    assert text.startswith("{")
    assert text.endswith("}\n")
    return json.loads(text)


def damaged(checkpoint: Path, folder: Path) -> Path:
    """A copy of `checkpoint` with one byte of its first shard changed."""
    shutil.copytree(checkpoint, folder)
    shard = min(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return folder


def examples(text: str) -> list[list[str]]:
    """The arguments of every command line in a help text."""
    return [line.split()[1:] for line in text.splitlines() if re.match(r"\s+quantkit \S", line)]


# --- help and start-up


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


# --- results on stdout, talk on stderr, exit codes


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Inspection", ("inspect", "TOY")),
        ("Manifest", ("convert", "TOY", "--dry-run")),
        ("Manifest", ("convert", "TOY", "-o", "OUTPUT")),
        ("Verification", ("verify", "INT4", "--against", "TOY")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_json_is_one_object(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, kind: str, arguments: tuple[str, ...]
) -> None:
    """`--json` prints one object with its schema version first and its kind, and nothing else anywhere."""
    paths = {"TOY": toy, "INT4": toy_int4, "OUTPUT": tmp_path / "output"}
    result = quantkit(*(paths.get(argument, argument) for argument in arguments), "--json")

    assert result.exit_code == 0
    assert result.stderr == ""
    report = only_object(result.stdout)
    assert list(report)[:2] == ["schema_version", "kind"]
    assert report["schema_version"] == 1
    assert report["kind"] == kind


def test_json_of_a_conversion_is_its_manifest(quantkit: Runner, toy: Path, tmp_path: Path) -> None:
    """What `convert --json` prints is what it wrote to quantkit.json."""
    result = quantkit("convert", toy, "-o", tmp_path / "output", "--json")

    assert result.stdout == (tmp_path / "output" / "quantkit.json").read_text()


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_warnings_are_talk(quantkit: Runner, make_toy: Callable[..., Path], form: tuple[str, ...]) -> None:
    """A warning is on stderr, whatever is on stdout; under --json the object holds it too."""
    source = make_toy()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))

    result = quantkit("inspect", source, *form)

    assert result.exit_code == 0
    assert result.stderr.startswith("warning: model.norm.weight")
    assert "warning:" not in result.stdout
    if form:
        assert "model.norm.weight" in only_object(result.stdout)["warnings"][0]


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_failed_check_is_exit_code_3(quantkit: Runner, toy_int4: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    """`verify` of a damaged checkpoint prints its report all the same, then names on stderr what failed, and is 3."""
    folder = damaged(toy_int4, tmp_path / "damaged")

    result = quantkit("verify", folder, *form)

    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {folder} failed: ")
    assert "manifest" in result.stderr.splitlines()[0]
    if form:
        assert not only_object(result.stdout)["passed"]
    else:
        assert "FAILED" in result.stdout


EXCLUDE = "--int4, --nvfp4, --bf16 and --recipe exclude each other"
KNOWN_ERRORS: dict[str, tuple[int, str]] = {
    "inspect NOWHERE": (1, "NOWHERE: no such folder"),
    "inspect EMPTY": (1, "EMPTY: config.json is missing"),
    "convert NOWHERE --dry-run": (1, "NOWHERE: no such folder"),
    "convert TOY": (2, "where to?"),
    "convert TOY --int4 --bf16 --dry-run": (2, EXCLUDE),
    "convert TOY --int4 --nvfp4 --dry-run": (2, EXCLUDE),
    "convert TOY --nvfp4 --bf16 --dry-run": (2, EXCLUDE),
    "convert TOY --int4 --recipe bf16 --dry-run": (2, EXCLUDE),
    "convert TOY --nvfp4 --recipe glm-5.2-nvfp4 --dry-run": (2, EXCLUDE),
    "convert TOY --bf16 --group-size 64 --dry-run": (2, "--group-size needs a recipe with int4 in it; bf16 has none"),
    "convert TOY --nvfp4 --group-size 64 --dry-run": (2, "--group-size needs a recipe with int4 in it"),
    "convert TOY --nvfp4 --scale signed --dry-run": (1, "NVFP4 scales are never negative"),
    "convert TOY --format modelopt --dry-run": (1, "the format modelopt holds NVFP4, and not INT4"),
    "convert TOY --int4 --format modelopt --dry-run": (1, "the format modelopt holds NVFP4, and not INT4"),
    "convert TOY --recipe glm-5.2-int4 --format modelopt --dry-run": (1, "rule 1 of glm-5.2-int4 makes INT4"),
    "convert TOY --recipe glm-5.2-nvfp4 --format modelopt --dry-run": (1, "the format modelopt cannot hold"),
    "convert INT4 --format modelopt --dry-run": (1, "the format modelopt holds NVFP4, and not INT4"),
    "recipes show nothing": (2, "there is no recipe 'nothing'"),
    "recipes check NO-TYPES.yaml": (1, "NO-TYPES: model_types"),
    "recipes check bf16 NOWHERE": (1, "NOWHERE: no such folder"),
    "recipes check glm-4.x-int4 TOY": (1, "is made for glm4_moe, glm4_moe_lite"),
    "convert TOY --recipe nothing --dry-run": (2, "there is no recipe 'nothing'"),
    "convert TOY --recipe NOWHERE.yaml --dry-run": (1, "NOWHERE.yaml: cannot be read"),
    "convert TOY --recipe NOT-TEXT.yaml --dry-run": (1, "NOT-TEXT"),
    "convert TOY --recipe NO-TYPES.yaml --dry-run": (1, "NO-TYPES"),
    "convert TOY --group-size 48 --dry-run": (1, "group_size is 48; the engines take 32, 64, 128"),
    "convert INT4 --dry-run": (1, "INT4 is already converted"),
    "convert TOY -o TOY": (1, "overlap"),
    "convert TOY -o TOY/output --overwrite": (1, "overlap"),
    "verify NOWHERE": (1, "NOWHERE: no such folder"),
    "verify INT4 --against NOWHERE": (1, "NOWHERE: no such folder"),
    "push NOWHERE me/toy --yes": (1, "NOWHERE: no such folder"),
    "push INT4 toy --yes": (2, "toy is no repository id"),
    "push INT4 me/toy": (2, "nothing is sent unasked, and there is no terminal to ask on"),
    "eval INT4 --baseline TOY --text NOWHERE": (2, "NOWHERE: cannot be read"),
    "eval INT4 --baseline NOWHERE --text TEXT": (1, "NOWHERE: no such folder"),
}


@pytest.mark.parametrize("line", KNOWN_ERRORS)
def test_known_error_is_a_sentence(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """A fault that the user can mend prints `error:` and at most a `hint:` on stderr, and has its class's exit code."""
    exit_code, words = KNOWN_ERRORS[line]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("TEXT").write_text("some words\n")
    Path("TOY").symlink_to(toy)
    Path("INT4").symlink_to(toy_int4)
    Path("EMPTY").mkdir()
    Path("NOT-TEXT.yaml").write_bytes(b"\xff\xfe")
    Path("NO-TYPES.yaml").write_text("model_types: 3\nrules: [{roles: all, scheme: keep}]\n")
    before = tree(toy)

    result = quantkit(*(f"./{word}" if word.isupper() else word for word in line.split()))

    assert result.exit_code == exit_code
    assert result.stdout == ""
    first, *others = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert words in first
    assert all(other.startswith("hint: ") for other in others)
    assert tree(toy) == before


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("inspect ./NOWHERE", "Check the path."),
        ("convert ./TOY", "Give -o FOLDER, or --dry-run."),
        ("convert ./TOY --recipe nothing --dry-run", "Built in: bf16, deepseek-v3-int4"),
        ("convert ./TOY --format modelopt --dry-run", "Give --nvfp4 for NVFP4, or leave --format out for INT4."),
        ("convert ./TOY --int4 --format modelopt --dry-run", "Give --nvfp4 for NVFP4, or leave --format out for INT4."),
        ("convert ./TOY --recipe glm-5.2-nvfp4 --format modelopt --dry-run", "Give --rest bf16."),
        ("convert ./INT4 --int4 --dry-run", "Serve it as it is"),
        ("recipes check glm-4.x-int4 ./TOY", "quantkit recipes list says which recipe is for which model types."),
        ("convert ./TOY -o ./INT4", "Choose another folder, or give --overwrite."),
        ("convert ./TOY -o ./TOY", "Choose another output."),
    ],
)
def test_known_error_has_a_hint(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, hint: str
) -> None:
    """Where there is a remedy, the line after the error says it."""
    monkeypatch.chdir(tmp_path)
    Path("TOY").symlink_to(toy)
    Path("INT4").symlink_to(toy_int4)

    assert quantkit(*line.split()).stderr.splitlines()[1].startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "Usage: quantkit"),
        ("nothing", "nothing"),
        ("--nothing", "--nothing"),
        ("convert", "model"),
        ("convert source --nothing", "--nothing"),
        ("convert source --group-size many", "--group-size"),
        ("convert source --rest int8", "--rest"),
        ("convert source --scale best", "--scale"),
        ("convert source --format gguf", "--format"),
        ("recipes nothing", "nothing"),
        ("recipes show", "recipe"),
        ("convert source --workers 0", "--workers"),
        ("verify", "checkpoint"),
        ("push source", "repo"),
        ("eval source --text text", "--baseline"),
        ("eval source --text text --baseline other --window 1", "--window"),
    ],
)
def test_usage_error_is_exit_code_2(quantkit: Runner, line: str, words: str) -> None:
    """A command line that does not parse is refused on stderr, with the word that is wrong."""
    result = quantkit(*line.split())

    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


@pytest.mark.parametrize(("line", "exit_code"), [("inspect ./NOWHERE", 1), ("convert ./NOWHERE", 2)])
def test_debug_shows_the_traceback_of_a_known_error(line: str, exit_code: int) -> None:
    """QUANTKIT_DEBUG=1 adds where an error was raised, and changes nothing about how the program ends."""
    result = run_program(*line.split(), QUANTKIT_DEBUG="1")

    assert result.returncode == exit_code
    assert b"Traceback (most recent call last)" in result.stderr
    assert b"quantkit/cli/" in result.stderr
    assert result.stdout == b""


def test_eval_names_the_extra_that_it_needs(
    quantkit: Runner, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without transformers, which a plain installation lacks, `eval` says what to install instead of crashing."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text").write_text("some words\n")

    result = quantkit("eval", toy_int4, "--baseline", toy_int4, "--text", tmp_path / "text")

    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "quantkit[eval]" in result.stderr


# --- terminals


def test_conversion_without_a_terminal_prints_plain_text(toy: Path, tmp_path: Path) -> None:
    """In a pipe or a log file there are neither progress bars, nor colours, nor carriage returns; only the result."""
    result = run_program("convert", toy, "-o", tmp_path / "output")

    assert result.returncode == 0
    assert result.stderr == b""
    assert b"routed_expert" in result.stdout
    assert not {0x1B, 0x0D} & set(result.stdout)


def test_conversion_on_a_terminal_draws_progress_on_stderr(toy: Path, tmp_path: Path) -> None:
    """Progress is for the terminal that stderr is; stdout, which goes elsewhere, still is one JSON object."""
    terminal, stderr = pty.openpty()
    command: list[str | Path] = [PROGRAM, "convert", toy, "-o", tmp_path / "output", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment(TERM="xterm")) as process:
        os.close(stderr)
        drawn = b""
        with suppress(OSError):  # raised when the other end is closed
            while data := os.read(terminal, 65536):
                drawn += data
        os.close(terminal)
        assert process.stdout is not None
        printed = process.stdout.read()

    assert b"converting" in drawn
    assert b"\x1b" in drawn
    assert only_object(printed.decode())["kind"] == "Manifest"


# --- outputs


def test_dry_run_writes_nothing(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dry-run` says what would be written, to the byte, and touches neither the output nor the source."""
    monkeypatch.chdir(tmp_path)
    before = tree(toy)

    result = quantkit("convert", toy, "--dry-run", "-o", "output", "--json")

    planned, made = only_object(result.stdout), json.loads((toy_int4 / "quantkit.json").read_text())
    made["source"]["shards_sha256"] = {}  # nothing is read
    for key in ("source", "recipe", "quantization_config", "groups", "num_tensors", "total_bytes", "file_bytes"):
        assert planned[key] == made[key]
    assert planned["files"] == {}
    assert list(tmp_path.iterdir()) == []
    assert tree(toy) == before


@pytest.mark.parametrize("options", [(), ("--int4",), ("--recipe", "glm-5.2-int4")])
def test_int4_is_what_convert_does_by_itself(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """`convert` without a choice, `--int4` and the recipe's name give the same bytes; an empty folder will do."""
    (tmp_path / "output").mkdir()

    assert quantkit("convert", toy, *options, "-o", tmp_path / "output").exit_code == 0
    assert contents(tmp_path / "output") == contents(toy_int4)


def test_options_reach_the_recipe(quantkit: Runner, toy: Path) -> None:
    """--group-size, --scale and --rest change the recipe that the manifest records."""
    options = ("--group-size", "64", "--scale", "minmax", "--rest", "bf16")
    recipe = only_object(quantkit("convert", toy, *options, "--dry-run", "--json").stdout)["recipe"]

    assert {(rule.get("group_size"), rule.get("scale")) for rule in recipe["rules"] if rule["scheme"] == "int4"} == {
        (64, "minmax")
    }
    assert recipe["rules"][-1] == {"roles": "all", "scheme": "bf16"}


@pytest.mark.parametrize("there", ["folder", "own output", "file"])
def test_existing_output_is_refused(quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, there: str) -> None:
    """Without --overwrite nothing that exists is written to, not even an output of quantkit."""
    output = tmp_path / "output"
    if there == "own output":
        shutil.copytree(toy_int4, output)
    elif there == "folder":
        output.mkdir()
        (output / "notes.txt").write_text("mine")
    else:
        output.write_text("mine")
    before = tree(tmp_path)

    result = quantkit("convert", toy, "-o", output)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {output} exists and is not empty\nhint: ")
    assert tree(tmp_path) == before


def test_overwrite_replaces_an_own_output(quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """--overwrite leaves nothing of the earlier output: the folder is as if it had been empty."""
    quantkit("convert", toy, "--bf16", "-o", tmp_path / "output")
    (tmp_path / "output" / "left-over.safetensors").write_bytes(b"old")

    result = quantkit("convert", toy, "-o", tmp_path / "output", "--overwrite")

    assert result.exit_code == 0
    assert contents(tmp_path / "output") == contents(toy_int4)


@pytest.mark.parametrize("there", ["folder", "file"])
def test_overwrite_refuses_what_is_not_ours(quantkit: Runner, toy: Path, tmp_path: Path, there: str) -> None:
    """--overwrite does not remove what quantkit did not write."""
    output = tmp_path / "output"
    if there == "folder":
        shutil.copytree(toy, output)
    else:
        output.write_text("mine")
    before = tree(tmp_path)

    result = quantkit("convert", toy, "-o", output, "--overwrite")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {output} was not written by quantkit")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("options", [("--group-size", "48"), ("--recipe", "nothing"), ("--int4", "--bf16")])
def test_refused_conversion_leaves_an_own_output_alone(
    quantkit: Runner, toy: Path, toy_int4: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """--overwrite removes the earlier output only when there will be a new one."""
    shutil.copytree(toy_int4, tmp_path / "output")
    before = tree(tmp_path)

    result = quantkit("convert", toy, *options, "-o", tmp_path / "output", "--overwrite")

    assert result.exit_code in (1, 2)
    assert tree(tmp_path) == before

"""A fault of the user's is a sentence on stderr, with a remedy and its exit code, and never a traceback."""

import sys
from pathlib import Path

import pytest

from support.checkpoints import tree
from support.program import Runner, run_program

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
    """A fault that the user can fix prints `error:` and at most a `hint:` on stderr, and has its class's exit code."""
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

"""Earlier results are found again only for the same weights, task and settings, and a bad file does no harm."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import OutputError
from quantkit.eval.gate.history import FILE, History
from quantkit.eval.gate.runs import Item, TaskRun

SETTINGS: dict[str, Any] = {"lm_eval": "0.4.13", "definition": "1f3a", "seed": 0, "generation": {"until": ["\n"]}}
ITEMS = (Item("document", "prompt", {"acc,none": 1.0}), Item("other", "more", {"acc,none": 0.0}, ("empty answer",)))
RUN = TaskRun("arc_easy", SETTINGS, {"acc,none": True}, ITEMS, seconds=2.5)
WRITER = """if True:
    import sys
    from pathlib import Path
    from quantkit.eval.gate.history import History
    from quantkit.eval.gate.runs import TaskRun
    file, name = sys.argv[1:]
    history = History(Path(file))
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(40):
        history.keep("digest", TaskRun(f"{name} {number}", {}, {}, ()))
"""


@pytest.fixture
def history(tmp_path: Path) -> History:
    """A history that holds `RUN` by the checkpoint `digest`."""
    made = History(tmp_path / FILE)
    made.keep("digest", RUN)
    return made


def test_a_run_is_found_again(history: History, tmp_path: Path) -> None:
    """What was kept is found, by another process's history as well, and whatever the order of the settings."""
    backwards = dict(reversed(SETTINGS.items()))

    assert history.find("digest", "arc_easy", SETTINGS) == RUN
    assert History(tmp_path / FILE).find("digest", "arc_easy", backwards) == RUN


def test_other_weights_or_another_task_are_another_key(history: History) -> None:
    """A run is of one checkpoint's content and one task."""
    assert history.find("other digest", "arc_easy", SETTINGS) is None
    assert history.find("digest", "arc_challenge", SETTINGS) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"lm_eval": "0.5.0"},
        {"definition": "77d0"},
        {"seed": 1},
        {"generation": {"until": ["\n"], "temperature": 0.6}},
        {"generation": None},
        {"chat_template": "9c2e"},
    ],
    ids=str,
)
def test_other_settings_are_another_key(history: History, changes: dict[str, Any]) -> None:
    """A run with another version, definition, seed, sampling or template is not this one; both can be kept."""
    other = replace(RUN, settings=SETTINGS | changes, items=ITEMS[:1])

    assert history.find("digest", "arc_easy", other.settings) is None
    history.keep("digest", other)
    assert history.find("digest", "arc_easy", other.settings) == other
    assert history.find("digest", "arc_easy", SETTINGS) == RUN


def test_other_pages_are_another_key(history: History) -> None:
    """A run on pages of another dtype, or with other KV scales, is not this one, wherever the scales are from."""
    pages = {"kv": "fp8", "scales": "a file", "scales_digest": "1f3a"}
    other = replace(RUN, items=ITEMS[:1], pages=pages, remarks=("7 values were clamped",))

    assert history.find("digest", "arc_easy", SETTINGS, pages) is None
    history.keep("digest", other)
    assert history.find("digest", "arc_easy", SETTINGS, pages | {"scales": "another file"}) == other
    assert history.find("digest", "arc_easy", SETTINGS, pages | {"scales_digest": "77d0"}) is None
    assert history.find("digest", "arc_easy", SETTINGS, {"kv": "bf16"}) is None
    assert history.find("digest", "arc_easy", SETTINGS) == RUN


def test_a_later_run_takes_the_place(history: History) -> None:
    """Keeping a run of the same key again leaves the later one."""
    history.keep("digest", replace(RUN, seconds=9.0))

    found = history.find("digest", "arc_easy", SETTINGS)
    assert found is not None
    assert found.seconds == 9.0


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history without a file finds nothing, and writes nowhere."""
    monkeypatch.chdir(tmp_path)
    history = History(None)

    history.keep("digest", RUN)

    assert history.find("digest", "arc_easy", SETTINGS) is None
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made(tmp_path: Path) -> None:
    """A history in a folder that is not there yet begins empty."""
    history = History(tmp_path / "new" / "folder" / FILE)

    assert history.find("digest", "arc_easy", SETTINGS) is None
    history.keep("digest", RUN)
    assert history.find("digest", "arc_easy", SETTINGS) == RUN


@pytest.mark.parametrize(
    "damaged",
    ["", "3", "null", "[]", "{}", RUN.to_json()[:-20], RUN.to_json().replace('"schema": 1', '"schema": 0')],
    ids=["nothing", "number", "null", "list", "empty", "cut", "older"],
)
def test_a_damaged_or_older_row_is_run_anew(history: History, tmp_path: Path, damaged: str) -> None:
    """A row that is no run of this version is not found, and the next run takes its place."""
    with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
        database.execute("UPDATE runs SET run = ?", (damaged,))

    assert history.find("digest", "arc_easy", SETTINGS) is None
    history.keep("digest", RUN)
    assert history.find("digest", "arc_easy", SETTINGS) == RUN


@pytest.mark.parametrize("there", ["text", "folder", "other table", "below a file"])
def test_a_file_that_is_no_history_is_refused(tmp_path: Path, there: str) -> None:
    """What is no history raises an error that says the remedy, already when a run is looked for, and is left alone."""
    path = tmp_path / FILE
    if there == "text":
        path.write_text("some notes that are no SQLite database\n" * 10)
    elif there == "folder":
        path.mkdir()
    elif there == "other table":
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE runs (mine TEXT)")
    else:
        path.write_text("some notes\n")
        path /= "history.sqlite"
    before = [entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()]

    for use in (
        lambda: History(path).find("digest", "arc_easy", SETTINGS),
        lambda: History(path).keep("digest", RUN),
    ):
        with pytest.raises(OutputError) as caught:
            use()
        assert str(caught.value).startswith(f"{path}: results cannot be kept or found: ")
        assert caught.value.hint == "Give another file with --history, or --no-history."

    assert [entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()] == before


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    """Two processes that make the file and write to it at the same time lose nothing."""
    path = tmp_path / FILE
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()

    for writer in writers:
        writer.communicate(timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT COUNT(*) FROM runs").fetchone() == (80,)

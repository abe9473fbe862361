"""`quantkit push` finds what would fail later before a byte is sent, and tells all of it at once."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.digest import GATE_FILE
from quantkit.eval.gate.report import Verdict
from support.hub.pushing import REPO, WEIGHTS, Push, assert_nothing_sent, assert_refused, gate

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, by huggingface_hub


def test_dry_run_sends_nothing_and_shows_the_card(push: Push, hub: Any) -> None:
    """--dry-run makes all checks and prints the card and what would be sent."""
    result = push("--dry-run")

    assert result.returncode == 0, result.stderr
    assert_nothing_sent(hub)
    assert "# toy-int4" in result.stdout
    assert "8 files, 8 to send" in result.stdout.splitlines()[-1]


def without_gate(hub: Any, folder: Path) -> None:
    (folder / GATE_FILE).unlink()


def failed_gate(hub: Any, folder: Path) -> None:
    (folder / GATE_FILE).write_text(gate(folder, verdict=Verdict.CANNOT_DECIDE).to_json())


def gate_of_other_weights(hub: Any, folder: Path) -> None:
    (folder / GATE_FILE).write_text(gate(folder, candidate_digest="0" * 64).to_json())


def no_gate_report(hub: Any, folder: Path) -> None:
    shutil.copy(folder / "quantkit.json", folder / GATE_FILE)


def damaged_weights(hub: Any, folder: Path) -> None:
    data = bytearray((folder / WEIGHTS[0]).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS[0]).write_bytes(data)


def other_config(hub: Any, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))


def no_manifest(hub: Any, folder: Path) -> None:
    (folder / "quantkit.json").unlink()


def wrong_model_index(hub: Any, folder: Path) -> None:
    (folder / "README.md").write_text("---\nmodel-index:\n- name: toy\n  results:\n  - task: {}\n---\n")


def no_metadata(hub: Any, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [\n---\n")


def binary_readme(hub: Any, folder: Path) -> None:
    (folder / "README.md").write_bytes(b"\xff\xfe")


def public(hub: Any, folder: Path) -> None:
    hub.create(REPO, {})


def private(hub: Any, folder: Path) -> None:
    hub.create(REPO, {}, private=True)


def stale_weights(hub: Any, folder: Path) -> None:
    hub.create(REPO, {"model-00001-of-00001.safetensors": b"old"})


def expired_token(hub: Any, folder: Path) -> None:
    hub.fail("/api/whoami-v2", status=401, times=9)


def reading_token(hub: Any, folder: Path) -> None:
    hub.state.role = "read"


def strict_hub(hub: Any, folder: Path) -> None:
    hub.state.metadata_errors.append('"license" must be one of a list')


def huge_file(hub: Any, folder: Path) -> None:
    with (folder / "model-00003-of-00003.safetensors").open("wb") as file:
        file.truncate(51 * 10**9)  # sparse


TROUBLES: dict[str, tuple[Callable[[Any, Path], None], tuple[str, ...], str]] = {
    "no gate": (without_gate, (), "there is no result of the accuracy gate"),
    "undecided gate": (failed_gate, (), "its verdict is cannot decide"),
    "gate of other weights": (gate_of_other_weights, (), "it is about other weights"),
    "no gate report": (no_gate_report, (), "is no result of the accuracy gate"),
    "damaged weights": (damaged_weights, ("--no-gate",), f"manifest: {WEIGHTS[0]} has another sha256"),
    "config against disk": (other_config, ("--no-gate",), "config: SGLang: "),
    "no manifest": (no_manifest, (), "has no quantkit.json"),
    "wrong model-index": (wrong_model_index, (), "the card's metadata are not valid: "),
    "metadata that are no YAML": (no_metadata, (), "README.md: its metadata are no YAML"),
    "README that is no text": (binary_readme, (), "README.md cannot be read as UTF-8 text"),
    "metadata the Hub refuses": (strict_hub, (), '"license" must be one of a list'),
    "public, private asked": (public, ("--private",), f"{REPO} is public and should be private"),
    "private, public asked": (private, ("--public",), f"{REPO} is private and should be public"),
    "weights of another": (stale_weights, (), "model-00001-of-00001.safetensors"),
    "pull request for nothing": (lambda hub, folder: None, ("--pr",), "to open a pull request for"),
    "pull request for no branch": (public, ("--pr", "--revision", "x"), "there is no revision x"),
    "expired token": (expired_token, (), "set HF_TOKEN to a valid one"),
    "token that may only read": (reading_token, (), "the token may only read"),
    "file over 50 GB": (huge_file, ("--no-gate",), "model-00003-of-00003.safetensors has 51,000,000,000 bytes"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_preflight_refuses_in_words(push: Push, hub: Any, judged: Path, name: str) -> None:
    """Whatever would fail later is found before a byte is sent, named, and is exit code 3."""
    prepare, options, words = TROUBLES[name]
    prepare(hub, judged)

    result = push(*options)

    assert_refused(result, 3, words, "one problem", "hint: Nothing was sent.")
    assert_nothing_sent(hub)


def test_preflight_tells_all_problems_at_once(push: Push, hub: Any, judged: Path) -> None:
    """One run names everything that is wrong, each with its remedy; a file that is too large is not even read."""
    for prepare in (huge_file, wrong_model_index, without_gate, stale_weights):
        prepare(hub, judged)

    result = push("--private")

    lines = result.stderr.splitlines()
    assert lines[0].endswith("5 problems:")
    assert all(re.search(r"\(.+\)$", line) for line in lines[1:6])
    assert_refused(
        result, 3, "is public", "51,000,000,000 bytes", "metadata are not valid", "no result of the accuracy"
    )
    assert_nothing_sent(hub)


def test_missing_token(push: Push, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token nothing is even asked that needs one."""
    monkeypatch.delenv("HF_TOKEN")

    assert_refused(push(), 3, "there is no token for the Hub (Set HF_TOKEN.)")
    assert_nothing_sent(hub)


def test_offline(program: Push, hub: Any) -> None:
    """Where the Hub may not be asked the message says so."""
    assert_refused(program(HF_HUB_OFFLINE="1"), 3, "the Hub: ", "offline mode is enabled")
    assert hub.requests == ()

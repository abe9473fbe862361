"""`quantkit push`: what is sent, in which order, and only if somebody says so."""

import hashlib
import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.digest import GATE_FILE
from quantkit.checkpoint.writer import File
from quantkit.eval.gate.report import Verdict
from quantkit.publishing import Publication, Target
from quantkit.publishing.card import NO_GATE, parse_card
from quantkit.remote import Upload
from support.hub.pushing import (
    LAST,
    REPO,
    SIDE,
    WEIGHTS,
    Push,
    assert_nothing_sent,
    assert_published,
    assert_refused,
    gate,
    local,
)
from support.program import PROGRAM, hub_environment
from support.tiers import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, by huggingface_hub


def test_push_publishes_the_folder_and_a_card(program: Push, hub: Any, judged: Path) -> None:
    """Every file is on the Hub byte for byte, with a card, in a new public repository; the report names the commit."""
    result = program("--json")

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged)
    assert not hub.is_private(REPO)
    report = json.loads(result.stdout)
    assert (report["kind"], report["repo"], report["uploaded"], report["already_there"]) == (
        "PublishReport",
        REPO,
        8,
        0,
    )
    assert report["url"] == f"{hub.endpoint}/{REPO}"
    assert report["commit"] == hub.head(REPO)
    for name, data in hub.files(REPO).items():
        if name != ".gitattributes":
            assert report["files"][name] == {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_weights_go_first_and_index_and_config_last(push: Push, hub: Any) -> None:
    """At no time is there a repository that loads and is not complete."""
    push()

    assert [commit.added for commit in hub.commits(REPO)] == [WEIGHTS, SIDE, ("README.md",), LAST]


def test_batches_are_bounded() -> None:
    """A commit has at most 25 files and 100 GB; the order is kept."""
    sizes = [10**9] * 30 + [60 * 10**9, 60 * 10**9, 1]
    uploads = tuple(Upload(f"{number:02}.safetensors", b"", File(size, "")) for number, size in enumerate(sizes))
    publication = Publication(Target(REPO), None, {}, uploads, "")

    batches = [batch for _, batch in publication.batches]

    assert [len(batch) for batch in batches] == [25, 6, 2]
    assert tuple(upload for batch in batches for upload in batch) == uploads


def test_card_tells_what_was_measured(push: Push, hub: Any, judged: Path, toy: Path, tmp_path: Path) -> None:
    """The published card has the source's licence, the gate's result, and with --against the error of each role."""
    source = shutil.copytree(toy, tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: zai-org/GLM-5.2\n---\n# GLM\n")

    result = push("--against", source)

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    card = parse_card(hub.files(REPO)["README.md"].decode(), "README.md")
    assert (card.metadata["license"], card.metadata["base_model"]) == ("mit", "zai-org/GLM-5.2")
    assert card.metadata["model-index"][0]["results"][0]["dataset"]["name"] == "gsm8k"
    assert "Verdict: **pass**" in card.text
    assert re.search(r"^\| routed_expert \| int4 g=32 \| 24 \| \d\.\d+% ", card.text, re.MULTILINE)


@pytest.mark.exhaustive
def test_card_of_a_source_on_the_hub(program: Push, hub: Any, judged: Path, toy: Path, tmp_path: Path) -> None:
    """For a source that was fetched from the Hub, its card is fetched at that commit, and it is the base model."""
    source = shutil.copytree(toy, tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: somebody/else\n---\n")
    manifest = json.loads((judged / "quantkit.json").read_text())
    manifest["source"] |= {"name": "owner/toy", "revision": hub.add("owner/toy", source)}
    (judged / "quantkit.json").write_text(json.dumps(manifest))

    assert program().returncode == 0
    card = parse_card(hub.files(REPO)["README.md"].decode(), "README.md")
    assert (card.metadata["license"], card.metadata["base_model"]) == ("mit", "owner/toy")
    assert f"`owner/toy` at revision `{manifest['source']['revision']}`" in card.text


@pytest.mark.exhaustive
def test_weights_go_through_xet(program: Push, hub: Any, judged: Path, tmp_path: Path) -> None:
    """As on the real Hub, the client's Xet library sends the weights, under the hashes that the preflight found."""
    store = tmp_path / "xet"
    store.mkdir()
    hub.use_xet(store, [(judged / name).read_bytes() for name in WEIGHTS])

    result = program(HF_HUB_DISABLE_XET="0")

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged)
    assert hub.sent == []
    stored = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert stored > sum((judged / name).stat().st_size for name in WEIGHTS) / 2


def test_second_push_sends_nothing(push: Push, hub: Any) -> None:
    """What is already there is not sent again: no bytes, no commit."""
    push()
    commits, sent = len(hub.commits(REPO)), list(hub.sent)

    result = push("--json")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["uploaded"], report["uploaded_bytes"], report["already_there"]) == (0, 0, 8)
    assert report["commit"] == hub.head(REPO)
    assert (len(hub.commits(REPO)), hub.sent) == (commits, sent)


def test_changed_weights_take_the_old_config_out_first(push: Push, hub: Any, judged: Path) -> None:
    """An update withdraws index and config with its first commit, so that they never meet weights of another kind."""
    old = local(judged) | {WEIGHTS[0]: b"old", "LICENSE": b"text"}
    hub.create(REPO, old)

    result = push()

    assert result.returncode == 0, result.stderr
    commits = hub.commits(REPO)
    assert [commit.added for commit in commits] == [(WEIGHTS[0],), ("README.md",), LAST]
    assert [commit.deleted for commit in commits] == [LAST, (), ()]
    assert hub.files(REPO)[WEIGHTS[0]] == (judged / WEIGHTS[0]).read_bytes()
    assert hub.files(REPO)["LICENSE"] == b"text"


def test_private_repository(push: Push, hub: Any) -> None:
    """--private makes a private repository."""
    assert push("--private").returncode == 0
    assert hub.is_private(REPO)


@pytest.mark.parametrize("exists", [False, True])
def test_revision_is_a_branch(push: Push, hub: Any, judged: Path, exists: bool) -> None:
    """--revision publishes to a branch, which is made if it is not there; the main branch stays as it is."""
    hub.create(REPO, {".gitattributes": b"x"})
    if exists:
        hub.branch(REPO, "g32")

    result = push("--revision", "g32")

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged, "g32")
    assert hub.files(REPO) == {".gitattributes": b"x"}
    assert b"--revision g32" in hub.files(REPO, "g32")["README.md"]


def test_pull_request_holds_all_commits(push: Push, hub: Any, judged: Path) -> None:
    """--pr opens one pull request, with the first commit, and puts all others into it."""
    hub.create(REPO, {".gitattributes": b"x"})

    result = push("--pr", "--json")

    assert result.returncode == 0, result.stderr
    assert {commit.revision for commit in hub.commits(REPO)} == {"refs/pr/1"}
    assert_published(hub, judged, "refs/pr/1")
    assert hub.files(REPO) == {".gitattributes": b"x"}
    assert json.loads(result.stdout)["url"] == f"{hub.endpoint}/{REPO}/discussions/1"


def test_gate_result_from_elsewhere_is_published_too(push: Push, hub: Any, judged: Path, tmp_path: Path) -> None:
    """--gate FILE is the evidence for the card's claim, and goes along as quantkit-gate.json."""
    (judged / GATE_FILE).rename(tmp_path / "result.json")

    assert push("--gate", tmp_path / "result.json").returncode == 0
    assert hub.files(REPO)[GATE_FILE] == (tmp_path / "result.json").read_bytes()


def test_without_gate_the_card_says_so(push: Push, hub: Any, judged: Path) -> None:
    """--no-gate publishes a checkpoint whose gate failed, without that result, and the card says there is none."""
    (judged / GATE_FILE).write_text(gate(judged, verdict=Verdict.FAIL).to_json())

    result = push("--no-gate")

    assert result.returncode == 0, result.stderr
    assert NO_GATE in hub.files(REPO)["README.md"].decode()
    assert GATE_FILE not in hub.files(REPO)


def test_what_is_not_of_the_conversion_is_mentioned(push: Push, judged: Path) -> None:
    """A file that somebody put into the folder is published with a warning; a missing licence is one too."""
    (judged / "notes.txt").write_text("mine")
    (judged / GATE_FILE).write_text(gate(judged).to_json())

    result = push()

    assert result.returncode == 0, result.stderr
    assert "warning: not of the conversion, and published all the same: notes.txt" in result.stderr
    assert "warning: no licence is known" in result.stderr


# --- asking


def test_nothing_is_sent_unasked(hub: Any, judged: Path, tmp_path: Path) -> None:
    """Where nobody can be asked, --yes is needed before anything else happens."""
    command = [PROGRAM, "push", judged, REPO]
    ours = hub_environment(hub.endpoint, tmp_path / "home")
    result = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    assert_refused(result, 2, "nothing is sent unasked", "Give --yes")
    assert hub.requests == ()


@pytest.mark.parametrize(("answer", "exit_code"), [(b"\n", 1), exhaustive(b"y\n", 0)])
def test_terminal_is_asked(hub: Any, judged: Path, tmp_path: Path, answer: bytes, exit_code: int) -> None:
    """On a terminal the repository, its visibility, the files and bytes are shown; only a yes sends them."""
    terminal, theirs = pty.openpty()
    command = [PROGRAM, "push", judged, REPO, "--private", "--json"]
    ours = hub_environment(hub.endpoint, tmp_path / "home", TERM="dumb")
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ours) as process:
        os.close(theirs)
        os.write(terminal, answer)
        printed, said = process.communicate(timeout=60)
        os.close(terminal)

    assert process.returncode == exit_code
    assert re.search(rf"Send 8 files, [\d,]+ bytes, to the private repository {REPO}\?", said.decode())
    if exit_code:
        assert_nothing_sent(hub)
    else:
        assert_published(hub, judged)
        assert json.loads(printed)["private"]

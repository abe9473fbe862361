"""`quantkit push`: refused before a byte is sent, or complete; resumed, compared at the end, and never half loadable.

The real client sends to a Hub on loopback that fails at will. Most tests run the program in this process, which saves
the time of loading it; huggingface_hub, which reads its settings when it is imported, is told of the Hub then.
"""

import hashlib
import importlib.util
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import constants

from quantkit.card import NO_GATE, parse_card
from quantkit.checkpoint.digest import GATE_FILE, checkpoint_digest
from quantkit.cli import main
from quantkit.publish import Publication, Target
from quantkit.remote import Upload
from quantkit.report import AccuracyReport, Comparison, File, Verdict

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, by huggingface_hub
PROGRAM = Path(sysconfig.get_path("scripts")) / "quantkit"
REPO = "owner/toy-int4"
COMMIT = f"/api/models/{REPO}/commit/main"
WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LAST = ("config.json", "model.safetensors.index.json")
SIDE = ("quantkit-gate.json", "quantkit.json", "tokenizer.json")
WRITES = {"PUT", "/preupload/", "/commit/", "/repos/create", "/branch/", "/lfs/"}
Completed = subprocess.CompletedProcess[str]
Push = Callable[..., Completed]


def load(name: str) -> ModuleType:
    """Import a module beside this one, which is on no import path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load("hub_server")
UploadHub: Any = load("hub_uploads").UploadHub


def gate(folder: Path, **changes: Any) -> AccuracyReport:
    """The gate's result for the checkpoint in `folder`."""
    task = Comparison("gsm8k", "exact_match", "", 100, 90, 89, 3, 2, -0.01, -0.04, 0.02, 1.0, 1.0, 0.05, True)
    report = {
        "candidate": "toy-int4",
        "baseline": "toy",
        "candidate_digest": checkpoint_digest(folder),
        "baseline_digest": "0" * 64,
        "suite": "quick",
        "rule": "paired",
        "max_drop": 0.05,
        "verdict": Verdict.PASS,
        "reasons": ("the lower bound -4.00 is above -5.00",),
        "tasks": (task,),
        "pooled": None,
        "needed_items": None,
        "distribution": None,
        "settings": {},
        "seconds": {},
    }
    return AccuracyReport(**(report | changes))


def environment(endpoint: str, home: Path, **changes: str) -> dict[str, str]:
    """The environment of the product, with the Hub at `endpoint` and nothing else of this machine's settings."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "QUANTKIT_")) and not name.lower().endswith("_proxy") and name != "FORCE_COLOR"
    }
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "x", "HF_HUB_DISABLE_XET": "1"}
    return ours | hub | {"HF_HUB_DISABLE_TELEMETRY": "1"} | changes


@pytest.fixture
def folder(toy_int4: Path, tmp_path: Path) -> Path:
    """A converted checkpoint with the gate's result beside it."""
    shutil.copytree(toy_int4, tmp_path / "int4")
    (tmp_path / "int4" / GATE_FILE).write_text(gate(toy_int4).to_json())
    return tmp_path / "int4"


@pytest.fixture
def hub() -> Iterator[Any]:
    """A Hub that holds nothing."""
    with UploadHub() as server:
        yield server


@pytest.fixture
def push(
    hub: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Push:
    """Runs `quantkit push` of `folder` to `hub` without asking, in this process; options follow."""
    for name in [name for name in os.environ if name.startswith(("HF_", "QUANTKIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run(*options: str | Path) -> Completed:
        command = ["quantkit", "push", str(folder), REPO, "--yes", *map(str, options)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main()
        return Completed(command, int(leaving.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def program(hub: Any, folder: Path, tmp_path: Path) -> Push:
    """Does the same with the installed program."""

    def run(*options: str | Path, **changes: str) -> Completed:
        command: list[str | Path] = [PROGRAM, "push", folder, REPO, "--yes", *options]
        ours = environment(hub.endpoint, tmp_path / "home", **changes)
        return subprocess.run(command, env=ours, capture_output=True, text=True, timeout=60)

    return run


def local(folder: Path) -> dict[str, bytes]:
    """The bytes of a folder's files but the card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def assert_published(hub: Any, folder: Path, revision: str = "main") -> None:
    """The Hub has every file of the folder, and a card."""
    there = hub.files(REPO, revision)
    assert b"# toy-int4" in there.pop("README.md")
    there.pop(".gitattributes", None)
    assert there == local(folder)


def assert_nothing_sent(hub: Any) -> None:
    """Not one request that changes anything came in."""
    asked = [f"{request.method} {request.path}" for request in hub.requests]
    assert [line for line in asked if any(word in line for word in WRITES)] == []


def assert_refused(result: Completed, exit_code: int, *words: str) -> None:
    """The run ended in words on stderr, and printed nothing else."""
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert re.search(r"^error: ", result.stderr, re.MULTILINE)
    assert re.search(r"^hint: ", result.stderr, re.MULTILINE)
    for word in words:
        assert word in result.stderr, result.stderr


# --- a complete upload


def test_push_publishes_the_folder_and_a_card(program: Push, hub: Any, folder: Path) -> None:
    """Every file is on the Hub byte for byte, with a card, in a new public repository; the report names the commit."""
    result = program("--json")

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder)
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


def test_card_tells_what_was_measured(push: Push, hub: Any, folder: Path, toy: Path, tmp_path: Path) -> None:
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
    assert re.search(r"^\| routed_expert \| int4 g=32 \| 12 \| \d\.\d+% ", card.text, re.MULTILINE)


def test_card_of_a_source_on_the_hub(program: Push, hub: Any, folder: Path, toy: Path, tmp_path: Path) -> None:
    """For a source that was fetched from the Hub, its card is fetched at that commit, and it is the base model."""
    source = shutil.copytree(toy, tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: somebody/else\n---\n")
    manifest = json.loads((folder / "quantkit.json").read_text())
    manifest["source"] |= {"name": "owner/toy", "revision": hub.add("owner/toy", source)}
    (folder / "quantkit.json").write_text(json.dumps(manifest))

    assert program().returncode == 0
    card = parse_card(hub.files(REPO)["README.md"].decode(), "README.md")
    assert (card.metadata["license"], card.metadata["base_model"]) == ("mit", "owner/toy")
    assert f"`owner/toy` at revision `{manifest['source']['revision']}`" in card.text


def test_weights_go_through_xet(program: Push, hub: Any, folder: Path, tmp_path: Path) -> None:
    """As on the real Hub, the client's Xet library sends the weights, under the hashes that the preflight found."""
    store = tmp_path / "xet"
    store.mkdir()
    hub.use_xet(store, [(folder / name).read_bytes() for name in WEIGHTS])

    result = program(HF_HUB_DISABLE_XET="0")

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder)
    assert hub.sent == []
    stored = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert stored > sum((folder / name).stat().st_size for name in WEIGHTS) / 2


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


def test_changed_weights_take_the_old_config_out_first(push: Push, hub: Any, folder: Path) -> None:
    """An update withdraws index and config with its first commit, so that they never meet weights of another kind."""
    old = local(folder) | {WEIGHTS[0]: b"old", "LICENSE": b"text"}
    hub.create(REPO, old)

    result = push()

    assert result.returncode == 0, result.stderr
    commits = hub.commits(REPO)
    assert [commit.added for commit in commits] == [(WEIGHTS[0],), ("README.md",), LAST]
    assert [commit.deleted for commit in commits] == [LAST, (), ()]
    assert hub.files(REPO)[WEIGHTS[0]] == (folder / WEIGHTS[0]).read_bytes()
    assert hub.files(REPO)["LICENSE"] == b"text"


def test_private_repository(push: Push, hub: Any) -> None:
    """--private makes a private repository."""
    assert push("--private").returncode == 0
    assert hub.is_private(REPO)


@pytest.mark.parametrize("exists", [False, True])
def test_revision_is_a_branch(push: Push, hub: Any, folder: Path, exists: bool) -> None:
    """--revision publishes to a branch, which is made if it is not there; the main branch stays as it is."""
    hub.create(REPO, {".gitattributes": b"x"})
    if exists:
        hub.branch(REPO, "g32")

    result = push("--revision", "g32")

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder, "g32")
    assert hub.files(REPO) == {".gitattributes": b"x"}
    assert b"--revision g32" in hub.files(REPO, "g32")["README.md"]


def test_pull_request_holds_all_commits(push: Push, hub: Any, folder: Path) -> None:
    """--pr opens one pull request, with the first commit, and puts all others into it."""
    hub.create(REPO, {".gitattributes": b"x"})

    result = push("--pr", "--json")

    assert result.returncode == 0, result.stderr
    assert {commit.revision for commit in hub.commits(REPO)} == {"refs/pr/1"}
    assert_published(hub, folder, "refs/pr/1")
    assert hub.files(REPO) == {".gitattributes": b"x"}
    assert json.loads(result.stdout)["url"] == f"{hub.endpoint}/{REPO}/discussions/1"


def test_gate_result_from_elsewhere_is_published_too(push: Push, hub: Any, folder: Path, tmp_path: Path) -> None:
    """--gate FILE is the evidence for the card's claim, and goes along as quantkit-gate.json."""
    (folder / GATE_FILE).rename(tmp_path / "result.json")

    assert push("--gate", tmp_path / "result.json").returncode == 0
    assert hub.files(REPO)[GATE_FILE] == (tmp_path / "result.json").read_bytes()


def test_without_gate_the_card_says_so(push: Push, hub: Any, folder: Path) -> None:
    """--no-gate publishes a checkpoint whose gate failed, without that result, and the card says there is none."""
    (folder / GATE_FILE).write_text(gate(folder, verdict=Verdict.FAIL).to_json())

    result = push("--no-gate")

    assert result.returncode == 0, result.stderr
    assert NO_GATE in hub.files(REPO)["README.md"].decode()
    assert GATE_FILE not in hub.files(REPO)


def test_what_is_not_of_the_conversion_is_mentioned(push: Push, folder: Path) -> None:
    """A file that somebody put into the folder is published with a warning; a missing licence is one too."""
    (folder / "notes.txt").write_text("mine")
    (folder / GATE_FILE).write_text(gate(folder).to_json())

    result = push()

    assert result.returncode == 0, result.stderr
    assert "warning: not of the conversion, and published all the same: notes.txt" in result.stderr
    assert "warning: no licence is known" in result.stderr


# --- refused before a byte is sent


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
def test_preflight_refuses_in_words(push: Push, hub: Any, folder: Path, name: str) -> None:
    """Whatever would fail later is found before a byte is sent, named, and is exit code 3."""
    prepare, options, words = TROUBLES[name]
    prepare(hub, folder)

    result = push(*options)

    assert_refused(result, 3, words, "one problem", "hint: Nothing was sent.")
    assert_nothing_sent(hub)


def test_preflight_tells_all_problems_at_once(push: Push, hub: Any, folder: Path) -> None:
    """One run names everything that is wrong, each with its remedy; a file that is too large is not even read."""
    for prepare in (huge_file, wrong_model_index, without_gate, stale_weights):
        prepare(hub, folder)

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


# --- asking


def test_nothing_is_sent_unasked(hub: Any, folder: Path, tmp_path: Path) -> None:
    """Where nobody can be asked, --yes is needed before anything else happens."""
    command = [PROGRAM, "push", folder, REPO]
    ours = environment(hub.endpoint, tmp_path / "home")
    result = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    assert_refused(result, 2, "nothing is sent unasked", "Give --yes")
    assert hub.requests == ()


@pytest.mark.parametrize(("answer", "exit_code"), [(b"y\n", 0), (b"\n", 1)])
def test_terminal_is_asked(hub: Any, folder: Path, tmp_path: Path, answer: bytes, exit_code: int) -> None:
    """On a terminal the repository, its visibility, the files and bytes are shown; only a yes sends them."""
    terminal, theirs = pty.openpty()
    command = [PROGRAM, "push", folder, REPO, "--private", "--json"]
    ours = environment(hub.endpoint, tmp_path / "home", TERM="dumb")
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
        assert_published(hub, folder)
        assert json.loads(printed)["private"]


# --- faults


@pytest.mark.parametrize("options", [(), ("--pr",)])
def test_busy_hub_is_waited_for(program: Push, hub: Any, folder: Path, options: tuple[str, ...]) -> None:
    """429 with Retry-After twice and then 503: the wait is as long as asked, and nothing is sent or committed twice."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=429, times=2, headers={"Retry-After": "1"})
    hub.fail(COMMIT, status=503, headers={"Retry-After": "0"})
    start = time.monotonic()

    result = program(*options)

    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start > 2
    assert_published(hub, folder, "refs/pr/1" if options else "main")
    assert len(hub.sent) == len(set(hub.sent)) == 2
    assert len(hub.commits(REPO)) == 4
    assert result.stderr.count("trying again in 1 s") == 2


@pytest.mark.parametrize(
    ("method", "ending"), [("GET", "/api/whoami-v2"), ("POST", "/preupload/main"), ("POST", "/objects/batch")]
)
def test_busy_hub_is_waited_for_everywhere(push: Push, hub: Any, folder: Path, method: str, ending: str) -> None:
    """A passing refusal of any request does not end the run; the client's own tries are not multiplied."""
    hub.fail(ending, status=503, method=method, headers={"Retry-After": "0"})

    result = push()

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder)
    assert len(hub.sent) == 2


def test_patience_is_bounded(push: Push, hub: Any) -> None:
    """A Hub that stays busy is given up after five tries."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=503, times=99, headers={"Retry-After": "0"})

    assert_refused(push(), 1, "503", "already in owner/toy-int4 at main: 0 of 8 files")
    assert len([request for request in hub.requests if request.path == COMMIT]) == 5


@pytest.mark.parametrize(
    ("headers", "waits"),
    [
        ({}, [1, 2, 4, 8]),
        ({"Retry-After": "7"}, [7, 7, 7, 7]),
        ({"Retry-After": "soon"}, [1, 2, 4, 8]),
        ({"RateLimit": '"api";r=0;t=55'}, [55, 55, 55, 55]),
        ({"RateLimit": '"api";r=480;t=55'}, [1, 2, 4, 8]),
    ],
)
def test_waits_are_those_asked_for(
    push: Push, hub: Any, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], waits: list[float]
) -> None:
    """Between tries the wait is what the Hub asks for, in either of its ways, else it doubles from a second."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    hub.fail("/api/whoami-v2", status=429, times=99, headers=headers)

    push()

    assert waited == waits


def test_too_long_a_wait_is_not_waited(push: Push, hub: Any) -> None:
    """A Hub that asks for hours is told to the user at once."""
    hub.fail("/api/whoami-v2", status=429, times=9, headers={"Retry-After": "7200"})

    assert_refused(push(), 3, "The Hub limits the rate")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 409, 413, 422])
def test_permanent_refusal_stops_at_once(push: Push, hub: Any, folder: Path, status: int) -> None:
    """A final answer is not asked for twice; the message says what is already there, and config is not."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=status, skip=1)

    result = push()

    nbytes = sum((folder / name).stat().st_size for name in WEIGHTS)
    assert_refused(result, 1, str(status), f"at main: 2 of 8 files, {nbytes:,} bytes: {', '.join(WEIGHTS)}")
    assert "Check the connection" not in result.stderr
    assert len([request for request in hub.requests if request.path == COMMIT]) == 2
    assert hub.files(REPO).keys() == set(WEIGHTS)


def test_stopped_upload_goes_on(push: Push, hub: Any, folder: Path) -> None:
    """After a permanent refusal the next run sends only what is missing."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=403, skip=1)
    push()
    hub.heal()

    result = push("--json")

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder)
    assert json.loads(result.stdout)["already_there"] == 2
    assert len(hub.sent) == 2
    assert [commit.added for commit in hub.commits(REPO)] == [WEIGHTS, SIDE, ("README.md",), LAST]


def test_stopped_pull_request_says_how_to_go_on(push: Push, hub: Any, folder: Path) -> None:
    """A pull request that stays half done names itself, and takes the rest with --revision."""
    hub.create(REPO, {})
    hub.fail("/commit/refs%2Fpr%2F1", status=403)

    assert_refused(push("--pr"), 1, "give --revision refs/pr/1 instead of --pr")
    assert push("--revision", "refs/pr/1").returncode == 0
    assert_published(hub, folder, "refs/pr/1")
    assert len(hub.sent) == 2


def test_connection_that_breaks_while_sending(push: Push, hub: Any, folder: Path) -> None:
    """A connection that breaks under a shard's bytes costs that shard another try, and no other."""
    sha256 = hashlib.sha256((folder / WEIGHTS[0]).read_bytes()).hexdigest()
    hub.hang_up(f"/lfs/{sha256}", method="PUT")

    result = push()

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder)
    assert len(hub.sent) == 2


def test_commit_whose_answer_is_lost(push: Push, hub: Any, folder: Path) -> None:
    """A commit that was made but never answered is made again without harm."""
    hub.create(REPO, {})
    hub.cut(COMMIT, keep=0, method="POST")

    result = push()

    assert result.returncode == 0, result.stderr
    assert_published(hub, folder)
    assert len(hub.sent) == 2


def test_pull_request_whose_answer_is_lost_is_not_opened_twice(push: Push, hub: Any) -> None:
    """Whether the pull request exists is not known then, and another one would be wrong."""
    hub.create(REPO, {})
    hub.cut(COMMIT, keep=0, method="POST")

    assert_refused(push("--pr"), 1, "0 of 8 files")
    assert len(hub.commits(REPO)) == 1


def test_lost_shard_and_altered_size_are_found(push: Push, hub: Any) -> None:
    """The Hub is compared with the folder in the end: each file that differs is named, and the exit code is 3."""
    hub.lose(WEIGHTS[0])
    hub.resize(WEIGHTS[1], 12)
    hub.lose("tokenizer.json")

    result = push()

    assert_refused(result, 3, f"{WEIGHTS[0]} is missing", f"{WEIGHTS[1]} has 12 bytes; here it has ")
    assert "tokenizer.json is missing" in result.stderr


def test_altered_bytes_are_found(push: Push, hub: Any) -> None:
    """Equal sizes do not pass for equal bytes."""
    hub.alter("tokenizer.json", b"[]\n")

    assert_refused(push(), 3, "tokenizer.json has other bytes")


def test_repository_that_becomes_public_gets_nothing(push: Push, hub: Any) -> None:
    """If a repository made private is not private, nothing is sent to it."""
    hub.state.always_public = True

    assert_refused(push("--private"), 1, "did not become private")
    assert hub.sent == []

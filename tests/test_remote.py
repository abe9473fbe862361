"""Models on the Hub: fetched by the real client from a server on loopback, converted as a folder is, refused in words.

The product runs in processes of its own, because huggingface_hub reads HF_ENDPOINT when it is imported.
"""

import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quantkit import remote
from quantkit.checkpoint.locate import describe_model, open_model
from quantkit.inspection import inspect

PROGRAM = Path(sysconfig.get_path("scripts")) / "quantkit"
REPO = "owner/toy"
SHARD = "model-00002-of-00002.safetensors"
Completed = subprocess.CompletedProcess[str]


def load_hub_server() -> ModuleType:
    """Import `hub_server.py`, which is on no import path."""
    spec = importlib.util.spec_from_file_location("hub_server", Path(__file__).with_name("hub_server.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HubServer: Any = load_hub_server().HubServer


def quantkit(*arguments: str | Path, endpoint: str, home: Path) -> Completed:
    """Run the program with the Hub at `endpoint` and its cache in `home`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "QUANTKIT_")) and not name.lower().endswith("_proxy") and name != "FORCE_COLOR"
    }
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "x"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a converted checkpoint; its manifest holds names and times, and is left out."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "quantkit.json"}


def fetched(requests: tuple[Any, ...]) -> list[str]:
    """The files whose bytes were asked for, in order."""
    return [
        request.path.split("/")[-1] for request in requests if request.method == "GET" and "/resolve/" in request.path
    ]


def cache_state(home: Path) -> dict[str, tuple[bytes | str, int]]:
    """Every file and link of the cache's repositories: bytes or target, and when it was changed."""
    return {
        str(path.relative_to(home)): (
            str(path.readlink()) if path.is_symlink() else path.read_bytes(),
            path.lstat().st_mtime_ns,
        )
        for path in (home / "hub").rglob("*")
        if path.is_symlink() or path.is_file()
    }


def assert_refused(result: Completed, *words: str, exit_code: int = 1) -> None:
    """The run ended with `exit_code`, a message that holds `words`, and a hint; all on stderr, without a traceback."""
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr, result.stderr
    message = re.search(r"^error: (.+)", result.stderr, re.MULTILINE)
    assert message, result.stderr
    for word in words:
        assert word in message[1]
    assert re.search(r"^hint: .+", result.stderr, re.MULTILINE), f"no hint in {result.stderr!r}"


@pytest.fixture
def hub(toy: Path) -> Iterator[Any]:
    """A Hub that has the toy."""
    with HubServer() as server:
        server.add(REPO, toy, revisions=("main", "v1"))
        yield server


@pytest.fixture
def run(hub: Any, tmp_path: Path) -> Callable[..., Completed]:
    """Runs the program against `hub`, with a cache that is empty at first."""
    return lambda *arguments: quantkit(*arguments, endpoint=hub.endpoint, home=tmp_path / "home")


@pytest.fixture(scope="module")
def dead_endpoint() -> str:
    """An address at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass(frozen=True)
class Conversion:
    """A run of `quantkit convert owner/toy`, and what it left."""

    result: Completed
    output: Path
    home: Path
    commit: str
    requests: tuple[Any, ...]


@pytest.fixture(scope="module")
def conversion(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """The toy converted from the Hub; not to be changed."""
    folder = tmp_path_factory.mktemp("hub")
    home, output = folder / "home", folder / "output"
    with HubServer() as server:
        commit = server.add(REPO, toy)
        result = quantkit("convert", REPO, "-o", output, "--json", endpoint=server.endpoint, home=home)
        assert result.returncode == 0, result.stderr
        return Conversion(result, output, home, commit, server.requests)


def test_hub_repository_converts_as_its_folder(conversion: Conversion, toy_int4: Path) -> None:
    """A Hub id and the local folder give the same files, byte for byte: shards, index, config and what goes along."""
    assert contents(conversion.output) == contents(toy_int4)


def test_manifest_records_the_commit(conversion: Conversion) -> None:
    """quantkit.json names the Hub id and the commit that was converted, not the branch."""
    source = json.loads((conversion.output / "quantkit.json").read_text())["source"]

    assert source["name"] == REPO
    assert source["revision"] == conversion.commit


def test_every_file_is_fetched_once_with_the_token(conversion: Conversion, toy: Path) -> None:
    """A conversion fetches each file of the repository once, and HF_TOKEN goes with every request."""
    assert sorted(fetched(conversion.requests)) == sorted(path.name for path in toy.iterdir())
    assert {request.headers.get("authorization") for request in conversion.requests} == {"Bearer x"}


def test_fetching_draws_no_progress_without_a_terminal(conversion: Conversion) -> None:
    """A log file gets no progress bars while a repository is fetched and converted: there is nothing to say."""
    assert conversion.result.stderr == ""


def test_cached_snapshot_converts_without_the_hub_and_stays_as_it_is(
    conversion: Conversion, dead_endpoint: str, toy: Path, tmp_path: Path
) -> None:
    """What is in the cache converts while the Hub is down; its links are read through, and no byte or time changes."""
    snapshot = conversion.home / "hub" / "models--owner--toy" / "snapshots" / conversion.commit
    assert all(path.is_symlink() for path in snapshot.iterdir())
    assert contents(snapshot) == contents(toy)
    before = cache_state(conversion.home)

    result = quantkit("convert", REPO, "-o", tmp_path / "output", endpoint=dead_endpoint, home=conversion.home)

    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "output") == contents(conversion.output)
    assert cache_state(conversion.home) == before


def test_output_holds_files_not_links_into_the_cache(conversion: Conversion) -> None:
    """Nothing of a conversion from the Hub depends on the cache afterwards."""
    assert not any(path.is_symlink() for path in conversion.output.rglob("*"))


def test_verify_against_a_hub_repository(run: Callable[..., Completed], toy_int4: Path) -> None:
    """`verify --against` takes a Hub id and compares every weight with it."""
    result = run("verify", toy_int4, "--against", REPO, "--json")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["passed"]
    assert report["errors"]


def test_verify_against_a_revision(run: Callable[..., Completed], hub: Any, toy_int4: Path) -> None:
    """`verify --against --revision` compares with that revision, and says so if there is none."""
    result = run("verify", toy_int4, "--against", REPO, "--revision", "v1", "--json")

    assert json.loads(result.stdout)["passed"]
    assert any("/revision/v1" in request.path for request in hub.requests)
    assert "nowhere" in run("verify", toy_int4, "--against", REPO, "--revision", "nowhere").stderr


def test_inspect_fetches_only_the_config(run: Callable[..., Completed], hub: Any, toy: Path) -> None:
    """`inspect` of a Hub id tells from config.json alone what `inspect` of the whole folder tells."""
    report = json.loads(run("inspect", REPO, "--revision", "v1", "--json").stdout)

    assert fetched(hub.requests) == ["config.json"]
    assert {request.path for request in hub.requests} == {f"/{REPO}/resolve/v1/config.json"}
    local = json.loads(inspect(toy).to_json())
    for key in ("model_type", "num_tensors", "parameters", "total_bytes", "quantization", "holdings", "layers"):
        assert report[key] == local[key]


def test_dry_run_fetches_only_the_config(
    run: Callable[..., Completed], hub: Any, toy_int4: Path, tmp_path: Path
) -> None:
    """`convert --dry-run` of a Hub id foretells the tensors and bytes of the conversion, and writes no output."""
    output = tmp_path / "output"
    planned = json.loads(run("convert", REPO, "--dry-run", "-o", output, "--json").stdout)

    assert fetched(hub.requests) == ["config.json"]
    assert not output.exists()
    made = json.loads((toy_int4 / "quantkit.json").read_text())
    for key in ("recipe", "quantization_config", "groups", "num_tensors", "total_bytes"):
        assert planned[key] == made[key]


def test_alias_is_fetched_from_its_repository(
    run: Callable[..., Completed], hub: Any, toy: Path, toy_int4: Path, tmp_path: Path
) -> None:
    """`glm-5.2` stands for its repository on the Hub; the manifest keeps the alias and records the commit."""
    repo = "zai-org/GLM-5.2-FP8"
    commit = hub.add(repo, toy)

    result = run("convert", "glm-5.2", "-o", tmp_path / "output", "--json")

    assert result.returncode == 0, result.stderr
    assert all(f"/{repo}/" in request.path for request in hub.requests)
    assert contents(tmp_path / "output") == contents(toy_int4)
    source = json.loads(result.stdout)["source"]
    assert (source["name"], source["revision"]) == ("glm-5.2", commit)


@pytest.mark.parametrize(("revision", "asked"), [(None, "main"), ("v1", "v1")])
def test_alias_has_a_revision_that_can_be_chosen(
    toy: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None, asked: str
) -> None:
    """An alias is fetched at the revision of `models.yaml`, or at the one that is given."""
    downloads: list[tuple[object, ...]] = []

    def download(*arguments: object) -> Path:
        downloads.append(arguments)
        return toy

    monkeypatch.setattr(remote, "download", download)
    open_model("glm-5.2", revision)

    assert downloads == [("zai-org/GLM-5.2-FP8", asked)]


def test_alias_is_described_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config of an alias comes with the program: its tensors are known without a request."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"asked the Hub for {arguments}")

    monkeypatch.setattr(remote, "download", refuse)
    monkeypatch.setattr(remote, "download_file", refuse)

    assert len(describe_model("glm-5.2").tensors) == 118_629


@dataclass(frozen=True)
class Trouble:
    """What to ask for, and what to do to the Hub before, so that it must be refused."""

    model: str
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Any, Path], object] = lambda hub, toy: None


TROUBLES = {
    "missing repository": Trouble("owner/missing"),
    "missing revision": Trouble(REPO, ("--revision", "nowhere")),
    "gated repository": Trouble("owner/gated", prepare=lambda hub, toy: hub.add("owner/gated", toy, gated=True)),
    "failing download": Trouble(REPO, prepare=lambda hub, toy: hub.fail(SHARD, status=500, method="GET", times=9)),
    "failing listing": Trouble(REPO, prepare=lambda hub, toy: hub.fail(hub.add(REPO, toy), status=500, times=9)),
    "not a Hub": Trouble(REPO, prepare=lambda hub, toy: hub.fail("/main", status=200, times=9)),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_convert_is_refused_in_words(
    run: Callable[..., Completed], hub: Any, toy: Path, tmp_path: Path, trouble: Trouble
) -> None:
    """Whatever the Hub does not give, the message names the repository, a hint follows, and no output is begun."""
    trouble.prepare(hub, toy)

    result = run("convert", trouble.model, *trouble.arguments, "-o", tmp_path / "output")

    assert_refused(result, trouble.model)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("name", ["missing revision", "gated repository"])
def test_inspect_is_refused_in_words(run: Callable[..., Completed], hub: Any, toy: Path, name: str) -> None:
    """`inspect` refuses as `convert` does, although it asks for one file only."""
    trouble = TROUBLES[name]
    trouble.prepare(hub, toy)

    assert_refused(run("inspect", trouble.model, *trouble.arguments), trouble.model)


def test_dead_server_is_refused_in_words(dead_endpoint: str, tmp_path: Path) -> None:
    """Where nobody listens, the message names the repository, a hint follows, and no output is begun."""
    result = quantkit("convert", REPO, "-o", tmp_path / "output", endpoint=dead_endpoint, home=tmp_path / "home")

    assert_refused(result, REPO)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("config", ["<html>", "[]", '{"model_type": "glm_moe_dsa"}'])
def test_config_that_cannot_be_used_is_refused_in_words(
    run: Callable[..., Completed], hub: Any, tmp_path: Path, config: str
) -> None:
    """A config.json that is no JSON object, or too little of one, is the repository's fault and not a crash."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(config)
    hub.add("owner/odd", tmp_path / "source")

    result = run("inspect", "owner/odd")

    assert result.returncode == 1
    assert "Traceback" not in result.stderr, result.stderr
    assert result.stderr.startswith("error: owner/odd")


def test_repository_without_config_is_refused_in_words(
    run: Callable[..., Completed], hub: Any, toy: Path, tmp_path: Path
) -> None:
    """A repository of something else has no config.json; the message says so and does not advise another try."""
    shutil.copytree(toy, tmp_path / "source")
    (tmp_path / "source" / "config.json").unlink()
    hub.add("owner/odd", tmp_path / "source")

    result = run("inspect", "owner/odd")

    assert_refused(result, "owner/odd", "config.json")
    assert "Run again" not in result.stderr


@pytest.mark.parametrize("name", ["owner/na..me", "a/b/c", "glm-9"])
def test_name_that_cannot_be_a_repository_asks_the_hub_for_nothing(
    run: Callable[..., Completed], hub: Any, name: str
) -> None:
    """What is neither a folder, an alias nor owner/name is refused before any request."""
    assert_refused(run("inspect", name), name)
    assert hub.requests == ()


@pytest.mark.parametrize("arguments", [(), ("--recipe", "nothing")], ids=["existing output", "unknown recipe"])
def test_what_is_wrong_here_is_refused_before_fetching(
    run: Callable[..., Completed], hub: Any, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Hundreds of gigabytes are not fetched for an output that is refused, or a recipe that does not exist."""
    output = tmp_path / "output"
    if not arguments:
        output.mkdir()
        (output / "notes.txt").write_text("mine")

    result = run("convert", REPO, *arguments, "-o", output)

    assert_refused(result, exit_code=2 if arguments else 1)
    assert fetched(hub.requests) == []


def test_failed_download_is_taken_up_again(
    run: Callable[..., Completed], hub: Any, toy_int4: Path, tmp_path: Path
) -> None:
    """As the hint promises, a second run fetches what is missing and nothing that is complete."""
    hub.fail(SHARD, status=500, method="GET")
    first = run("convert", REPO, "-o", tmp_path / "output")
    assert_refused(first, REPO)
    complete = set(fetched(hub.requests)) - {SHARD}
    begun = len(hub.requests)

    second = run("convert", REPO, "-o", tmp_path / "output")

    assert second.returncode == 0, second.stderr
    assert contents(tmp_path / "output") == contents(toy_int4)
    again = fetched(hub.requests[begun:])
    assert SHARD in again
    assert not complete & set(again)


def test_download_that_breaks_goes_on_where_it_stopped(
    run: Callable[..., Completed], hub: Any, toy: Path, tmp_path: Path
) -> None:
    """A connection that breaks costs no more than the client's last 10 MiB, and the file comes out whole."""
    shutil.copytree(toy, tmp_path / "source")
    data = random.Random(0).randbytes(11 << 20)
    (tmp_path / "source" / "tokenizer.model").write_bytes(data)
    hub.add("owner/large", tmp_path / "source")
    hub.cut("/tokenizer.model", keep=len(data) - 1)

    result = run("convert", "owner/large", "-o", tmp_path / "output")

    assert result.returncode == 0, result.stderr
    asked = [request for request in hub.requests if request.path.endswith("/tokenizer.model")]
    assert [request.headers.get("range") for request in asked] == [None, None, f"bytes={10 << 20}-"]
    assert (tmp_path / "output" / "tokenizer.model").read_bytes() == data

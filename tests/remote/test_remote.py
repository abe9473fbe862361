"""Models on the Hub: fetched by the real client from a server on loopback, and converted as a folder is."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quantkit import remote
from quantkit.families.locate import describe_model, open_model
from quantkit.inspection import inspect
from support.checkpoints import contents
from support.hub.pulling import REPO, fetched, run_at
from support.hub.server import HubServer
from support.program import Completed, run_apart


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
        result = run_apart("convert", REPO, "-o", output, "--json", endpoint=server.endpoint, home=home)
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

    result = run_at("convert", REPO, "-o", tmp_path / "output", endpoint=dead_endpoint, home=conversion.home)

    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "output") == contents(conversion.output)
    assert cache_state(conversion.home) == before


def test_output_holds_files_not_links_into_the_cache(conversion: Conversion) -> None:
    """Nothing of a conversion from the Hub depends on the cache afterwards."""
    assert not any(path.is_symlink() for path in conversion.output.rglob("*"))


def test_verify_against_a_hub_repository(run_on_hub: Callable[..., Completed], toy_int4: Path) -> None:
    """`verify --against` takes a Hub id and compares every weight with it."""
    result = run_on_hub("verify", toy_int4, "--against", REPO, "--json")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["passed"]
    assert report["errors"]


def test_verify_against_a_revision(run_on_hub: Callable[..., Completed], toy_hub: Any, toy_int4: Path) -> None:
    """`verify --against --revision` compares with that revision, and says so if there is none."""
    result = run_on_hub("verify", toy_int4, "--against", REPO, "--revision", "v1", "--json")

    assert json.loads(result.stdout)["passed"]
    assert any("/revision/v1" in request.path for request in toy_hub.requests)
    assert "nowhere" in run_on_hub("verify", toy_int4, "--against", REPO, "--revision", "nowhere").stderr


def test_inspect_fetches_only_the_config(run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path) -> None:
    """`inspect` of a Hub id tells from config.json alone what `inspect` of the whole folder tells."""
    report = json.loads(run_on_hub("inspect", REPO, "--revision", "v1", "--json").stdout)

    assert fetched(toy_hub.requests) == ["config.json"]
    assert {request.path for request in toy_hub.requests} == {f"/{REPO}/resolve/v1/config.json"}
    local = json.loads(inspect(toy).to_json())
    for key in ("model_type", "num_tensors", "parameters", "total_bytes", "quantization", "holdings", "layers"):
        assert report[key] == local[key]


def test_dry_run_fetches_only_the_config(
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy_int4: Path, tmp_path: Path
) -> None:
    """`convert --dry-run` of a Hub id foretells the tensors and bytes of the conversion, and writes no output."""
    output = tmp_path / "output"
    planned = json.loads(run_on_hub("convert", REPO, "--dry-run", "-o", output, "--json").stdout)

    assert fetched(toy_hub.requests) == ["config.json"]
    assert not output.exists()
    made = json.loads((toy_int4 / "quantkit.json").read_text())
    for key in ("recipe", "quantization_config", "groups", "num_tensors", "total_bytes"):
        assert planned[key] == made[key]


def test_alias_is_fetched_from_its_repository(
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, toy_int4: Path, tmp_path: Path
) -> None:
    """`glm-5.2` stands for its repository on the Hub; the manifest keeps the alias and records the commit."""
    repo = "zai-org/GLM-5.2-FP8"
    commit = toy_hub.add(repo, toy)

    result = run_on_hub("convert", "glm-5.2", "-o", tmp_path / "output", "--json")

    assert result.returncode == 0, result.stderr
    assert all(f"/{repo}/" in request.path for request in toy_hub.requests)
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

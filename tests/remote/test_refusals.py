"""What a Hub does not give is refused in words, and a download that broke off goes on."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import contents
from support.hub.pulling import REPO, SHARD, assert_refused, fetched, run_at
from support.program import Completed


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
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, tmp_path: Path, trouble: Trouble
) -> None:
    """Whatever the Hub does not give, the message names the repository, a hint follows, and no output is begun."""
    trouble.prepare(toy_hub, toy)

    result = run_on_hub("convert", trouble.model, *trouble.arguments, "-o", tmp_path / "output")

    assert_refused(result, trouble.model)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("name", ["missing revision", "gated repository"])
def test_inspect_is_refused_in_words(run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, name: str) -> None:
    """`inspect` refuses as `convert` does, although it asks for one file only."""
    trouble = TROUBLES[name]
    trouble.prepare(toy_hub, toy)

    assert_refused(run_on_hub("inspect", trouble.model, *trouble.arguments), trouble.model)


def test_dead_server_is_refused_in_words(dead_endpoint: str, tmp_path: Path) -> None:
    """Where nobody listens, the message names the repository, a hint follows, and no output is begun."""
    result = run_at("convert", REPO, "-o", tmp_path / "output", endpoint=dead_endpoint, home=tmp_path / "home")

    assert_refused(result, REPO)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("config", ["<html>", "[]", '{"model_type": "glm_moe_dsa"}'])
def test_config_that_cannot_be_used_is_refused_in_words(
    run_on_hub: Callable[..., Completed], toy_hub: Any, tmp_path: Path, config: str
) -> None:
    """A config.json that is no JSON object, or too little of one, is the repository's fault and not a crash."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(config)
    toy_hub.add("owner/odd", tmp_path / "source")

    result = run_on_hub("inspect", "owner/odd")

    assert result.returncode == 1
    assert "Traceback" not in result.stderr, result.stderr
    assert result.stderr.startswith("error: owner/odd")


def test_repository_without_config_is_refused_in_words(
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, tmp_path: Path
) -> None:
    """A repository of something else has no config.json; the message says so and does not advise another try."""
    shutil.copytree(toy, tmp_path / "source")
    (tmp_path / "source" / "config.json").unlink()
    toy_hub.add("owner/odd", tmp_path / "source")

    result = run_on_hub("inspect", "owner/odd")

    assert_refused(result, "owner/odd", "config.json")
    assert "Run again" not in result.stderr


@pytest.mark.parametrize("name", ["owner/na..me", "a/b/c", "glm-9"])
def test_name_that_cannot_be_a_repository_asks_the_hub_for_nothing(
    run_on_hub: Callable[..., Completed], toy_hub: Any, name: str
) -> None:
    """What is neither a folder, an alias nor owner/name is refused before any request."""
    assert_refused(run_on_hub("inspect", name), name)
    assert toy_hub.requests == ()


@pytest.mark.parametrize("arguments", [(), ("--recipe", "nothing")], ids=["existing output", "unknown recipe"])
def test_what_is_wrong_here_is_refused_before_fetching(
    run_on_hub: Callable[..., Completed], toy_hub: Any, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Hundreds of gigabytes are not fetched for an output that is refused, or a recipe that does not exist."""
    output = tmp_path / "output"
    if not arguments:
        output.mkdir()
        (output / "notes.txt").write_text("mine")

    result = run_on_hub("convert", REPO, *arguments, "-o", output)

    assert_refused(result, exit_code=2 if arguments else 1)
    assert fetched(toy_hub.requests) == []


def test_failed_download_is_taken_up_again(
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy_int4: Path, tmp_path: Path
) -> None:
    """As the hint promises, a second run fetches what is missing and nothing that is complete."""
    toy_hub.fail(SHARD, status=500, method="GET")
    first = run_on_hub("convert", REPO, "-o", tmp_path / "output")
    assert_refused(first, REPO)
    complete = set(fetched(toy_hub.requests)) - {SHARD}
    begun = len(toy_hub.requests)

    second = run_on_hub("convert", REPO, "-o", tmp_path / "output")

    assert second.returncode == 0, second.stderr
    assert contents(tmp_path / "output") == contents(toy_int4)
    again = fetched(toy_hub.requests[begun:])
    assert SHARD in again
    assert not complete & set(again)


def test_download_that_breaks_goes_on_where_it_stopped(
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, tmp_path: Path
) -> None:
    """A connection that breaks costs no more than the client's last 10 MiB, and the file comes out whole."""
    shutil.copytree(toy, tmp_path / "source")
    data = random.Random(0).randbytes(11 << 20)
    (tmp_path / "source" / "tokenizer.model").write_bytes(data)
    toy_hub.add("owner/large", tmp_path / "source")
    toy_hub.cut("/tokenizer.model", keep=len(data) - 1)

    result = run_on_hub("convert", "owner/large", "-o", tmp_path / "output")

    assert result.returncode == 0, result.stderr
    asked = [request for request in toy_hub.requests if request.path.endswith("/tokenizer.model")]
    assert [request.headers.get("range") for request in asked] == [None, None, f"bytes={10 << 20}-"]
    assert (tmp_path / "output" / "tokenizer.model").read_bytes() == data

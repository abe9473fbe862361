"""What tests of models on the Hub share: a Hub on loopback that has the toy, and the program told of it."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hub.server import HubServer
from support.program import Completed, run_here, told_of_hub

REPO = "owner/toy"
SHARD = "model-00002-of-00002.safetensors"


def run_at(*arguments: str | Path, endpoint: str, home: Path) -> Completed:
    """Run the program in this process with the Hub at `endpoint` and its cache in `home`."""
    with told_of_hub(endpoint, home):
        return Completed(arguments, *run_here(*arguments))


def fetched(requests: tuple[Any, ...]) -> list[str]:
    """The files whose bytes were asked for, in order."""
    return [
        request.path.split("/")[-1] for request in requests if request.method == "GET" and "/resolve/" in request.path
    ]


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
def toy_hub(toy: Path) -> Iterator[Any]:
    """A Hub that has the toy."""
    with HubServer() as server:
        server.add(REPO, toy, revisions=("main", "v1"))
        yield server


@pytest.fixture
def run_on_hub(toy_hub: Any, tmp_path: Path) -> Callable[..., Completed]:
    """Runs the program against `toy_hub`, with a cache that is empty at first."""
    return lambda *arguments: run_at(*arguments, endpoint=toy_hub.endpoint, home=tmp_path / "home")


@pytest.fixture(scope="module")
def dead_endpoint() -> str:
    """An address at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

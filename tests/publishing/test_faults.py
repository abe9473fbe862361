"""`quantkit push` to a Hub that fails: waited for, resumed, compared at the end, and never half loadable."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.hub.pushing import COMMIT, LAST, REPO, SIDE, WEIGHTS, Push, assert_published, assert_refused
from support.tiers import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, by huggingface_hub


@pytest.mark.parametrize("options", [(), exhaustive(("--pr",))])
def test_busy_hub_is_waited_for(program: Push, hub: Any, judged: Path, options: tuple[str, ...]) -> None:
    """429 with Retry-After twice and then 503: the wait is as long as asked, and nothing is sent or committed twice."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=429, times=2, headers={"Retry-After": "1"})
    hub.fail(COMMIT, status=503, headers={"Retry-After": "0"})
    start = time.monotonic()

    result = program(*options)

    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start > 2
    assert_published(hub, judged, "refs/pr/1" if options else "main")
    assert len(hub.sent) == len(set(hub.sent)) == 2
    assert len(hub.commits(REPO)) == 4
    assert result.stderr.count("trying again in 1 s") == 2


@pytest.mark.parametrize(
    ("method", "ending"), [("GET", "/api/whoami-v2"), ("POST", "/preupload/main"), ("POST", "/objects/batch")]
)
def test_busy_hub_is_waited_for_everywhere(push: Push, hub: Any, judged: Path, method: str, ending: str) -> None:
    """A passing refusal of any request does not end the run; the client's own tries are not multiplied."""
    hub.fail(ending, status=503, method=method, headers={"Retry-After": "0"})

    result = push()

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged)
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
def test_permanent_refusal_stops_at_once(push: Push, hub: Any, judged: Path, status: int) -> None:
    """A final answer is not asked for twice; the message says what is already there, and config is not."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=status, skip=1)

    result = push()

    nbytes = sum((judged / name).stat().st_size for name in WEIGHTS)
    assert_refused(result, 1, str(status), f"at main: 2 of 8 files, {nbytes:,} bytes: {', '.join(WEIGHTS)}")
    assert "Check the connection" not in result.stderr
    assert len([request for request in hub.requests if request.path == COMMIT]) == 2
    assert hub.files(REPO).keys() == set(WEIGHTS)


def test_stopped_upload_goes_on(push: Push, hub: Any, judged: Path) -> None:
    """After a permanent refusal the next run sends only what is missing."""
    hub.create(REPO, {})
    hub.fail(COMMIT, status=403, skip=1)
    push()
    hub.heal()

    result = push("--json")

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged)
    assert json.loads(result.stdout)["already_there"] == 2
    assert len(hub.sent) == 2
    assert [commit.added for commit in hub.commits(REPO)] == [WEIGHTS, SIDE, ("README.md",), LAST]


def test_stopped_pull_request_says_how_to_go_on(push: Push, hub: Any, judged: Path) -> None:
    """A pull request that stays half done names itself, and takes the rest with --revision."""
    hub.create(REPO, {})
    hub.fail("/commit/refs%2Fpr%2F1", status=403)

    assert_refused(push("--pr"), 1, "give --revision refs/pr/1 instead of --pr")
    assert push("--revision", "refs/pr/1").returncode == 0
    assert_published(hub, judged, "refs/pr/1")
    assert len(hub.sent) == 2


def test_connection_that_breaks_while_sending(push: Push, hub: Any, judged: Path) -> None:
    """A connection that breaks under a shard's bytes costs that shard another try, and no other."""
    sha256 = hashlib.sha256((judged / WEIGHTS[0]).read_bytes()).hexdigest()
    hub.hang_up(f"/lfs/{sha256}", method="PUT")

    result = push()

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged)
    assert len(hub.sent) == 2


def test_commit_whose_answer_is_lost(push: Push, hub: Any, judged: Path) -> None:
    """A commit that was made but never answered is made again without harm."""
    hub.create(REPO, {})
    hub.cut(COMMIT, keep=0, method="POST")

    result = push()

    assert result.returncode == 0, result.stderr
    assert_published(hub, judged)
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

"""Sending to the Hub: what a repository is and holds, and commits to it.

The client itself tries again when a file's bytes do not get through; the other requests are tried again here.
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantkit.checkpoint.writer import File
from quantkit.errors import RemoteError
from quantkit.records import Report
from quantkit.remote.client import first_line, quiet_unless_terminal
from quantkit.tables import Line, size

Result = TypeVar("Result")

_ATTEMPTS = 5
_LONGEST_WAIT = 600  # seconds; the Hub's limits are counted over five minutes
_REFUSED_UNDONE = frozenset({429, 503})  # the Hub says so before it does anything
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repository:
    """A repository as it is now; `commit` is that of the revision, or of the main branch if it has no such revision."""

    private: bool
    commit: str
    has_revision: bool


@dataclass(frozen=True)
class RemoteFile:
    """A file as the Hub lists it: a large one with its sha256, another by its git blob's hash alone."""

    nbytes: int
    sha256: str | None
    blob_id: str


@dataclass(frozen=True)
class Upload:
    """A file to send: its name in the repository, where its bytes are, and what they are."""

    name: str
    content: Path | bytes
    file: File

    def is_at(self, listed: RemoteFile) -> bool:
        """Whether the Hub has exactly these bytes."""
        if listed.nbytes != self.file.nbytes:
            return False
        return listed.sha256 == self.file.sha256 if listed.sha256 else listed.blob_id == self._blob_id()

    def _blob_id(self) -> str:
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Commit:
    """A commit; `revision` is where the next one goes, and `pull_request` the address of the one that it opened."""

    oid: str
    revision: str | None
    pull_request: str | None


@dataclass(frozen=True)
class PublishReport(Report):
    """What `push` left on the Hub; of a dry run, which has no commit, what it would.

    revision, url            the branch or the pull request, and where people see it
    files                    all files with size and sha256; `card` is the text of one of them, README.md
    uploaded, already_there  how many files were sent, and how many the Hub had before
    """

    repo: str
    private: bool
    revision: str
    url: str
    commit: str | None
    files: dict[str, File]
    uploaded: int
    uploaded_bytes: int
    already_there: int
    card: str
    warnings: tuple[str, ...] = ()

    def verbatim(self) -> str:
        """Of a dry run the card, which is what remains to be judged."""
        return self.card if self.commit is None else ""

    def answer(self) -> Line:
        """What is there now, or would be."""
        visibility = "private" if self.private else "public"
        sent = f"{self.uploaded} {'to send' if self.commit is None else 'sent'} ({size(self.uploaded_bytes)})"
        return Line(
            f"{self.url} ({visibility}), {self.revision}: {len(self.files)} files, {sent}, "
            f"{self.already_there} already there" + (f"; commit {self.commit}" if self.commit else "")
        )


def address(repo: str) -> str:
    """Where people see the repository."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


def identify() -> str:
    """The user whose token this is. Raises RemoteError unless the Hub takes it, and for writing."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise RemoteError("there is no token for the Hub", hint="Set HF_TOKEN.")
    with _explained("the Hub"):
        user = _retried(HfApi().whoami)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise RemoteError("the token may only read", hint="Set HF_TOKEN to one that may write.")
    return str(user.get("name"))


def find_repository(repo: str, revision: str | None) -> Repository | None:
    """The repository `repo`, or None if there is none that the token may see."""
    from huggingface_hub import HfApi, errors

    api = HfApi()
    with _explained(repo):
        try:
            main = _retried(lambda: api.model_info(repo))
        except errors.RepositoryNotFoundError:
            return None
        wanted = main
        if revision is not None:
            try:
                wanted = _retried(lambda: api.model_info(repo, revision=revision))
            except errors.RevisionNotFoundError:
                return Repository(bool(main.private), str(main.sha), has_revision=False)
    return Repository(bool(main.private), str(wanted.sha), has_revision=True)


def list_files(repo: str, revision: str) -> dict[str, RemoteFile]:
    """What the repository holds at a revision, by name."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with _explained(repo):
        entries = _retried(lambda: list(HfApi().list_repo_tree(repo, revision=revision, recursive=True)))
    files = (entry for entry in entries if isinstance(entry, RepoFile))
    return {file.path: RemoteFile(file.size, file.lfs.sha256 if file.lfs else None, file.blob_id) for file in files}


def check_card(text: str, *, ask: bool) -> None:
    """Raise RemoteError, with the reasons, unless the client and, on `ask`, the Hub take a model card's metadata."""
    from huggingface_hub import HfApi, ModelCard, get_session, get_token, hf_raise_for_status
    from huggingface_hub.errors import BadRequestError

    hint = "Fix the metadata of README.md in the folder."
    try:
        ModelCard(text, ignore_metadata_errors=False)
    except (ValueError, TypeError, AttributeError) as error:  # it raises what its parsing happens to raise
        raise RemoteError(f"the card's metadata are not valid: {first_line(error)}", hint=hint) from error
    if not ask:
        return
    api, body = HfApi(), {"content": text, "repoType": "model"}
    headers = {"Authorization": f"Bearer {get_token()}"}

    def validate() -> None:
        hf_raise_for_status(get_session().post(f"{api.endpoint}/api/validate-yaml", json=body, headers=headers))

    with _explained("the card"):
        try:
            _retried(validate)
        except BadRequestError as error:
            reasons = "; ".join(str(entry.get("message")) for entry in error.response.json().get("errors", ()))
            raise RemoteError(f"the Hub refuses the card's metadata: {reasons}", hint=hint) from error


def create_repository(repo: str, *, private: bool) -> None:
    """Make a model repository; one that exists is left as it is."""
    from huggingface_hub import HfApi

    with _explained(repo):
        _retried(lambda: HfApi().create_repo(repo, private=private, exist_ok=True))


def create_branch(repo: str, branch: str) -> None:
    """Make a branch from the main one."""
    from huggingface_hub import HfApi

    with _explained(repo):
        _retried(lambda: HfApi().create_branch(repo, branch=branch, exist_ok=True))


def commit(
    repo: str,
    uploads: Sequence[Upload],
    message: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    delete: Iterable[str] = (),
) -> Commit:
    """Send files, those first whose bytes the Hub does not have yet, and commit them.

    The client tries again for each file's bytes; the commit, which costs nothing, is tried again here. That which opens
    a pull request is tried again only if the Hub said that it has not done it.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, additions = HfApi(), list[CommitOperationAdd]()
    for upload in uploads:
        content = upload.content if isinstance(upload.content, bytes) else str(upload.content)
        addition = CommitOperationAdd(upload.name, content)
        addition.upload_info.sha256 = bytes.fromhex(upload.file.sha256)  # known: no need to read it all for it
        additions.append(addition)
    deletions = [CommitOperationDelete(name) for name in sorted(delete)]
    with _explained(repo), quiet_unless_terminal():
        api.preupload_lfs_files(repo, additions, revision=revision, create_pr=create_pr, free_memory=False)
        made = _retried(
            lambda: api.create_commit(
                repo, [*deletions, *additions], commit_message=message, revision=revision, create_pr=create_pr
            ),
            only=_REFUSED_UNDONE if create_pr else None,
        )
    return Commit(made.oid, made.pr_revision or revision, made.pr_url)


# --- trying again, and giving up


def _retried(call: Callable[[], Result], *, only: frozenset[int] | None = None) -> Result:
    """What `call` returns, tried up to five times while the Hub is busy or the connection breaks.

    Waits as long as the Hub asks, else 1, 2, 4, 8 seconds. `only` are the statuses after which it is harmless.
    """
    import httpx

    for attempt in range(1, _ATTEMPTS):
        try:
            return call()
        except httpx.HTTPError as error:
            pause = _pause(error, attempt, only)
            if pause is None:
                raise
            _log.warning("%s; trying again in %g s (%d of %d)", first_line(error), pause, attempt, _ATTEMPTS - 1)
        time.sleep(pause)
    return call()


def _pause(error: Exception, attempt: int, only: frozenset[int] | None) -> float | None:
    """The seconds to wait before another try; None if there is no point in one."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return 2.0 ** (attempt - 1) if isinstance(error, httpx.TransportError) and only is None else None
    status, headers = error.response.status_code, error.response.headers
    if status not in only if only is not None else status not in (408, 429) and status < 500:
        return None
    limit = re.search(r";r=0;t=(\d+)", headers.get("RateLimit", ""))  # no request left, and the seconds until there are
    asked = re.fullmatch(r"(\d+)", headers.get("Retry-After", "")) or limit
    pause = float(asked[1]) if asked else 2.0 ** (attempt - 1)
    return pause if pause <= _LONGEST_WAIT else None


@contextmanager
def _explained(what: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error  # of a worker thread
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        hint = _HINTS.get(status, _HINT if status is None or status >= 500 else _FINAL)
        hint = "Write owner/name." if isinstance(cause, HFValidationError) else hint
        raise RemoteError(f"{what}: {first_line(cause)}", hint=hint) from error


_HINT = "Check the connection and HF_ENDPOINT, and run again: what is there is not sent twice."
_FINAL = "The Hub will not take it as it is; what is there is not sent twice when you run again."
_HINTS: dict[int | None, str] = {
    401: "The token is wrong or has expired: set HF_TOKEN to a valid one.",
    403: "The token may not write there: set HF_TOKEN to one that may, or choose another repository.",
    404: "Check the spelling; the token must be allowed to see the repository.",
    409: "Somebody else writes to the repository; run again when that is done.",
    413: "The Hub does not take so large a file.",
    429: "The Hub limits the rate: run again later; what is there is not sent twice.",
}

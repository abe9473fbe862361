"""A Hub on loopback: serves local folders as model repositories to the real huggingface_hub client, and fails at will.

    with HubServer() as hub:
        commit = hub.add("owner/name", folder)
        hub.fail("/model.safetensors", status=500, method="GET")
        ...  # a process that runs with HF_ENDPOINT=hub.endpoint and HF_HUB_DISABLE_XET=1

    GET        /api/models/{id}/revision/{revision}    what a revision is: its commit and files
    GET        /api/models/{id}/tree/{revision}        its files with sizes and hashes
    POST       /api/models/{id}/paths-info/{revision}  those of its files that are asked for
    HEAD, GET  /{id}/resolve/{revision}/{path}         a file, whole or from a byte on

A request is answered by the row of `Handler.routes` that it matches; `hub_uploads.py` adds those for writing. Refusals
carry the codes of the Hub in X-Error-Code, by which the client chooses its exception.
"""

import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from functools import cached_property, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin")
_LFS_POINTER_BYTES = 134


@dataclass(frozen=True)
class File:
    """A file of a repository: the large ones are named by their sha256, the others by their git blob's hash."""

    content: Path | bytes
    name: str

    @cached_property
    def data(self) -> bytes:
        """The file's bytes, as they were when they were first asked for."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    @cached_property
    def sha256(self) -> str | None:
        """The hash of a large file; None for one that git holds itself."""
        return hashlib.sha256(self.data).hexdigest() if self.name.endswith(LFS_SUFFIXES) else None

    @cached_property
    def blob_id(self) -> str:
        """The hash by which git knows the file."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def entry(self) -> dict[str, Any]:
        """The file as a tree lists it."""
        size = len(self.data)
        lfs = {"lfs": {"oid": self.sha256, "size": size, "pointerSize": _LFS_POINTER_BYTES}} if self.sha256 else {}
        return {"type": "file", "oid": self.blob_id, "size": size, "path": self.name, **lfs}


@dataclass(frozen=True)
class Repository:
    """A repository of one commit; `revisions` are its branches and tags."""

    name: str
    files: dict[str, File]
    revisions: frozenset[str]
    gated: bool

    @cached_property
    def commit(self) -> str:
        """The hash of all that the repository holds."""
        content = [self.name, *(f"{file.name} {file.blob_id}" for file in self.files.values())]
        return hashlib.sha1("\n".join(content).encode()).hexdigest()

    def has(self, revision: str) -> bool:
        """Whether `revision` is the commit or a name of it."""
        return revision == self.commit or revision in self.revisions


@dataclass(frozen=True)
class Request:
    """A request that came in: the path without the query, the headers by their names in lower case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Fault:
    """What happens to requests: a status, an answer cut after `keep` bytes, or, without either, no answer at all.

    flip  a bit of the answer's last byte
    """

    ending: str
    method: str | None
    status: int | None
    keep: int | None
    left: int
    headers: dict[str, str] = field(default_factory=dict)
    skip: int = 0
    flip: bool = False


@dataclass
class State:
    """What the server has and has seen."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Use up a fault that waits for such a request."""
        with self.lock:
            for fault in self.faults:
                if fault.left and fault.method in (None, method) and path.endswith(fault.ending):
                    if fault.skip == 0:
                        fault.left -= 1
                        return fault
                    fault.skip -= 1
        return None


class HubServer:
    """The server; a context manager that serves until it is left and raises what went wrong in it."""

    def __init__(self, state: State | None = None, handler: "type[Handler] | None" = None) -> None:
        self._state = state or State()
        self._server = _Server(("127.0.0.1", 0), partial(handler or Handler, self._state), self._state)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._state.errors and error is None:
            raise self._state.errors[0]

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests that came in, in order."""
        with self._state.lock:
            return tuple(self._state.requests)

    def add(self, name: str, folder: Path, *, revisions: tuple[str, ...] = ("main",), gated: bool = False) -> str:
        """Serve the files of `folder` as the repository `name`, and return its commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = [File(path, path.relative_to(folder).as_posix()) for path in paths]
        repository = Repository(name, {file.name: file for file in files}, frozenset(revisions), gated)
        self._state.repositories[name] = repository
        return repository.commit

    def fail(self, ending: str, *, status: int, times: int = 1, method: str | None = None, **more: Any) -> None:
        """Answer the next `times` requests whose path ends in `ending` with `status`; `skip` so many before."""
        self._state.faults.append(Fault(ending, method, status, 0, times, **more))

    def cut(self, ending: str, *, keep: int, times: int = 1, method: str = "GET") -> None:
        """Send `keep` bytes of the next `times` bodies of a path that ends in `ending`, then close the connection."""
        self._state.faults.append(Fault(ending, method, None, keep, times))

    def flip(self, ending: str, *, times: int = 1) -> None:
        """Flip a bit in the next `times` bodies of a path that ends in `ending`; their sizes are right."""
        self._state.faults.append(Fault(ending, "GET", None, sys.maxsize, times, flip=True))

    def hang_up(self, ending: str, *, method: str, times: int = 1) -> None:
        """Close the connection of the next `times` requests whose path ends in `ending` while they are being sent."""
        self._state.faults.append(Fault(ending, method, None, None, times))

    def heal(self) -> None:
        """Forget all faults."""
        self._state.faults.clear()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any, state: State) -> None:
        super().__init__(address, handler)
        self.state = state

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what went wrong for the test; a client that goes away is no fault."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            self.state.errors.append(error)


class Handler(BaseHTTPRequestHandler):
    """Answers requests by `routes`: method, path, and the handler's method that takes the parts of the path."""

    routes: Any = ()
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, state: State, *arguments: Any) -> None:
        self.state = state
        self.fault: Fault | None = None
        self.body = b""
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing: the tests read `HubServer.requests`."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.fault = self.state.take_fault(self.command, path)
        if self.fault and self.fault.status is None and self.fault.keep is None:
            self.close_connection = True
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, path, {name.lower(): value for name, value in self.headers.items()})
        with self.state.lock:
            self.state.requests.append(request)
        if self.fault and self.fault.status:
            self._send(self.fault.status, headers=self.fault.headers)
            return
        for method, pattern, answer in self.routes:
            if method == self.command and (match := pattern.fullmatch(path)):
                answer(self, **{key: unquote(value) for key, value in match.groupdict().items()})
                return
        self._send(404)

    do_HEAD = do_POST = do_PUT = do_GET

    def revision(self, repo: str, revision: str) -> None:
        if repository := self._find(repo, revision):
            siblings = [{"rfilename": name} for name in repository.files]
            self._send_json({"id": repo, "sha": repository.commit, "siblings": siblings, "gated": repository.gated})

    def tree(self, repo: str, revision: str) -> None:
        if repository := self._find(repo, revision):
            self._send_json([file.entry() for file in repository.files.values()])

    def paths_info(self, repo: str, revision: str) -> None:
        if repository := self._find(repo, revision):
            asked = parse_qs(self.body.decode())["paths"]
            self._send_json([repository.files[name].entry() for name in asked if name in repository.files])

    def resolve(self, repo: str, revision: str, name: str) -> None:
        repository = self._find(repo, revision)
        if repository is None:
            return
        commit = {"X-Repo-Commit": repository.commit}
        if repository.gated:  # its files only: everyone may read what it is and holds
            self._refuse(403, "GatedRepo", commit)
        elif name not in repository.files:
            self._refuse(404, "EntryNotFound", commit)
        else:
            self._send_file(repository.files[name], commit)

    def _find(self, name: str, revision: str) -> Repository | None:
        repository = self.state.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound", {})
        elif not repository.has(revision):
            self._refuse(404, "RevisionNotFound", {})
        else:
            return repository
        return None

    def _send_file(self, file: File, headers: dict[str, str]) -> None:
        size = len(file.data)
        headers |= {"ETag": f'"{file.blob_id}"', "Accept-Ranges": "bytes"}
        if file.sha256:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(size)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(200, file.data, headers)
            return
        begin, end = int(wanted[1]), min(int(wanted[2] or size - 1) + 1, size)
        if begin >= end:
            self._send(416, headers=headers | {"Content-Range": f"bytes */{size}"})
        else:
            self._send(206, file.data[begin:end], headers | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"})

    def _send_json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, headers: dict[str, str]) -> None:
        self._send(status, headers=headers | {"X-Error-Code": code, "X-Error-Message": HTTPStatus(status).phrase})

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.fault and self.fault.status is None:
            body = body[: self.fault.keep]
            body = body[:-1] + bytes([body[-1] ^ 1]) if self.fault.flip else body
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(body)


REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
Handler.routes = (
    ("GET", re.compile(rf"/api/models/{REPO}/revision/{REVISION}"), Handler.revision),
    ("GET", re.compile(rf"/api/models/{REPO}/tree/{REVISION}"), Handler.tree),
    ("POST", re.compile(rf"/api/models/{REPO}/paths-info/{REVISION}"), Handler.paths_info),
    ("HEAD", re.compile(rf"/{REPO}/resolve/{REVISION}/(?P<name>.+)"), Handler.resolve),
    ("GET", re.compile(rf"/{REPO}/resolve/{REVISION}/(?P<name>.+)"), Handler.resolve),
)

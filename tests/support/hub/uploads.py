"""A Hub on loopback that can be written to: `hub_server.HubServer` and what a client needs to make repositories.

with UploadHub() as hub:
    hub.create("owner/name", {"README.md": b"..."}, private=True)
    hub.lose("model.safetensors")     # from the next commits
    ...
    hub.files("owner/name"), hub.commits("owner/name")

GET   /api/whoami-v2                                whose token it is, and what it may do
POST  /api/repos/create                             a repository of one empty commit
GET   /api/models/{id}                              its visibility and latest commit
POST  /api/models/{id}/branch/{branch}              a branch from the main one
POST  /api/models/{id}/preupload/{revision}         which files git holds itself, and which are large
POST  /{id}.git/info/lfs/objects/batch              where to put the large ones that are not there yet
PUT   /lfs/{sha256}                                 the bytes of one
POST  /api/models/{id}/commit/{revision}            files and deletions; with ?create_pr=1 into a pull request
POST  /api/validate-yaml                            whether a card's metadata are valid
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from support.hub.server import LFS_SUFFIXES, REPO, REVISION, File, Handler, HubServer, Repository, State


@dataclass(frozen=True)
class Commit:
    """A commit that came in: where to, its summary, and the files that it added and deleted."""

    revision: str
    summary: str
    added: tuple[str, ...]
    deleted: tuple[str, ...]


@dataclass
class Model:
    """A repository that can be written to: what each branch and each commit holds."""

    private: bool
    heads: dict[str, Repository]
    commits: list[Commit] = field(default_factory=list)
    history: dict[str, Repository] = field(default_factory=dict)

    def put(self, revision: str, repository: Repository) -> None:
        self.heads[revision] = self.history[repository.commit] = repository


@dataclass
class UploadState(State):
    """What the server has: repositories, the bytes of large files, and how it spoils commits."""

    models: dict[str, Model] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    altered: dict[str, bytes] = field(default_factory=dict)
    resized: dict[str, int] = field(default_factory=dict)
    always_public: bool = False
    xet: Path | None = None
    role: str = "write"
    metadata_errors: list[str] = field(default_factory=list)


class UploadHub(HubServer):
    """The server; a context manager like `HubServer`."""

    def __init__(self) -> None:
        self.state = UploadState()
        super().__init__(self.state, UploadHandler)

    def create(self, name: str, files: dict[str, bytes], *, private: bool = False) -> None:
        """Make a repository that holds `files`."""
        self.state.models[name] = model = Model(private, {})
        model.put("main", make_repository(name, files))

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a branch holds."""
        return {name: file.data for name, file in self.state.models[name].heads[revision].files.items()}

    def head(self, name: str) -> str:
        """The latest commit of the main branch."""
        return self.state.models[name].heads["main"].commit

    def branch(self, name: str, branch: str) -> None:
        """Make a branch from the main one."""
        model = self.state.models[name]
        model.put(branch, model.heads["main"])

    def commits(self, name: str) -> list[Commit]:
        """The commits that came in, in order."""
        return self.state.models[name].commits

    def is_private(self, name: str) -> bool:
        """The visibility of a repository."""
        return self.state.models[name].private

    def lose(self, name: str) -> None:
        """Leave the file out of every commit from now on."""
        self.state.lost.add(name)

    def alter(self, name: str, data: bytes) -> None:
        """Commit other bytes for the file from now on."""
        self.state.altered[name] = data

    def use_xet(self, folder: Path, blobs: Iterable[bytes]) -> None:
        """Let the client's own Xet library write to `folder`, and expect these large files."""
        self.state.xet = folder
        self.state.blobs |= {hashlib.sha256(data).hexdigest(): data for data in blobs}

    def resize(self, name: str, nbytes: int) -> None:
        """List the file with another size from now on."""
        self.state.resized[name] = nbytes

    @property
    def sent(self) -> list[str]:
        """The sha256 of each large file whose bytes came in, as often as they did."""
        return [request.path.split("/")[-1] for request in self.requests if request.method == "PUT"]


def make_repository(name: str, files: dict[str, bytes]) -> Repository:
    """A state of a repository."""
    return Repository(name, {path: File(data, path) for path, data in files.items()}, frozenset(), gated=False)


class UploadHandler(Handler):
    """Answers what a client asks when it writes."""

    state: UploadState

    def whoami(self) -> None:
        self._send_json({"name": "owner", "auth": {"accessToken": {"role": self.state.role}}})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if there := name in self.state.models:
            self._send_json({"url": f"/{name}", "error": "it exists"}, status=409)
        else:
            self.state.models[name] = model = Model(
                asked.get("visibility") == "private" and not self.state.always_public, {}
            )
            model.put("main", make_repository(name, {".gitattributes": b""}))
            self._send_json({"url": f"/{name}", "existed": there})

    def describe(self, repo: str, revision: str = "main") -> None:
        if repo not in self.state.models:
            super().revision(repo, revision)
        elif repository := self._find(repo, revision):
            self._send_json({"id": repo, "sha": repository.commit, "private": self.state.models[repo].private})

    def branch(self, repo: str, revision: str) -> None:
        model = self.state.models[repo]
        model.put(revision, model.heads["main"])
        self._send_json({})

    def tree(self, repo: str, revision: str) -> None:
        if repository := self._find(repo, revision):
            entries = [file.entry() for file in repository.files.values()]
            sizes = self.state.resized
            self._send_json([entry | {"size": sizes.get(entry["path"], entry["size"])} for entry in entries])

    def preupload(self, repo: str, revision: str) -> None:
        if self._find(repo, revision):
            files = [
                {"path": path, "uploadMode": "lfs" if path.endswith(LFS_SUFFIXES) else "regular", "shouldIgnore": False}
                for path in (file["path"] for file in json.loads(self.body)["files"])
            ]
            self._send_json({"files": files})

    def batch(self, repo: str) -> None:
        objects = json.loads(self.body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.state.blobs:
                entry["actions"] = {"upload": {"href": f"http://{self.headers['Host']}/lfs/{entry['oid']}"}}
        self._send_json({"transfer": "basic", "objects": objects})

    def xet_token(self, repo: str, revision: str) -> None:
        if self.state.xet is None:
            self._send(404)
        else:
            self._send_json({"accessToken": "x", "exp": 1 << 40, "casUrl": f"local://{self.state.xet}"})

    def put(self, sha256: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == sha256
        self.state.blobs[sha256] = self.body
        self._send(200)

    def commit(self, repo: str, revision: str) -> None:
        before = self._find(repo, revision)
        if before is None:
            return
        model, query = self.state.models[repo], parse_qs(urlsplit(self.path).query)
        if pull_request := "create_pr" in query:
            revision = f"refs/pr/{1 + sum(head.startswith('refs/pr/') for head in model.heads)}"
        files, made = self._apply({name: file.data for name, file in before.files.items()}, revision)
        model.put(revision, make_repository(repo, files))
        model.commits.append(made)
        url = f"http://{self.headers['Host']}/{repo}"
        number = revision.split("/")[-1]
        answer = {"commitOid": model.heads[revision].commit, "commitUrl": url}
        self._send_json(answer | {"pullRequestUrl": f"{url}/discussions/{number}" if pull_request else None})

    def _apply(self, files: dict[str, bytes], revision: str) -> tuple[dict[str, bytes], Commit]:
        added, deleted, summary = [], [], ""
        for line in map(json.loads, self.body.splitlines()):
            value, name = line["value"], line["value"].get("path")
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "deletedFile":
                del files[name]
                deleted.append(name)
            elif name not in self.state.lost:
                large = line["key"] == "lfsFile"
                data = self.state.blobs[value["oid"]] if large else base64.b64decode(value["content"])
                files[name] = self.state.altered.get(name, data)
                added.append(name)
        return files, Commit(revision, summary, tuple(added), tuple(deleted))

    def validate(self) -> None:
        errors = [{"message": message} for message in self.state.metadata_errors]
        self._send_json({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def _find(self, name: str, revision: str) -> Repository | None:
        model = self.state.models.get(name)
        if model is None:
            return super()._find(name, revision)
        found = model.heads.get(revision) or model.history.get(revision)
        if found is None:
            self._refuse(404, "RevisionNotFound", {})
        return found


_MODEL = rf"/api/models/{REPO}"
UploadHandler.routes = (
    ("GET", re.compile("/api/whoami-v2"), UploadHandler.whoami),
    ("POST", re.compile("/api/repos/create"), UploadHandler.create),
    ("GET", re.compile(_MODEL), UploadHandler.describe),
    ("GET", re.compile(rf"{_MODEL}/revision/{REVISION}"), UploadHandler.describe),
    ("GET", re.compile(rf"{_MODEL}/tree/{REVISION}"), UploadHandler.tree),
    ("POST", re.compile(rf"{_MODEL}/branch/{REVISION}"), UploadHandler.branch),
    ("POST", re.compile(rf"{_MODEL}/preupload/{REVISION}"), UploadHandler.preupload),
    ("GET", re.compile(rf"{_MODEL}/xet-write-token/{REVISION}"), UploadHandler.xet_token),
    ("POST", re.compile(rf"/{REPO}\.git/info/lfs/objects/batch"), UploadHandler.batch),
    ("PUT", re.compile(r"/lfs/(?P<sha256>[0-9a-f]{64})"), UploadHandler.put),
    ("POST", re.compile(rf"{_MODEL}/commit/{REVISION}"), UploadHandler.commit),
    ("POST", re.compile("/api/validate-yaml"), UploadHandler.validate),
    *Handler.routes,
)

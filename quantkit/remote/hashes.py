"""Whether a file from the Hub is the one that the Hub says: sha256 of large files, git's own hash of small ones.

The Hub's cache names each file by the hash that the Hub gave for it. Where a name is no hash, or the file has another
one, the Hub is asked again before the file is thrown away. What was found right is recorded with size and time, so
that it is read once only: `quantkit/verified.jsonl` in HF_HOME.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RemoteError

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 of a git blob, or sha256 of a file in LFS
_GIT_DIGITS = 40
_RECORD = ("quantkit", "verified.jsonl")
_THREADS = 4


@dataclass(frozen=True)
class Cached:
    """A file of a repository in the Hub's cache: its name there, and where it lies, through links."""

    name: str
    link: Path
    blob: Path

    @classmethod
    def at(cls, link: Path, name: str) -> "Cached":
        """The file that `link`, in a snapshot, leads to."""
        return cls(name, link, link.resolve())


def check_files(repo: str, revision: str, files: Iterable[Cached]) -> None:
    """Raise RemoteError for a file of `repo`, at a commit, that is not the Hub's, after taking it out of the cache, and
    for one of which neither the cache nor the Hub gives a hash.

    A file is read only if the record does not have it.
    """
    known = _read_record()
    new = [file for file in files if _line(file) not in known]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: _hash(file.blob, file.blob.name), new))
    doubtful = [file for file, is_right in zip(new, found, strict=True) if is_right != file.blob.name]
    expected = _ask(repo, revision, doubtful) if doubtful else {}
    bad = [file for file in doubtful if _hash(file.blob, expected[file.name]) != expected[file.name]]
    _record([file for file in new if file not in bad])
    if not bad:
        return
    first, more = bad[0], f" (and {len(bad) - 1} more files)" if len(bad) > 1 else ""
    what = f"{repo}: {first.name} is not the Hub's: {_hash(first.blob, expected[first.name])} was fetched"
    for file in bad:
        for path in {file.link, file.blob}:
            path.unlink(missing_ok=True)
    raise RemoteError(
        f"{what}, and it has {expected[first.name]}{more}",
        hint="It is out of the cache: run again to fetch it anew. If it comes back, look at proxies, disk and memory.",
    )


def _ask(repo: str, revision: str, files: Sequence[Cached]) -> dict[str, str]:
    """The hashes by the Hub's own account of the files, else by their names in the cache; RemoteError for neither."""
    import httpx
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import HfHubHTTPError

    expected = {file.name: file.blob.name for file in files if _HASH.fullmatch(file.blob.name)}
    with suppress(HfHubHTTPError, httpx.HTTPError, OSError, ValueError):
        for info in HfApi().get_paths_info(repo, [file.name for file in files], revision=revision):
            if isinstance(info, RepoFile):
                expected[info.path] = info.lfs.sha256 if info.lfs else info.blob_id
    for file in files:
        if not _HASH.fullmatch(expected.get(file.name, "")):
            hint = f"Be online for once, or give the folder itself, unchecked: {file.link.parent}."
            raise RemoteError(f"{repo}: there is no hash to check {file.name} against", hint=hint)
    return expected


def _hash(path: Path, like: str) -> str:
    """The file's hash of the kind that `like` is: git's own, or sha256."""
    with path.open("rb") as stream:
        if len(like) != _GIT_DIGITS:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        git = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: git).hexdigest()


def _line(file: Cached) -> str:
    """What the record knows a file by."""
    stat = file.blob.stat()
    return json.dumps([str(file.blob), stat.st_size, stat.st_mtime_ns])


def _read_record() -> set[str]:
    try:
        return set(_record_path().read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return set()


def _record(files: Sequence[Cached]) -> None:
    """Remember files; where that cannot be written they are read again each time."""
    if files:
        with suppress(OSError):
            _record_path().parent.mkdir(parents=True, exist_ok=True)
            with _record_path().open("a", encoding="utf-8") as record:
                record.write("".join(f"{_line(file)}\n" for file in files))


def _record_path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME, *_RECORD)

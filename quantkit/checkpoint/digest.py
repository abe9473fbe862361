"""The size and sha256 of a checkpoint's files, and one digest of all that decides what the model says."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from quantkit.checkpoint.source import CONFIG_FILE, readable
from quantkit.checkpoint.writer import MANIFEST_FILE, File
from quantkit.errors import SourceError
from quantkit.progress import Advance

GATE_FILE = "quantkit-gate.json"  # the accuracy gate's result, beside the checkpoint that it is about
_DOCUMENTS = ("readme", "license", "licence", "notice")


def checkpoint_digest(folder: Path, *, workers: int = 2) -> str:
    """The digest of the checkpoint in `folder`; every byte is read. Raises SourceError as `hash_files` does."""
    return digest_of(hash_files(list_files(folder), workers=workers))


def digest_of(files: Mapping[str, File]) -> str:
    """The sha256 over the sorted lines `name sha256 nbytes` of the files that decide what the model says.

    These are the weights, the index, the configs, the tokenizer, templates and code: all files but documents, the
    manifest and the gate's result. It does not depend on where the checkpoint lies.
    """
    lines = sorted(f"{name} {file.sha256} {file.nbytes}\n" for name, file in files.items() if _decides(name))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def earlier_digests(files: Mapping[str, File], respelled: Iterable[File]) -> frozenset[str]:
    """The digests that a checkpoint of these files had while its config.json was one of `respelled`, of a manifest.

    Each is that of all other files as they are now: whoever has the digest knows that no tensor has changed since.
    """
    return frozenset(digest_of({**files, CONFIG_FILE: config}) for config in respelled)


def list_files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint by their names relative to `folder`; hidden files and folders are left out.

    Raises SourceError for a name that is no UTF-8, which no manifest can hold.
    """
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    kept = {name: found[name] for name in sorted(found) if not any(part.startswith(".") for part in name.split("/"))}
    for name in kept:
        if name != name.encode("utf-8", "replace").decode():
            raise SourceError(f"{folder} holds a file whose name is no UTF-8: {name!r}", hint="Rename it.")
    return kept


def hash_file(path: Path) -> File:
    """The size and sha256 of a file, read whole; OSError where it cannot be, which callers put in their own words."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return File(stream.tell(), sha256)


def hash_files(
    paths: Mapping[str, Path], *, workers: int = 2, progress: Advance = lambda done: None
) -> dict[str, File]:
    """The size and sha256 of each file, read whole; `progress` is told the bytes of each file that is done.

    Raises SourceError, naming the file, for one that cannot be read.
    """

    def work(path: Path) -> File:
        with readable(path):
            file = hash_file(path)
        progress(file.nbytes)
        return file

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(paths, pool.map(work, paths.values()), strict=True))


def _decides(name: str) -> bool:
    path = PurePosixPath(name.lower())
    document = path.suffix == ".md" or (path.suffix in ("", ".txt") and path.name.startswith(_DOCUMENTS))
    return not document and name not in (MANIFEST_FILE, GATE_FILE)

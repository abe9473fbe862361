"""The sha256 of a shard: of a source's step by step while it is converted, of a finished one's as a whole."""

import hashlib
import os
from concurrent.futures import Executor, Future
from pathlib import Path

from quantkit.checkpoint.source import readable
from quantkit.errors import SourceError

_READ_BYTES = 1 << 20
_STEP_BYTES = 16 << 20  # less is not worth a step


class FileHash:
    """The hash of the file `path`, made by `hasher`; if in steps, by its one thread.

    What is hashed was converted before, and is taken out of the page cache: it is not needed again, the cache keeps
    what was in it, and the next pieces find pages that are free already.
    """

    def __init__(self, path: Path, hasher: Executor) -> None:
        self._path = path
        self._hasher = hasher
        self._sha256 = hashlib.sha256()
        self._asked = self._done = 0
        self._steps: list[Future[None]] = []
        self._digest: Future[str] | None = None

    def advance(self, end: int) -> None:
        """Hash up to the byte `end`, soon."""
        if end >= self._asked + _STEP_BYTES and self._digest is None:
            self._asked = end
            self._steps.append(self._hasher.submit(self._hash, end))

    def finish(self) -> Future[str]:
        """Hash the rest; the digest of the whole shard in the end."""
        if self._digest is None:
            self._digest = self._hasher.submit(self._finish)
        return self._digest

    def _finish(self) -> str:
        for step in self._steps:
            step.result()
        self._hash(None)
        return self._sha256.hexdigest()

    def _hash(self, end: int | None) -> None:
        with readable(self._path), self._path.open("rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size if end is None else end
            buffer = memoryview(bytearray(_READ_BYTES))
            begin = self._done
            while self._done < end:
                count = os.preadv(file.fileno(), [buffer[: end - self._done]], self._done)
                if count == 0:
                    what = f"{self._path}: ended early; it was changed meanwhile"
                    raise SourceError(what, hint="Let nothing else write there, and run again.")
                self._sha256.update(buffer[:count])
                self._done += count
            os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)

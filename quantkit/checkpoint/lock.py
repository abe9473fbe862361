"""One run at a time writes into a folder: a lock on the file `.quantkit/.lock`, which says who holds it.

The kernel takes the lock from a process that ends, however it ends. The file alone, of a run that was killed, means
nothing: the next run takes it over, and a work folder that holds nothing else counts as not there.

A file system without locks is refused: two runs that mix their shards are found hours later, or never.
"""

import errno
import fcntl
import getpass
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from quantkit.checkpoint.writer import LOCK_FILE, WORK_FOLDER, explained
from quantkit.errors import OutputError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_ATTEMPTS = 100  # at a file that others take away at the same time
_GLANCES, _GLANCE = 10, 0.02  # times and seconds to wait for those who only look: `check_free`


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: the content of its file."""

    user: str
    host: str
    pid: int
    started: str
    command: str

    @classmethod
    def of_this_process(cls, command: str) -> "Holder":
        """This process, from now on."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user id without a name, as in containers
            user = str(os.getuid())
        return cls(user, socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), command)

    def __str__(self) -> str:
        """In words."""
        return f"quantkit {self.command} of {self.user} on {self.host} (process {self.pid}) since {self.started}"


@contextmanager
def lock(folder: Path, command: str) -> Iterator[bool]:
    """Hold `folder`, which is made if it is not there, for a run of `command`; yields whether an earlier run left a
    work folder there.

    Afterwards the work folder and the folder are gone again if nothing was put into them. Raises OutputError, saying
    who holds it since when, if another run does, and for a folder that cannot be written to or locked.
    """
    left = (folder / WORK_FOLDER).is_dir()
    made: list[Path] = []
    try:
        with explained(folder):
            file = _acquire(folder, made)
        try:
            with explained(folder / WORK_FOLDER / LOCK_FILE):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(asdict(Holder.of_this_process(command))).encode(), 0)
            yield left
        finally:
            _release(folder, file)
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()  # which leaves what holds something


def check_free(folder: Path) -> None:
    """Raise OutputError, saying who holds it since when, if a run is at work in `folder`; nothing is made or kept."""
    try:
        file = os.open(folder / WORK_FOLDER / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # there is none, or `lock` will say what is wrong with it
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder) from None
    except OSError:
        return
    finally:
        os.close(file)


def _acquire(folder: Path, made: list[Path]) -> int:
    """The descriptor of the locked file; the folders above it that had to be made are added to `made`.

    A run that ends takes its file away, so that a lock on a file that has lost its name excludes nobody: it counts
    only if the name still leads to it.
    """
    path = folder / WORK_FOLDER / LOCK_FILE
    for attempt in range(_ATTEMPTS):
        _make(path.parent, made)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue
        locked = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locked := _is_named(file, path):
                return file
        except BlockingIOError:
            if attempt >= _GLANCES:
                raise _in_use(folder) from None
            time.sleep(_GLANCE)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if not os.fstat(file).st_size:  # nobody has ever held it
                _remove(path)
            what = f"{folder}: its file system has no locks ({error.strerror}): two runs could write at once"
            raise OutputError(what, hint="Choose another disk, or mount it with locks (Lustre: -o flock).") from error
        finally:
            if not locked:
                os.close(file)
    raise OutputError(f"{folder} is in use by other runs, which begin and end all the time", hint="Run again.")


def _release(folder: Path, file: int) -> None:
    """Give the lock back; the file goes before, while nobody else can have locked it."""
    path = folder / WORK_FOLDER / LOCK_FILE
    try:
        if _is_named(file, path):
            _remove(path)
    finally:
        os.close(file)


def _remove(path: Path) -> None:
    """Take the file away, and the work folder if nothing else is in it; what stays means nothing without its lock."""
    with suppress(OSError):
        os.unlink(path)
        os.rmdir(path.parent)


def _make(folder: Path, made: list[Path]) -> None:
    for path in (path for path in (*reversed(folder.parents), folder) if not path.is_dir()):
        try:
            path.mkdir()
            if path != folder:  # the work folder goes with the lock
                made.append(path)
        except FileExistsError:
            if path.is_symlink():
                raise


def _is_named(file: int, path: Path) -> bool:
    """Whether `path` leads to the file behind the descriptor."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _in_use(folder: Path) -> OutputError:
    try:
        text = (folder / WORK_FOLDER / LOCK_FILE).read_text(encoding="utf-8")
        who = str(Holder(**json.loads(text)))
    except (OSError, ValueError, TypeError):  # just locked, or just ended
        who = "another run"
    return OutputError(f"{folder} is in use by {who}", hint="Wait for it to end, or choose another one.")

"""A shard file holds what was appended, whatever the sizes and whatever the file system can do."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from quantkit.checkpoint.writer import ShardFile

PIECES = {
    "a header": [104],
    "odd sizes": [8, 1, 4095, 4097, 3],
    "one buffer": [8 << 20],
    "over a buffer's end": [(8 << 20) - 5, 11, 9 << 20, 1],
    "several buffers at once": [20 << 20],
}


def write(path: Path, sizes: list[int]) -> bytes:
    """Write pieces of these sizes to `path`, check the hash, and return what should be there."""
    pieces = [os.urandom(size) for size in sizes]
    file = ShardFile(path, sum(sizes))
    for piece in pieces:
        file.append(memoryview(piece))
    whole = b"".join(pieces)
    assert file.finish() == hashlib.sha256(whole).hexdigest()
    file.close()
    return whole


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES.keys())
def test_file_holds_what_was_appended(tmp_path: Path, sizes: list[int]) -> None:
    """The bytes come in order, with no padding at the end, and the hash is theirs."""
    assert write(tmp_path / "shard", sizes) == (tmp_path / "shard").read_bytes()


def test_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that knows no direct writes the page cache takes the bytes."""
    refused = []
    control = fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    monkeypatch.setattr("quantkit.checkpoint.writer.fcntl.fcntl", refuse)

    assert write(tmp_path / "shard", PIECES["over a buffer's end"]) == (tmp_path / "shard").read_bytes()
    assert refused


def test_direct_writes_refused_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the flag is taken and the write refused, for it wants larger blocks, the page cache takes the bytes."""
    write_bytes = os.write
    refused = []

    def refuse(file: int, data: memoryview) -> int:
        if not refused:
            refused.append(file)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write_bytes(file, data)

    monkeypatch.setattr("quantkit.checkpoint.writer._DIRECT", os.O_NOATIME)  # a flag that any file system takes
    monkeypatch.setattr("quantkit.checkpoint.writer.os.write", refuse)

    assert write(tmp_path / "shard", [20 << 20]) == (tmp_path / "shard").read_bytes()
    assert refused


def test_another_invalid_argument_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the page cache takes the bytes already, a refused write is not tried for ever."""

    def refuse(file: int, data: memoryview) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("quantkit.checkpoint.writer.os.write", refuse)
    file = ShardFile(tmp_path / "shard", 1)
    file.append(memoryview(b"x"))

    with pytest.raises(OSError, match="Invalid argument"):
        file.finish()
    file.close()

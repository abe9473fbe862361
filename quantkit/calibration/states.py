"""Rows of numbers for every token, between one layer and the next: in a file, the first of them in memory, too.

    hidden-N.bin    hidden states [tokens, hidden] after N layers
    choices-N.bin   int32 [tokens, top_k], the positions that layer N's indexer chose, for layers that share them

Reads and writes are plain ones: a memory map would count as resident.
"""

import os
from pathlib import Path

import torch

from quantkit.checkpoint.digest import hash_file
from quantkit.errors import OutputError


def hash_states(path: Path) -> str:
    """The sha256 of a file of states. Raises OutputError for one that cannot be read."""
    try:
        return hash_file(path).sha256
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error


class RowFile:
    """Rows of `width` numbers in the file `path`; what was never written is zero."""

    def __init__(self, path: Path, width: int, dtype: torch.dtype) -> None:
        self.path = path
        self._width, self._dtype = width, dtype
        self._row_bytes = width * dtype.itemsize
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

    def write(self, begin: int, rows: torch.Tensor) -> None:
        """Write rows [T, width] from row `begin` on. Raises OutputError when the disk is full."""
        data = rows.to(self._dtype).cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
        offset = begin * self._row_bytes
        try:
            while data:
                count = os.pwrite(self._file, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def read(self, begin: int, end: int) -> torch.Tensor:
        """The rows `begin` to `end`: [T, width]."""
        rows = torch.zeros(end - begin, self._width, dtype=self._dtype)
        data, offset = rows.view(torch.uint8).numpy().reshape(-1).data, begin * self._row_bytes
        while data:
            count = os.preadv(self._file, [data], offset)
            if count == 0:
                raise OutputError(f"{self.path}: ended early; it was changed meanwhile")
            data, offset = data[count:], offset + count
        return rows

    def sync(self) -> None:
        """Wait until the disk has all of it, and its name."""
        os.fsync(self._file)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def close(self, remove: bool = False) -> None:
        """Close the file, and delete it if so asked."""
        os.close(self._file)
        if remove:
            self.path.unlink(missing_ok=True)


class HiddenStates:
    """The hidden states of all tokens after `layers` layers, the first `held` rows of which are in memory, too.

    While a layer runs, every row is read once and then written once; `advance` makes what was written current.
    """

    def __init__(self, folder: Path, layers: int, width: int, dtype: torch.dtype, held: int) -> None:
        self._folder, self._width, self._dtype = folder, width, dtype
        self.layers = layers
        self._held = torch.zeros(held, width, dtype=dtype)
        self._current = self._open(layers)
        self._next: RowFile | None = None

    def load_held(self) -> None:
        """Read the rows that are held, after a file of an earlier run was opened."""
        self._held = self._current.read(0, len(self._held))

    def read(self, begin: int, end: int) -> torch.Tensor:
        """The rows `begin` to `end`, a copy."""
        if end <= len(self._held):
            return self._held[begin:end].clone()
        return self._current.read(begin, end)

    def begin(self, begin: int, rows: torch.Tensor) -> None:
        """Set rows before the first layer."""
        self._put(self._current, begin, rows)

    def write(self, begin: int, rows: torch.Tensor) -> None:
        """Set rows as they are after the layer that runs."""
        if self._next is None:
            self._next = self._open(self.layers + 1)
        self._put(self._next, begin, rows)

    def sync(self) -> Path:
        """Wait until the disk has what the layer wrote; the file that has it."""
        assert self._next is not None
        self._next.sync()
        return self._next.path

    def advance(self) -> None:
        """Go on to the next layer; the states before it are deleted."""
        assert self._next is not None
        self._current.close(remove=True)
        self._current, self._next = self._next, None
        self.layers += 1

    def close(self) -> None:
        """Delete everything."""
        for file in (self._current, self._next):
            if file:
                file.close(remove=True)

    def _open(self, layers: int) -> RowFile:
        return RowFile(self._folder / f"hidden-{layers}.bin", self._width, self._dtype)

    def _put(self, file: RowFile, begin: int, rows: torch.Tensor) -> None:
        file.write(begin, rows)
        held = self._held[begin : begin + len(rows)]
        held.copy_(rows[: len(held)])

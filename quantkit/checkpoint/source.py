"""A checkpoint opened for reading: its config, and where every tensor lies. Data are read only when asked for.

Reads are `preadv` into buffers of the caller, because a memory map counts as resident memory.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.checkpoint.header import StoredTensor, parse_header, parse_length
from quantkit.errors import SourceError
from quantkit.records import parse_json

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_READ_BYTES = 64 << 20
_DOWNLOAD = "Download the checkpoint again."
_UNREADABLE = "Make it readable, or download it again."
_FIX = "Fix the file, or download it again."


@dataclass(frozen=True)
class Source:
    """A checkpoint's config and headers.

    name      what the user called it
    folder    where its files are, or None when the headers were made from a config alone
    tensors   by name; where the index and a second shard disagree, the index decides
    revision  the commit of a Hub repository
    warnings  what is odd in it, but harmless
    """

    name: str
    folder: Path | None
    config_text: str
    tensors: Mapping[str, StoredTensor]
    revision: str | None = None
    warnings: tuple[str, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        try:
            config = parse_json(self.config_text)
        except ValueError as error:
            raise SourceError(f"{self.name}: {CONFIG_FILE} does not parse: {error}", hint=_FIX) from error
        if not isinstance(config, dict):
            raise SourceError(f"{self.name}: {CONFIG_FILE} is not a JSON object", hint=_FIX)
        return config

    @property
    def model_type(self) -> str:
        """The config's `model_type`."""
        return str(self.config.get("model_type"))

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the language model: `text_config` where a vision model is round it, else all of it."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def quantization_config(self) -> dict[str, Any]:
        """What the config says of the weights' formats, at its top or in `text_config`; {} if nothing."""
        return self.config.get("quantization_config") or self.text_config.get("quantization_config") or {}

    @property
    def num_hidden_layers(self) -> int:
        """The number of main layers; layers from here on are MTP layers."""
        try:
            return int(self.text_config["num_hidden_layers"])
        except (KeyError, TypeError, ValueError):
            raise SourceError(f"{self.name}: {CONFIG_FILE} has no valid num_hidden_layers", hint=_FIX) from None

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """The names of the files that hold tensors, in order."""
        return tuple(sorted({tensor.shard for tensor in self.tensors.values()}))

    @cached_property
    def nbytes(self) -> int:
        """The size of all tensors in bytes, as an index's `total_size` counts it."""
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def read_into(self, tensor: StoredTensor, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `tensor` from its byte `begin` on.

        The file is opened for this read alone: a checkpoint of any number of shards needs few open files.
        """
        if self.folder is None:
            raise SourceError(f"{self.name}: only the config is known; there are no weights to read")
        path = self.folder / tensor.shard
        try:
            with path.open("rb", buffering=0) as file:
                done = 0
                while done < len(buffer):
                    piece = buffer[done : done + _READ_BYTES]
                    count = os.preadv(file.fileno(), [piece], tensor.offset + begin + done)
                    if count == 0:
                        what = f"{path}: ended {len(buffer) - done:,} bytes early; it was changed meanwhile"
                        raise SourceError(what, hint=_DOWNLOAD)
                    done += count
        except OSError as error:
            what = f"{path}: {tensor.spec.name} cannot be read: {error.strerror}"
            raise SourceError(what, hint=_UNREADABLE) from error


def open_source(folder: Path, name: str | None = None, revision: str | None = None) -> Source:
    """Open the checkpoint in `folder` and check that its files are whole.

    Raises SourceError, naming the file or the tensor, for a missing config, index or shard, a shard whose size is not
    what its header says, and a tensor that the index names and no shard holds.
    """
    name = name or str(folder)
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "no such folder"
        raise SourceError(f"{name}: {what}", hint="Give the folder of a checkpoint, an alias or a Hub repository id.")
    config_text = _read_text(folder, CONFIG_FILE, name)
    weight_map = _read_weight_map(folder, name)
    tensors: dict[str, StoredTensor] = {}
    warnings = []
    for shard in sorted(set(weight_map.values())):
        for tensor in read_header(folder / shard):
            if weight_map.get(tensor.spec.name, shard) != shard:
                home = weight_map[tensor.spec.name]
                warnings.append(f"{tensor.spec.name} is also in {shard}; the index's copy in {home} is used")
            else:
                if tensor.spec.name not in weight_map:
                    warnings.append(f"{tensor.spec.name} in {shard} is not in the index; it is used all the same")
                if tensor.spec.name in tensors:
                    raise SourceError(f"{name}: {tensor.spec.name} is in two shards and the index names neither")
                tensors[tensor.spec.name] = tensor
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise SourceError(
            f"{name}: the index says that {missing[0]} is in {weight_map[missing[0]]}, but it is not"
            + (f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else ""),
            hint="Download that shard again.",
        )
    source = Source(name, folder, config_text, tensors, revision, tuple(warnings))
    source.config  # noqa: B018 - a config that does not parse is refused here, not later
    return source


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one safetensors file, checked against its size."""
    try:
        with readable(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = parse_length(file.read(8), size, path.name)
            return parse_header(file.read(length), size, path.name)
    except SourceError:
        if not path.exists():
            raise SourceError(f"{path.parent}: shard {path.name} is missing", hint="Download it again.") from None
        raise


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise SourceError, naming `path`, for what goes wrong in reading it."""
    try:
        yield
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}", hint=_UNREADABLE) from error


@dataclass(frozen=True)
class Index:
    """An index: the shard of each tensor, and what it says of the bytes of all, which may be anything."""

    weight_map: dict[str, str]
    total_size: Any


def read_index(folder: Path, name: str) -> Index | None:
    """The index in the folder of the checkpoint `name`, if there is one; SourceError if it names no files."""
    if not (folder / INDEX_FILE).exists():
        return None
    try:
        content = parse_json(_read_text(folder, INDEX_FILE, name))
    except ValueError as error:
        raise SourceError(f"{name}: {INDEX_FILE} does not parse: {error}", hint=_FIX) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{name}: {INDEX_FILE} has no weight_map from tensors to files", hint=_FIX)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", "..") or "\0" in shard:
            what = f"{name}: {INDEX_FILE} says that {tensor} is in {shard!r}, which is not a file name"
            raise SourceError(what, hint=_FIX)
    metadata = content.get("metadata")
    return Index(weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None)


def _read_weight_map(folder: Path, name: str) -> dict[str, str]:
    if index := read_index(folder, name):
        return index.weight_map
    if not (folder / SINGLE_FILE).exists():
        raise SourceError(
            f"{name}: neither {INDEX_FILE} nor {SINGLE_FILE} is there",
            hint="Give the folder of a safetensors checkpoint.",
        )
    return {tensor.spec.name: SINGLE_FILE for tensor in read_header(folder / SINGLE_FILE)}


def _read_text(folder: Path, file: str, name: str) -> str:
    try:
        return (folder / file).read_bytes().decode("utf-8")  # line ends as they are
    except FileNotFoundError:
        folding = (folder / ".quantkit" / "fold.json").exists()  # `quantkit.folding.in_place` has moved the config away
        hint = "A fold in place was interrupted: run it again, or quantkit fold --undo." if folding else _DOWNLOAD
        raise SourceError(f"{name}: {file} is missing", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name}: {file} cannot be read as UTF-8 text: {error}", hint=_FIX) from error

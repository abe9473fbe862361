"""How outputs become lines: files by digest, JSON by its keys, errors by their words.

A line does not depend on where folders lie, on quantkit's version, on the number of workers or on the machine: floats
have six digits, or none where a processor's own sums decide.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.version import VERSION
from support.program import Result, run_here

_SHOWN = 300  # characters of JSON; what is longer is a digest
_LEFT_OUT = ("schema_version", "version", "seconds")


class Recorder:
    """Runs the program and notes what comes of it.

    names  what paths are called in the record, the longer ones first
    """

    def __init__(self, names: Mapping[Path, str]) -> None:
        self._names = sorted(((str(path), name) for path, name in names.items()), key=lambda pair: -len(pair[0]))
        self._printed: list[str] = []  # by the last command
        self.lines: list[str] = []

    def run(self, *arguments: str | Path, floats: bool = True) -> Result:
        """Run `quantkit` with these arguments and --json; note the command, exit code, words and the report's keys."""
        result = run_here(*arguments, "--json")
        words = self._named(" ".join(map(str, arguments)))
        self.lines.append(f"$ {words}" + (f"  -> {result.exit_code}" if result.exit_code else ""))
        self._note(f"stderr: {line}" for line in self._named(result.stderr).splitlines())
        self._printed = list(keys(json.loads(self._named(result.stdout)), floats)) if result.stdout else []
        self._note(self._printed)
        return result

    def note_folder(self, folder: Path) -> None:
        """Note every file of a checkpoint: of shards header and tensors, of the manifest its keys, else the bytes."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if path.suffix == ".safetensors":
                self._note([f"{name} header {digest(header(path))} tensors {tensors(path)}"])
            elif name == "quantkit.json":
                self._note_manifest(path.read_text())
            else:
                self._note([f"{name} {digest(self._named(path.read_text('latin-1')).encode())}"])

    def _note_manifest(self, text: str) -> None:
        """A manifest is what was printed, or its keys are noted."""
        written = list(keys(json.loads(self._named(text)), True))
        self._note(
            ["quantkit.json as printed"] if written == self._printed else map("quantkit.json {}".format, written)
        )

    def _note(self, lines: Iterable[str]) -> None:
        self.lines += [f"  {line}" for line in lines]

    def _named(self, text: str) -> str:
        for path, name in self._names:
            text = text.replace(path, name)
        return text.replace(VERSION, "VERSION")


def keys(report: Mapping[str, Any], floats: bool) -> Iterator[str]:
    """A line for each key of a JSON object: the value, or its digest where that is long."""
    for key, value in report.items():
        if key not in _LEFT_OUT and value not in (None, "", [], {}):
            text = json.dumps(_rounded(value, floats), sort_keys=True)
            yield f"{key}: {text if len(text) <= _SHOWN else f'{digest(text.encode())} of {len(text)} characters'}"


def _rounded(value: Any, floats: bool) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if floats else "a float"
    if isinstance(value, dict):
        return {key: _rounded(entry, floats) for key, entry in value.items() if key not in _LEFT_OUT}
    return [_rounded(entry, floats) for entry in value] if isinstance(value, list) else value


def digest(data: bytes) -> str:
    """16 digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def header(shard: Path) -> bytes:
    """The header of a shard, its length included."""
    data = shard.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


def tensors(shard: Path) -> str:
    """The digest of names, dtypes, shapes and bytes, in whatever order they lie."""
    begin, data = len(header(shard)), shard.read_bytes()
    found = hashlib.blake2b(digest_size=8)
    for name, entry in sorted(json.loads(header(shard)[8:]).items()):
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            found.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode() + data[first:last])
    return found.hexdigest()

"""How outputs become lines: files by digest, JSON by its keys, errors by their words.

A line does not depend on where folders lie, on quantkit's version, on the number of workers or on the machine: floats
have six digits, or none where a processor's own sums decide.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.version import VERSION
from support.program import Result, run_here

_SHOWN = 240  # characters of JSON; what is longer is a digest
_LEFT_OUT = ("kind", "schema_version", "version", "seconds", "files")  # files: `verify` compares their digests
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(\.\d+)?(e-?\d+)?(?!\w)")
_VERSION = re.compile(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.])")
_CONFIG = "quantization_config"
_INDENT = "  "


@dataclass
class Block:
    """A command as it was given, or another title, and what was noted of it."""

    title: str
    said: list[str] = field(default_factory=list)


class Recorder:
    """Runs the program and notes what comes of it.

    names    what paths are called in the record
    brief    of a report, note the digest instead of the keys
    configs  the keys of each quantization_config that is noted by its digest, by that digest
    """

    def __init__(self, names: Mapping[Path, str], brief: bool) -> None:
        self.names = dict(names)
        self.brief = brief
        self.configs: dict[str, list[str]] = {}
        self._blocks: list[Block] = []
        self._printed: dict[str, Any] = {}  # by the last command

    def begin(self, title: str) -> None:
        """Note from now on under this title."""
        self._blocks.append(Block(title))

    def run(self, *arguments: str | Path, without: tuple[type, ...] = ()) -> Result:
        """Run `quantkit` with these arguments and --json; note the command, exit code, words and the report.

        Numbers of the types `without`, those that another processor may count otherwise, are left out.
        """
        result = run_here(*arguments, "--json")
        words = self._named(" ".join(map(str, arguments)))
        self.begin(f"$ {words}" + (f"  -> {result.exit_code}" if result.exit_code else ""))
        said = self._named(result.stderr).splitlines()
        self._printed = json.loads(self._named(result.stdout)) if result.stdout else {}
        if self.brief and result.exit_code == 0:
            self._note_report(self._printed | {"stderr": said}, without)
        else:
            self._note(*said)
            heard = {line.removeprefix("warning: ") for line in said}
            warnings = [warning for warning in self._printed.get("warnings", []) if warning not in heard]
            self._note_report(self._printed | {"warnings": warnings}, without)
        return result

    def repeats(self) -> bool:
        """Whether what was noted of the last command is what was noted of an earlier one."""
        *earlier, last = self._blocks
        return any(block.said == last.said for block in earlier)

    def note_folder(self, folder: Path, source: Path | None = None) -> None:
        """Note every file of a checkpoint: of shards tensors and header, of a manifest its keys, else the bytes.

        Those that are the bytes of the file of `source` with the same name share one line.
        """
        copied = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if source and (source / name).exists() and path.read_bytes() == (source / name).read_bytes():
                copied.append(name)
            elif path.suffix == ".safetensors":
                data = path.read_bytes()
                self._note(f"{name} {tensors(data)} header {digest(header(data))}")
            elif name == "quantkit.json":
                self._note_manifest(json.loads(self._named(path.read_text())))
            else:
                self._note(f"{name} {digest(self._named(path.read_text('latin-1')).encode())}")
        if copied:
            self._note(f"as in SOURCE: {' '.join(copied)}")

    def note_json(self, path: Path, without: tuple[type, ...]) -> None:
        """Note a file that is one JSON object."""
        self._note(path.name)
        self._note_report(json.loads(self._named(path.read_text())), without)

    def lines(self) -> list[str]:
        """All that was noted; what repeats an earlier block of several lines is that one's title."""
        first: dict[tuple[str, ...], str] = {}
        found = []
        for block in self._blocks:
            same = first.setdefault(tuple(block.said), block.title)
            said = [f"as {same}"] if same != block.title and len(block.said) > 1 else block.said
            found += [block.title, *(_INDENT + line for line in said)]
        return found

    def _note_manifest(self, manifest: dict[str, Any]) -> None:
        """A manifest is what was printed, or it is noted."""
        if manifest == self._printed:
            self._note("quantkit.json as printed")
        else:
            self._note("quantkit.json")
            self._note_report(manifest)

    def _note_report(self, report: Mapping[str, Any], without: tuple[type, ...] = ()) -> None:
        found = dict(keys(report, without))
        title = f"{report.get('kind', '')} {report.get('schema_version', '')}".strip()
        if self.brief and title:
            self._note(f"{title} {_shortened(json.dumps(found), 0)}")
            found = {_CONFIG: found[_CONFIG]} if _CONFIG in found else {}
        elif title:
            self._note(title)
        self._note(*(f"{key}: {_shortened(text)}" for key, text in found.items()))
        if len(found.get(_CONFIG, "")) > _SHOWN:
            texts = [f"{key}: {text}" for key, text in keys(report[_CONFIG])]
            self.configs[digest(found[_CONFIG].encode())] = texts

    def _note(self, *lines: str) -> None:
        self._blocks[-1].said += lines

    def _named(self, text: str) -> str:
        for path, name in sorted(self.names.items(), key=lambda pair: -len(str(pair[0]))):
            text = text.replace(str(path), name)
        return _VERSION.sub("VERSION", text)


def keys(report: Mapping[str, Any], without: tuple[type, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each key of a JSON object that says something, and its value as the record writes it."""
    for key, value in report.items():
        if key not in _LEFT_OUT and value not in (None, "", [], {}):
            yield key, json.dumps(_plain(value, without), sort_keys=True)


def _plain(value: Any, without: tuple[type, ...]) -> Any:
    """A value with floats of six digits, and without these types of numbers, those in words included."""
    match value:
        case dict():
            return {key: _plain(entry, without) for key, entry in value.items() if key != "seconds"}
        case list():
            return [_plain(entry, without) for entry in value]
        case int() | float() if type(value) in without:
            return "a number"
        case float():
            return float(f"{value:.6g}")
        case str() if int in without:
            return _NUMBER.sub("N", value)
    return value


def _shortened(text: str, shown: int = _SHOWN) -> str:
    """A text, or the digest of a long one."""
    return text if len(text) <= shown else f"{digest(text.encode())} of {len(text)} characters"


def digest(data: bytes) -> str:
    """12 digits."""
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def header(shard: bytes) -> bytes:
    """The header of a shard, its length included."""
    return shard[: 8 + int.from_bytes(shard[:8], "little")]


def tensors(shard: bytes) -> str:
    """The digest of names, dtypes, shapes and bytes, in whatever order they lie."""
    text = header(shard)
    begin = len(text)
    found = hashlib.blake2b(digest_size=6)
    for name, entry in sorted(json.loads(text[8:]).items()):
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            found.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode() + shard[first:last])
    return found.hexdigest()

"""Frozen dataclasses as JSON, and back: what is read must be exactly what `to_json` could have written.

`parse_json` is for JSON of any origin: it refuses what `json` lets pass and readers of it understand differently.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any, Self, TypeVar

import msgspec

from quantkit.tables import Line, TextTable

R = TypeVar("R")
SCHEMA_VERSION = 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Record:
    """A frozen dataclass that lies in a file as JSON."""

    def to_json(self) -> str:
        """The report as JSON text, `schema_version` and the report's kind first."""
        assert is_dataclass(self)
        content = {"schema_version": SCHEMA_VERSION, "kind": type(self).__name__, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote; ValueError, naming the field, if it is none."""
        content = parse_json(text)
        if not isinstance(content, dict) or "kind" not in content:
            raise ValueError(f"no {cls.__name__}")
        if (kind := content.pop("kind")) != cls.__name__:
            raise ValueError(f"a {kind}, not a {cls.__name__}")
        if (version := content.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version}, and {SCHEMA_VERSION} is understood")
        return read_record(cls, content)


class Report(Record):
    """What a command returns: JSON for programs, and for people tables, lines and one sentence that answers."""

    def tables(self) -> Iterable[TextTable]:
        """The tables, in the order to be read."""
        return ()

    def lines(self) -> Iterable[Line]:
        """What stands below the tables."""
        return ()

    def verbatim(self) -> str:
        """Text that is to be copied, and therefore printed as it is."""
        return ""

    def answer(self) -> Line | None:
        """One sentence that answers what was asked; None where the text does."""
        raise NotImplementedError

    def remarks(self) -> Iterable[Line]:
        """What is no part of the result, and may be worth knowing."""
        return ()


def read_record(kind: type[R], content: Any) -> R:
    """The dataclass `kind` out of what `asdict` made of one; ValueError, naming the field, if it is none."""
    try:
        record = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    _check_known(content, msgspec.to_builtins(record), "$")
    return record


def _check_known(content: Any, known: Any, where: str) -> None:
    """Raise ValueError for a field that the record has not: msgspec passes over those of dataclasses."""
    if isinstance(content, dict):
        if strange := content.keys() - known.keys():
            raise ValueError(f"Object has unknown field `{min(strange)}` - at `{where}`")
        for name, value in content.items():
            _check_known(value, known[name], f"{where}.{name}")
    elif isinstance(content, list):
        for place, (value, read) in enumerate(zip(content, known, strict=True)):
            _check_known(value, read, f"{where}[{place}]")


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for a text that does not parse, for a name that occurs twice in an object, for NaN and infinities
    (1e999, too), for halves of surrogate pairs, which no file can hold, and for values nested too deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=_checked)
        _check_finite("it", value)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    for name, value in pairs:
        _check_finite(name, value)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return content


def _check_finite(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not a finite number")
    if isinstance(value, list):
        for entry in value:
            _check_finite(name, entry)

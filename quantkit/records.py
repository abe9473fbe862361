"""Frozen dataclasses as JSON, and back: what is read must be exactly what `to_json` could have written.

`parse_json` is for JSON of any origin: it refuses what `json` lets pass and readers of it understand differently.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Self, TypeVar, cast, get_args, get_origin, get_type_hints

R = TypeVar("R")
SCHEMA_VERSION = 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SHOWN = 60  # characters of a value that is wrong


@dataclass(frozen=True)
class TextTable:
    """A title, headings (those that end in a colon are text, the others numbers) and rows."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Report:
    """A frozen dataclass that a workflow returns."""

    def tables(self) -> Iterable[TextTable]:
        """What a person sees of it, in the order to be read."""
        return ()

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
        return cast(Self, _build(cls, content, ""))


def read_record(kind: type[R], content: Any) -> R:
    """The dataclass `kind` out of what `asdict` made of one; ValueError, naming the field, if it is none."""
    return cast(R, _build(kind, content, ""))


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


def _build(kind: Any, value: Any, where: str) -> Any:
    """What `to_json` made of a value of the type `kind`, turned back; `where` is its field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(value, dict):
        return _build_record(kind, value, where)
    if origin is tuple and isinstance(value, list) and arguments[1:] == (...,):
        return tuple(_build(arguments[0], entry, f"{where}[{place}]") for place, entry in enumerate(value))
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_build(each, entry, where) for each, entry in zip(arguments, value, strict=True))
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], entry, f"{where}[{place}]") for place, entry in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: _build(arguments[1], entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if type(value) is kind:
        return value
    if kind is float and type(value) is int and abs(value) < 1 << 1023:
        return float(value)
    if arguments and origin not in (tuple, list, dict):
        return _build_one_of(arguments, value, where)
    shown = json.dumps(value)[:_SHOWN]
    raise ValueError(f"{where.lstrip('.') or 'it'} is {shown}, not {getattr(kind, '__name__', kind)}")


def _build_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    if strange := value.keys() - known.keys():
        raise ValueError(f"{where.lstrip('.') or 'it'} has {min(strange)}, which is not known")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where.lstrip('.') or 'it'} has no {name}")
    return kind(**{name: _build(hints[name], entry, f"{where}.{name}") for name, entry in value.items()})


def _build_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """The first of several kinds that fits; None is told apart first, so that an error names the field in it."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds[:-1]:
        try:
            return _build(kind, value, where)
        except ValueError:
            continue
    return _build(kinds[-1], value, where)

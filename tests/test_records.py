"""Records: what comes from JSON is exactly what could have been written, or is refused by its field."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from quantkit.records import Report, parse_json


class Kind(StrEnum):
    GOOD = "good"


@dataclass(frozen=True)
class Part:
    size: int
    share: float = 0.5


@dataclass(frozen=True)
class Whole(Report):
    kind_of: Kind
    parts: tuple[Part, ...]
    named: dict[str, Part]
    numbers: float | list[float]
    pair: tuple[int, str]
    maybe: Part | None = None
    anything: Any = None


WHOLE = Whole(Kind.GOOD, (Part(1), Part(2, 1.0)), {"a": Part(3)}, [1.0, 2.0], (1, "x"), Part(4), {"free": [1, "2"]})


@pytest.mark.parametrize("whole", [WHOLE, Whole(Kind.GOOD, (), {}, 2.0, (0, ""))])
def test_a_report_comes_back(whole: Whole) -> None:
    """Records in records, enumerations, lists and numbers, whole ones for floats included."""
    assert Whole.from_json(whole.to_json()) == whole
    assert Whole.from_json(whole.to_json().replace("2.0", "2")) == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content["parts"][1].update(size="2"), r'parts\[1\]\.size is "2", not int'),
        (lambda content: content["parts"][1].update(size=True), r"parts\[1\]\.size is true, not int"),
        (lambda content: content["named"]["a"].update(share=None), r"named\.a\.share is null, not float"),
        (lambda content: content["maybe"].update(size=1.5), r"maybe\.size is 1\.5, not int"),
        (lambda content: content["maybe"].pop("size"), "maybe has no size"),
        (lambda content: content.pop("parts"), "it has no parts"),
        (lambda content: content.update(parts={}), r"parts is \{\}, not tuple"),
        (lambda content: content.update(numbers=["x"]), r'numbers\[0\] is "x", not float'),
        (lambda content: content.update(pair=[1]), r"pair is \[1\], not tuple"),
        (lambda content: content.update(more=1), "it has more, which is not known"),
        (lambda content: content.update(kind_of="bad"), "'bad' is not a valid Kind"),
        (lambda content: content.update(kind="Part"), "a Part, not a Whole"),
        (lambda content: content.update(schema_version=2), "schema_version is 2, and 1 is understood"),
    ],
)
def test_what_was_not_written_is_refused(change: Any, told: str) -> None:
    """The field is named, with what stands there."""
    content = json.loads(WHOLE.to_json())
    change(content)
    with pytest.raises(ValueError, match=told):
        Whole.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": NaN}', "a is nan, not a finite number"),
        ('{"a": [[-Infinity]]}', "a is -inf, not a finite number"),
        ("[1e999]", "it is inf, not a finite number"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
        ("", "Expecting value"),
    ],
)
def test_loose_json_is_refused(text: str, told: str) -> None:
    """What readers of JSON understand differently, or what no file can hold."""
    with pytest.raises(ValueError, match=told):
        parse_json(text)


def test_a_pair_of_surrogates_is_a_character() -> None:
    """JSON writes characters beyond the first plane so."""
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"

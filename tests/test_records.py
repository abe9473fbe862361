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
        (
            lambda content: content["parts"][1].update(size="2"),
            r"`int`, got `str` - at `\$\.parts\[1\]\.size`",
        ),
        (
            lambda content: content["parts"][1].update(size=True),
            r"`int`, got `bool` - at `\$\.parts\[1\]\.size`",
        ),
        (
            lambda content: content["named"]["a"].update(share=None),
            r"`float`, got `null` - at `\$\.named\[\.\.\.\]\.share`",
        ),
        (lambda content: content["maybe"].update(size=1.5), r"Expected `int`, got `float` - at `\$\.maybe\.size`"),
        (lambda content: content["maybe"].pop("size"), r"missing required field `size` - at `\$\.maybe`"),
        (lambda content: content.pop("parts"), "missing required field `parts`"),
        (lambda content: content.update(parts={}), r"Expected `array`, got `object` - at `\$\.parts`"),
        (lambda content: content.update(numbers=["x"]), r"Expected `float`, got `str` - at `\$\.numbers\[0\]`"),
        (lambda content: content.update(pair=[1]), r"Expected `array` of length 2, got 1 - at `\$\.pair`"),
        (lambda content: content.update(more=1), r"unknown field `more` - at `\$`"),
        (lambda content: content["parts"][1].update(more=1), r"unknown field `more` - at `\$\.parts\[1\]`"),
        (lambda content: content.update(kind_of="bad"), r"Invalid enum value 'bad' - at `\$\.kind_of`"),
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

"""A task made from any text: its items lie in the text apart from each other, and are the same each time."""

import random
from importlib import resources
from pathlib import Path

import pytest

from quantkit.errors import UsageError
from quantkit.eval.gate.text_tasks import (
    CHOICES,
    CONTEXT_CHARACTERS,
    CONTINUATION_CHARACTERS,
    continuation_task,
    make_items,
)

ITEMS = 40
NEEDED = 300 * ITEMS  # characters


def make_words(lengths: range, count: int) -> str:
    """Random words of random lengths."""
    draw = random.Random(0)
    return " ".join("".join(draw.choices("abcdefgh", k=draw.choice(lengths))) for _ in range(count))


TEXTS = {
    "short words": make_words(range(1, 6), 4000),
    "words over 60 characters": make_words(range(40, 100), 300),
    "words over 200 characters": make_words(range(1, 300), 200),
    "no spaces": make_words(range(NEEDED, NEEDED + 1), 1),
    "just long enough": make_words(range(2, 9), 3000)[: NEEDED - 1] + "x",
}


@pytest.fixture(params=[*TEXTS, "sample", "held-out"])
def text(request: pytest.FixtureRequest, glm_tiny: Path) -> str:
    """Made-up texts, the one that quantkit ships and one with long lines of code."""
    if request.param == "sample":
        found = (resources.files("quantkit.eval") / "texts" / "django-docs.txt").read_text(encoding="utf-8")
    elif request.param == "held-out":
        found = (glm_tiny / "heldout.txt").read_text(encoding="utf-8")
    else:
        found = TEXTS[request.param]
    return " ".join(found.split())


def true_continuation(item: dict[str, object]) -> str:
    """The choice that the item's answer names."""
    choices, answer = item["choices"], item["answer"]
    assert isinstance(choices, list)
    assert isinstance(answer, int)
    return str(choices[answer])


def test_items_are_passages_of_the_text(text: str) -> None:
    """Context and true continuation follow each other in the text, none reaches into the next item, none is long."""
    end = 0
    for item in make_items(text, ITEMS):
        context, continuation = item["context"], true_continuation(item)
        places = [text.find(f"{context}{gap}{continuation}", end) for gap in (" ", "")]
        assert max(places) >= end
        end = max(places) + len(context) + len(continuation)
        assert 0 < len(context) <= CONTEXT_CHARACTERS
        assert 0 < len(continuation) <= CONTINUATION_CHARACTERS


def test_distractors_are_other_items_continuations(text: str) -> None:
    """Each item has four choices, from four places, and the true one stands at any of them."""
    items = make_items(text, ITEMS)
    continuations = [true_continuation(item) for item in items]

    for number, item in enumerate(items):
        others = [choice for place, choice in enumerate(item["choices"]) if place != item["answer"]]
        assert len(others) == CHOICES - 1
        assert set(others) <= set(continuations[:number] + continuations[number + 1 :])
    assert {item["answer"] for item in items} == set(range(CHOICES))


def test_words_are_whole_where_they_can_be() -> None:
    """In a text with spaces no word is cut, and a passage is nearly as long as it may be."""
    words = set(TEXTS["short words"].split())

    for item in make_items(TEXTS["short words"], ITEMS):
        assert set(item["context"].split()) <= words
        assert set(true_continuation(item).split()) <= words
        assert len(item["context"]) > CONTEXT_CHARACTERS - 10
        assert len(true_continuation(item)) > CONTINUATION_CHARACTERS - 10


def test_a_text_gives_the_same_items_each_time(text: str) -> None:
    """Items depend on the text's words and on nothing else, such as how its lines break."""
    broken = text.replace(" ", "\n ")

    assert make_items(text, ITEMS) == make_items(text, ITEMS) == make_items(broken, ITEMS)


@pytest.mark.parametrize("length", [0, 100, NEEDED - 1])
def test_too_short_a_text_is_refused(length: int) -> None:
    """A text without room for so many items is refused with both lengths, and one letter more is enough."""
    with pytest.raises(UsageError, match=f"has {length:,} characters; 40 items need 12,000") as caught:
        continuation_task("x" * length, ITEMS)

    assert caught.value.hint == "Give a longer text or a smaller --limit."
    assert len(make_items("x" * NEEDED, ITEMS)) == ITEMS


@pytest.mark.parametrize("items", [0, 1, CHOICES - 1])
def test_fewer_items_than_choices_are_refused(items: int) -> None:
    """Fewer items than choices leave too few distractors; the remedy is more items, not a longer text."""
    with pytest.raises(UsageError, match=f"so {items} items are too few") as caught:
        continuation_task(TEXTS["short words"], items)

    assert caught.value.hint == "Give a larger --limit."

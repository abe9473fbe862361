"""A task made from any text, with no data to fetch: which of four continuations is the true one?

    context        the words before a place in the text, about 200 characters
    continuations  the words that follow there, about 60 characters, and as many from three other places

Places are even distances apart, and none reaches into the next; distractors and their order are drawn by a fixed seed:
a text gives the same items each time. A sound language model finds most of them; what it loses here it loses in longer
texts, too.
"""

import random
from typing import Any

from quantkit.errors import UsageError
from quantkit.eval.gate.task_specs import TaskSpec

NAME = "quantkit_continuation"
CONTEXT_CHARACTERS, CONTINUATION_CHARACTERS, CHOICES = 200, 60, 4
_REACH = 40  # characters to look for the first word's begin in


def continuation_task(text: str, items: int = 100) -> TaskSpec:
    """The task with so many items; UsageError if they are too few, or the text too short for them not to overlap."""
    documents = make_items(text, items)

    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(documents)}

    definition = {
        "custom_dataset": dataset,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
        "metric_list": [
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
        "metadata": {"version": 1},
    }
    return TaskSpec(NAME, "acc_norm", "none", overrides=definition)


def make_items(text: str, items: int) -> list[dict[str, Any]]:
    """The items, each a dict of `context`, `choices` and the `answer`'s number."""
    words = text.split()
    text = " ".join(words)
    stride = len(text) // max(items, 1)
    needed = CONTEXT_CHARACTERS + CONTINUATION_CHARACTERS + _REACH
    if items < CHOICES:
        raise UsageError(f"{NAME} has {CHOICES} choices, so {items} items are too few", hint="Give a larger --limit.")
    if stride < needed:
        raise UsageError(
            f"the text has {len(text):,} characters; {items} items need {items * needed:,}",
            hint="Give a longer text or a smaller --limit.",
        )
    passages = [_passage(text, number * stride) for number in range(items)]
    draw = random.Random(0)
    return [_item(number, passages, draw) for number in range(items)]


def _passage(text: str, begin: int) -> tuple[str, str]:
    """Context and continuation from the first word that begins at or after `begin`; only a longer word is cut."""
    begin = max(begin, text.find(" ", begin - 1, begin - 1 + _REACH) + 1) if begin else 0
    middle = _word_end(text, begin, CONTEXT_CHARACTERS)
    follows = middle + (text[middle] == " ")
    return text[begin:middle], text[follows : _word_end(text, follows, CONTINUATION_CHARACTERS)]


def _word_end(text: str, begin: int, length: int) -> int:
    """Where the last word ends of those that lie within `length` characters from `begin`."""
    end = text.rfind(" ", begin, begin + length)
    return end if end > begin else begin + length


def _item(number: int, passages: list[tuple[str, str]], draw: random.Random) -> dict[str, Any]:
    others = draw.sample([index for index in range(len(passages)) if index != number], CHOICES - 1)
    choices = [passages[index][1] for index in others]
    answer = draw.randrange(CHOICES)
    choices.insert(answer, passages[number][1])
    return {"context": passages[number][0], "choices": choices, "answer": answer}

"""A task made from any text, with no data to fetch: which of four continuations is the true one?

    context        the words before a place in the text, about 200 characters
    continuations  the words that follow there, about 60 characters, and as many from three other places

Places are even distances apart, distractors and their order are drawn by a fixed seed: a text gives the same items each
time. A sound language model finds most of them; what it loses here it loses in longer texts, too.
"""

import random
from typing import Any

from quantkit.errors import UsageError
from quantkit.eval.task_specs import TaskSpec

NAME = "quantkit_continuation"
CONTEXT_CHARACTERS, CONTINUATION_CHARACTERS, CHOICES = 200, 60, 4


def continuation_task(text: str, items: int = 100) -> TaskSpec:
    """The task with so many items; UsageError if the text is too short for them not to overlap."""
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
    needed = CONTEXT_CHARACTERS + CONTINUATION_CHARACTERS
    if items < CHOICES or stride < needed:
        raise UsageError(
            f"the text has {len(text):,} characters; {items} items need {max(items, CHOICES) * needed:,}",
            hint="Give a longer text or a smaller --limit.",
        )
    passages = [_passage(text, number * stride) for number in range(items)]
    draw = random.Random(0)
    return [_item(number, passages, draw) for number in range(items)]


def _passage(text: str, begin: int) -> tuple[str, str]:
    """Context and continuation from the first word that begins at or after `begin`, in whole words."""
    begin = text.index(" ", begin - 1) + 1 if begin else 0
    middle = text.rindex(" ", begin, begin + CONTEXT_CHARACTERS)
    end = text.rindex(" ", middle + 1, middle + 1 + CONTINUATION_CHARACTERS)
    return text[begin:middle], text[middle + 1 : end]


def _item(number: int, passages: list[tuple[str, str]], draw: random.Random) -> dict[str, Any]:
    others = draw.sample([index for index in range(len(passages)) if index != number], CHOICES - 1)
    choices = [passages[index][1] for index in others]
    answer = draw.randrange(CHOICES)
    choices.insert(answer, passages[number][1])
    return {"context": passages[number][0], "choices": choices, "answer": answer}

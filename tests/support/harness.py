"""What tests of the gate share: random Llamas, stand-ins that answer as told, lm-eval and a task for it."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.eval.gate import accuracy
from quantkit.eval.gate.loading import Loaded, load
from quantkit.eval.gate.task_specs import TaskSpec


@pytest.fixture(scope="session")
def harness() -> Iterator[Any]:
    """lm_eval, which is slow to import, with an index of a few of its tasks, which is slow to make of all of them."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval missing: pip install 'quantkit[eval]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval.evaluator
        import lm_eval.models.huggingface
        import lm_eval.tasks

        folder = Path(lm_eval.tasks.__file__).parent
        paths = [folder / name for name in ("arc", "gsm8k", "hellaswag", "mmlu/default", "mmlu_pro", "wikitext")]
        manager = lm_eval.tasks.TaskManager(include_path=paths, include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "_task_manager", lambda: manager)
        yield lm_eval


LlamaMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_llama(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> LlamaMaker:
    """Writes a random Llama of two layers with the trained checkpoint's tokenizer: `make_llama(seed, length=128)`."""
    import transformers

    def make(seed: int, *, length: int = 128, template: bool = True) -> Path:
        folder = tmp_path_factory.mktemp("llama") / f"llama-{seed}"
        tokenizer = transformers.AutoTokenizer.from_pretrained(glm_tiny)
        if not template:
            tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=length,
            bos_token_id=0,
            eos_token_id=[0, 4],
            pad_token_id=0,
        )
        torch.manual_seed(seed)
        transformers.utils.logging.disable_progress_bar()
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def llama_folder(make_llama: LlamaMaker) -> Path:
    """A random Llama for 128 tokens; not to be changed."""
    return make_llama(0)


@pytest.fixture(scope="session")
def other_llama_folder(make_llama: LlamaMaker) -> Path:
    """Another random Llama; not to be changed."""
    return make_llama(1)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Loaded:
    """The same in memory; not to be changed."""
    return load(llama_folder)


Answering = Callable[[Loaded, Sequence[Sequence[int]]], Loaded]


@pytest.fixture(scope="session")
def answering() -> Answering:
    """Makes stand-ins for models whose `generate` gives these tokens in turn, cut at the cap, padded to the longest."""

    def make(loaded: Loaded, answers: Sequence[Sequence[int]]) -> Loaded:
        model, waiting = copy.copy(loaded.model), list(answers)

        def generate(input_ids: torch.Tensor, max_length: int, pad_token_id: int, **_: Any) -> torch.Tensor:
            room = max_length - input_ids.shape[1]
            rows = [torch.tensor(waiting.pop(0)[:room]) for _ in input_ids]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
            return torch.cat([input_ids, padded], dim=1)

        model.generate = generate
        return Loaded(model, loaded.tokenizer)

    return make


TaskMaker = Callable[..., TaskSpec]


@pytest.fixture
def make_task() -> TaskMaker:
    """Makes a task with its documents: `make_task(items=8, generates=False, **changes to lm-eval's definition)`."""

    def make(name: str = "colours", *, items: int = 8, generates: bool = False, **changes: Any) -> TaskSpec:
        documents = [{"question": f"Question {number}", "answer": f"answer {number % 3}"} for number in range(items)]

        def dataset(**_: Any) -> Any:
            from datasets import Dataset

            return {"test": Dataset.from_list(documents), "train": Dataset.from_list(documents[::-1])}

        definition = {
            "custom_dataset": dataset,
            "test_split": "test",
            "fewshot_split": "train",
            "doc_to_text": "{{question}}:",
            "doc_to_target": "{{answer}}",
            "output_type": "generate_until" if generates else "multiple_choice",
            "metric_list": [
                {"metric": "exact_match" if generates else "acc", "aggregation": "mean", "higher_is_better": True}
            ],
        }
        definition |= {} if generates else {"doc_to_choice": ["answer 0", "answer 1", "answer 2"]}
        definition |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}} if generates else {}
        return TaskSpec(name, overrides=definition | changes)

    return make

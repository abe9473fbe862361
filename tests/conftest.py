"""What several test files use: a small random checkpoint, the trained one and its conversions; lm-eval and a task."""

import copy
import gc
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import quantkit
from quantkit.eval import accuracy
from quantkit.eval.loading import Loaded, load
from quantkit.eval.task_specs import TaskSpec
from support.paths import GLM_TINY
from support.toys import ToyMaker, toy_tensors, write_toy

# fixtures of files of one topic; a module comes before those that import it
_FIXTURES = ("core_seconds", "program", "runnable", "folds", "generating", "phase_plans", "hub.pushing", "hub.pulling")
pytest_plugins = [f"support.{module}" for module in _FIXTURES]

gc.set_threshold(100_000, 50, 50)  # the headers of published models are half a million objects, and hold no garbage
hypothesis.settings.register_profile("all", deadline=None)  # a busy machine is no fault
hypothesis.settings.register_profile(
    "quick", deadline=None, derandomize=True, database=None, max_examples=15, stateful_step_count=30
)
hypothesis.settings.load_profile("all")
os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when triton is imported, which is later


@pytest.fixture
def make_toy(tmp_path: Path) -> ToyMaker:
    """Writes a toy checkpoint: `make_toy(change)` with a function that changes the tensors before they are written."""

    def make(
        change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
        name: str = "toy",
        num_shards: int = 2,
    ) -> Path:
        tensors = toy_tensors()
        change(tensors)
        return write_toy(tmp_path / name, tensors, num_shards)

    return make


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GLM checkpoint in two shards; not to be changed."""
    return write_toy(tmp_path_factory.mktemp("toy") / "source", toy_tensors())


@pytest.fixture(scope="session")
def toy_int4(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy converted by the default recipe; not to be changed."""
    folder = tmp_path_factory.mktemp("toy-int4") / "output"
    quantkit.convert(toy, folder)
    return folder


@pytest.fixture(scope="session")
def glm_tiny() -> Path:
    """The trained FP8 checkpoint of this repository."""
    return GLM_TINY


@pytest.fixture(scope="session")
def glm_tiny_converted(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained checkpoint converted by each built-in recipe, by the recipe's name."""
    folder = tmp_path_factory.mktemp("glm-tiny")
    for recipe in ("glm-5.2-int4", "glm-5.2-int4-bf16rest", "glm-5.2-nvfp4", "glm-5.2-nvfp4-modelopt", "bf16"):
        quantkit.convert(glm_tiny, folder / recipe, recipe)
    return {path.name: path for path in folder.iterdir()}


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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch in one thread: in tiny models, threads that wait for each other on a busy machine take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

"""Checkpoints are measured as they are stored, or not at all."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.weights import read_weights
from quantkit.errors import SourceError
from quantkit.eval.loading import (
    Loaded,
    check_measurable,
    check_memory,
    load,
    load_tokenizer,
    quantizes_activations,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def copied(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of a random Llama, to be broken."""
    return shutil.copytree(llama_folder, tmp_path / "copy")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_everything_is_float32(llama: Loaded, glm_tiny_converted: dict[str, Path]) -> None:
    """Whatever a checkpoint is stored in, no weight and no buffer of the model is of another float type."""
    for loaded in (llama, load(glm_tiny_converted["glm-5.2-int4"])):
        tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
        assert not loaded.model.training


@pytest.mark.parametrize(
    ("recipe", "quantizes"), [("glm-5.2-int4", True), ("glm-5.2-int4-bf16rest", False), ("bf16", False)]
)
def test_quantized_activations_are_known(glm_tiny_converted: dict[str, Path], recipe: str, quantizes: bool) -> None:
    """Of the built-in recipes, those that keep FP8 modules make transformers quantize activations."""
    assert quantizes_activations(check_measurable(glm_tiny_converted[recipe])) is quantizes


def test_fp8_blocks_are_refused(glm_tiny: Path) -> None:
    """transformers misreads ragged FP8 blocks without a word, so they are not measured but decoded first."""
    with pytest.raises(SourceError, match="FP8 blocks") as caught:
        check_measurable(glm_tiny)

    assert "--bf16" in str(caught.value.hint)


def test_missing_weights_are_refused(copied: Path) -> None:
    """A weight that is not there, which transformers would make up at random, is named."""
    change_weights(copied, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".q_proj." in name])

    with pytest.raises(SourceError, match=r"2 weights are missing, model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(copied)


def test_weights_of_another_shape_are_refused(copied: Path) -> None:
    """A weight that does not fit the config is an error in one line, not a traceback."""
    change_weights(copied, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))

    with pytest.raises(SourceError, match="transformers cannot load it") as caught:
        load(copied)
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_architecture_is_refused(copied: Path) -> None:
    """A model type that transformers does not know is an error that says so."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))

    with pytest.raises(SourceError, match=r"transformers cannot load it: ValueError: .*nothing"):
        load(copied)


def test_missing_tokenizer_is_refused(copied: Path) -> None:
    """A checkpoint without a tokenizer is an error that names its folder."""
    for path in copied.glob("tokenizer*"):
        path.unlink()

    with pytest.raises(SourceError, match=f"{copied}: transformers cannot load it"):
        load_tokenizer(copied)


def test_loading_prints_nothing(llama_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither bars nor remarks of the loaders are seen."""
    load(llama_folder)

    assert capfd.readouterr() == ("", "")


def test_too_little_memory_is_refused(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that do not fit into the memory side by side in float32 are refused; what just fits is not."""
    source = check_measurable(llama_folder)
    nbytes = sum(4 * math.prod(weight.shape) for weight in read_weights(source))
    monkeypatch.setattr("os.sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else nbytes)

    check_memory([source])
    with pytest.raises(SourceError, match=r"GB of memory in float32, and this machine has"):
        check_memory([source, source])

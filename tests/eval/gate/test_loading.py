"""Checkpoints are measured as they are stored, or not at all."""

import itertools
import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quantkit.choices import Mtp, Scheme
from quantkit.cli import app
from quantkit.conversion import Options, convert
from quantkit.errors import SourceError
from quantkit.eval.gate.loading import (
    Loaded,
    check_measurable,
    check_memory,
    load,
    load_tokenizer,
    quantizes_activations,
)
from quantkit.naming import TensorName
from quantkit.weights.grouping import read_weights
from support.families import PUBLISHED, write_family
from support.reference import assert_same, copy_readable, load_model, quiet, write_plain
from support.tiers import quick_if

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
    for loaded in (llama, *(load(glm_tiny_converted[recipe]) for recipe in ("glm-5.2-int4", "glm-5.2-nvfp4"))):
        tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
        assert not loaded.model.training


@pytest.mark.parametrize(
    ("recipe", "quantizes"),
    [("glm-5.2-int4", True), ("glm-5.2-nvfp4", True), ("glm-5.2-int4-bf16rest", False), ("bf16", False)],
)
def test_quantized_activations_are_known(glm_tiny_converted: dict[str, Path], recipe: str, quantizes: bool) -> None:
    """Of the built-in recipes, those that keep FP8 modules make transformers quantize activations."""
    assert quantizes_activations(check_measurable(glm_tiny_converted[recipe])) is quantizes


@pytest.fixture
def with_tokenizer(glm_tiny: Path) -> Callable[[Path], Path]:
    """Gives a checkpoint the trained one's tokenizer."""

    def add(folder: Path) -> Path:
        for path in glm_tiny.glob("*token*"):
            shutil.copy(path, folder)
        return folder

    return add


def assert_weights(loaded: Loaded, plain: Path, unit: float = 0.0) -> None:
    """The model's weights are those of the checkpoint in `plain`, but for a relative error of `unit`."""
    actual = dict(loaded.model.named_parameters())
    with quiet():
        expected, _ = load_model(plain, torch.float32)
    for name, values in expected.named_parameters():
        if unit:
            torch.testing.assert_close(actual[name], values, rtol=unit, atol=0)
        else:
            assert_same(actual[name], values)


MEASURED = [name for name in PUBLISHED if not name.endswith("-int4")]
SCHEMES = [Scheme.INT4, Scheme.NVFP4]


@pytest.mark.parametrize(
    ("name", "scheme"),
    quick_if(
        lambda name, scheme: MEASURED.index(name) % 4 == 2 * SCHEMES.index(scheme), itertools.product(MEASURED, SCHEMES)
    ),
)
def test_weights_are_measured_as_stored(
    name: str, scheme: Scheme, tmp_path: Path, with_tokenizer: Callable[[Path], Path]
) -> None:
    """Every family's conversions are loaded, experts' global scales included, as numpy decodes them, in float32."""
    source = write_family(tmp_path / "source", name)
    convert(with_tokenizer(source), tmp_path / "converted", options=Options(scheme=scheme))
    folder = copy_readable(tmp_path / "converted", tmp_path / "copy")

    assert_weights(load(folder), write_plain(folder, tmp_path / "plain", torch.float32))


@pytest.mark.parametrize(
    ("storage", "unit"),
    [
        ("f16", 0.0),
        ("f32", 0.0),
        ("fused3d", 0.0),
        ("fp8_channel", 0.0),
        ("fp8_tensor_static", 0.0),
        ("int4", 0.0),
        ("nvfp4", 2.0**-8),  # global scales that are no powers of two: rounded to BF16
        ("nvfp4_w4a4", 2.0**-8),
    ],
)
def test_other_storages_are_measured(
    storage: str, unit: float, tmp_path: Path, with_tokenizer: Callable[[Path], Path]
) -> None:
    """What others wrote is loaded as numpy decodes it, without the scales of activations."""
    folder = with_tokenizer(write_family(tmp_path / "source", f"glm-5.2-{storage}"))

    assert_weights(load(folder), write_plain(folder, tmp_path / "plain", torch.float32), unit)


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        ("glm-5.2-fp8_block", "FP8 blocks, which transformers misreads", "--bf16"),
        ("glm-5.2-fp8_block_e8m0", "FP8 blocks, which transformers misreads", "--bf16"),
        ("glm-5.2-fp8_block_ct", "experts in FP8 blocks, which transformers cannot decode", "--bf16"),
        ("glm-5.2-autofp8", "FP8 with a scale for each tensor, which transformers reads without", "--bf16"),
        ("llama-autofp8_static", "FP8 with a scale for each tensor, which transformers reads without", "--bf16"),
        ("llama-modelopt_fp8", "FP8 with a scale for each tensor, which transformers reads without", "--bf16"),
        ("glm-5.2-nvfp4_modelopt", "NVFP4 in ModelOpt's spelling", "--format compressed-tensors"),
        ("llama-nvfp4_modelopt_w4a16", "NVFP4 in ModelOpt's spelling", "--format compressed-tensors"),
    ],
)
def test_what_would_be_misread_is_refused(name: str, words: str, remedy: str, tmp_path: Path) -> None:
    """It is named before it is loaded, and the command that is given makes a checkpoint that can be measured."""
    source = write_family(tmp_path / "source", name)

    with pytest.raises(SourceError, match=words) as caught:
        check_measurable(source)
    command = str(caught.value.hint).partition("quantkit ")[2].removesuffix(".")
    assert remedy in command
    result = CliRunner().invoke(app, shlex.split(command.replace("FOLDER", str(tmp_path / "output"))))
    assert result.exit_code == 0, result.output
    check_measurable(tmp_path / "output")


def test_experts_of_different_formats_are_refused(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """transformers takes one format for all experts, and makes up those that have another."""
    folder = shutil.copytree(glm_tiny_converted["glm-5.2-nvfp4"], tmp_path / "mixed")
    tensors = {}
    for source, layers in ((glm_tiny_converted["bf16"], (3,)), (folder, (1, 2))):
        for path in source.glob("*.safetensors"):
            tensors |= {
                name: tensor
                for name, tensor in load_file(path).items()
                if ".mlp.experts." not in name or TensorName.parse(name).layer in layers
            }
            if source == folder:
                path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(SourceError, match=r"layers\.[12]\.\S+ \(nvfp4\) and \S+layers\.3\.\S+ \(plain\)") as caught:
        load(folder)
    assert "--bf16" in str(caught.value.hint)


def test_mtp_layers_are_not_measured(glm_tiny: Path, tmp_path: Path) -> None:
    """Experts in FP8 blocks are no obstacle in a layer that transformers does not load."""
    convert(glm_tiny, tmp_path / "output", options=Options(mtp=Mtp.KEEP))

    assert load(tmp_path / "output").model.config.num_hidden_layers == 4


def test_missing_weights_are_refused(copied: Path) -> None:
    """A weight that is not there, which transformers would make up at random, is named."""
    change_weights(copied, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".q_proj." in name])

    with pytest.raises(SourceError, match=r"2 weights are missing, model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(copied)


def test_weights_of_no_module_are_refused(copied: Path) -> None:
    """A weight that transformers leaves out is named: what it belongs to would be measured without it."""
    change_weights(copied, lambda tensors: tensors.update({"model.layers.1.extra_proj.weight": torch.ones(4, 4)}))

    with pytest.raises(SourceError, match=r"does not use 1 weights, model\.layers\.1\.extra_proj\.weight"):
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
    """A checkpoint without a tokenizer is an error that names its folder, and where to get one."""
    for path in copied.glob("tokenizer*"):
        path.unlink()

    with pytest.raises(SourceError, match=f"{copied}, its tokenizer: transformers cannot load it") as caught:
        load_tokenizer(copied)
    assert "tokenizer's files from the source" in str(caught.value.hint)


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

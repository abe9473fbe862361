"""The converted checkpoint is still the model: transformers' logits on it, and on weights decoded by `formats`."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loguru import logger
from safetensors.torch import load_file, save_file

from quantkit.formats import fp8_block, int4

TOKENS = torch.randint(8, 2000, (2, 160), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the loaders' remarks."""
    transformers.utils.logging.set_verbosity_error()
    logger.disable("compressed_tensors")
    yield
    logger.enable("compressed_tensors")
    transformers.utils.logging.set_verbosity_warning()


def load_model(folder: Path, dtype: torch.dtype) -> tuple[Any, set[str]]:
    """The model in `folder`, and the tensors that transformers did not expect."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, attn_implementation="eager"
    )
    assert info["missing_keys"] == set()
    assert info["mismatched_keys"] == set()
    return model.eval(), info["unexpected_keys"]


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    """The model's logits on `TOKENS`."""
    result: torch.Tensor = model(TOKENS).logits
    return result


def decode(folder: Path, output: Path, rest: torch.dtype = torch.bfloat16) -> Path:
    """Write the checkpoint in `folder` decoded by the references: INT4 to BF16, FP8 blocks to `rest`."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    decoded = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            codes, scale = int4.unpack(tensor), tensors[name.replace("_packed", "_scale")]
            decoded[name.replace("_packed", "")] = int4.dequantize(codes, scale)
        elif tensor.dtype == torch.float8_e4m3fn:
            decoded[name] = fp8_block.dequantize(tensor, tensors[f"{name}_scale"], dtype=rest)
        elif not name.endswith(("weight_scale", "weight_shape")):
            decoded[name] = tensor
    output.mkdir()
    save_file(decoded, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config))
    return output


def widen_experts(model: Any, dtype: torch.dtype) -> Any:
    """The routed experts in `dtype`: transformers keeps compressed ones in BF16 in a float32 model."""
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.to(dtype)
    return model


def test_bf16_rest_is_bit_equal(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """INT4 experts with a BF16 rest give, in BF16, bit for bit the logits of the dequantized model."""
    folder = glm_tiny_converted["glm-5.2-int4-bf16rest"]

    model, _ = load_model(folder, torch.bfloat16)
    reference, _ = load_model(decode(folder, tmp_path / "decoded"), torch.bfloat16)

    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("recipe", ["glm-5.2-int4", "glm-5.2-int4-bf16rest", "bf16"])
def test_only_mtp_tensors_are_unexpected(glm_tiny_converted: dict[str, Path], recipe: str) -> None:
    """transformers finds every tensor that it needs, and ignores those of the MTP layer, and no other."""
    _, unexpected = load_model(glm_tiny_converted[recipe], torch.bfloat16)

    assert unexpected
    assert [name for name in unexpected if not name.startswith("model.layers.4.")] == []


def test_mixed_without_activation_quantization(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """INT4 experts with an FP8 rest give, in float32 with activations left alone, the logits of the decoded weights."""
    folder = shutil.copytree(glm_tiny_converted["glm-5.2-int4"], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_1"]["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))

    model, _ = load_model(folder, torch.float32)
    reference, _ = load_model(decode(folder, tmp_path / "decoded", torch.float32), torch.float32)

    assert torch.equal(logits(model), logits(widen_experts(reference, torch.bfloat16)))


def quantize_activations(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What group_1's input_activations ask for: E4M3 with a scale for each 128 numbers of a token."""
    groups = args[0].unflatten(-1, (-1, 128))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    quantized = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return (quantized.flatten(-2),)


def test_mixed_with_activation_quantization(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """As shipped, transformers quantizes the inputs of the FP8 modules and no others: simulated, the logits agree."""
    folder = glm_tiny_converted["glm-5.2-int4"]
    fp8_modules = {
        name.removesuffix(".weight")
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if tensor.dtype == torch.float8_e4m3fn
    }

    model, _ = load_model(folder, torch.float32)
    reference, _ = load_model(decode(folder, tmp_path / "decoded", torch.float32), torch.float32)
    unquantized = logits(widen_experts(reference, torch.bfloat16))
    hooked = [name for name, module in reference.named_modules() if name in fp8_modules]
    for name in hooked:
        reference.get_submodule(name).register_forward_pre_hook(quantize_activations)
    simulated = logits(reference)

    assert len(hooked) == sum(not name.startswith("model.layers.4.") for name in fp8_modules)
    actual = logits(model)
    assert (actual - unquantized).abs().max() > 0.02 * unquantized.abs().max()
    assert (actual - simulated).abs().max() < 0.1 * (actual - unquantized).abs().max()

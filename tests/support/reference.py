"""What transformers computes on the numbers of a checkpoint, decoded by `truth.py`: the same model, plain weights.

Nothing of quantkit is in it. `write_numbers` keeps them in float32. transformers 5.17 rounds what it decodes, and so
does `write_plain`:

    experts       to BF16, whatever the model's dtype
    FP8 in BF16   FP32 scales first, then the product
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loguru import logger
from safetensors.torch import load_file, save_file

from support.runnable import edit_config
from support.truth import numbers, read_tensors, truth

_EXPERT = re.compile(r".*layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(\w+)")
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the loaders' remarks and bars."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logger.disable("compressed_tensors")
    yield
    logger.enable("compressed_tensors")
    transformers.utils.logging.set_verbosity_warning()


def copy_readable(folder: Path, output: Path) -> Path:
    """A copy that transformers reads: Kimi K2's model type needs code of its own, but the model is DeepSeek-V3's."""
    shutil.copytree(folder, output)
    config = json.loads((output / "config.json").read_text())
    if config["model_type"] == "kimi_k2":
        config.pop("auto_map", None)
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (output / "config.json").write_text(json.dumps(config))
    return output


def write_plain(folder: Path, output: Path, dtype: torch.dtype) -> Path:
    """The checkpoint in `folder` as transformers decodes it for a model in `dtype`, without quantization."""
    if dtype is torch.bfloat16:
        folder = _with_rounded_scales(folder, output.with_name(f"{output.name}-scales"))
    stored, tensors = read_tensors(folder), {}
    for name, values in truth(folder).items():
        tensor = torch.from_numpy(values.copy())
        if name in stored and stored[name][0] in _FLOATS:
            tensors[name] = tensor.to(_FLOATS[stored[name][0]])
        else:
            rounded = tensor.float().bfloat16() if _EXPERT.fullmatch(name) else tensor.float()
            tensors[name] = rounded.to(dtype)
    output.mkdir()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config))
    return output


def _with_rounded_scales(folder: Path, output: Path) -> Path:
    """A copy whose FP32 scales of FP8 weights are such that BF16 holds them."""
    shutil.copytree(folder, output)
    for path in output.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(".weight_scale") and tensor.dtype == torch.float32:
                tensors[name] = tensor.bfloat16().float()
        save_file(tensors, path, metadata={"format": "pt"})
    return output


def load_model(folder: Path, dtype: torch.dtype) -> tuple[Any, set[str]]:
    """The model in `folder`, and the tensors that transformers did not expect; none is missing or misshapen."""
    is_vision = "text_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, attn_implementation="eager")
    assert info["missing_keys"] == set()
    assert info["mismatched_keys"] == set()
    return model.eval(), info["unexpected_keys"]


@torch.inference_mode()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The model's logits on `tokens`."""
    result: torch.Tensor = model(tokens).logits
    return result


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit; else it says how far they are apart."""
    assert actual.dtype == expected.dtype
    difference = (actual.double() - expected.double()).abs().max()
    assert torch.equal(actual, expected), f"{difference:.3g} apart, of {expected.abs().max():.3g}"


@torch.inference_mode()
def divide_experts(model: Any, folder: Path) -> int:
    """Divide NVFP4 experts by their global scales, which transformers 5.17 leaves out; the number of scales."""
    experts = {name: module for name, module in model.named_modules() if name.endswith(".mlp.experts")}
    done = 0
    for name, (dtype, data) in read_tensors(folder).items():
        match = _EXPERT.fullmatch(name)
        if match is None or match[4] != "weight_global_scale":
            continue
        for module_name, module in experts.items():
            if f"layers.{match[1]}." in module_name:
                done += 1
                expert, half = int(match[2]), module.gate_up_proj.shape[1] // 2
                rows = {"gate": slice(half), "up": slice(half, None), "down": slice(None)}[match[3]]
                fused = module.down_proj if match[3] == "down" else module.gate_up_proj
                fused[expert, rows] /= float(numbers(dtype, data).item())
    return done


def quantize_inputs(model: Any, folder: Path) -> int:
    """Round the inputs of the model's FP8 modules to E4M3, as the config in `folder` says; how many modules that are.

    A scale is shared by 128 numbers of a token where weights have blocks, else by the whole token.
    """
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    wanted = [group["input_activations"] for group in groups if group["input_activations"]]
    columns = {activations.get("group_size") for activations in wanted}
    fp8 = {name for name, (dtype, _) in read_tensors(folder).items() if dtype == "F8_E4M3" and name.endswith(".weight")}

    def quantize(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (size,) = columns
        groups = args[0].unflatten(-1, (-1, size or args[0].shape[-1]))
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
        rounded = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(scale.dtype) * scale
        return (rounded.flatten(-2),)

    found = [module for name, module in model.named_modules() if f"{name}.weight" in fp8]
    for module in found:
        module.register_forward_pre_hook(quantize)
    return len(found)


def write_numbers(folder: Path, output: Path) -> Path:
    """The checkpoint in `folder` in float32, without quantization, for transformers."""
    copy_readable(folder, output)
    for path in output.glob("*.safetensors*"):
        path.unlink()
    tensors = {name: torch.from_numpy(values.astype("f4", order="C")) for name, values in truth(folder).items()}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})

    def strip(config: dict[str, Any]) -> None:
        for part in (config, config.get("text_config", {})):
            part.pop("quantization_config", None)

    return edit_config(output, strip)


@contextmanager
def ties_to_the_first() -> Iterator[None]:
    """torch.topk leaves open which of equal values it gives; here it is the first.

    Indexers have many: relu makes a score exactly 0 where no head fires.
    """

    def topk(values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        ordered, places = torch.sort(values, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((ordered.narrow(dim, 0, k), places.narrow(dim, 0, k)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        patch.setattr(torch, "topk", topk)
        yield


def reference_model(numbers: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder that `write_numbers` made."""
    with quiet():
        return load_model(numbers, dtype)[0]


@torch.inference_mode()
def reference_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Float32 logits [..., T, vocab] of tokens [..., T]."""
    with ties_to_the_first():
        logits: torch.Tensor = model(tokens.view(-1, tokens.shape[-1])).logits.float()
    return logits.view(*tokens.shape, -1)

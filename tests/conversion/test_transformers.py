"""The trained checkpoint, converted, is still the model: transformers' logits are those of weights decoded by numpy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.naming import Role, TensorName
from support.reference import (
    assert_same,
    divide_experts,
    load_model,
    logits,
    quantize_inputs,
    quiet,
    write_plain,
)
from support.tiers import exhaustive
from support.truth import read_tensors

TOKENS = torch.randint(8, 2000, (2, 160), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_remarks() -> Iterator[None]:
    """Without the loaders' remarks."""
    with quiet():
        yield


def widen_experts(model: Any, dtype: torch.dtype) -> Any:
    """The routed experts in `dtype`: transformers keeps compressed ones in BF16 in a float32 model."""
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.to(dtype)
    return model


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        exhaustive("glm-5.2-int4", torch.float32),
        ("glm-5.2-int4", torch.bfloat16),
        exhaustive("glm-5.2-int4-bf16rest", torch.bfloat16),
        ("glm-5.2-nvfp4", torch.bfloat16),
    ],
)
def test_logits_are_those_of_the_weights(
    glm_tiny_converted: dict[str, Path], tmp_path: Path, recipe: str, dtype: torch.dtype
) -> None:
    """Bit for bit, once experts have their global scales; of FP8 modules, and no others, inputs are quantized."""
    folder = glm_tiny_converted[recipe]
    model, _ = load_model(folder, dtype)
    reference, _ = load_model(write_plain(folder, tmp_path / "plain", dtype), dtype)
    widen_experts(reference, torch.bfloat16)
    divide_experts(model, folder)

    weights_alone = logits(reference, TOKENS)
    quantized = quantize_inputs(reference, folder)

    actual = logits(model, TOKENS)
    assert_same(actual, logits(reference, TOKENS))
    effect = (actual - weights_alone).abs().max() / weights_alone.abs().max()
    assert effect > 0.02 if quantized else effect == 0


@pytest.mark.parametrize(
    "recipe", ["glm-5.2-int4", "glm-5.2-nvfp4", exhaustive("glm-5.2-int4-bf16rest"), exhaustive("bf16")]
)
def test_only_mtp_tensors_are_unexpected(glm_tiny_converted: dict[str, Path], recipe: str) -> None:
    """transformers finds every tensor that it needs, and ignores those of the MTP layer and experts' global scales."""
    _, unexpected = load_model(glm_tiny_converted[recipe], torch.bfloat16)

    names = [TensorName.parse(name) for name in unexpected]
    left = [name for name in names if not name.is_mtp(4)]
    assert len(left) < len(names)
    assert {(name.role, name.leaf) for name in left} == (
        {(Role.ROUTED_EXPERT, "weight_global_scale")} if recipe == "glm-5.2-nvfp4" else set()
    )


def test_nvfp4_experts_lose_their_global_scales(glm_tiny_converted: dict[str, Path]) -> None:
    """transformers 5.17 does not divide routed experts by them (huggingface/transformers issue 48371)."""
    folder = glm_tiny_converted["glm-5.2-nvfp4"]
    model, _ = load_model(folder, torch.bfloat16)
    wrong = model.model.layers[1].mlp.experts.down_proj[0].clone()

    assert divide_experts(model, folder) == 3 * 16 * 3
    right = model.model.layers[1].mlp.experts.down_proj[0]
    (scale,) = read_tensors(folder)["model.layers.1.mlp.experts.0.down_proj.weight_global_scale"][1].tolist()
    assert scale > 1000
    assert_same(wrong, right * scale)


def test_nvfp4_runs_in_bf16_only(glm_tiny_converted: dict[str, Path]) -> None:
    """compressed-tensors decodes NVFP4 to BF16, which a float32 model does not multiply."""
    model, _ = load_model(glm_tiny_converted["glm-5.2-nvfp4"], torch.float32)

    with pytest.raises(RuntimeError, match="same dtype"):
        logits(model, TOKENS)


def test_modelopt_is_not_read(glm_tiny_converted: dict[str, Path]) -> None:
    """transformers 5.17 knows no such method, takes codes for weights, and finds that they do not fit."""
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load_model(glm_tiny_converted["glm-5.2-nvfp4-modelopt"], torch.bfloat16)

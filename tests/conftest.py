"""Checkpoints that several test files use: a small random one, the trained one, and conversions of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.inventory import inventory
from quantkit.formats import fp8_block

TOY_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "hidden_size": 256,
    "vocab_size": 96,
    "first_k_dense_replace": 1,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 64,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "indexer_types": ["full", "shared"],
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def toy_tensors() -> dict[str, torch.Tensor]:
    """Random tensors of `TOY_CONFIG` under the publisher's names: FP8 blocks, BF16, and an FP32 router bias."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in inventory("toy", json.dumps(TOY_CONFIG)).tensors.items():
        values = torch.randn(stored.spec.shape, generator=generator) * 0.02
        if stored.spec.dtype == "F8_E4M3":
            tensors[name], tensors[f"{name}_scale_inv"] = fp8_block.quantize(values)
        elif not name.endswith("_scale_inv"):
            tensors[name] = values.bfloat16() if stored.spec.dtype == "BF16" else values
    return tensors


def write_toy(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 2) -> Path:
    """Write a checkpoint whose tensors go round the shards in turn, so that most scales are not beside their weight."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    for number, (name, tensor) in enumerate(tensors.items()):
        shards[number % num_shards][name] = tensor.contiguous()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{num_shards:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(TOY_CONFIG, indent=2) + "\n")
    (folder / "tokenizer.json").write_text("{}\n")
    return folder


ToyMaker = Callable[..., Path]


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
    return Path(__file__).parent / "fixtures" / "glm-tiny-fp8"


@pytest.fixture(scope="session")
def glm_tiny_converted(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained checkpoint converted by each built-in recipe, by the recipe's name."""
    folder = tmp_path_factory.mktemp("glm-tiny")
    for recipe in ("glm-5.2-int4", "glm-5.2-int4-bf16rest", "bf16"):
        quantkit.convert(glm_tiny, folder / recipe, recipe)
    return {path.name: path for path in folder.iterdir()}

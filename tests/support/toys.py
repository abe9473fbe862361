"""GLM-5.2 in small: its headers alone, its tensors filled at random, and its folder; and the one writer of folders.

Every checkpoint that a test makes is written by `write`: these, those of a few tensors (`checkpoints.py`), and those of
every family in every storage (`families.py`).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.source import Source
from quantkit.families.inventory import inventory
from quantkit.formats import fp8_block

Tensors = dict[str, torch.Tensor]
ToyMaker = Callable[..., Path]  # `make_toy` of conftest.py

# one dense layer, two sparse ones and the MTP layer; every width is a multiple of 128, kv_a_proj_with_mqa has 144 rows
TOY: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "vocab_size": 512,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def toy_headers(**changes: Any) -> Source:
    """The headers of `TOY` with some keys changed; a key set to `...` is left out."""
    config = {key: value for key, value in {**TOY, **changes}.items() if value is not ...}
    return inventory("toy", json.dumps(config))


def toy_tensors() -> Tensors:
    """Random tensors of `TOY` under the publisher's names: FP8 blocks, BF16, and an FP32 router bias."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, stored in toy_headers().tensors.items():
        values = torch.randn(stored.spec.shape, generator=generator) * 0.02
        if stored.spec.dtype == "F8_E4M3":
            tensors[name], tensors[f"{name}_scale_inv"] = fp8_block.quantize(values)
        elif not name.endswith("_scale_inv"):
            tensors[name] = values.bfloat16() if stored.spec.dtype == "BF16" else values
    return tensors


def write_toy(folder: Path, tensors: Tensors, num_shards: int = 2) -> Path:
    """Write the toy with tensors that go round the shards in turn, so that most scales are not beside their weight."""
    shards = [dict(list(tensors.items())[number::num_shards]) for number in range(num_shards)]
    write(folder, shards, TOY)
    (folder / "tokenizer.json").write_text("{}\n")
    return folder


def write(folder: Path, shards: Iterable[Tensors], config: Mapping[str, Any]) -> Path:
    """Write the shards, the index and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(shards)
    weight_map: dict[str, str] = {}
    nbytes = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


@pytest.fixture
def make_toy(tmp_path: Path) -> ToyMaker:
    """Writes a toy checkpoint: `make_toy(change)` with a function that changes the tensors before they are written."""

    def make(
        change: Callable[[Tensors], None] = lambda tensors: None,
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

"""Checkpoints of a few tensors, for cases that need no whole model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

MLP = "model.layers.0.mlp"
DOWN = f"{MLP}.down_proj"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(folder: Path, *shards: Tensors, **config: Any) -> Path:
    """Write the tensors of each shard, index and config into the new `folder`; a Llama unless the config says else."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "llama", "num_hidden_layers": 1, **config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers near 0.02 times a normal distribution."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.to(dtype)


def fp8_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random E4M3 bytes, none of them a NaN."""
    return (normal(*shape, seed=seed, dtype=torch.float32) * 5000).clamp(-448, 448).to(torch.float8_e4m3fn)

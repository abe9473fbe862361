"""Checkpoints of a few tensors, for cases that need no whole model; and what lies in a checkpoint's folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from support import toys
from support.toys import Tensors

MLP = "model.layers.0.mlp"
DOWN = f"{MLP}.down_proj"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(folder: Path, *shards: Tensors, **config: Any) -> Path:
    """Write the tensors of each shard, index and config into the new `folder`; a Llama unless the config says else."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, **config}
    return toys.write(folder, shards, config)


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


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a converted checkpoint, but the manifest, which holds names and times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "quantkit.json"}


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file below `folder`."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    return {name: hashlib.sha256(content).hexdigest() for name, (content, _) in tree(folder).items()}


def load(folder: Path) -> Tensors:
    """All tensors of a checkpoint, by the safetensors library."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in tensors, f"{name} is in two shards"
            tensors[name] = tensor
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())

"""Conversions broken on purpose, as bugs of a converter would: the gate has to catch each of them.

Each takes a sound INT4 checkpoint's tensors and breaks them in place; the copy's manifest is made to fit, so that it is
not its sha256 that gives it away.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.source import CONFIG_FILE
from quantkit.checkpoint.writer import MANIFEST_FILE

Tensors = dict[str, torch.Tensor]


def double_scales(tensors: Tensors, layer: int) -> None:
    """One expert's scales are twice what they should be."""
    for name in _of_layer(tensors, layer, ".experts.0.", ".weight_scale"):
        tensors[name] = tensors[name] * 2


def swap_nibbles(tensors: Tensors, layer: int) -> None:
    """In one layer's experts the two codes of each byte are exchanged."""
    for name in _of_layer(tensors, layer, ".experts.", ".weight_packed"):
        octets = tensors[name].view(torch.uint8)
        tensors[name] = (((octets & 0xF) << 4) | (octets >> 4)).view(torch.int32)


def rotate_experts(tensors: Tensors, layer: int) -> None:
    """One layer's experts stand under their neighbours' numbers."""
    names = _of_layer(tensors, layer, ".experts.", "")
    numbers = sorted({int(_number(name)) for name in names})
    old = {name: tensors[name] for name in names}
    for name in names:
        following = numbers[(numbers.index(int(_number(name))) + 1) % len(numbers)]
        tensors[name] = old[name.replace(f".experts.{_number(name)}.", f".experts.{following}.")]


def round_router_bias(tensors: Tensors, layer: int) -> None:
    """All routers' biases, which choose the experts, are BF16 instead of FP32."""
    for name in tensors:
        if name.endswith(".e_score_correction_bias"):
            tensors[name] = tensors[name].to(torch.bfloat16)


BREAKAGES: dict[str, Callable[[Tensors, int], None]] = {
    "one expert's scales doubled": double_scales,
    "one layer's nibbles swapped": swap_nibbles,
    "one layer's experts rotated": rotate_experts,
    "router bias in BF16": round_router_bias,
}


def break_checkpoint(source: Path, output: Path, how: str) -> None:
    """Copy the INT4 checkpoint in `source` to `output` and break it; `how` is a key of `BREAKAGES`.

    The layer in the middle of those with experts is the one that is broken.
    """
    shutil.copytree(source, output)
    shards = {path: load_file(path) for path in sorted(output.glob("*.safetensors"))}
    config = json.loads((output / CONFIG_FILE).read_text(encoding="utf-8"))
    layers = range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"])
    together: Tensors = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    BREAKAGES[how](together, layers[len(layers) // 2])
    manifest = json.loads((output / MANIFEST_FILE).read_text(encoding="utf-8"))
    for path, tensors in shards.items():
        save_file({name: together[name].contiguous() for name in tensors}, path, {"format": "pt"})
        data = path.read_bytes()
        manifest["files"][path.name] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (output / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _of_layer(tensors: Tensors, layer: int, part: str, end: str) -> list[str]:
    return [name for name in tensors if f".layers.{layer}." in name and part in name and name.endswith(end)]


def _number(name: str) -> str:
    return name.partition(".experts.")[2].partition(".")[0]

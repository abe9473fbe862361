"""The tensors of Kimi's vision tower (MoonViT) and its projector, all BF16: 335 of them in Kimi K2.6.

Shapes: `modeling_kimi_k25.py` of the Hub repository moonshotai/Kimi-K2.6 (MoonViT3dPretrainedModel, PatchMergerMLP).
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from quantkit.checkpoint.header import TensorSpec

_CHANNELS = 3  # of an image


def vision_tower(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """All tensors outside the language model, from the config's `vision_config`; KeyError names a key that it lacks."""
    hidden, intermediate, patch = config["vt_hidden_size"], config["vt_intermediate_size"], config["patch_size"]
    tower = "vision_tower"
    yield from _affine(f"{tower}.patch_embed.proj", hidden, _CHANNELS, patch, patch)
    grid = (config["pos_emb_height"], config["pos_emb_width"], hidden)
    yield TensorSpec(f"{tower}.patch_embed.pos_emb.weight", "BF16", grid)
    for number in range(config["vt_num_hidden_layers"]):
        block = f"{tower}.encoder.blocks.{number}"
        yield from _affine(f"{block}.norm0", hidden)
        yield from _affine(f"{block}.norm1", hidden)
        yield from _affine(f"{block}.wqkv", 3 * hidden, hidden)
        yield from _affine(f"{block}.wo", hidden, hidden)
        yield from _affine(f"{block}.mlp.fc0", intermediate, hidden)
        yield from _affine(f"{block}.mlp.fc1", hidden, intermediate)
    yield from _affine(f"{tower}.encoder.final_layernorm", hidden)
    merged = hidden * prod(config["merge_kernel_size"])
    yield from _affine("mm_projector.pre_norm", hidden)
    yield from _affine("mm_projector.proj.0", merged, merged)
    yield from _affine("mm_projector.proj.2", config["text_hidden_size"], merged)


def _affine(module: str, *shape: int) -> Iterator[TensorSpec]:
    """A weight of `shape` and a bias of its first size."""
    yield TensorSpec(f"{module}.weight", "BF16", shape)
    yield TensorSpec(f"{module}.bias", "BF16", shape[:1])

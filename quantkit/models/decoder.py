"""The layers in order: from tokens to hidden states and logits.

A forward pass gets one row for each new token, of one request or of many; apart from the cache every operation treats
rows alike. For bit-for-bit equal results a request must have the same rows in the same passes, without others: torch
adds products of 1 row and of 64 rows in different orders, so another size of chunks, or other requests in the pass,
change last bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from quantkit.checkpoint.source import Source
from quantkit.families.config import ModelConfig
from quantkit.models.cache import Cache, Step
from quantkit.models.gqa import Gqa
from quantkit.models.linear import Linear
from quantkit.models.mla import Mla
from quantkit.models.moe import Mlp, Moe
from quantkit.models.norm import RmsNorm
from quantkit.models.rope import make_rotation
from quantkit.weights.packed import Packed


@dataclass(frozen=True)
class Layer:
    """Attention and MLP, each behind its norm, each added to the residual."""

    attention_norm: RmsNorm
    attention: Gqa | Mla
    mlp_norm: RmsNorm
    mlp: Mlp | Moe


@dataclass(frozen=True)
class Decoder:
    """A model ready to run.

    embedding  [vocab, hidden] in its stored dtype
    head       the same weight where the config ties them
    mtp        weights of the layers for multi-token prediction, by name; they are not run
    kv_scales  scales of an FP8 cache that the checkpoint holds, by name; a runtime must use them or refuse
    passed     tensors that were not read: a vision tower's, and static scales of activations, which are not quantized
    source     the checkpoint that it was loaded from
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear
    mtp: Mapping[str, Packed | torch.Tensor]
    kv_scales: Mapping[str, float]
    passed: tuple[str, ...]
    source: Source

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Hidden states [T, hidden], after the last norm, of `tokens` at `positions` of their requests, int64 [T] each.

        The cache holds all earlier positions of each row's request, or gets them in this pass, and keeps the new ones.
        """
        step = Step(positions, make_rotation(self.config.rope, positions), cache)
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        selected: torch.Tensor | None = None
        for layer in self.layers:
            attended, selected = layer.attention.attend(layer.attention_norm(x), step, selected)
            x = x + attended
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 [T, vocab] for the next token; rounded to BF16, one in fifty would have two best ones."""
        return self.head(hidden.float())

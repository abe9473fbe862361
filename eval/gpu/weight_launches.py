"""Launches of the kernels for packed weights in every branch that they have, with the shapes of GLM-5.2, on any device.

Dense 12288x6144, and the routed experts' gate and up projection, [256, 4096, 6144], under 8 choices of each token.
Kimi K2.6 and DeepSeek-V3 have rows of 7168 and 1536, which other tiles divide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from quantkit.kernels.gpu.fp8_block_dequantize import fp8_block_dequantize
from quantkit.kernels.gpu.int4_dequantize import int4_dequantize
from quantkit.kernels.gpu.nvfp4_dequantize import nvfp4_dequantize
from quantkit.kernels.gpu.w4a16 import w4a16, w4a16_experts

ROWS, COLUMNS, EXPERTS, EXPERT_ROWS, CHOICES = 12288, 6144, 256, 4096, 8
E4M3, E8M0, BF16, F16, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float16, torch.float32
Weight = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """Empty weights on `device`."""

    device: torch.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def weight(self, kind: str, *shape: int, scale: torch.dtype = BF16) -> Weight:
        """Packed, scale, and for NVFP4 a multiplier, of [(E,) N, K] weights of a kind like "INT4 g=32" or "NVFP4"."""
        *lead, columns = shape
        if kind.startswith("INT4"):
            groups = columns // int(kind.rpartition("=")[2])
            return self.empty((*lead, columns // 8), torch.int32), self.empty((*lead, groups), scale)
        packed, blocks = self.empty((*lead, columns // 2), torch.uint8), self.empty((*lead, columns // 16), E4M3)
        return packed, blocks, self.empty((lead[0] if len(lead) == 2 else 1,), F32)

    def fp8(
        self, shape: tuple[int, int], block: tuple[int, int], scale: torch.dtype = F32, out: torch.dtype = BF16
    ) -> None:
        """Decode FP8 blocks."""
        scales = self.empty((-(-shape[0] // block[0]), -(-shape[1] // block[1])), scale)
        fp8_block_dequantize(self.empty(shape, E4M3), scales, block, out)

    def int4(
        self, kind: str, shape: tuple[int, int] = (ROWS, COLUMNS), scale: torch.dtype = BF16, out: torch.dtype = BF16
    ) -> None:
        """Decode INT4."""
        packed, scales = self.weight(kind, *shape, scale=scale)
        int4_dequantize(packed, scales, out)

    def nvfp4(self, shape: tuple[int, int] = (ROWS, COLUMNS), out: torch.dtype = BF16) -> None:
        """Decode NVFP4."""
        packed, scale, multiplier = self.weight("NVFP4", *shape)
        nvfp4_dequantize(packed, scale, multiplier, out)

    def dense(
        self,
        kind: str,
        tokens: int,
        dtype: torch.dtype = BF16,
        shape: tuple[int, int] = (ROWS, COLUMNS),
        scale: torch.dtype = BF16,
    ) -> None:
        """x times a matrix."""
        w4a16(self.empty((tokens, shape[1]), dtype), *self.weight(kind, *shape, scale=scale))

    def experts(self, kind: str, tokens: int, ids: torch.dtype = torch.int64) -> None:
        """x times the matrices of experts."""
        packed, scale, *multiplier = self.weight(kind, EXPERTS, EXPERT_ROWS, COLUMNS)
        chosen, x = self.empty((tokens, CHOICES), ids), self.empty((tokens, COLUMNS), BF16)
        w4a16_experts(x, packed, scale, chosen, *multiplier)


def weight_launches(device: torch.device) -> dict[str, Callable[[], object]]:
    """What models need, by name."""
    weights = Weights(device)
    dense, experts = weights.dense, weights.experts
    groups = [f"INT4 g={group}" for group in (32, 64, 128)]
    return {
        "FP8 block dequantize": partial(weights.fp8, (ROWS, COLUMNS), (128, 128)),
        "FP8 channel dequantize": partial(weights.fp8, (ROWS, COLUMNS), (1, COLUMNS)),
        **{f"INT4 g={group} dequantize": partial(weights.int4, f"INT4 g={group}") for group in (128, 96)},
        "NVFP4 dequantize": weights.nvfp4,
        **{f"{kind} M={tokens}": partial(dense, kind, tokens) for kind in (*groups, "NVFP4") for tokens in (1, 16)},
        **{f"INT4 g=32 M={tokens}": partial(dense, "INT4 g=32", tokens) for tokens in (64, 4096)},
        "NVFP4 M=4096": partial(dense, "NVFP4", 4096),
        **{f"INT4 g=32 M={tokens} FP16": partial(dense, "INT4 g=32", tokens, F16) for tokens in (1, 16)},
        "INT4 g=32 experts, 1 token": partial(experts, "INT4 g=32", 1),
        **{f"INT4 g=32 experts, {tokens} tokens": partial(experts, "INT4 g=32", tokens) for tokens in (64, 4096)},
        "NVFP4 experts, 1 token": partial(experts, "NVFP4", 1),
        "NVFP4 experts, 64 tokens": partial(experts, "NVFP4", 64),
    }


def weight_branches(device: torch.device) -> dict[str, Callable[[], object]]:
    """What those leave out: other types and groups, and rows that other tiles divide, or none."""
    weights = Weights(device)
    dense, shape = weights.dense, (ROWS, COLUMNS)
    return {
        "FP8 block dequantize, BF16 scales, to FP16": partial(weights.fp8, shape, (128, 128), BF16, F16),
        "FP8 block dequantize, E8M0 scales, to float32": partial(weights.fp8, shape, (32, 40), E8M0, F32),
        "INT4 dequantize, float32 scales, to FP16": partial(weights.int4, "INT4 g=32", shape, F32, F16),
        "NVFP4 dequantize to float32": partial(weights.nvfp4, shape, F32),
        "INT4 g=32 M=1 K=7168": partial(dense, "INT4 g=32", 1, shape=(2048, 7168)),
        "INT4 g=32 M=1 K=1536": partial(dense, "INT4 g=32", 1, shape=(24576, 1536)),
        "INT4 g=16 M=1, float32 scales": partial(dense, "INT4 g=16", 1, scale=F32),
        "INT4 g=40 M=1 K=200": partial(dense, "INT4 g=40", 1, shape=(40, 200)),
        "INT4 g=40 M=3 K=200, FP16 scales": partial(dense, "INT4 g=40", 3, shape=(40, 200), scale=F16),
        "NVFP4 M=1 FP16 K=1536": partial(dense, "NVFP4", 1, F16, (24576, 1536)),
        "NVFP4 M=16 FP16": partial(dense, "NVFP4", 16, F16),
        "INT4 g=32 experts, 1 token, 32-bit ids": partial(weights.experts, "INT4 g=32", 1, torch.int32),
        **_ones(weights),
    }


def _ones(weights: Weights) -> dict[str, Callable[[], object]]:
    """One of everything: Triton makes a constant of an argument that is 1, which is another program."""
    return {
        "FP8 dequantize, one block": partial(weights.fp8, (1, 16), (1, 16)),
        "INT4 dequantize, one word": partial(weights.int4, "INT4 g=8", (1, 8)),
        "NVFP4 dequantize, one block": partial(weights.nvfp4, (1, 16)),
        **{f"INT4 M={tokens}, one word": partial(weights.dense, "INT4 g=8", tokens, shape=(1, 8)) for tokens in (1, 2)},
    }

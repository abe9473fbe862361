"""Launches of the kernels for weights with the shapes of GLM-5.2, for `triton_support.compile_launches`.

Dense 12288x6144, and the routed experts' gate and up projection, [256, 4096, 6144], under 8 choices of each token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quantkit.kernels.gpu.fp8_block_dequantize import fp8_block_dequantize
from quantkit.kernels.gpu.int4_dequantize import int4_dequantize
from quantkit.kernels.gpu.nvfp4_dequantize import nvfp4_dequantize
from quantkit.kernels.gpu.w4a16 import w4a16, w4a16_experts

ROWS, COLUMNS, EXPERTS = 12288, 6144, 256


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int4(*lead: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _empty((*lead, COLUMNS // 8), torch.int32),
        _empty((*lead, COLUMNS // group_size), torch.bfloat16),
    )


def _nvfp4(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _empty((*lead, COLUMNS // 2), torch.uint8),
        _empty((*lead, COLUMNS // 16), torch.float8_e4m3fn),
        _empty((1,), torch.float32),
    )


def _dense(tokens: int, weight: tuple[torch.Tensor, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    w4a16(_empty((tokens, COLUMNS), dtype), *weight)


def _experts(tokens: int, packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor | None = None) -> None:
    ids = _empty((tokens, 8), torch.int64)
    w4a16_experts(_empty((tokens, COLUMNS), torch.bfloat16), packed, scale, ids, multiplier)


_FP8 = _empty((ROWS, COLUMNS), torch.float8_e4m3fn)
_STACK = (EXPERTS, 4096)

LAUNCHES: dict[str, Callable[[], Any]] = {
    "FP8 block dequantize": partial(fp8_block_dequantize, _FP8, _empty((96, 48), torch.float32)),
    "FP8 channel dequantize": partial(fp8_block_dequantize, _FP8, _empty((ROWS, 1), torch.float32), (1, COLUMNS)),
    "INT4 g=128 dequantize": partial(int4_dequantize, *_int4(ROWS, group_size=128)),
    "INT4 g=96 dequantize": partial(int4_dequantize, *_int4(ROWS, group_size=96)),
    "NVFP4 dequantize": partial(nvfp4_dequantize, *_nvfp4(ROWS)),
    **{f"INT4 g={g} M=1": partial(_dense, 1, _int4(ROWS, group_size=g)) for g in (32, 64, 128)},
    **{f"INT4 g={g} M=16": partial(_dense, 16, _int4(ROWS, group_size=g)) for g in (32, 64, 128)},
    "INT4 g=32 M=64": partial(_dense, 64, _int4(ROWS, group_size=32)),
    "INT4 g=32 M=4096": partial(_dense, 4096, _int4(ROWS, group_size=32)),
    "INT4 g=32 M=1 FP16": partial(_dense, 1, _int4(ROWS, group_size=32), torch.float16),
    "INT4 g=32 M=16 FP16": partial(_dense, 16, _int4(ROWS, group_size=32), torch.float16),
    "NVFP4 M=1": partial(_dense, 1, _nvfp4(ROWS)),
    "NVFP4 M=16": partial(_dense, 16, _nvfp4(ROWS)),
    "NVFP4 M=4096": partial(_dense, 4096, _nvfp4(ROWS)),
    "INT4 g=32 experts, 1 token": partial(_experts, 1, *_int4(*_STACK, group_size=32)),
    "INT4 g=32 experts, 64 tokens": partial(_experts, 64, *_int4(*_STACK, group_size=32)),
    "INT4 g=32 experts, 4096 tokens": partial(_experts, 4096, *_int4(*_STACK, group_size=32)),
    "NVFP4 experts, 1 token": partial(_experts, 1, *_nvfp4(*_STACK)),
    "NVFP4 experts, 64 tokens": partial(_experts, 64, *_nvfp4(*_STACK)),
}

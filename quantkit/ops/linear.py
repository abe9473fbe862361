"""Products with stored weights, x @ W^T, dense or for routed experts: the kernel that suits device and type of x.

    compiled   on CPUs, for BF16: loops over the weights as they are stored (`kernels.cpu.linear`)
    triton     on GPUs: INT4 and NVFP4 fused (`kernels.gpu.w4a16`), FP8 decoded and multiplied by torch
    reference  for float32: weights decoded exactly, and multiplied by torch

`ids` int64 [tokens, choices] are routed experts. Weights then have one axis more, E, in front; x has a row for each
token that serves all its choices, or a row for each pair; the result has a row for each pair. Only chosen experts are
read.
Layouts and errors: `quantkit.formats` and the kernels.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional as F

from quantkit.formats import fp8_block as fp8_format
from quantkit.formats import int4 as int4_format
from quantkit.formats import nvfp4 as nvfp4_format

if TYPE_CHECKING:
    from quantkit.kernels.cpu.linear import Weights

Backend = Literal["compiled", "triton", "reference"]


def fp8_block(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    ids: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """x [M, K] times `weight` float8_e4m3fn [N, K] with `scale` float32 [ceil(N/rows), ceil(K/columns)] of `block`."""
    backend = backend or _choose(x, weight)
    if backend == "compiled":
        from quantkit.kernels.cpu.linear import fp8_block_linear

        return fp8_block_linear(x, weight, scale, block, ids)

    def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if backend == "triton":
            from quantkit.kernels.gpu.fp8_block_dequantize import fp8_block_dequantize

            return fp8_block_dequantize(codes, scales, block, x.dtype)
        return decode_fp8_block(codes, scales, block, x.dtype)

    return _decoded(x, ids, (weight, scale), decode)


def int4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """x [M, K] times `packed` int32 [N, K/8] with `scale` bfloat16 [N, K/g]."""
    words = packed.shape[-1] % scale.shape[-1] == 0  # each has one scale; else it is nobody's kernel
    match backend or (_choose(x, packed) if words else "reference"):
        case "compiled":
            from quantkit.kernels.cpu.linear import int4_linear

            return int4_linear(x, packed, scale, ids)
        case "triton":
            return _w4a16(x, packed, scale, None, ids)
    return _decoded(x, ids, (packed, scale), lambda codes, scales: decode_int4(codes, scales, x.dtype))


def nvfp4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor,
    ids: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """x [M, K] times `packed` uint8 [N, K/2] with `scale` float8_e4m3fn [N, K/16] and `multiplier` float32 []."""
    match backend or _choose(x, packed):
        case "compiled":
            from quantkit.kernels.cpu.linear import nvfp4_linear

            return nvfp4_linear(x, packed, scale, multiplier, ids)
        case "triton":
            return _w4a16(x, packed, scale, multiplier.reshape(-1), ids)
    parts = packed, scale, multiplier
    return _decoded(x, ids, parts, lambda codes, scales, factor: decode_nvfp4(codes, scales, factor, x.dtype))


def plain(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None = None, backend: Backend | None = None
) -> torch.Tensor:
    """x [M, K] times `weight` [N, K] of any type of floats. BF16 weights meet float32 x as they are."""
    is_bf16 = weight.dtype == torch.bfloat16
    if (backend or ("compiled" if is_bf16 and meets_loops(x, weight) else "reference")) == "compiled":
        from quantkit.kernels.cpu.linear import plain_linear

        return plain_linear(x, weight, ids)
    return _decoded(x, ids, (weight,), lambda codes: codes.to(x.dtype))


def ready_plain(codes: torch.Tensor) -> "Weights | None":
    """Weights made ready for `compiled`, in the same memory; None where there are no loops for them, as here for any
    type but BF16."""
    from quantkit.kernels.cpu.linear import plain_weights

    return plain_weights(codes) if codes.device.type == "cpu" and codes.dtype == torch.bfloat16 else None


def ready_fp8_block(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> "Weights | None":
    """The same of FP8 in blocks."""
    from quantkit.kernels.cpu.linear import fp8_block_weights

    return fp8_block_weights(codes, scale, block) if codes.device.type == "cpu" else None


def ready_int4(codes: torch.Tensor, scale: torch.Tensor) -> "Weights | None":
    """The same of INT4 in groups of whole words."""
    from quantkit.kernels.cpu.linear import int4_weights

    words = codes.shape[-1] % scale.shape[-1] == 0
    return int4_weights(codes, scale) if codes.device.type == "cpu" and words else None


def ready_nvfp4(codes: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor) -> "Weights | None":
    """The same of NVFP4."""
    from quantkit.kernels.cpu.linear import nvfp4_weights

    return nvfp4_weights(codes, scale, multiplier) if codes.device.type == "cpu" else None


def meets_loops(x: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether `compiled` is chosen for x, where there are loops for the weights: for BF16, and where these are BF16."""
    return x.device.type == "cpu" and torch.bfloat16 in (x.dtype, codes.dtype)


def compiled(x: torch.Tensor, weights: "Weights", ids: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weights that are ready."""
    from quantkit.kernels.cpu.linear import multiply

    return multiply(x, weights, ids)


def heads(x: torch.Tensor, weight: torch.Tensor, ready: "Weights | None" = None) -> torch.Tensor:
    """x [T, heads, K] times the matrix of each head, `weight` [heads, N, K], which may be ready: [T, heads, N]."""
    ready = ready or ready_plain(weight)
    if ready is None:
        return torch.einsum("thk,hnk->thn", x, weight)
    from quantkit.kernels.cpu.linear import multiply_each

    return multiply_each(x, ready)


def decode_fp8_block(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of an FP8 matrix: the product rounded to float32, and then to `dtype`."""
    if weight.device.type != "cpu":
        return fp8_format.dequantize(weight, scale, block, dtype)
    from quantkit.kernels.cpu.linear import fp8_block_decode

    return fp8_block_decode(weight, scale, block).to(dtype)


def decode_int4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of an INT4 matrix, exact in float32, in `dtype`."""
    if packed.device.type != "cpu":
        return int4_format.dequantize(int4_format.unpack(packed), scale, dtype)
    from quantkit.kernels.cpu.linear import int4_decode

    return int4_decode(packed, scale).to(dtype)


def decode_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of an NVFP4 matrix: the exact product rounded to float32, and then to `dtype`."""
    if packed.device.type != "cpu":
        exact = nvfp4_format.dequantize(nvfp4_format.unpack(packed), scale, 0, torch.float64)
        return (exact * multiplier).to(dtype)
    from quantkit.kernels.cpu.linear import nvfp4_decode

    return nvfp4_decode(packed, scale, float(multiplier)).to(dtype)


def _choose(x: torch.Tensor, codes: torch.Tensor) -> Backend:
    if meets_loops(x, codes):
        return "compiled"
    return "triton" if x.is_cuda and x.dtype == torch.bfloat16 else "reference"


def _w4a16(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> torch.Tensor:
    from quantkit.kernels.gpu.w4a16 import w4a16, w4a16_experts

    if ids is None:
        return w4a16(x.contiguous(), packed, scale, multiplier)
    return w4a16_experts(x.contiguous(), packed, scale, ids, multiplier)


def _decoded(
    x: torch.Tensor, ids: torch.Tensor | None, parts: tuple[torch.Tensor, ...], decode: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """x times the matrix that `decode` makes of `parts`, or of the chosen experts' shares of them, one at a time."""
    if ids is None:
        return F.linear(x, decode(*parts))
    chosen = ids.flatten()
    rows = torch.arange(len(chosen), device=x.device) // max(1, len(chosen) // max(1, len(x)))
    out = x.new_empty(len(chosen), parts[0].shape[1])
    for expert in sorted(set(chosen.tolist())):
        pairs = (chosen == expert).nonzero().squeeze(1)
        out[pairs] = F.linear(x[rows[pairs]], decode(*(part[expert] for part in parts)))
    return out

"""NVFP4 weights -> BF16, FP16 or float32.

    packed      [..., N, K / 2]   uint8; byte j holds codes 2j and 2j+1, the first in the low nibble; a code is an E2M1
                                  number: sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6
    scale       [..., N, K / 16]  float8_e4m3fn, or uint8
    multiplier  [1] or [E]        float32: of the tensor, or of each of E experts (packed is then [E, N, K / 2]).
                                  ModelOpt's `weight_scale_2`; 1 / compressed-tensors' `weight_global_scale`
    out         [..., N, K]       number * scale * multiplier

The product of number and scale has six bits; with the multiplier it is rounded to float32, then to the result's type.
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import require
from quantkit.kernels.gpu.bits import FLOATS, bf16_as_bits, e2m1_to_float16, e4m3_to_float16, from_float32
from quantkit.kernels.gpu.launching import run


@dataclass(frozen=True)
class Config:
    """The tile of a program, in rows and groups of 16 weights, and its warps of 32 threads."""

    ROWS: int = 4
    GROUPS: int = 128
    num_warps: int = 4


def configs() -> list[Config]:
    """The tiles worth timing."""
    return [Config(rows, groups, warps) for rows in (1, 4, 8) for groups in (64, 128) for warps in (4, 8)]


def nvfp4_dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Decode `packed` with `scale` and `multiplier` into `out` (by default new, of `dtype`). All are contiguous.

    Raises UsageError where shapes or types do not fit.
    """
    *lead, width = packed.shape
    shape = (*lead, width * 2)
    out = torch.empty(shape, dtype=dtype, device=packed.device) if out is None else out
    require(packed.dtype == torch.uint8, f"packed is {packed.dtype}, not uint8")
    require(scale.dtype in (torch.float8_e4m3fn, torch.uint8), f"scale is {scale.dtype}, not float8_e4m3fn or uint8")
    require(width % 8 == 0, f"packed is {[*packed.shape]}: K = {width * 2} is no multiple of 16")
    require([*scale.shape] == [*lead, width // 8], f"scale is {[*scale.shape]}, not {[*lead, width // 8]}")
    experts = 1 if multiplier.numel() == 1 else lead[0]
    fits = multiplier.dtype == torch.float32 and multiplier.numel() == experts
    require(fits, f"multiplier is {multiplier.dtype} {[*multiplier.shape]}, not float32 [1] or [{lead[0]}]")
    require(out.shape == shape, f"out is {[*out.shape]}, not {[*shape]}")
    require(out.dtype in FLOATS, f"out is {out.dtype}, not BF16, FP16 or float32")
    require(all(t.is_contiguous() for t in (packed, scale, out)), "packed, scale and out must be contiguous")
    if out.numel() == 0:
        return out
    config = config or Config()
    rows, groups = packed.numel() // width, width // 8
    run(
        _dequantize,
        (triton.cdiv(rows, config.ROWS), triton.cdiv(groups, config.GROUPS)),
        packed,
        scale.view(torch.uint8),
        multiplier,
        bf16_as_bits(out),
        rows,
        groups,
        rows // experts,
        HARDWARE=packed.device.type != "cpu",
        **asdict(config),
    )
    return out


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    packed_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,
    rows,
    groups,
    rows_per_multiplier,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = (row < rows)[:, None] & (group < groups)[None, :]
    at = row.to(tl.int64)[:, None] * groups + group[None, :]
    scale = e4m3_to_float16(tl.load(scale_ptr + at, mask=inside, other=0), HARDWARE)
    byte = tl.arange(0, 8)[None, None, :]
    packed = tl.load(packed_ptr + at[:, :, None] * 8 + byte, mask=inside[:, :, None], other=0).to(tl.uint16)
    codes = tl.join(e2m1_to_float16(packed & 0xF), e2m1_to_float16(packed >> 4))
    numbers = tl.reshape(codes, [ROWS, GROUPS, 16]) * scale[:, :, None]
    multiplier = tl.load(multiplier_ptr + row // rows_per_multiplier, mask=row < rows, other=0.0)
    values = from_float32(numbers.to(tl.float32) * multiplier[:, None, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :], values, mask=inside[:, :, None])


def reference(
    packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The same by torch alone."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).long()
    step = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=-1)
    values = torch.cat((numbers, -numbers))[codes] * step
    return (values * multiplier.view(-1, *[1] * (packed.dim() - 1))).to(dtype)

"""Small number formats by their bits: device functions that give the same result on a GPU and in Triton's interpreter.

    E4M3   s eeee mmm         (-1)^s * 2^(e-7) * (1 + m/8), or (-1)^s * 2^-6 * m/8 when e = 0; 0x7F and 0xFF are NaN
    E8M0   eeeeeeee           2^(e-127); 0xFF is NaN, there is no zero
    E2M1   s ee m             0 0.5 1 1.5 2 3 4 6 and their negatives
    BF16   s eeeeeeee mmmmmmm the upper half of a float32

Triton 3.9's interpreter rounds a conversion to BF16 towards zero, multiplies BF16 numbers as whole ones, and converts
E4M3 wrongly at its edges. Kernels therefore hold numbers as float32 or float16, and on a CPU a BF16 tensor is passed as
uint16 (`bf16_as_bits`): `to_float32` and `from_float32` tell the two apart by the element type. E4M3 is always uint8.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import require

E4M3_NAN: tl.constexpr = tl.constexpr(0x7F)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def bf16_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a uint16 view of it where it is BF16 on a CPU, for the interpreter."""
    return tensor.view(torch.uint16) if tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16 else tensor


class Weight4(NamedTuple):
    """4-bit weights as kernels read them; `as_weight4` makes it.

    words       [E, N, K / 8]   int32: nibble i of word j belongs to weight 8j + i, in INT4 and in NVFP4
    scale       [E, N, groups]  BF16 (uint16 on a CPU), FP16 or float32; E4M3 as uint8 where `nvfp4`
    multiplier  [1] or [E]      float32; None where there is none
    """

    words: torch.Tensor
    scale: torch.Tensor
    multiplier: torch.Tensor | None
    nvfp4: bool
    group_words: int


def as_weight4(packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor | None) -> Weight4:
    """Check INT4 `packed` int32 [(E,) N, K / 8] or NVFP4 `packed` uint8 [(E,) N, K / 2] with `scale` and `multiplier`.

    Raises UsageError where shapes or types do not fit.
    """
    nvfp4 = packed.dtype == torch.uint8
    require(nvfp4 or packed.dtype == torch.int32, f"packed is {packed.dtype}, not int32 (INT4) or uint8 (NVFP4)")
    kinds = (torch.float8_e4m3fn, torch.uint8) if nvfp4 else FLOATS
    require(scale.dtype in kinds, f"scale is {scale.dtype}, not one of {kinds}")
    require(packed.is_contiguous() and scale.is_contiguous(), "packed and scale must be contiguous")
    groups = scale.shape[-1]
    words = packed.shape[-1] // (4 if nvfp4 else 1)
    fits = words == 2 * groups and packed.shape[-1] % 8 == 0 if nvfp4 else groups > 0 and words % groups == 0
    require(
        fits and scale.shape[:-1] == packed.shape[:-1],
        f"scale is {[*scale.shape]}, which does not fit packed {[*packed.shape]}",
    )
    experts = packed.shape[0] if packed.dim() == 3 else 1
    if multiplier is not None:
        fits = multiplier.dtype == torch.float32 and multiplier.numel() in (1, experts)
        require(fits, f"multiplier is {multiplier.dtype} {[*multiplier.shape]}, not float32 [1] or [{experts}]")
    shape = (experts, packed.shape[-2])
    view = packed.view(torch.int32).view(*shape, words)
    stored = scale.view(torch.uint8) if nvfp4 else bf16_as_bits(scale)
    return Weight4(view, stored.view(*shape, groups), multiplier, nvfp4, words // groups)


def check_product(x: torch.Tensor, weight: Weight4, pairs: int, out: torch.Tensor) -> None:
    """Raise UsageError unless `x` [rows, K] fits `weight`, its rows divide `pairs`, and `out` is [pairs, N] like it."""
    _, rows, words = weight.words.shape
    require(x.dtype in (torch.bfloat16, torch.float16), f"x is {x.dtype}, not BF16 or FP16")
    require(x.dim() == 2 and x.shape[1] == words * 8, f"x is {[*x.shape]}, but the weights have K = {words * 8}")
    require(pairs == 0 or (len(x) > 0 and pairs % len(x) == 0), f"x has {len(x)} rows for {pairs} pairs")
    fits = out.shape == (pairs, rows) and out.dtype == x.dtype
    require(fits, f"out is {out.dtype} {[*out.shape]}, not {x.dtype} {[pairs, rows]}")
    require(x.is_contiguous() and out.is_contiguous(), "x and out must be contiguous")


def matrices(weight: Weight4) -> torch.Tensor:
    """The numbers that `weight` stands for, without its multiplier, float64 [E, N, K], by torch alone."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.words.device)
    codes = ((weight.words.unsqueeze(-1) >> shifts) & 0xF).flatten(-2).long()
    numbers = torch.arange(-8, 8, dtype=torch.float64, device=codes.device)
    scale = weight.scale.view(torch.bfloat16) if weight.scale.dtype == torch.uint16 else weight.scale
    if weight.nvfp4:
        half = numbers.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        numbers, scale = torch.cat((half, -half)), weight.scale.view(torch.float8_e4m3fn)
    return numbers[codes] * scale.double().repeat_interleave(weight.group_words * 8, dim=-1)


@triton.jit
def to_float32(x):  # type: ignore[no-untyped-def]
    """Float32 numbers of any float type, or of BF16 bits (uint16); exact."""
    if x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def from_float32(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of `dtype` nearest to float32 `x`, ties to even; uint16: BF16 bits, NaN 0x7FFF."""
    if dtype == tl.uint16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FFF).to(tl.uint16)
    return x.to(dtype)


@triton.jit
def e4m3_to_float16(byte, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float16 numbers of E4M3 bytes (uint8); exact, since float16 holds all of E4M3.

    HARDWARE  use the conversion instruction of sm_89 and later, which gives the same bits (NaN: its sign may differ)

    The bits of an E4M3 number, moved under float16's exponent, mean 2^-8 of it, subnormal numbers included.
    """
    if HARDWARE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = byte.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    number = bits.to(tl.float16, bitcast=True) * 256.0
    nan = ((wide & 0x80) << 8) | 0x7E00
    return tl.where((wide & 0x7F) == E4M3_NAN, nan.to(tl.float16, bitcast=True), number)


@triton.jit
def float32_to_e4m3(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The E4M3 bytes (uint8) nearest to float32 `x` clamped to -448..448, ties to even; signs are kept, of NaN too.

    HARDWARE  use the conversion instruction of sm_89 and later, which saturates and gives the same bits

    Below 2^-6 the steps are 2^-9, those of float32 at 2^14: adding 2^14 rounds. From there on a carry out of the
    rounded mantissa counts up the exponent.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) | sign.to(tl.uint8)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = (clamped + 0x7FFFF + ((clamped >> 20) & 1) - (120 << 23)) >> 20
    shifted = clamped.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(clamped < (121 << 23), subnormal, normal)
    return (tl.where(magnitude > 0x7F800000, E4M3_NAN, code) | sign).to(tl.uint8)


@triton.jit
def e8m0_to_float32(byte):  # type: ignore[no-untyped-def]
    """The float32 numbers of E8M0 bytes (uint8); exact: byte 0 is the subnormal 2^-127."""
    wide = byte.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def int4_to_float16(nibble):  # type: ignore[no-untyped-def]
    """The float16 numbers -8..7 of stored nibbles 0..15 (code + 8), in any integer type of 16 bits or more; exact."""
    return (nibble | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - 1032.0  # 0x6400 is 1024


@triton.jit
def e2m1_to_float16(code):  # type: ignore[no-untyped-def]
    """The float16 numbers of E2M1 codes 0..15, in any integer type of 16 bits or more; exact.

    The bits of an E2M1 number, moved under float16's exponent, mean 2^-14 of it, the subnormal 0.5 included.
    """
    wide = code.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0

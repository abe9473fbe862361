"""The one place that chooses between a compiled kernel and the torch reference: by argument, never at import.

Arrays are numpy's, because the way of a conversion does not import torch: FP8 as uint8 bytes, BF16 as uint16 bits.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from quantkit.formats.global_scale import nvfp4_exponent as nvfp4_exponent

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.convert.nvfp4_groups import Nvfp4Counts
    from quantkit.kernels.convert.weight_error import WeightError

Backend = Literal["compiled", "reference"]
Bytes = npt.NDArray[np.uint8]
Bf16Bits = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint32]
Scales = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Divisors = tuple[tuple[int, int], ...]


def bad_scale(scale: Scales) -> int | None:
    """The flat position of the first FP8 block scale that is NaN, not positive, subnormal, or so large that 448 * scale
    overflows float32; None when all are sound."""
    from quantkit.kernels.e4m3 import LARGEST_SCALE, SMALLEST_SCALE

    sound = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
    return None if sound.all() else int(np.argmin(sound))


def e4m3_values() -> npt.NDArray[np.float64]:
    """The number that each of the 256 E4M3 bytes stands for."""
    from quantkit.kernels.e4m3 import VALUES

    return VALUES


def first_nan(weight: Bytes) -> int | None:
    """The flat position of the first E4M3 NaN (0x7F or 0xFF), or None."""
    nan = (weight & 0x7F) == 0x7F
    return int(np.argmax(nan)) if nan.any() else None


def fp8_block_to_int4(
    weight: Bytes,
    scale: Scales,
    block: tuple[int, int],
    group_size: int,
    divisors: Divisors,
    signed: bool,
    packed: Words,
    out_scale: Bf16Bits,
    backend: Backend = "compiled",
) -> int | None:
    """Quantize FP8 `weight` [N, K] with `scale` [ceil(N/rows), ceil(K/columns)] into `packed` [N, K/8] (words of eight
    nibbles) and `out_scale` [N, K/group_size]; `divisors` and `signed` as in `quantkit.formats.int4.quantize`.

    `group_size` divides K and the block's columns. Returns None, or the flat position of the first NaN.
    """
    if backend == "compiled":
        from quantkit.kernels.convert.fp8_block_to_int4 import fp8_block_to_int4 as kernel

        bad = kernel(weight, scale, block, group_size, divisors, signed, packed, out_scale)
        return first_nan(weight) if bad >= 0 else None
    import torch

    from quantkit.formats import fp8_block, int4

    fp8 = torch.from_numpy(weight).view(torch.float8_e4m3fn)
    exact = fp8_block.dequantize(fp8, torch.from_numpy(scale), block, torch.float64)
    codes, stored = int4.quantize(exact, group_size, divisors, signed)
    packed[:] = int4.pack(codes).numpy().view(np.uint32)
    out_scale[:] = stored.view(torch.uint16).numpy()
    return first_nan(weight)


def first_unsound(weight: Floats) -> int | None:
    """The flat position of the first NaN, infinity, or magnitude above 2^127, or None."""
    unsound = ~(np.abs(weight) <= 2.0**127)
    return int(np.argmax(unsound)) if unsound.any() else None


def float_to_int4(
    weight: Floats,
    group_size: int,
    divisors: Divisors,
    signed: bool,
    packed: Words,
    out_scale: Bf16Bits,
    backend: Backend = "compiled",
) -> int | None:
    """Quantize `weight` [N, K] into `packed` [N, K/8] and `out_scale` [N, K/group_size].

    Returns None, or the flat position of the first NaN, infinity, or number above 2^127 whose scale would overflow.
    """
    if backend == "compiled":
        from quantkit.kernels.convert.float_to_int4 import float_to_int4 as kernel

        bad = kernel(weight, group_size, divisors, signed, packed, out_scale)
        return first_unsound(weight) if bad >= 0 else None
    import torch

    from quantkit.formats import int4

    codes, stored = int4.quantize(torch.from_numpy(weight), group_size, divisors, signed)
    packed[:] = int4.pack(codes).numpy().view(np.uint32)
    out_scale[:] = stored.view(torch.uint16).numpy()
    return first_unsound(weight)


def unpack_int4(packed: Words) -> npt.NDArray[np.int64]:
    """The codes -8..7 [N, K] in `packed` [N, K/8]."""
    nibbles = (packed[:, :, None] >> (np.arange(8, dtype=np.uint32) * 4)) & 0xF
    return nibbles.astype(np.int64).reshape(len(packed), -1) - 8


def fp8_block_to_float(weight: Bytes, scale: Scales, block: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Decode FP8 `weight` [N, K] exactly."""
    expanded = scale.astype(np.float64).repeat(block[0], axis=0).repeat(block[1], axis=1)
    return e4m3_values()[weight] * expanded[: weight.shape[0], : weight.shape[1]]


def to_float32(data: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """The numbers of BF16, F16, F32 or E8M0 bytes (safetensors' F8_E8M0, or U8), exactly; E8M0 has no zero."""
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F8_E8M0", "U8"):
        return np.exp2(np.where(data == 0xFF, np.float32(np.nan), data.astype(np.float32) - 127))
    return data.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def to_bf16(values: Floats) -> Bf16Bits:
    """The BF16 numbers nearest to finite float32 ones, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: Bf16Bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def int4_to_float(packed: Words, scale: Bf16Bits) -> npt.NDArray[np.float32]:
    """Decode INT4 `packed` [N, K/8] with `scale` [N, K/g] exactly: four bits times eight."""
    codes = unpack_int4(packed).reshape(*scale.shape, -1)
    step = to_float32(scale.reshape(-1).view(np.uint8), "BF16").reshape(scale.shape)
    return (codes.astype(np.float32) * step[:, :, None]).reshape(len(packed), -1)


def nvfp4_to_float(packed: Bytes, scale: Bytes, multiplier: float) -> npt.NDArray[np.float64]:
    """Decode NVFP4 `packed` [N, K/2] with E4M3 `scale` [N, K/16]; exact if `multiplier` is."""
    codes = unpack_nvfp4(packed).reshape(*scale.shape, -1)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return (values[codes] * (e4m3_values()[scale] * multiplier)[:, :, None]).reshape(len(packed), -1)


def fp8_block_to_bf16(
    weight: Bytes, scale: Scales, block: tuple[int, int], out: Bf16Bits, backend: Backend = "compiled"
) -> int | None:
    """Decode FP8 `weight` [N, K] into `out` [N, K]; returns None, or the flat position of the first NaN."""
    if backend == "compiled":
        from quantkit.kernels.convert.fp8_block_to_bf16 import fp8_block_to_bf16 as kernel

        return first_nan(weight) if kernel(weight, scale, block, out) >= 0 else None
    import torch

    from quantkit.formats import fp8_block

    fp8 = torch.from_numpy(weight).view(torch.float8_e4m3fn)
    out[:] = fp8_block.dequantize(fp8, torch.from_numpy(scale), block).view(torch.uint16).numpy()
    return first_nan(weight)


def int4_error(
    weight: Bytes, scale: Scales, block: tuple[int, int], packed: Words, out_scale: Bf16Bits
) -> "WeightError":
    """What INT4 `packed` [N, K/8] with `out_scale` [N, K/g] lost against FP8 `weight` [N, K]; compiled only."""
    from quantkit.kernels.convert.int4_error import int4_error as kernel

    return kernel(weight, scale, block, packed, out_scale)


def float_int4_error(weight: Floats, packed: Words, out_scale: Bf16Bits, slack: float = 0.0) -> "WeightError":
    """What INT4 `packed` [N, K/8] with `out_scale` [N, K/g], all sound, lost against floats `weight` [N, K].

    slack  how far `weight` may be, relatively, from the numbers that the codes were made from
    """
    from quantkit.kernels.convert.weight_error import WeightError

    exact = weight.astype(np.float64)
    step = to_float32(out_scale.view(np.uint8), "BF16").astype(np.float64).reshape(out_scale.shape)
    step = step.repeat(weight.shape[1] // out_scale.shape[1], axis=1)
    codes = unpack_int4(packed)
    error = exact - codes * step
    beyond = ((codes == 7) & (error / step > 0)) | ((codes == -8) & (error / step < 0))
    not_nearest = int((~((np.abs(error) <= np.abs(step) / 2 + slack * np.abs(exact)) | beyond)).sum())
    return WeightError(float(np.square(error).sum()), float(np.square(exact).sum()), not_nearest, bad_scales=0)


def fp8_block_to_nvfp4(
    weight: Bytes,
    scale: Scales,
    block: tuple[int, int],
    exponent: int,
    search: bool,
    packed: Bytes,
    out_scale: Bytes,
    backend: Backend = "compiled",
) -> "Nvfp4Counts":
    """Quantize FP8 `weight` [N, K] with `scale` [ceil(N/rows), ceil(K/columns)] into `packed` [N, K/2] (two codes a
    byte) and `out_scale` [N, K/16] (E4M3 bytes); `exponent` and `search` as in `quantkit.formats.nvfp4.quantize`.

    16 divides K and the block's columns. `bad` of the result is None, or the flat position of the first NaN.
    """
    if backend == "compiled":
        from quantkit.kernels.convert.fp8_block_to_nvfp4 import fp8_block_to_nvfp4 as kernel

        counts = kernel(weight, scale, block, exponent, search, packed, out_scale)
        return counts if counts.bad is None else counts._replace(bad=first_nan(weight))
    import torch

    from quantkit.formats import fp8_block

    fp8 = torch.from_numpy(weight).view(torch.float8_e4m3fn)
    exact = fp8_block.dequantize(fp8, torch.from_numpy(scale), block, torch.float64)
    return _nvfp4_reference(exact, exponent, search, packed, out_scale, first_nan(weight))


def float_to_nvfp4(
    weight: Floats, exponent: int, search: bool, packed: Bytes, out_scale: Bytes, backend: Backend = "compiled"
) -> "Nvfp4Counts":
    """Quantize `weight` [N, K] into `packed` [N, K/2] and `out_scale` [N, K/16], as `fp8_block_to_nvfp4` does.

    `bad` of the result is None, or the flat position of the first NaN, infinity, or number above 2^127.
    """
    if backend == "compiled":
        from quantkit.kernels.convert.float_to_nvfp4 import float_to_nvfp4 as kernel

        counts = kernel(weight, exponent, search, packed, out_scale)
        return counts if counts.bad is None else counts._replace(bad=first_unsound(weight))
    import torch

    exact = torch.from_numpy(weight)
    return _nvfp4_reference(exact, exponent, search, packed, out_scale, first_unsound(weight))


def _nvfp4_reference(
    weight: "torch.Tensor", exponent: int, search: bool, packed: Bytes, out_scale: Bytes, bad: int | None
) -> "Nvfp4Counts":
    import torch

    from quantkit.formats import nvfp4
    from quantkit.kernels.convert.nvfp4_groups import Nvfp4Counts

    codes, stored = nvfp4.quantize(weight, exponent, search)
    packed[:] = nvfp4.pack(codes).numpy()
    out_scale[:] = stored.view(torch.uint8).numpy()
    return Nvfp4Counts(bad, *nvfp4.count(weight, exponent, codes))


def unpack_nvfp4(packed: Bytes) -> Bytes:
    """The codes 0..15 [N, K] in `packed` [N, K/2]."""
    return np.stack((packed & 0xF, packed >> 4), axis=2).reshape(len(packed), -1)


def nvfp4_error(
    weight: Bytes, scale: Scales, block: tuple[int, int], packed: Bytes, out_scale: Bytes, multiplier: float
) -> "WeightError":
    """What NVFP4 `packed` [N, K/2] with `out_scale` [N, K/16] lost against FP8 `weight` [N, K]; compiled only."""
    from quantkit.kernels.convert.nvfp4_error import nvfp4_error as kernel

    return kernel(weight, scale, block, packed, out_scale, multiplier)


def float_nvfp4_error(
    weight: Floats, packed: Bytes, out_scale: Bytes, multiplier: float, slack: float = 0.0
) -> "WeightError":
    """What NVFP4 `packed` [N, K/2] with `out_scale` [N, K/16] lost against floats `weight` [N, K]; compiled only.

    slack  how far `weight` may be, relatively, from the numbers that the codes were made from
    """
    from quantkit.kernels.convert.nvfp4_error import float_nvfp4_error as kernel

    return kernel(weight, packed, out_scale, multiplier, slack)

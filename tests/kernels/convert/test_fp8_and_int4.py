"""The compiled loops equal the torch references byte for byte, over awkward shapes and all byte values."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit import ops
from quantkit.choices import ScaleMethod
from quantkit.formats import fp8_block
from quantkit.kernels.convert.int4_tables import code_tables
from quantkit.kernels.e4m3 import VALUES

SHAPES = [(1, 128), (129, 128), (144, 256), (320, 448), (576, 384)]


def random_fp8(shape: tuple[int, int], block: tuple[int, int] = (128, 128)) -> tuple[ops.Bytes, ops.Scales]:
    """Random finite bytes of all magnitudes, and scales over many orders of magnitude."""
    generator = np.random.default_rng(shape[0] * shape[1])
    magnitudes = generator.integers(0, 0x7F, shape, dtype=np.uint8)
    signs = generator.integers(0, 2, shape, dtype=np.uint8) << 7
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return magnitudes | signs, np.exp2(generator.uniform(-40, 10, grid)).astype(np.float32)


def int4_arrays(shape: tuple[int, int], group_size: int) -> tuple[ops.Words, ops.Bf16Bits]:
    """Outputs full of a pattern that no result leaves standing."""
    packed: ops.Words = np.full((shape[0], shape[1] // 8), 0xDEADBEEF, np.uint32)
    scale: ops.Bf16Bits = np.full((shape[0], shape[1] // group_size), 0xDEAD, np.uint16)
    return packed, scale


def quantize(
    weight: ops.Bytes,
    scale: ops.Scales,
    block: tuple[int, int],
    group_size: int,
    method: ScaleMethod = ScaleMethod.MINMAX,
    backend: ops.Backend = "compiled",
) -> tuple[ops.Words, ops.Bf16Bits]:
    """Words and scales of a weight without NaN."""
    packed, out_scale = int4_arrays((weight.shape[0], weight.shape[1]), group_size)
    signed = method is ScaleMethod.SIGNED
    assert (
        ops.fp8_block_to_int4(weight, scale, block, group_size, method.divisors, signed, packed, out_scale, backend)
        is None
    )
    return packed, out_scale


def assert_int4_equal(
    weight: ops.Bytes,
    scale: ops.Scales,
    block: tuple[int, int],
    group_size: int,
    methods: Iterable[ScaleMethod] = tuple(ScaleMethod),
) -> None:
    """Both backends give the same words and scales, however the scales are chosen."""
    for method in methods:
        _assert_equal(
            quantize(weight, scale, block, group_size, method, "compiled"),
            quantize(weight, scale, block, group_size, method, "reference"),
        )


def _assert_equal(ours: tuple[ops.Words, ops.Bf16Bits], theirs: tuple[ops.Words, ops.Bf16Bits]) -> None:
    for compiled, reference in zip(ours, theirs, strict=True):
        different = np.argwhere(compiled != reference)
        assert not len(different), f"{len(different)} differ, the first at {different[0]}"


def test_e4m3_table_equals_torch() -> None:
    """All 256 bytes stand for the numbers that torch gives them, the sign of zero and both NaNs included."""
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()

    assert np.array_equal(VALUES, expected, equal_nan=True)
    assert np.array_equal(np.signbit(VALUES[:255]), np.signbit(expected[:255]))


@pytest.mark.parametrize(
    ("shape", "group_size"),
    [(shape, group_size) for shape in SHAPES for group_size in (32, 64, 128) if shape[1] % group_size == 0],
)
def test_int4_equals_reference(shape: tuple[int, int], group_size: int) -> None:
    """INT4 from FP8 blocks has the reference's bytes, ragged last blocks included."""
    assert_int4_equal(*random_fp8(shape), (128, 128), group_size)


@pytest.mark.parametrize("block", [(1, 128), (64, 64), (128, 32), (7, 96)])
def test_int4_other_block_shapes(block: tuple[int, int]) -> None:
    """The block's shape is the checkpoint's, not always 128 x 128."""
    assert_int4_equal(*random_fp8((130, 192), block), block, 32)


def test_int4_every_byte_under_every_maximum() -> None:
    """For each largest magnitude all bytes up to it, of both signs, get the reference's codes, whatever the scale."""
    rows = []
    for largest in range(127):
        members = np.r_[np.arange(largest + 1), 0x80 + np.arange(largest + 1)]
        chunks = np.array_split(members, -(-len(members) // 31))
        rows += [np.r_[largest, chunk, np.zeros(31 - len(chunk))] for chunk in chunks]
    weight = np.array(rows, np.uint8)
    for seed in range(3):
        scale = np.exp2(np.random.default_rng(seed).uniform(-3, 3, (len(rows), 1))).astype(np.float32)
        assert_int4_equal(weight, scale, (1, 32), 32)


@pytest.mark.parametrize("group_size", [32, 96, 128])
@pytest.mark.parametrize("method", ScaleMethod)
def test_int4_from_floats_equals_reference(method: ScaleMethod, group_size: int) -> None:
    """INT4 from floats has the reference's bytes: zeros, tiny, huge and tied numbers, groups that no FP8 block has."""
    weight = np.random.default_rng(7).standard_normal((40, 384)).astype(np.float32)
    weight[3] = 0
    weight[4, ::2] = 1e-45
    weight[5] *= 1e-37
    weight[6] *= 1e37
    weight[7] = np.tile([0.5, -0.5, 0.25, -0.0], 96)
    results = []
    backends: tuple[ops.Backend, ...] = ("compiled", "reference")
    for backend in backends:
        packed, out_scale = int4_arrays((40, 384), group_size)
        signed = method is ScaleMethod.SIGNED
        assert ops.float_to_int4(weight, group_size, method.divisors, signed, packed, out_scale, backend) is None
        results.append((packed, out_scale))

    _assert_equal(*results)


@pytest.mark.parametrize("method", ScaleMethod)
def test_both_ways_to_int4_agree(method: ScaleMethod) -> None:
    """From exact floats the bytes are those of the FP8 byte domain."""
    weight, scale = random_fp8((130, 256))
    packed, out_scale = int4_arrays((130, 256), 64)
    floats = ops.fp8_block_to_float(weight, scale, (128, 128))

    assert ops.float_to_int4(floats, 64, method.divisors, method is ScaleMethod.SIGNED, packed, out_scale) is None

    _assert_equal((packed, out_scale), quantize(weight, scale, (128, 128), 64, method))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_unsound_floats_are_found(value: float, backend: ops.Backend) -> None:
    """A NaN, an infinity and a number whose scale would overflow are reported at their position."""
    weight = np.ones((3, 64), np.float32)
    weight[2, 5] = value

    arrays = int4_arrays((3, 64), 32)
    assert ops.float_to_int4(weight, 32, ((15, 2),), False, *arrays, backend) == 2 * 64 + 5


@pytest.mark.parametrize("exponent", [-126, -125, -120, -118, -112, 100, 119])
def test_int4_extreme_scales(exponent: int) -> None:
    """At the ends of the scales' range, where an INT4 scale would be subnormal, the codes are still the reference's."""
    weight, scale = random_fp8((128, 128))
    scale[:] = np.float32(2.0**exponent)
    weight[:4] = 0
    weight[4:8] &= 0x81  # zeros and the smallest magnitude
    assert_int4_equal(weight, scale, (128, 128), 32)


def test_int4_tables_refuse_an_unsafe_divisor() -> None:
    """A divisor for which rounding the scale to BF16 could move a code is refused, not approximated."""
    for method in ScaleMethod:
        assert code_tables(method.divisors).shape == (len(method.divisors), 3, 127, 256)
    with pytest.raises(ValueError, match=r"37/4 is not safe"):
        code_tables(((8, 1), (37, 4)))


@given(st.sampled_from(ScaleMethod), st.integers(1, 126), st.integers(0, 126), st.floats(2.0**-100, 2.0**100, width=32))
def test_int4_tables_hold_exact_codes(method: ScaleMethod, largest: int, byte: int, block_scale: float) -> None:
    """By exact fractions: the table of the stored scale's side holds the nearest code, ties to even."""
    byte = min(byte, largest)
    tables = code_tables(method.divisors)
    for number, (top, bottom) in enumerate(method.divisors):
        amax = Fraction(VALUES[largest]) * Fraction(block_scale)
        ideal = amax * bottom / top
        stored = Fraction(torch.tensor(float(ideal), dtype=torch.float32).bfloat16().item())
        side = 0 if stored < ideal else 1 if stored == ideal else 2
        quotient = Fraction(VALUES[byte]) * Fraction(block_scale) / stored
        assert tables[number, side, largest, byte] == 8 + min(round(quotient), 7)
        assert tables[number, side, largest, byte | 0x80] == 8 + max(round(-quotient), -8)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_equals_reference(shape: tuple[int, int]) -> None:
    """Decoding to BF16 has the reference's bytes, ragged last blocks included."""
    weight, scale = random_fp8(shape)
    compiled, reference = np.full(shape, 0xDEAD, np.uint16), np.full(shape, 0xDEAD, np.uint16)

    assert ops.fp8_block_to_bf16(weight, scale, (128, 128), compiled) is None
    assert ops.fp8_block_to_bf16(weight, scale, (128, 128), reference, "reference") is None
    assert np.array_equal(compiled, reference)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nan_is_found(nan: int, backend: ops.Backend) -> None:
    """A NaN byte of either sign is reported at its position by every conversion."""
    weight, scale = random_fp8((130, 256))
    weight[129, 77] = nan

    arrays = int4_arrays((130, 256), 32)
    position = ops.fp8_block_to_int4(weight, scale, (128, 128), 32, ((15, 2),), False, *arrays, backend)

    assert position == 129 * 256 + 77
    assert ops.fp8_block_to_bf16(weight, scale, (128, 128), np.empty((130, 256), np.uint16), backend) == 129 * 256 + 77


@pytest.mark.parametrize("value", [0.0, -1.0, 2.0**-127, 1e-45, 2.0**120, np.inf, -np.inf, np.nan])
def test_bad_scale_is_found(value: float) -> None:
    """A block scale that is not positive, normal and small enough is reported at its position."""
    scale = np.ones(5, np.float32)
    scale[3] = value

    assert ops.bad_scale(scale) == 3
    assert ops.bad_scale(np.array([2.0**-126, 2.0**119, 1.0], np.float32)) is None


def decoded(packed: ops.Words, out_scale: ops.Bf16Bits) -> npt.NDArray[np.float64]:
    """INT4 decoded by plain indexing."""
    shifts = np.arange(8, dtype=np.uint32) * 4
    codes = ((packed[:, :, None] >> shifts) & 0xF).astype(np.int64).reshape(len(packed), -1) - 8
    step = (out_scale.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return codes * step.repeat(codes.shape[1] // step.shape[1], axis=1)


def test_int4_error_equals_plain_arithmetic() -> None:
    """The error's sums are those of decoding both and subtracting."""
    weight, scale = random_fp8((144, 256))
    packed, out_scale = quantize(weight, scale, (128, 128), 64)

    error = ops.int4_error(weight, scale, (128, 128), packed, out_scale)

    fp8 = torch.from_numpy(weight).view(torch.float8_e4m3fn)
    exact = fp8_block.dequantize(fp8, torch.from_numpy(scale), dtype=torch.float64).numpy()
    difference = exact - decoded(packed, out_scale)
    assert error.squared_error == pytest.approx(np.square(difference).sum(), rel=1e-12)
    assert error.squared_weight == pytest.approx(np.square(exact).sum(), rel=1e-12)
    assert (error.not_nearest, error.bad_scales) == (0, 0)


def test_int4_error_counts_wrong_codes_and_scales() -> None:
    """A code that is one step off, and a scale that is zero, infinite or NaN, are counted."""
    weight, scale = random_fp8((128, 128))
    packed, out_scale = quantize(weight, scale, (128, 128), 32)
    packed[5, 3] ^= 0x10
    packed[77, 0] ^= 0x1
    out_scale[100, 1:] = [0, 0x7F80, 0x7FC0]

    error = ops.int4_error(weight, scale, (128, 128), packed, out_scale)

    assert (error.not_nearest, error.bad_scales) == (2, 3)

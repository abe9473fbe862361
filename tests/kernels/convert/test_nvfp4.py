"""The compiled NVFP4 loops equal the torch reference byte for byte, and their error that of a plain reader."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit import ops
from quantkit.kernels.convert.nvfp4_groups import Nvfp4Counts

Packed = tuple[ops.Bytes, ops.Bytes, Nvfp4Counts]
BACKENDS: tuple[ops.Backend, ...] = ("compiled", "reference")
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_fp8(shape: tuple[int, int], block: tuple[int, int], spread: float = 2) -> tuple[ops.Bytes, ops.Scales]:
    """Random finite bytes of all magnitudes, rows of small ones and of zeros; scales over `spread` powers of two."""
    generator = np.random.default_rng(shape[0] * shape[1])
    weight = generator.integers(0, 0x7F, shape, dtype=np.uint8)
    weight[::3] = generator.integers(0, 40, weight[::3].shape)
    weight[::7] = generator.integers(0, 2, weight[::7].shape)
    weight |= generator.integers(0, 2, shape, dtype=np.uint8) << 7
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return weight, np.exp2(generator.uniform(-12 - spread, -12, grid)).astype(np.float32)


def outputs(shape: tuple[int, ...]) -> tuple[ops.Bytes, ops.Bytes]:
    """Outputs full of a pattern that no result leaves standing."""
    return np.full((shape[0], shape[1] // 2), 0x88, np.uint8), np.full((shape[0], shape[1] // 16), 0xAD, np.uint8)


def from_fp8(
    weight: ops.Bytes,
    scale: ops.Scales,
    block: tuple[int, int],
    exponent: int,
    search: bool,
    backend: ops.Backend = "compiled",
) -> Packed:
    """Codes, scales and counts of FP8 blocks."""
    packed, out_scale = outputs(weight.shape)
    counts = ops.fp8_block_to_nvfp4(weight, scale, block, exponent, search, packed, out_scale, backend)
    return packed, out_scale, counts


def from_floats(weight: ops.Floats, exponent: int, search: bool, backend: ops.Backend = "compiled") -> Packed:
    """Codes, scales and counts of floats."""
    packed, out_scale = outputs(weight.shape)
    return packed, out_scale, ops.float_to_nvfp4(weight, exponent, search, packed, out_scale, backend)


def assert_equal(left: Packed, right: Packed) -> None:
    """Both have the same codes, scales and counts, and met no NaN."""
    for ours, theirs in zip(left[:2], right[:2], strict=True):
        different = np.argwhere(ours != theirs)
        assert not len(different), f"{len(different)} differ, the first at {different[0]}"
    assert left[2] == right[2]
    assert left[2].bad is None


def assert_fp8_equal(weight: ops.Bytes, scale: ops.Scales, block: tuple[int, int], exponents: list[int]) -> None:
    """Both backends, and the way by floats, agree with and without a search."""
    for exponent in exponents:
        for search in (False, True):
            ours = from_fp8(weight, scale, block, exponent, search)
            assert_equal(ours, from_fp8(weight, scale, block, exponent, search, "reference"))
            assert_equal(ours, from_floats(ops.fp8_block_to_float(weight, scale, block), exponent, search))


def exponents_for(scale: ops.Scales) -> list[int]:
    """The right exponent, one that clamps most groups, and one that flushes most."""
    right = ops.nvfp4_exponent(448 * float(scale.max()), "w")
    return [right, right - 4, right + 9]


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((1, 16), (128, 128)),
        ((129, 144), (128, 128)),
        ((320, 448), (128, 128)),
        ((130, 192), (64, 48)),
        ((40, 208), (1, 128)),
        ((33, 320), (1, 320)),
        ((70, 256), (70, 256)),
        ((70, 256), (128, 256)),
    ],
)
def test_fp8_equals_reference(shape: tuple[int, int], block: tuple[int, int]) -> None:
    """NVFP4 from FP8 blocks has the reference's bytes and counts: ragged blocks, per channel, per tensor."""
    for spread in (2, 30):
        weight, scale = random_fp8(shape, block, spread)
        assert_fp8_equal(weight, scale, block, exponents_for(scale))


def test_every_byte_under_every_maximum() -> None:
    """For each largest magnitude all bytes up to it, of both signs, get the reference's codes, whatever the scale."""
    rows = []
    for largest in range(127):
        members = np.r_[np.arange(largest + 1), 0x80 + np.arange(largest + 1)]
        chunks = np.array_split(members, -(-len(members) // 15))
        rows += [np.r_[largest, chunk, np.zeros(15 - len(chunk))] for chunk in chunks]
    weight = np.array(rows, np.uint8)
    scales = [2.0**-12, *np.exp2(np.random.default_rng(0).uniform(-13, -12, 3))]
    for scale in scales:
        assert_fp8_equal(weight, np.array([[scale]], np.float32), weight.shape, [-12, -8])


@pytest.mark.parametrize(("exponent", "block_scale"), [(-126, -126), (-126, -118), (126, 118), (117, 118), (0, -126)])
def test_extreme_scales(exponent: int, block_scale: int) -> None:
    """At the ends of the scales' range the bytes are still the reference's."""
    weight, _ = random_fp8((64, 128), (64, 128))
    assert_fp8_equal(weight, np.array([[2.0**block_scale]], np.float32), (64, 128), [exponent])


finite_bytes = st.integers(0, 254).filter(lambda byte: byte != 0x7F)


@given(
    st.lists(st.lists(finite_bytes, min_size=32, max_size=32), min_size=1, max_size=4),
    st.lists(st.floats(2.0**-30, 1, width=32), min_size=2, max_size=2),
    st.integers(-30, 4),
)
def test_any_bytes_equal_reference(rows: list[list[int]], scales: list[float], exponent: int) -> None:
    """Any bytes under any two block scales and any global scale."""
    weight, scale = np.array(rows, np.uint8), np.array([scales], np.float32)
    assert_fp8_equal(weight, scale, (len(rows), 16), [exponent])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("search", [False, True])
def test_floats_equal_reference(dtype: type[np.floating[Any]], search: bool) -> None:
    """NVFP4 from floats has the reference's bytes: zeros of both signs, tiny, huge and tied numbers, outliers."""
    weight = np.random.default_rng(7).standard_normal((60, 384)).astype(dtype)
    weight[3], weight[4] = 0, -0.0
    weight[5, ::2] = 1e-45
    weight[6] *= 1e-37
    weight[7] *= 1e30
    weight[8] = np.tile([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5, 6], 48)
    weight[9, ::17] *= 1000
    weight[10] = np.random.default_rng(8).choice([-1, 1], 384) * 6
    for exponent in (-9, 0, -20, 90):
        assert_equal(*(from_floats(weight, exponent, search, backend) for backend in BACKENDS))


def test_ties_of_scales_equal_reference() -> None:
    """Largest magnitudes halfway between two scales, and on either side of that, give the reference's scales."""
    scales = ops.e4m3_values()[:0x7F]
    halfway = 3 * (scales[:-1] + scales[1:])
    weight = np.zeros((3 * len(halfway), 16))
    weight[:, 5] = np.r_[halfway, np.nextafter(halfway, 0), np.nextafter(halfway, np.inf)]
    for search in (False, True):
        assert_equal(*(from_floats(weight, 0, search, backend) for backend in BACKENDS))

    ones = np.array([[0x38, *[0x28] * 15]] * len(halfway), np.uint8)  # 1 and quarters
    assert_fp8_equal(ones, halfway.astype(np.float32)[:, None], (1, 16), [0])


def test_pieces_equal_the_whole() -> None:
    """Rows converted in pieces, in any order, into parts of one output have the bytes of the whole weight."""
    weight, scale = random_fp8((300, 272), (128, 128))
    packed, out_scale, counts = from_fp8(weight, scale, (128, 128), -12, True)
    parts = outputs(weight.shape)
    sums = np.zeros(3, np.int64)
    for begin, end in ((128, 256), (256, 300), (0, 128)):
        rows, scales = weight[begin:end], scale[begin // 128 : -(-end // 128)]
        codes, block_scales = (part[begin:end] for part in parts)
        sums += ops.fp8_block_to_nvfp4(rows, scales, (128, 128), -12, True, codes, block_scales)[1:]

    assert_equal((packed, out_scale, counts), (*parts, Nvfp4Counts(None, *sums.tolist())))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nan_is_found(nan: int, backend: ops.Backend) -> None:
    """A NaN byte of either sign is reported at its position."""
    weight, scale = random_fp8((130, 256), (128, 128))
    weight[129, 77] = nan

    assert from_fp8(weight, scale, (128, 128), -12, False, backend)[2].bad == 129 * 256 + 77


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("backend", BACKENDS)
def test_unsound_floats_are_found(value: float, backend: ops.Backend) -> None:
    """A NaN, an infinity and a number above 2^127 are reported at their position."""
    weight = np.ones((3, 64), np.float32)
    weight[2, 5] = value

    assert from_floats(weight, 0, True, backend)[2].bad == 2 * 64 + 5


def decoded(packed: ops.Bytes, out_scale: ops.Bytes, exponent: int) -> npt.NDArray[np.float64]:
    """NVFP4 decoded by plain indexing, E4M3 from its bits."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    bits = out_scale.astype(np.int64)
    power, mantissa = bits >> 3 & 15, bits & 7
    scale = np.where(power > 0, (8 + mantissa) * 2.0 ** (power - 10), mantissa * 2.0**-9)
    return NUMBERS[codes] * scale.repeat(16, axis=1) * 2.0**exponent


@pytest.mark.parametrize("block", [(128, 128), (128, 24)])
def test_error_equals_plain_arithmetic(block: tuple[int, int]) -> None:
    """The error's sums are those of decoding both and subtracting, for FP8 blocks of any width and for floats."""
    weight, scale = random_fp8((144, 240), block)
    exact = ops.fp8_block_to_float(weight, scale, block)
    for search in (False, True):
        packed, out_scale, _ = from_floats(exact, -12, search)
        difference = exact - decoded(packed, out_scale, -12)

        errors = (
            ops.nvfp4_error(weight, scale, block, packed, out_scale, 2.0**-12),
            ops.float_nvfp4_error(exact, packed, out_scale, 2.0**-12),
            ops.float_nvfp4_error(exact.astype(np.float32), packed, out_scale, 2.0**-12, slack=2.0**-24),
        )

        for error in errors:
            assert error.squared_error == pytest.approx(np.square(difference).sum(), rel=1e-6)
            assert error.squared_weight == pytest.approx(np.square(exact).sum(), rel=1e-6)
            assert (error.not_nearest, error.bad_scales) == (0, 0)


def test_error_counts_each_code_that_is_not_nearest() -> None:
    """Of the sixteen codes for a weight those are counted that a plain search over the numbers finds farther off."""
    weights = np.array([0, -0.0, 0.1, -0.25, 0.25, 0.3, 0.75, -0.75, 1.4, -2.5, 2.5, 3.5, -5, 5, 5.5, -40])
    for code in range(16):
        packed = np.full((1, 8), code << 4 | code, np.uint8)
        distances = np.abs(weights[:, None] - NUMBERS)
        expected = int((distances[:, code] > distances.min(axis=1)).sum())

        error = ops.float_nvfp4_error(weights[None] * 8, packed, np.array([[0x38]], np.uint8), 8.0)

        assert (error.not_nearest, error.bad_scales) == (expected, 0)


def test_error_allows_slack() -> None:
    """A source that was rounded after the codes were made may be off by `slack`, and not by more."""
    packed, out_scale = np.full((1, 8), 0x11, np.uint8), np.array([[0x38]], np.uint8)
    weight = np.full((1, 16), 0.75 * (1 + 2.0**-9), np.float32)

    assert ops.float_nvfp4_error(weight, packed, out_scale, 1.0).not_nearest == 16
    assert ops.float_nvfp4_error(weight, packed, out_scale, 1.0, slack=2.0**-8).not_nearest == 0
    assert ops.float_nvfp4_error(weight, packed, out_scale, 1.0, slack=2.0**-10).not_nearest == 16


def test_error_counts_bad_scales() -> None:
    """NaN, negative, minus zero, and zero where a weight or a code is not, are bad scales; zero for zeros is not."""
    weight, scale = random_fp8((128, 256), (128, 128))
    weight[100] = 0x38
    weight[101, :64] = 0
    packed, out_scale, _ = from_fp8(weight, scale, (128, 128), -12, True)
    out_scale[100, :5] = [0x7F, 0xFF, 0xB8, 0x80, 0]
    out_scale[101, :3] = 0
    packed[101, 0], packed[101, 8] = 0x10, 0x80  # half, and minus zero

    error = ops.nvfp4_error(weight, scale, (128, 128), packed, out_scale, 2.0**-12)

    assert (error.not_nearest, error.bad_scales) == (0, 6)

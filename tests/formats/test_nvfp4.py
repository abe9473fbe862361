"""NVFP4's reference against a reader and a writer in exact fractions, and against the library that engines use."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from hypothesis import given
from hypothesis import strategies as st

from quantkit import ops
from quantkit.errors import SourceError
from quantkit.formats import nvfp4

NUMBERS = [Fraction(number) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}  # midpoint -> the even code of its two


def e4m3(byte: int) -> Fraction:
    """The number of a positive E4M3 byte that is not NaN."""
    exponent, mantissa = byte >> 3, byte & 7
    return Fraction(8 + mantissa if exponent else mantissa, 8) * Fraction(2) ** (max(exponent, 1) - 7)


SCALES = {byte: e4m3(byte) for byte in range(0x08, 0x7F)}


def nearest_code(value: Fraction, step: Fraction) -> int:
    """The code whose number times `step` is nearest, ties to even, and no minus zero."""
    distances = [abs(abs(value) - number * step) for number in NUMBERS]
    index = min(range(8), key=lambda index: (distances[index], index % 2))
    return index + 8 if value < 0 and index else index


def nearest_scale(amax: Fraction) -> int:
    """The E4M3 byte of a normal number nearest to amax / 6, ties to even."""
    return min(SCALES, key=lambda byte: (abs(SCALES[byte] - amax / 6), byte % 2))


def squared_error(group: list[Fraction], scale: int) -> Fraction:
    """What a group, the global scale taken out, loses under a scale byte."""
    return sum(
        (min(abs(abs(value) - number * SCALES[scale]) for number in NUMBERS) ** 2 for value in group), Fraction(0)
    )


def quantize_row(row: list[float], exponent: int, search: bool = False) -> tuple[list[int], list[int]]:
    """The codes and scale bytes that the product gives one row."""
    codes, scale = nvfp4.quantize(torch.tensor([row], dtype=torch.float64), exponent, search)
    return codes[0].tolist(), scale.view(torch.uint8)[0].tolist()


def test_golden_bytes() -> None:
    """Four codes pack into the bytes that the format's docstring draws, the first code in the low nibble."""
    codes = torch.tensor([[0x1, 0xF, 0x0, 0x5]], dtype=torch.uint8)

    packed = nvfp4.pack(codes)

    assert packed.tolist() == [[0xF1, 0x50]]
    assert nvfp4.unpack(packed).tolist() == codes.tolist()
    decoded = nvfp4.dequantize(codes.tile(4), torch.ones(1, 1).to(torch.float8_e4m3fn), 0)
    assert decoded[0, :4].tolist() == [0.5, -6, 0, 3]


@given(st.lists(st.lists(st.integers(0, 15), min_size=16, max_size=16), min_size=1, max_size=4))
def test_packing_is_lossless(codes: list[list[int]]) -> None:
    """Any codes come back, from the reference and from the numpy unpacking, each nibble where the layout says."""
    packed = nvfp4.pack(torch.tensor(codes, dtype=torch.uint8))

    assert nvfp4.unpack(packed).tolist() == codes
    assert ops.unpack_nvfp4(packed.numpy()).tolist() == codes
    for row, data in zip(codes, packed.tolist(), strict=True):
        assert [data[k // 2] >> 4 * (k % 2) & 0xF for k in range(16)] == row


def test_layout_equals_compressed_tensors() -> None:
    """Bytes and numbers are those of compressed-tensors, both ways, for every code that we write."""
    written = torch.tensor([*range(8), *range(9, 16)], dtype=torch.uint8)
    codes = written[torch.randint(0, 15, (24, 96), generator=torch.Generator().manual_seed(0))]
    numbers = nvfp4.dequantize(codes, torch.ones(24, 6).to(torch.float8_e4m3fn), 0)

    assert torch.equal(nvfp4.pack(codes), pack_fp4_to_uint8(numbers))
    assert torch.equal(unpack_fp4_from_uint8(nvfp4.pack(codes), 24, 96), numbers)


@pytest.mark.parametrize("midpoint", TIES)
@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_tie_to_even(midpoint: float, sign: int) -> None:
    """Under any scale each of the seven midpoints gets the even code, and its neighbours in float64 the nearer ones."""
    below = sum(number < midpoint for number in NUMBERS) - 1
    for exponent in (-100, -17, 0, 100):
        for scale in SCALES:
            step = float(SCALES[scale]) * 2.0**exponent
            values = [np.nextafter(midpoint * step, 0), midpoint * step, np.nextafter(midpoint * step, np.inf)]
            codes, scales = quantize_row([6 * step, *(sign * value for value in values), *[0.0] * 12], exponent)
            assert scales == [scale]
            expected = [code + 8 if sign < 0 and code else code for code in (below, TIES[midpoint], below + 1)]
            assert codes[1:4] == expected


def test_scales_are_the_nearest_e4m3_numbers() -> None:
    """A largest magnitude of 6 times a scale, of a point halfway to the next, or beside it, gives the nearest scale."""
    for scale in range(0x08, 0x7E):
        halfway = float(SCALES[scale] + SCALES[scale + 1]) * 3
        row: list[float] = []
        for amax in (6 * float(SCALES[scale]), np.nextafter(halfway, 0), halfway, np.nextafter(halfway, np.inf)):
            row += [float(amax), *[0.0] * 15]
        _, scales = quantize_row(row, 0)
        assert scales == [scale, scale, scale + scale % 2, scale + 1]


def test_what_rounds_to_zero_has_no_sign() -> None:
    """Minus zero and tiny negative numbers get the code 0, in a group of zeros and beside others."""
    codes, scales = quantize_row([-0.0] * 16 + [6.0, -1e-30, -0.0, -0.25] + [-0.24] * 12, 0)

    assert codes == [0] * 16 + [7] + [0] * 15
    assert scales == [0x08, 0x38]


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("amax", [1e-300, 2.0**-40, 2.0**-10, 6 * 2.0**-8])
def test_tiny_groups_have_the_smallest_normal_scale(amax: float, search: bool) -> None:
    """A group too small for the block scales keeps the scale 2^-6, which kernels can hold, not less."""
    weight = torch.tensor([[amax, -amax, *[0.0] * 14]], dtype=torch.float64)

    codes, scale = nvfp4.quantize(weight, 0, search)

    assert scale.view(torch.uint8).tolist() == [[0x08]]
    assert codes[0].tolist() == [nearest_code(Fraction(value), Fraction(1, 64)) for value in weight[0].tolist()]
    assert nvfp4.count(weight, 0, codes) == (0, 1, int(amax < 2.0**-8))


def test_groups_out_of_range_are_counted() -> None:
    """Clamped, raised and flushed groups are counted; a group of zeros is none of them, nor is one just in range."""
    edge = 6 * 7.5 * 2.0**-9  # halfway between the largest subnormal scale and the smallest normal one
    amaxes = [0.0, 2688.0, np.nextafter(2688, np.inf), 1e6, edge, np.nextafter(edge, 0), 2.0**-8, 1e-9]
    weight = torch.zeros(1, 16 * len(amaxes), dtype=torch.float64)
    weight[0, 3::16] = -torch.tensor(amaxes, dtype=torch.float64)

    codes, scale = nvfp4.quantize(weight, 0)

    assert nvfp4.count(weight, 0, codes) == (2, 3, 2)
    assert scale.view(torch.uint8)[0].tolist() == [0x08, 0x7E, 0x7E, 0x7E, 0x08, 0x08, 0x08, 0x08]
    assert codes[0, 3::16].tolist() == [0, 15, 15, 15, 15, 15, 0, 0]


groups = st.lists(
    st.one_of(
        st.floats(-2688, 2688, width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2688.0, 1e5, 2.0**-8, -(2.0**-8)]),
        st.builds(lambda step, tie: float(step) * tie, st.sampled_from([*SCALES.values()]), st.sampled_from([*TIES])),
    ),
    min_size=16,
    max_size=16,
)


@given(groups, st.integers(-100, 100))
def test_plain_equals_exact_fractions(row: list[float], exponent: int) -> None:
    """For any group the plain scale and the codes are those found by exact fractions over all scales and numbers."""
    codes, scales = quantize_row([value * 2.0**exponent for value in row], exponent)

    scale = nearest_scale(max(abs(Fraction(value)) for value in row))
    assert scales == [scale]
    assert codes == [nearest_code(Fraction(value), SCALES[scale]) for value in row]


@given(groups, st.integers(-100, 100))
def test_search_takes_the_best_neighbour(row: list[float], exponent: int) -> None:
    """The scale of a search is a neighbour of the plain one, and none has a smaller error, the plain one included."""
    codes, scales = quantize_row([value * 2.0**exponent for value in row], exponent, search=True)

    group = [Fraction(value) for value in row]
    plain = nearest_scale(max(abs(value) for value in group))
    neighbours = {plain + offset for offset in nvfp4.CANDIDATES} & set(SCALES)
    assert plain in neighbours
    assert scales[0] in neighbours
    least = min(squared_error(group, scale) for scale in neighbours)
    assert squared_error(group, scales[0]) <= least * (1 + Fraction(1, 2**45))
    assert codes == [nearest_code(value, SCALES[scales[0]]) for value in group]


@pytest.mark.parametrize(("distribution", "ratio"), [("normal", 0.74), ("laplace", 0.80)])
def test_search_gains_what_all_scales_would(distribution: str, ratio: float) -> None:
    """Eight candidates come within 0.5 % of the best of all 119 scales, well below the error of plain rounding."""
    weight = torch.from_numpy(getattr(np.random.default_rng(1), distribution)(size=(64, 256)))
    groups = weight.reshape(-1, 1, 16) / 2.0**-7
    steps = torch.tensor([float(step) for step in SCALES.values()], dtype=torch.float64).reshape(1, -1, 1)
    distances = torch.stack([(groups.abs() - float(number) * steps).abs() for number in NUMBERS]).amin(dim=0)
    best = distances.square().sum(dim=2).amin(dim=1).sum() * 2.0**-14

    def error(search: bool) -> torch.Tensor:
        codes, scale = nvfp4.quantize(weight, -7, search)
        return (weight - nvfp4.dequantize(codes, scale, -7, torch.float64)).square().sum()

    assert best <= error(True) * (1 + 1e-12)
    assert error(True) < 1.005 * best
    assert error(True) < ratio * error(False)


def test_dequantize_multiplies() -> None:
    """Number times scale times 2^exponent, exact in BF16 and in the dtype asked for, whatever the code and scale."""
    codes = torch.arange(16, dtype=torch.uint8).tile(119, 1)
    scale = torch.tensor([*SCALES], dtype=torch.uint8).reshape(-1, 1).view(torch.float8_e4m3fn)

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        decoded = nvfp4.dequantize(codes, scale, -13, dtype)
        assert decoded.dtype == dtype
        for row, step in zip(decoded.double().tolist(), SCALES.values(), strict=True):
            assert row[:8] == [float(number * step / 2**13) for number in NUMBERS]
            assert row[8:] == [-value for value in row[:8]]


@given(st.floats(2.0**-110, 2.0**127))
def test_exponent_is_the_smallest(amax: float) -> None:
    """The largest group gets a block scale of at most 448, and with a smaller exponent it would not."""
    exponent = ops.nvfp4_exponent(amax, "w")

    assert Fraction(amax) / (6 * Fraction(2) ** exponent) <= 448
    assert Fraction(amax) / (6 * Fraction(2) ** (exponent - 1)) > 448


def test_exponent_at_the_edges() -> None:
    """Zero and 6 * 448 give 0, the next number 1; the smallest magnitude that has an exponent gives -126."""
    assert ops.nvfp4_exponent(0.0, "w") == 0
    assert ops.nvfp4_exponent(2688.0, "w") == 0
    assert ops.nvfp4_exponent(math.nextafter(2688, math.inf), "w") == 1
    assert ops.nvfp4_exponent(math.nextafter(2688 * 2.0**-127, 1), "w") == -126


@pytest.mark.parametrize("amax", [math.nan, math.inf, 2688 * 2.0**-127, 5e-324, 1e300])
def test_exponent_out_of_range_is_refused(amax: float) -> None:
    """What has no power of two with a normal reciprocal in float32 is refused by name."""
    with pytest.raises(SourceError, match=r"layers\.0\.gate_proj: .*no global scale") as error:
        ops.nvfp4_exponent(amax, "layers.0.gate_proj")
    assert error.value.hint

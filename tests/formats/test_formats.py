"""The torch references: golden bytes, rounding rules, edge groups, and agreement with the library that engines use."""

import math

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st

from quantkit.choices import ScaleMethod
from quantkit.formats import fp8_block, int4

SHAPES = [(1, 32), (3, 96), (128, 256), (144, 384)]


def test_int4_golden_word() -> None:
    """Eight codes pack into the word that the format's docstring draws, the first code lowest."""
    codes = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, -3]], dtype=torch.int8)

    assert int4.pack(codes).tolist() == [[0x5BA798F0]]
    assert int4.unpack(int4.pack(codes)).tolist() == codes.tolist()


def test_int4_word_with_the_top_bit_set_is_negative() -> None:
    """A word whose last nibble is 8 or more is a negative int32, not an overflow."""
    codes = torch.full((1, 8), 7, dtype=torch.int8)

    assert int4.pack(codes).tolist() == [[-1]]


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_packing_equals_compressed_tensors(shape: tuple[int, int]) -> None:
    """Words and codes are those of compressed-tensors, both ways."""
    codes = torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))

    packed = int4.pack(codes)

    assert torch.equal(packed, pack_to_int32(codes, num_bits=4))
    assert torch.equal(unpack_from_int32(packed, 4, torch.Size(shape)), codes)
    assert torch.equal(int4.unpack(packed), codes)


@given(st.lists(st.lists(st.integers(-8, 7), min_size=16, max_size=16), min_size=1, max_size=4))
def test_int4_packing_is_lossless(codes: list[list[int]]) -> None:
    """Any codes come back, and each nibble is where the layout says."""
    packed = int4.pack(torch.tensor(codes, dtype=torch.int8))

    assert int4.unpack(packed).tolist() == codes
    for row, words in zip(codes, packed.tolist(), strict=True):
        for column, code in enumerate(row):
            assert (words[column // 8] >> 4 * (column % 8)) & 0xF == code + 8


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, allow_subnormal=False, width=32), min_size=32, max_size=32),
    st.sampled_from(ScaleMethod),
)
def test_int4_scale_and_codes_are_sound(row: list[float], method: ScaleMethod) -> None:
    """For any numbers the scale is normal and finite, signed only on request, and no code has a nearer neighbour."""
    weight = torch.tensor([row], dtype=torch.float64)

    codes, scale = int4.quantize(weight, 32, method.divisors, method is ScaleMethod.SIGNED)

    step = scale.double().item()
    assert 2.0**-126 <= abs(step) < math.inf
    assert step > 0 or method is ScaleMethod.SIGNED
    for value, code in zip(row, codes[0].tolist(), strict=True):
        neighbours = [abs(value - other * step) for other in (code - 1, code + 1) if -8 <= other <= 7]
        assert abs(value - code * step) <= min(neighbours)


def test_int4_search_takes_the_smallest_error() -> None:
    """On Gaussian rows the error of choosing for each group is well below that of every candidate alone."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).double()

    def error(divisors: tuple[tuple[int, int], ...], signed: bool) -> torch.Tensor:
        codes, scale = int4.quantize(weight, 32, divisors, signed)
        return (weight - int4.dequantize(codes, scale, torch.float64)).square().sum()

    for method in (ScaleMethod.SEARCH, ScaleMethod.SIGNED):
        signed = method is ScaleMethod.SIGNED
        alone = [error((divisor,), signed) for divisor in method.divisors]
        assert error(method.divisors, signed) < 0.95 * min(alone)


def test_int4_scale_and_codes_by_hand() -> None:
    """With a largest magnitude of 7.5 the scale is 1; codes are the nearest integers, ties even, ends clamped."""
    row = [7.5, -7.5, 0.5, 1.5, 2.5, -0.5, -1.5, 6.6] + [0.0] * 24

    codes, scale = int4.quantize(torch.tensor([row]), 32)

    assert scale.tolist() == [[1.0]]
    assert codes[0, :8].tolist() == [7, -8, 0, 2, 2, 0, -2, 7]


def test_int4_codes_are_nearest_under_the_rounded_scale() -> None:
    """Codes are chosen under the scale that is stored, not under the one before rounding to BF16."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).double()

    codes, scale = int4.quantize(weight, 32)

    step = scale.double().repeat_interleave(32, dim=1)
    error = (weight - codes * step).abs()
    clamped = (codes == 7) & (weight > 7 * step) | (codes == -8) & (weight < -8 * step)
    assert ((error <= step / 2) | clamped).all()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-38, 1e-45])
def test_int4_tiny_groups_have_sound_scales(value: float) -> None:
    """A group of zeros or of tiny numbers has a positive normal scale and decodes to zeros or to something as tiny."""
    codes, scale = int4.quantize(torch.full((1, 32), value), 32)

    assert (scale >= 2.0**-126).all()
    assert torch.isfinite(scale).all()
    assert (int4.dequantize(codes, scale, torch.float32) - value).abs().max() <= max(value / 7, 2.0**-126)
    if value == 0:
        assert not codes.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_dequantize_multiplies(dtype: torch.dtype) -> None:
    """A code times its group's scale, in the dtype asked for."""
    codes = torch.tensor([[-8, 3, 0, 7]], dtype=torch.int8)
    scale = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)

    decoded = int4.dequantize(codes, scale, dtype)

    assert decoded.dtype == dtype
    assert decoded.tolist() == [[-4.0, 1.5, 0.0, 14.0]]


def test_fp8_block_ragged_rows_and_columns() -> None:
    """A 320 x 448 weight has 3 x 4 scales, and every element is its code times scale[i // 128, j // 128]."""
    codes = torch.randint(-8, 8, (320, 448), generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 13, dtype=torch.float32).reshape(3, 4)

    decoded = fp8_block.dequantize(codes, scale, dtype=torch.float32)

    for row, column in ((0, 0), (127, 128), (128, 127), (319, 447), (256, 384), (255, 383)):
        assert decoded[row, column] == codes[row, column].float() * scale[row // 128, column // 128]


@pytest.mark.parametrize("shape", [(576, 256), (128, 128), (1, 1), (320, 448)])
def test_fp8_block_quantize_as_the_publisher(shape: tuple[int, int]) -> None:
    """Each block's largest magnitude becomes 448, the grid is rounded up, and the error is half a step of E4M3."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))

    fp8, scale = fp8_block.quantize(weight)

    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert fp8[:128, :128].float().abs().max() == 448
    decoded = fp8_block.dequantize(fp8, scale, dtype=torch.float32)
    smallest = fp8_block.expand_scale(scale, weight.shape, (128, 128)) * 2.0**-10
    assert ((decoded - weight).abs() <= weight.abs() / 16 * 1.001 + smallest).all()


def test_fp8_block_of_zeros() -> None:
    """A block of zeros has the scale 1 and stays zeros."""
    fp8, scale = fp8_block.quantize(torch.zeros(128, 256))

    assert scale.tolist() == [[1.0, 1.0]]
    assert not fp8.float().any()

"""Products on a CPU with weights that stay packed, against the formats' definitions."""

import numpy as np
import pytest
import torch

from quantkit.eval import kernel_speed
from quantkit.formats import fp8_block, int4, nvfp4
from quantkit.kernels.cpu_linear import fp8_block_linear, int4_linear, nvfp4_linear, pack_int4
from quantkit.kernels.nvfp4_to_bf16 import nvfp4_to_bf16

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def assert_near(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Every number of `y` is that of x @ weight^T in float64 rounded to BF16, but for float32 sums."""
    exact = x.double() @ weight.double().T
    assert y.dtype == torch.bfloat16
    assert y.shape == exact.shape
    slack = exact.abs() * 2**-8 + (x.double().abs() @ weight.double().abs().T) * 1e-5
    assert ((y.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("rows_of_x", [0, 1, 3, 40])
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(48, 256, 32), (1, 64, 64), (37, 288, 96), (64, 512, 512), (20, 384, 128)]
)
def test_int4(rows_of_x: int, rows: int, columns: int, group: int) -> None:
    """Numbers of rows that torch does not take, and multiples of its groups; scales of both signs."""
    codes = torch.randint(-8, 8, (rows, columns)).to(torch.int8)
    scale = (torch.randn(rows, columns // group) * 0.01).bfloat16()
    x = torch.randn(rows_of_x, columns).bfloat16()
    y = int4_linear(x, pack_int4(int4.pack(codes), scale))

    assert_near(y, x, int4.dequantize(codes, scale, torch.float32))


def test_int4_each_weight_meets_its_number_of_x() -> None:
    """x with a single 1 gives a column of the weights, at every place."""
    codes = torch.randint(-8, 8, (16, 64)).to(torch.int8)
    scale = torch.ones(16, 2, dtype=torch.bfloat16)
    y = int4_linear(torch.eye(64).bfloat16(), pack_int4(int4.pack(codes), scale))

    assert torch.equal(y, codes.T.to(torch.bfloat16))


@pytest.mark.parametrize(("group", "dtype"), [(16, torch.bfloat16), (40, torch.bfloat16), (32, torch.float16)])
def test_int4_that_torch_does_not_take_is_refused(group: int, dtype: torch.dtype) -> None:
    """Other groups and other types of scales are named."""
    with pytest.raises(ValueError, match=f"groups of {group} with {dtype} scales"):
        pack_int4(torch.zeros(16, 40, dtype=torch.int32), torch.ones(16, 320 // group, dtype=dtype))


def test_nvfp4_decode_is_the_formats_definition() -> None:
    """Every scale, subnormal too, with every code under several multipliers, bit for bit; a NaN scale gives NaN."""
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16).contiguous()
    scale = torch.arange(256).to(torch.uint8).view(256, 1)
    for exponent in (-126, -20, 0, 100):
        out = np.empty((256, 16), np.uint16)
        nvfp4_to_bf16(nvfp4.pack(codes).numpy(), scale.numpy(), 2.0**exponent, out)
        actual = torch.from_numpy(out).view(torch.bfloat16)
        expected = nvfp4.dequantize(codes, scale.view(torch.float8_e4m3fn), exponent)

        assert torch.equal(actual.isnan(), expected.isnan())
        same = (actual.view(torch.int16) == expected.view(torch.int16)) | expected.isnan()
        assert same.all(), (exponent, same.logical_not().nonzero()[0])


@pytest.mark.parametrize("rows_of_x", [0, 1, 5])
@pytest.mark.parametrize(("rows", "columns"), [(7, 16), (300, 8208)])
def test_nvfp4(rows_of_x: int, rows: int, columns: int) -> None:
    """One tile and several, the last one not full."""
    codes, scale = nvfp4.quantize(torch.randn(rows, columns), -8)
    x = torch.randn(rows_of_x, columns).bfloat16()

    assert_near(nvfp4_linear(x, nvfp4.pack(codes), scale, 2.0**-8), x, nvfp4.dequantize(codes, scale, -8))


@pytest.mark.parametrize("rows_of_x", [0, 1, 5])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(7, 16, (128, 128)), (300, 4100, (128, 128)), (300, 4100, (7, 24))]
)
def test_fp8_block(rows_of_x: int, rows: int, columns: int, block: tuple[int, int]) -> None:
    """One tile and several, blocks that leave a rest."""
    weight, scale = fp8_block.quantize(torch.randn(rows, columns), block)
    x = torch.randn(rows_of_x, columns).bfloat16()

    assert_near(fp8_block_linear(x, weight, scale, block), x, fp8_block.dequantize(weight, scale, block))


def test_fp8_nan_is_refused() -> None:
    """A NaN weight is named by row and column."""
    weight, scale = fp8_block.quantize(torch.randn(300, 4100))
    weight.view(torch.uint8)[290, 4099] = 0xFF

    with pytest.raises(ValueError, match=r"NaN at \[290, 4099\]"):
        fp8_block_linear(torch.zeros(1, 4100, dtype=torch.bfloat16), weight, scale)


def test_other_types_of_x_are_refused() -> None:
    """float32 activations would be rounded in silence."""
    weight = pack_int4(torch.zeros(16, 4, dtype=torch.int32), torch.ones(16, 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        int4_linear(torch.zeros(1, 32), weight)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        fp8_block_linear(torch.zeros(1, 32), *fp8_block.quantize(torch.randn(4, 32)))


def test_benchmark_compares_what_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Each way of a comparison gives nearly the same numbers, and the script prints a line for each."""
    for comparison in kernel_speed.comparisons(32, 256, (2,))[2:]:
        *products, reference = [way() for way in comparison.ways.values()]
        for y in products:
            assert float((y - reference).norm() / reference.norm()) < 0.2

    kernel_speed.main(["--rows", "32", "--columns", "256", "--batch", "2", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert printed.count(" ms ") == 10
    assert "product, 2 rows of x" in printed

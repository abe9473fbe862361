"""Products on a CPU with weights as they are stored, dense and for routed experts, against the exact numbers."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from quantkit.eval.bench import kernel_speed
from quantkit.formats import fp8_block, int4, nvfp4
from quantkit.kernels.cpu import linear as cpu_linear
from quantkit.ops import linear
from support.tiers import exhaustive

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3 = torch.float8_e4m3fn
BATCHES = (0, 1, 2, 3, 5, 17, 64, 65)  # 65 takes the way of many rows
Product = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


class Case(NamedTuple):
    """A product with a weight, and the weight's exact numbers, float64 [N, K] or [E, N, K]."""

    multiply: Product
    exact: torch.Tensor


def make_fp8(rows: int, columns: int, block: tuple[int, int] = (128, 128), experts: int = 1) -> Case:
    """Every E4M3 byte but NaN, under scales of many sizes."""
    codes = torch.randint(0, 255, (experts, rows, columns)).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scale = torch.randn(experts, -(-rows // block[0]), -(-columns // block[1])).exp() * 1e-3
    weight = codes.view(E4M3)
    exact = torch.stack([fp8_block.dequantize(*pair, block, torch.float64) for pair in zip(weight, scale, strict=True)])
    return _case(
        lambda x, w, s, ids=None, backend=None: linear.fp8_block(x, w, s, block, ids, backend), exact, weight, scale
    )


def make_int4(rows: int, columns: int, group: int = 128, experts: int = 1) -> Case:
    """Every code, and scales of both signs."""
    codes = torch.randint(-8, 8, (experts * rows, columns)).to(torch.int8)
    scale = (torch.randn(experts * rows, columns // group) * 0.01).bfloat16()
    exact = int4.dequantize(codes, scale, torch.float64).view(experts, rows, columns)
    packed = int4.pack(codes).view(experts, rows, -1)
    return _case(linear.int4, exact, packed, scale.view(experts, rows, -1))


def make_nvfp4(rows: int, columns: int, experts: int = 1) -> Case:
    """Every code but minus zero, and block scales of a quantized weight."""
    codes, scale = nvfp4.quantize(torch.randn(experts * rows, columns), -8)
    exact = nvfp4.dequantize(codes, scale, -8, torch.float64).view(experts, rows, columns)
    parts = nvfp4.pack(codes).view(experts, rows, -1), scale.view(experts, rows, -1), torch.full((experts,), 2.0**-8)
    return _case(linear.nvfp4, exact, *parts)


def make_bf16(rows: int, columns: int, experts: int = 1) -> Case:
    """Plain weights."""
    weight = torch.randn(experts, rows, columns).bfloat16()
    return _case(linear.plain, weight.double(), weight)


def _case(multiply: Product, exact: torch.Tensor, *parts: torch.Tensor) -> Case:
    if len(exact) == 1:
        parts, exact = tuple(part[0] for part in parts), exact[0]
    return Case(lambda x, *args, **kwargs: multiply(x, *parts, *args, **kwargs), exact)


CASES = {
    "fp8": lambda: make_fp8(300, 4100),
    "fp8, narrower than a block": lambda: make_fp8(7, 16),
    "fp8, blocks that fill no step": lambda: make_fp8(50, 1100, (7, 24)),
    "fp8, a scale for each row": lambda: make_fp8(9, 1500, (1, 1500)),
    "fp8, a scale for all": lambda: make_fp8(9, 1500, (9, 1500)),
    "int4, g=32": lambda: make_int4(37, 288, 32),
    "int4, g=64": lambda: make_int4(1, 64, 64),
    "int4, g=96": lambda: make_int4(10, 288, 96),
    "int4, g=128": lambda: make_int4(50, 2176, 128),
    "int4, one group": lambda: make_int4(6, 512, 512),
    "nvfp4": lambda: make_nvfp4(35, 2064),
    "nvfp4, one group": lambda: make_nvfp4(7, 16),
    "bf16": lambda: make_bf16(35, 2060),
    "bf16, one column": lambda: make_bf16(3, 1),
}


def assert_near(y: torch.Tensor, x: torch.Tensor, exact: torch.Tensor) -> None:
    """`y` is x [pairs, K] times exact [pairs or 1, N, K], rounded to BF16 once, but for float32 sums.

    A sum of K products in float32 is wrong by at most K / 8 + 4 roundings of the sum of their magnitudes, since eight
    lanes are added apart; of 4-bit weights by twice that, since numbers of x have the unit of the largest of eight.
    """
    wide = x.double().unsqueeze(2)
    expected, magnitude = (exact @ wide).squeeze(2), (exact.abs() @ wide.abs()).squeeze(2)
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    slack = magnitude * (x.shape[1] / 8 + 4) * 2**-23 * 2
    if y.dtype == torch.bfloat16:
        slack += expected.abs() * 2**-8
    assert ((y.double() - expected).abs() <= slack).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products(name: str, dtype: torch.dtype) -> None:
    """With none, few and many rows of x, all blocks and groups, whole and ragged; a row is the same bits in any."""
    case = CASES[name]()
    rows = torch.randn(max(BATCHES), case.exact.shape[1]).to(dtype)
    alone = torch.cat([case.multiply(row[None], backend="compiled") for row in rows])

    for batch in BATCHES:
        y = case.multiply(rows[:batch], backend="compiled")
        assert_near(y, rows[:batch], case.exact)
        assert batch > 64 or torch.equal(y, alone[:batch])


@pytest.mark.parametrize("make", [make_fp8, make_int4, make_nvfp4, make_bf16])
def test_experts(make: Callable[..., Case]) -> None:
    """Each pair meets its own expert, as in a product of its own, whether x has a row for a token or for a pair."""
    case = make(72, 256, experts=6)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(21)])
    for x in (torch.randn(21, 256).bfloat16(), torch.randn(63, 256).bfloat16()):
        y = case.multiply(x, ids, backend="compiled")
        rows = x if len(x) == 63 else x.repeat_interleave(3, dim=0)

        assert_near(y, rows, case.exact[ids.flatten()])
        singly = [case.multiply(row[None], ids.flatten()[place].view(1, 1)) for place, row in enumerate(rows)]
        assert torch.equal(y, torch.cat(singly))
    assert case.multiply(torch.empty(0, 256).bfloat16(), ids[:0]).shape == (0, 72)


@pytest.mark.parametrize("make", [make_int4, *map(exhaustive, (make_fp8, make_nvfp4, make_bf16))])
def test_threads_change_nothing(make: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two and five threads give the same bits, for dense weights and for experts."""
    monkeypatch.setattr(cpu_linear, "_SHARED", 1)
    dense, experts = make(301, 256), make(37, 256, experts=4)
    x, ids = torch.randn(6, 256).bfloat16(), torch.tensor([[0, 3], [1, 3], [0, 2], [1, 2], [0, 1], [2, 3]])

    def run() -> torch.Tensor:
        return torch.cat([dense.multiply(x).flatten(), experts.multiply(x, ids).flatten()])

    one = run()
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(run(), one)


@pytest.mark.exhaustive
def test_any_machine_gives_the_same_bits(tmp_path: Path) -> None:
    """Without AVX2 and fused products in the processor the sums are the same."""
    script = """if True:
        import torch
        from quantkit.kernels.cpu.linear import int4_linear
        torch.manual_seed(1)
        packed, scale = torch.randint(-(2**31), 2**31, (5, 12)).int(), torch.rand(5, 3).bfloat16()
        print(int4_linear(torch.randn(3, 96), packed, scale).view(torch.int32).tolist())
    """
    slow = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    runs = [subprocess.run(command, env=os.environ | more, capture_output=True, check=True) for more in ({}, slow)]

    assert len(runs[0].stdout) > 100
    assert runs[0].stdout == runs[1].stdout


def test_int4_each_weight_meets_its_number_of_x() -> None:
    """x with a single 1 gives a column of the weights, at every place."""
    codes = torch.randint(-8, 8, (16, 64)).to(torch.int8)
    scale = torch.ones(16, 2, dtype=torch.bfloat16)

    assert torch.equal(linear.int4(torch.eye(64).bfloat16(), int4.pack(codes), scale), codes.T.to(torch.bfloat16))


def test_all_numbers_of_fp8_and_nvfp4() -> None:
    """Each byte and each pair of a code and a scale, subnormal ones too, times 1; NaN makes its row NaN."""
    weight = torch.arange(256, dtype=torch.uint8).view(256, 1).view(E4M3)
    y = linear.fp8_block(torch.ones(1, 1).bfloat16(), weight, torch.ones(1, 1), (256, 1))
    assert torch.equal(y[0].nan_to_num(777), weight[:, 0].to(torch.bfloat16).nan_to_num(777))

    codes, scale = torch.arange(16, dtype=torch.uint8).repeat(256, 1), torch.arange(256).to(torch.uint8).view(E4M3)
    exact = nvfp4.dequantize(codes, scale.view(256, 1), -3, torch.float32)
    y = linear.nvfp4(torch.eye(16), nvfp4.pack(codes), scale.view(256, 1), torch.tensor(2.0**-3), backend="compiled")
    assert torch.equal(y.T.nan_to_num(777), exact.nan_to_num(777))


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-60, 2.0**60, 2.0**110])
def test_fp8_of_any_size(size: float) -> None:
    """Neither tiny nor huge activations lose bits on the way, with scales that bring the result back."""
    case = make_fp8(8, 256)
    x = torch.randn(2, 256).bfloat16() * size
    weight, scale = fp8_block.quantize(case.exact.float())
    y = linear.fp8_block(x, weight, scale / size, (128, 128))

    assert_near(y, x, fp8_block.dequantize(weight, scale / size, (128, 128), torch.float64))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("bf16")])
def test_decoding_is_the_formats_definition(name: str) -> None:
    """The reference multiplies with float32 numbers that are the format's to the last bit."""
    case = CASES[name]()
    columns = min(case.exact.shape[1], 600)
    x = torch.eye(case.exact.shape[1])[:columns]

    assert torch.equal(case.multiply(x, backend="reference"), case.exact.float().T[:columns])


def test_nan_weights_stay_nan() -> None:
    """Of a row of FP8 weights with a NaN the products are NaN, of the others not; decoded or not."""
    weight, scale = fp8_block.quantize(torch.randn(300, 4100))
    weight.view(torch.uint8)[290, 4099], weight.view(torch.uint8)[3, 0] = 0xFF, 0x7F
    for batch in (1, 3, 65):
        bad = linear.fp8_block(torch.zeros(batch, 4100).bfloat16(), weight, scale, (128, 128)).isnan()
        assert bad.nonzero()[:, 1].unique().tolist() == [3, 290]
        assert bad[:, [3, 290]].all()


@pytest.mark.parametrize("make", [make_fp8, make_int4, make_nvfp4, make_bf16])
def test_triton_computes_the_same(make: Callable[..., Case]) -> None:
    """What a GPU is given, in the interpreter: dense with one row and several, and experts."""
    dense, experts = make(48, 256), make(40, 128, experts=3)
    for x in (torch.randn(1, 256).bfloat16(), torch.randn(5, 256).bfloat16()):
        compiled, triton = (dense.multiply(x, backend=backend).float() for backend in ("compiled", "triton"))
        assert (triton - compiled).norm() <= 0.01 * compiled.norm()
    x, ids = torch.randn(9, 128).bfloat16(), torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    for tokens in (2, 9):
        given = x[:tokens], ids[:tokens]
        compiled, triton = (experts.multiply(*given, backend=backend).float() for backend in ("compiled", "triton"))
        assert (triton - compiled).norm() <= 0.01 * compiled.norm()


def test_heads_are_multiplied_one_by_one() -> None:
    """Each head's rows meet its own matrix, in BF16 and in float32."""
    x, weight = torch.randn(5, 4, 24), torch.randn(4, 40, 24)
    expected = torch.einsum("thk,hnk->thn", x.bfloat16().double(), weight.bfloat16().double())

    actual = linear.heads(x.bfloat16(), weight.bfloat16())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)
    actual = linear.heads(x.bfloat16().float(), weight.bfloat16().float())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_multiplied_is_refused() -> None:
    """Another type or width of x, an expert that is not there, and groups that split words."""
    packed, scale = torch.zeros(2, 16, 4, dtype=torch.int32), torch.ones(2, 16, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is torch\.float16 \[1, 32\]"):
        cpu_linear.int4_linear(torch.zeros(1, 32, dtype=torch.float16), packed[0], scale[0])
    with pytest.raises(ValueError, match=r"\[1, 40\]; it must be bfloat16 or float32 with 32 columns"):
        cpu_linear.int4_linear(torch.zeros(1, 40), packed[0], scale[0])
    with pytest.raises(ValueError, match=r"an expert of 1\.\.2, and there are 2"):
        cpu_linear.int4_linear(torch.zeros(1, 32), packed, scale, torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="groups of 4"):
        cpu_linear.int4_linear(torch.zeros(1, 32), packed[0], torch.ones(16, 8, dtype=torch.bfloat16))


def test_benchmark_compares_what_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Each way of a comparison gives nearly the same numbers, and the script prints a line for each."""
    for comparison in kernel_speed.comparisons(32, 256, (2,))[1:]:
        *products, reference = [np.asarray(torch.as_tensor(way.run()).float()) for way in comparison.ways.values()]
        for y in products:
            assert np.linalg.norm(y - reference) < 0.2 * np.linalg.norm(reference)

    kernel_speed.main(["--rows", "32", "--columns", "256", "--batch", "2", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert printed.count(" ms ") == 11
    assert printed.count("GB/s") == 12
    assert "product, 2 rows of x" in printed

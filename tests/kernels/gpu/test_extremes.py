"""Faults of low-bit kernels as users of other tools reported them: ragged shapes and odd groups, elements beyond 2^31,
the edges of E4M3, and small block scales. What the kernels' own tests show of them is not repeated here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit import ops
from quantkit.formats import fp8_block, nvfp4
from quantkit.kernels import pages as layouts
from quantkit.kernels.cpu.linear import fp8_block_linear, int4_linear, nvfp4_linear
from quantkit.kernels.gpu import fp8_block_dequantize, int4_dequantize, nvfp4_dequantize, w4a16_gemv, w4a16_matmul
from quantkit.kernels.gpu.kv_write import write_gqa, write_mla
from quantkit.kernels.gpu.page_digest import page_digest
from quantkit.kernels.gpu.paged_decode import Launch, Tile, decode_gqa, decode_mla
from quantkit.kernels.reference import page_digest as digest_reference
from quantkit.kernels.reference.page_digest import Binding, Spans
from support.compiling import compile_elsewhere
from support.guards import Guards, guards
from support.tiers import exhaustive

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ALL_BYTES = torch.arange(256).to(torch.uint8)
SMALL = Launch(tile=Tile(16, 16, 4, 1))
BEYOND = 2**31
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {"gemv": w4a16_gemv.w4a16_gemv, "matmul": w4a16_matmul.w4a16_matmul}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # NaN in the interpreter
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(17)


Sparse = Callable[..., torch.Tensor]


@pytest.fixture
def sparse(tmp_path: Path) -> Sparse:
    """Makes tensors of zeros that take memory only where they are used: `sparse(shape, dtype)`."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        file, count = tmp_path / "zeros", torch.Size(shape).numel()
        mapped = torch.from_file(str(file), shared=True, size=count * dtype.itemsize, dtype=torch.uint8)
        file.unlink()
        return mapped.view(dtype).view(shape)

    return make


def random_int4(*shape: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words int32 [..., K / 8] and BF16 scales [..., K / group] for weights of `shape`."""
    *lead, columns = shape
    packed = torch.randint(-(2**31), 2**31, (*lead, columns // 8)).to(torch.int32)
    return packed, (torch.rand(*lead, columns // group) + 0.5).bfloat16()


def assert_rounded(y: torch.Tensor, exact: torch.Tensor) -> None:
    """Every number is the exact one rounded to BF16, but for float32 sums."""
    slack = exact.abs() * 2.0**-8 + exact.abs().mean() * 1e-5
    assert ((y.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize(("columns", "group"), [(200, 40), exhaustive(288, 96)])
@pytest.mark.parametrize("module", [w4a16_gemv, w4a16_matmul], ids=["gemv", "matmul"])
def test_odd_groups(module: Any, columns: int, group: int) -> None:
    """G01: M = 3, N = 40, groups of 40 and 96: small and large tiles are right, whatever lies behind the buffers."""
    x, weight = torch.randn(3, columns).bfloat16(), random_int4(40, columns, group=group)
    expected = module.reference(x, *weight)
    for config in module.configs()[::5]:
        with guards() as guarded:
            out = guarded.empty((3, 40), BF16)
            PRODUCTS[module.__name__.rpartition("_")[2]](guarded(x), *map(guarded, weight), out=out, config=config)
        assert_rounded(out, expected)


def compiled(guarded: Guards) -> dict[str, torch.Tensor]:
    """The results of the compiled loops, between guard areas, for weights of 3 rows in blocks of 2 x 96."""
    codes = guarded(torch.randint(0, 0x7F, (3, 288)).to(torch.uint8))
    scale, weight = guarded(torch.rand(2, 3) + 0.5), guarded(torch.randn(3, 288))
    fp8, packed, scales = (
        guarded.empty((3, 288), torch.uint16),
        guarded.empty((3, 36), torch.int32),
        guarded.empty((3, 3), torch.uint16),
    )
    block, divisors = (2, 96), ((15, 2), (7, 1))
    arrays = codes.numpy(), scale.numpy(), block
    assert ops.fp8_block_to_bf16(*arrays, fp8.numpy()) is None
    result = {"fp8": fp8}
    for name, run in {
        "fp8 to int4": partial(ops.fp8_block_to_int4, *arrays),
        "float to int4": partial(ops.float_to_int4, weight.numpy()),
    }.items():
        assert run(96, divisors, True, packed.numpy().view(np.uint32), scales.numpy()) is None
        result |= {name: packed.clone(), f"{name}, scales": scales.clone()}
    x = guarded(torch.randn(5, 288).bfloat16())
    signed = scales.view(BF16)
    result["int4 product"] = int4_linear(x, packed, signed)
    result["fp8 product"] = fp8_block_linear(x, codes.view(E4M3), scale, block)
    bytes_, blocks = guarded(torch.randint(0, 256, (3, 144)).to(torch.uint8)), guarded(ALL_BYTES[:54].view(3, 18))
    result["nvfp4 product"] = nvfp4_linear(x, bytes_, blocks.view(E4M3), torch.tensor(1.0))
    return result


class _Unguarded(Guards):
    """Tensors on their own."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


def test_odd_groups_on_the_cpu() -> None:
    """G01: groups of 96, and rows and columns that no tile divides: NaN around the buffers changes nothing."""
    with guards() as guarded:
        actual = compiled(guarded)
    torch.manual_seed(17)

    for name, expected in compiled(_Unguarded()).items():
        assert torch.equal(actual[name].view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [("gemv", "int4"), exhaustive("gemv", "nvfp4"), exhaustive("matmul", "int4"), exhaustive("matmul", "nvfp4")],
)
def test_experts_beyond_two_billion_words(kernel: str, kind: str, sparse: Sparse) -> None:
    """G03: the first and the last of 65,537 experts with 2^31 words and more give the products of these two alone."""
    experts, rows, columns, group = 65537, 32, 8192, 8
    packed, scale = random_int4(2, rows, columns, group=group)
    if kind == "nvfp4":
        packed, scale = packed.view(torch.uint8), torch.randint(0, 0x7F, (2, rows, columns // 16)).to(torch.uint8)
    all_packed, all_scales = (sparse((experts, *part.shape[1:]), part.dtype) for part in (packed, scale))
    all_packed[[0, -1]], all_scales[[0, -1]] = packed, scale
    assert all_packed.view(torch.int32).numel() > BEYOND
    multiplier = torch.ones(1) if kind == "nvfp4" else None
    x, ids = torch.randn(2, columns).bfloat16(), torch.tensor([[0], [experts - 1]])
    routed = {"ids": ids} if kernel == "gemv" else {"routing": w4a16_matmul.route(ids, experts)}
    y = PRODUCTS[kernel](x, all_packed, all_scales, multiplier, **routed)

    reference = w4a16_gemv.reference if kernel == "gemv" else w4a16_matmul.reference
    assert_rounded(y, reference(x, packed, scale, multiplier, torch.tensor([[0], [1]])))


class FirstAndLast:
    """A kernel of which only the first and the last program run: all of them would take the interpreter hours."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        from triton.runtime.interpreter import interpreter_builder

        def launch(*args: Any, **options: Any) -> None:
            for program in ((0, 0, 0), (*(size - 1 for size in grid), 0)):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(
                        interpreter_builder,
                        "set_grid_idx",
                        lambda *_, program=program: setattr(interpreter_builder, "grid_idx", program),
                    )
                    self._kernel[(1, 1)](*args, **options)

        return launch


@pytest.mark.parametrize("module", [fp8_block_dequantize, int4_dequantize, nvfp4_dequantize])
def test_weights_beyond_two_billion_are_decoded(module: Any, sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """G03: the first and the last tile of 2^31 weights and more are those of a small tensor with the same rows."""
    monkeypatch.setattr(module, "_dequantize", FirstAndLast(module._dequantize))
    kind, rows = module.__name__.rpartition(".")[2], BEYOND // 2048 + 4
    if kind == "fp8_block_dequantize":
        small: tuple[torch.Tensor, ...] = (torch.randint(0, 0x7F, (8, 2048)).to(torch.uint8), torch.rand(8, 2048))
        rest: tuple[Any, ...] = ((1, 1),)
    elif kind == "int4_dequantize":
        small, rest = random_int4(8, 2048, group=8), ()
    else:
        small = tuple(torch.randint(0, 0x7F, (8, width)).to(torch.uint8) for width in (1024, 128))
        rest = (torch.ones(1),)
    large = [sparse((rows, part.shape[1]), part.dtype) for part in small]
    for part, whole in zip(small, large, strict=True):
        whole[:4], whole[-4:] = part[:4], part[4:]
    out = sparse((rows, 2048), BF16)
    getattr(module, kind)(*large, *rest, out=out)

    expected = module.reference(*small, *rest)
    assert out.numel() > BEYOND
    assert torch.equal(torch.cat((out[:4], out[-4:])), expected)


def test_ds_pages_beyond_two_billion_words(sparse: Sparse) -> None:
    """G03: ds_mla rows at both ends of a pool are written and read where they belong, and the last page's digest is
    that of the page alone."""
    count = BEYOND // (64 * layouts.DS_ROW // 8) + 2
    pages, alone = sparse((count, 64, layouts.DS_ROW), torch.uint8), torch.zeros(2, 64, 656, dtype=torch.uint8)
    latent, rope = torch.randn(2, 512).bfloat16(), torch.randn(2, 64).bfloat16()
    query, lengths = torch.randn(2, 2, 576).bfloat16(), torch.tensor([1, 64], dtype=torch.int32)
    parts = query[..., :512].contiguous(), query[..., 512:].contiguous()
    results = []
    for pool, last in ((pages, count - 1), (alone, 1)):
        write_mla(latent, rope, pool, torch.tensor([0, last * 64 + 63]), 1.0, torch.zeros(3, dtype=torch.int64))
        table = torch.tensor([[0], [last]], dtype=torch.int32)
        spans = Spans(*(torch.tensor([number], dtype=torch.int32) for number in (last, 0, 64)), torch.zeros(1).long())
        binding = Binding(*(torch.ones(1, dtype=torch.int64) for _ in range(3)))
        digest = page_digest(pool, spans, binding)
        assert all(map(torch.equal, digest, digest_reference.page_digest(pool, spans, binding)))
        results.append((*decode_mla(*parts, pool, table, lengths, 0.1, 1.0, None, SMALL), *digest))

    assert pages[:-1].numel() // 8 > BEYOND  # the digest reads 8 bytes at a time
    assert results[0][0].isfinite().all()
    assert all(map(torch.equal, *results))


def test_heads_beyond_two_billion_numbers(sparse: Sparse) -> None:
    """G03: keys and values at both ends of a pool of GQA pages are written and read where they belong."""
    count = BEYOND // (64 * 8 * 128) + 1
    keys, values = (sparse((count, 64, 8, 128), torch.uint8) for _ in range(2))
    rows = torch.randn(2, 8, 128).bfloat16()
    write_gqa(rows, -rows, keys, values, torch.tensor([0, count * 64 - 64]), 0.1, 0.1, torch.zeros(3).long())
    table, lengths = torch.tensor([[0], [count - 1]], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    out, _ = decode_gqa(rows, keys, values, table, lengths, 0.1, 0.1, 0.1, SMALL)

    assert keys.numel() > BEYOND
    stored = (-rows.float() / 0.1).to(E4M3).float() * 0.1
    torch.testing.assert_close(out.float(), stored, rtol=2.0**-8, atol=0)
    assert torch.equal(keys[-1, 0], (rows[1].float() / 0.1).to(E4M3).view(torch.uint8))


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_every_e4m3_byte_is_decoded_on_the_cpu(backend: ops.Backend) -> None:
    """G04: all bytes that are numbers, subnormal ones and -0 too, become the BF16 of torch's table."""
    finite = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F].view(1, -1)
    out = np.empty(finite.shape, np.uint16)
    one = np.ones((1, 2), np.float32)
    assert ops.fp8_block_to_bf16(finite.numpy(), one, (128, 128), out, backend) is None

    assert torch.equal(torch.from_numpy(out), finite.view(E4M3).bfloat16().view(torch.uint16))


def test_every_bf16_number_is_quantized_to_fp8_blocks() -> None:
    """G04: all finite BF16 numbers up to 448, one block with 448 in it, get the nearest E4M3 number, ties to even."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(BF16).float()
    numbers = numbers[numbers.abs() <= 448]
    codes, scale = fp8_block.quantize(numbers.view(1, -1), (1, len(numbers)))
    assert scale.item() == 1

    table = ALL_BYTES[:0x7F].view(E4M3).float()
    upper = torch.bucketize(numbers.abs(), table)
    lower = (upper - 1).clamp(min=0)
    above, below = table[upper] - numbers.abs(), numbers.abs() - table[lower]
    nearest = torch.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    assert torch.equal(codes[0].view(torch.uint8), (nearest | (numbers.signbit().long() << 7)).to(torch.uint8))


@pytest.mark.exhaustive
def test_gpus_convert_e4m3_by_instructions() -> None:
    """G04: on sm_90 and sm_100 E4M3 is written by the instruction that rounds to even and saturates, with NaN kept, and
    read by the exact one."""
    for encoded, decoded in compile_elsewhere("ptx"):
        assert "cvt.rn.satfinite.e4m3x2.f32" in encoded
        assert "cvt.rn.f16x2.e4m3x2" in decoded


SCALES = torch.arange(1, 9).to(torch.uint8)  # 2^-9 to 2^-6, all of E4M3 in between
PLACES = torch.arange(8) * 17  # place i of group i


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("cpu", BF16), *((kernel, dtype) for kernel in PRODUCTS for dtype in (BF16, torch.float16))],
    ids=str,
)
def test_small_block_scales_are_not_flushed(kernel: str, dtype: torch.dtype) -> None:
    """G05: under a global scale of 1, each code times each block scale from 2^-9 to 2^-6 comes out exactly."""
    codes = torch.arange(16).to(torch.uint8).view(16, 1).expand(16, 128).contiguous()
    packed, scale = nvfp4.pack(codes), SCALES.expand(16, 8).contiguous().view(E4M3)
    x = torch.eye(128)[PLACES].to(dtype)
    y = (
        nvfp4_linear(x, packed, scale, torch.tensor(1.0))
        if kernel == "cpu"
        else PRODUCTS[kernel](x, packed, scale, torch.ones(1))
    )

    expected = nvfp4.dequantize(codes, scale, 0, torch.float64)[:, PLACES].T
    assert y.dtype == dtype
    assert torch.equal(y.double(), expected)
    assert (y == 0).sum() == 2 * 8  # the codes of 0 and -0

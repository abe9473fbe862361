"""The Triton kernels for weights, interpreted on the CPU, and compiled for sm_90 and sm_100 without running.

To remake the table of registers, shared memory and stack:

    python -m support.compiling table weights > fixtures/gpu_weights.md

in tests/.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from quantkit.errors import UsageError
from quantkit.formats import fp8_block, int4, nvfp4
from quantkit.kernels.gpu import (
    bits,
    compiled,
    fp8_block_dequantize,
    int4_dequantize,
    nvfp4_dequantize,
    w4a16,
    w4a16_gemv,
    w4a16_matmul,
)
from support.compiling import compiled_launches
from support.guards import Guards, guards
from support.paths import FIXTURES
from support.tiers import exhaustive, quick_if

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
TABLE = FIXTURES / "gpu_weights.md"
ALL_BYTES = torch.arange(256).to(torch.uint8)
BELOW_ONE_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a result, relatively

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@triton.jit
def _encode(x_ptr, out_ptr, count: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, count)
    tl.store(out_ptr + at, bits.float32_to_e4m3(bits.to_float32(tl.load(x_ptr + at)), False))


@triton.jit
def _decode(x_ptr, e4m3_ptr, e8m0_ptr, e2m1_ptr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    byte = tl.load(x_ptr + at)
    tl.store(e4m3_ptr + at, bits.e4m3_to_float16(byte, False))
    tl.store(e8m0_ptr + at, bits.e8m0_to_float32(byte))
    tl.store(e2m1_ptr + at, bits.e2m1_to_float16((byte & 0xF).to(tl.int32)))


@triton.jit
def _round(x_ptr, out_ptr, count: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, count)
    tl.store(out_ptr + at, bits.from_float32(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits where the numbers are, NaN where NaN is expected."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    different = (actual.view(whole) != expected.view(whole)) & ~expected.isnan()
    where = different.nonzero()
    assert len(where) == 0, f"{len(where)} differ, first at {where[0].tolist()}"


def test_guard_areas_catch_a_write_beyond_a_buffer() -> None:
    """One number too many, on either side, fails the check."""
    for shift in (-1, 1):
        guarded = Guards()
        out = guarded.empty((16,), torch.float32)
        guarded.check()
        _round[(1,)](torch.ones(16), torch.as_strided(out, (16,), (1,), out.storage_offset() + shift), 16)
        with pytest.raises(AssertionError, match="wrote"):
            guarded.check()


def test_bf16_numbers_become_e4m3_as_torch_rounds_them() -> None:
    """All 65,536 BF16 numbers, clamped to 448, have torch's bytes: ties, subnormals, -0 and NaN's sign included."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    with guards() as guarded:
        out = guarded.empty(x.shape, torch.uint8)
        _encode[(1,)](bits.bf16_as_bits(guarded(x)), out, len(x))

    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out, expected)


def test_floats_between_bf16_numbers_become_e4m3_as_torch_rounds_them() -> None:
    """Numbers just beside every halfway point of E4M3, and on it, go where torch sends them."""
    values = ALL_BYTES[:127].view(torch.float8_e4m3fn).double()
    halfway = ((values[:-1] + values[1:]) / 2).float()
    beside = [
        halfway,
        halfway.nextafter(torch.tensor(0.0)),
        halfway.nextafter(torch.tensor(1e9)),
        torch.rand(646) * 500,
    ]
    x = torch.cat(beside)
    x = torch.cat((x, -x))
    out = torch.empty(len(x), dtype=torch.uint8)
    assert len(x) == 2048
    _encode[(1,)](x, out, len(x))

    assert torch.equal(out, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_byte_is_decoded() -> None:
    """All 256 codes of E4M3 and E8M0, and the 16 of E2M1, are the numbers of their definitions; NaN keeps its sign."""
    e4m3, e8m0 = torch.empty(256, dtype=torch.float16), torch.empty(256)
    e2m1 = torch.empty(256, dtype=torch.float16)
    _decode[(1,)](ALL_BYTES, e4m3, e8m0, e2m1)

    assert_same_bits(e4m3, ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float16))
    assert torch.equal(e4m3.signbit(), ALL_BYTES >= 0x80)
    assert_same_bits(e8m0, ALL_BYTES.view(torch.float8_e8m0fnu).float())
    numbers = nvfp4.dequantize(ALL_BYTES[:16].view(1, 16), torch.ones(1, 1), 0, torch.float16)
    assert_same_bits(e2m1[:16], numbers[0])


def test_float32_is_rounded_to_bf16_bits() -> None:
    """The nearest BF16 number, ties to even, as torch does; the interpreter's own conversion rounds towards zero."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, 1 + 2**-8, 1 + 3 * 2**-8])
    x = torch.cat((special, torch.randn(1024 - len(special))))
    out = torch.empty(1024, dtype=torch.bfloat16)
    _round[(1,)](x, bits.bf16_as_bits(out), 1024)

    assert_same_bits(out, x.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (16, 24), (7, 13), (1, 200), (40, 200), (64, 1)], ids=str)
def test_fp8_dequantize(block: tuple[int, int], dtype: torch.dtype) -> None:
    """Ragged blocks, channels, one scale; all codes, NaN and -0 too: the format's definition, bit for bit."""
    weight = ALL_BYTES.repeat(32)[: 40 * 200].view(40, 200).view(torch.float8_e4m3fn)
    scale = torch.rand(-(-40 // block[0]), -(-200 // block[1])) * 2.0 ** torch.randint(-12, 4, (1,))
    with guards() as guarded:
        out = guarded.empty(weight.shape, dtype)
        fp8_block_dequantize.fp8_block_dequantize(guarded(weight), guarded(scale), block, out=out)

    assert_same_bits(out, fp8_block.dequantize(weight, scale, block, dtype))
    assert_same_bits(out, fp8_block_dequantize.reference(weight, scale, block, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_fp8_scales_of_other_types(dtype: torch.dtype) -> None:
    """Scales in BF16 or E8M0 mean the same numbers as in float32."""
    weight = torch.randint(0, 0x7F, (20, 40)).to(torch.uint8)
    scale = (2.0 ** torch.randint(-6, 6, (2, 3))).to(dtype)
    out = fp8_block_dequantize.fp8_block_dequantize(weight, scale, (16, 16))

    assert_same_bits(out, fp8_block.dequantize(weight.view(torch.float8_e4m3fn), scale.float(), (16, 16)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "group"), [((40, 200), 40), ((3, 192), 96), ((1, 8), 8), ((5, 256), 32), ((9, 4104), 4104)]
)
def test_int4_dequantize(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """Groups of 96, 40 and a whole row, rows that are no multiple of a tile: the format's definition, bit for bit."""
    codes = torch.randint(-8, 8, shape).to(torch.int8)
    scale = (torch.rand(shape[0], shape[1] // group) * 2.0 ** torch.randint(-10, 3, (1,))).bfloat16()
    packed = int4.pack(codes)
    with guards() as guarded:
        out = guarded.empty(shape, dtype)
        int4_dequantize.int4_dequantize(guarded(packed), guarded(scale), out=out)

    assert_same_bits(out, int4.dequantize(codes, scale, dtype))
    assert_same_bits(out, int4_dequantize.reference(packed, scale, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 208), (1, 16), (3, 5, 2064)], ids=str)
def test_nvfp4_dequantize(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All codes under block scales from the subnormal 2^-9 on: no product is flushed to zero."""
    codes = torch.arange(16).repeat(shape[-1]).to(torch.uint8)[: shape[-1]].expand(shape).contiguous()
    scale = (torch.arange(codes.numel() // 16) % 0x7F).to(torch.uint8).view(*shape[:-1], -1).view(torch.float8_e4m3fn)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    exponents = torch.zeros(1) if len(shape) == 2 else torch.arange(float(shape[0]))
    with guards() as guarded:
        out = guarded.empty(shape, dtype)
        nvfp4_dequantize.nvfp4_dequantize(guarded(packed), guarded(scale), guarded(2.0**exponents), out=out)

    flat = zip(codes.view(-1, *shape[-2:]), scale.view(-1, shape[-2], shape[-1] // 16), exponents, strict=True)
    expected = torch.stack([nvfp4.dequantize(codes, scale, int(exponent), dtype) for codes, scale, exponent in flat])
    assert_same_bits(out.view(expected.shape), expected)
    assert_same_bits(out, nvfp4_dequantize.reference(packed, scale, 2.0**exponents, dtype))


def weights(kind: str, *shape: int, group: int = 32) -> tuple[torch.Tensor, ...]:
    """Random 4-bit weights `kind` of [(E,) N, K]: packed, scale, and for NVFP4 a multiplier for each expert."""
    *lead, columns = shape
    if kind == "int4":
        packed = torch.randint(-(2**31), 2**31, (*lead, columns // 8)).to(torch.int32)
        return packed, (torch.randn(*lead, columns // group) * 0.01).bfloat16()
    packed = torch.randint(0, 256, (*lead, columns // 2)).to(torch.uint8)
    scale = torch.randint(0, 0x7F, (*lead, columns // 16)).to(torch.uint8).view(torch.float8_e4m3fn)
    return packed, scale, torch.rand(lead[0] if len(lead) == 2 else 1) / 100


def assert_near(y: torch.Tensor, exact: torch.Tensor) -> None:
    """Every number is the exact one rounded, but for float32 sums."""
    slack = exact.abs() * BELOW_ONE_STEP[y.dtype] + exact.abs().mean() * 1e-5
    assert ((y.double() - exact).abs() <= slack).all()


KERNELS: dict[str, Any] = {"gemv": w4a16_gemv, "matmul": w4a16_matmul}
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {"gemv": w4a16_gemv.w4a16_gemv, "matmul": w4a16_matmul.w4a16_matmul}
SHAPES = [  # M, N, K, group
    (1, 40, 200, 40),
    (3, 40, 200, 40),
    (1, 70, 512, 128),
    (5, 64, 512, 64),
    (17, 33, 1056, 32),
    (2, 130, 96, 96),
    (1, 9, 4128, 32),
]


def is_quick(kernel: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """One row goes to the one kernel and more to the other, as they are meant to; float16 of one shape each."""
    return (kernel == "gemv") == (shape[0] == 1) and (dtype == torch.bfloat16 or shape in SHAPES[:2])


@pytest.mark.parametrize(("kernel", "shape", "dtype"), quick_if(is_quick, itertools.product(PRODUCTS, SHAPES, HALVES)))
def test_int4_product(kernel: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """M, N and K that no tile divides, and groups of any multiple of 8."""
    rows_of_x, rows, columns, group = shape
    x, (packed, scale) = torch.randn(rows_of_x, columns).to(dtype), weights("int4", rows, columns, group=group)
    with guards() as guarded:
        out = guarded.empty((rows_of_x, rows), dtype)
        PRODUCTS[kernel](guarded(x), guarded(packed), guarded(scale), out=out)

    assert_near(out, KERNELS[kernel].reference(x, packed, scale))


NVFP4_SHAPES = [(1, 40, 208), (5, 65, 1040), (2, 1, 16)]  # M, N, K


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype"), quick_if(is_quick, itertools.product(PRODUCTS, NVFP4_SHAPES, HALVES))
)
def test_nvfp4_product(kernel: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The same for NVFP4, under block scales from zero and the subnormal ones on."""
    rows_of_x, rows, columns = shape
    x, weight = torch.randn(rows_of_x, columns).to(dtype), weights("nvfp4", rows, columns)
    with guards() as guarded:
        out = guarded.empty((rows_of_x, rows), dtype)
        PRODUCTS[kernel](guarded(x), *map(guarded, weight), out=out)

    assert_near(out, KERNELS[kernel].reference(x, *weight))


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_each_weight_meets_its_number_of_x(kernel: str, kind: str) -> None:
    """x with a single 1 gives a column of the weights, at each place of two words, a group's end and the last one."""
    rows, columns = 5, 1040
    weight = weights(kind, rows, columns, group=16)
    places = [*range(16), 31, 32, 255, 256, columns - 1]
    x = torch.zeros(len(places), columns, dtype=torch.float16)
    x[range(len(places)), places] = 1
    y = PRODUCTS[kernel](x, *weight)

    dequantize = int4_dequantize.reference if kind == "int4" else nvfp4_dequantize.reference
    expected = dequantize(*weight, torch.float32)[:, places].T
    torch.testing.assert_close(y.float(), expected, rtol=2**-10, atol=1e-4 * float(expected.abs().max()))


IDS = {
    "spread": torch.tensor([[0, 3], [3, 1], [0, 1]]),
    "one expert has all": torch.full((9, 2), 2),
    "experts of another rank": torch.tensor([[-1, 0], [4, 3], [1, -1]]),
    "many": torch.randint(0, 4, (20, 2), generator=torch.Generator().manual_seed(0)),
    "32 bits": torch.tensor([[1, 2]], dtype=torch.int32),
}


WAYS = [("int4", "gemv"), ("int4", "matmul"), ("nvfp4", "gemv"), ("nvfp4", "matmul")]


@pytest.mark.parametrize(
    ("pairs", "kind", "kernel"),
    quick_if(
        lambda pairs, *way: [*IDS].index(pairs) % 4 == WAYS.index(way), ((pairs, *way) for pairs in IDS for way in WAYS)
    ),
)
def test_experts(pairs: str, kind: str, kernel: str) -> None:
    """Each pair gets its own expert's product, in the order of the tokens; experts of nobody are not touched."""
    ids, weight = IDS[pairs], weights(kind, 4, 33, 208, group=16)
    x = torch.randn(len(ids), 208).bfloat16()
    with guards() as guarded:
        out = guarded.empty((ids.numel(), 33), torch.bfloat16)
        placed = [guarded(tensor) for tensor in (x, *weight)]
        if kernel == "gemv":
            w4a16_gemv.w4a16_gemv(*placed, ids=guarded(ids), out=out)
        else:
            routing = w4a16_matmul.Routing(*map(guarded, w4a16_matmul.route(ids, 4)))
            w4a16_matmul.w4a16_matmul(*placed, routing=routing, out=out)

    assert_near(out, KERNELS[kernel].reference(x, *weight, ids=ids))
    unknown = (ids < 0) | (ids >= 4)
    assert (out[unknown.flatten()] == 0).all()


def test_experts_with_a_row_of_x_for_each_pair() -> None:
    """The down projection has its own x for each pair, through both kernels."""
    ids, weight = IDS["spread"], weights("int4", 4, 33, 64)
    x = torch.randn(ids.numel(), 64).bfloat16()
    exact = w4a16_gemv.reference(x, *weight, ids=ids)

    assert_near(w4a16_gemv.w4a16_gemv(x, *weight, ids=ids), exact)
    rounded = w4a16_matmul.reference(x, *weight, ids=ids)
    assert_near(w4a16_matmul.w4a16_matmul(x, *weight, routing=w4a16_matmul.route(ids, 4)), rounded)


def test_routing_takes_no_more_tiles_than_experts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 experts with 20 pairs, 3 have any: at most 20 tiles are launched and 3 do something."""
    ids = torch.tensor([[7], [7], [300]]).repeat(7, 1)[:20]
    ids[-1] = 511
    ends = w4a16_matmul.route(ids, 512).ends
    assert [int(ends[e + 1] - ends[e]) for e in (7, 300, 511)] == [13, 6, 1]
    grids: list[tuple[int, ...]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(w4a16_matmul, "_matmul", Spy())
    monkeypatch.setattr(w4a16_matmul, "_add", Spy())
    weight = weights("int4", 512, 8, 64)
    w4a16_matmul.w4a16_matmul(torch.randn(20, 64).bfloat16(), *weight, routing=w4a16_matmul.route(ids, 512))
    assert grids[0][0] == 20


@pytest.mark.parametrize("split", [4, exhaustive(1), exhaustive(2), exhaustive(8)])
def test_parts_of_k_are_added(split: int) -> None:
    """K over several programs, some of them without a step, gives the sum of all parts, and the same bits each time."""
    x, weight = torch.randn(3, 712).bfloat16(), weights("int4", 40, 712, group=8)
    config = w4a16_matmul.Config(WORDS=16, SPLIT=split)
    y = w4a16_matmul.w4a16_matmul(x, *weight, config=config)

    assert_near(y, w4a16_matmul.reference(x, *weight))
    assert torch.equal(y, w4a16_matmul.w4a16_matmul(x, *weight, config=config))


@pytest.mark.parametrize("rows_of_x", [0, 1, 2])
def test_the_number_of_rows_chooses_the_kernel(rows_of_x: int) -> None:
    """No rows, one, and more go through the one function."""
    x, weight = torch.randn(rows_of_x, 64).bfloat16(), weights("int4", 8, 64)

    assert_near(w4a16.w4a16(x, *weight), w4a16_gemv.reference(x, *weight)) if rows_of_x < 2 else None
    assert_near(w4a16.w4a16(x, *weight), w4a16_matmul.reference(x, *weight)) if rows_of_x == 2 else None
    assert w4a16.w4a16(x, *weight).shape == (rows_of_x, 8)


@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_the_number_of_pairs_chooses_the_kernel(tokens: int) -> None:
    """No tokens, few pairs and many go through the one function for experts."""
    x, weight, ids = torch.randn(tokens, 64).bfloat16(), weights("int4", 4, 8, 64), torch.randint(0, 4, (tokens, 2))
    kernel = w4a16_gemv if tokens < 2 else w4a16_matmul
    packed, scale = weight

    y = w4a16.w4a16_experts(x, packed, scale, ids)
    assert y.shape == (tokens * 2, 8)
    if tokens:
        assert_near(y, kernel.reference(x, *weight, ids=ids))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_tile_gives_the_product(kernel: str) -> None:
    """Each of the tiles that are worth timing is right; their number of warps does not matter here."""
    x, weight = torch.randn(2, 544).bfloat16(), weights("int4", 70, 544)
    expected = KERNELS[kernel].reference(x, *weight)
    for config in KERNELS[kernel].configs():
        assert_near(PRODUCTS[kernel](x, *weight, config=config), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", [fp8_block_dequantize, int4_dequantize, nvfp4_dequantize])
def test_every_tile_decodes(module: Any) -> None:
    """Each of the tiles that are worth timing gives the same."""
    name = module.__name__.rsplit(".", 1)[1]
    kind = {"int4_dequantize": "int4", "nvfp4_dequantize": "nvfp4"}.get(name)
    given = (
        weights(kind, 9, 4112, group=16)
        if kind
        else (torch.randint(0, 0x7F, (9, 4112)).to(torch.uint8), torch.rand(1, 33))
    )
    launch = getattr(module, name)
    expected = launch(*given)
    for config in module.configs():
        assert_same_bits(launch(*given, config=config), expected)


PACKED, SCALE = torch.zeros(8, 8, dtype=torch.int32), torch.ones(8, 2, dtype=torch.bfloat16)
X = torch.zeros(1, 64, dtype=torch.bfloat16)
MISTAKES = {
    "another K": (lambda: w4a16.w4a16(X[:, :32].contiguous(), PACKED, SCALE), "weights have K = 64"),
    "float32 x": (lambda: w4a16.w4a16(X.float(), PACKED, SCALE), "x is torch.float32"),
    "groups": (lambda: w4a16.w4a16(X, PACKED, SCALE[:, :0]), "does not fit packed"),
    "int64": (lambda: w4a16.w4a16(X, PACKED.long(), SCALE), "packed is torch.int64"),
    "scale type": (lambda: w4a16.w4a16(X, PACKED, SCALE.to(torch.float8_e4m3fn)), "scale is torch.float8_e4m3fn"),
    "strides": (lambda: w4a16.w4a16(X.repeat(2, 2)[:, ::2], PACKED, SCALE), "must be contiguous"),
    "out": (lambda: w4a16_gemv.w4a16_gemv(X, PACKED, SCALE, out=X), "out is torch.bfloat16 [1, 64]"),
    "no ids": (lambda: w4a16_gemv.w4a16_gemv(X, PACKED[None], SCALE[None]), "go with ids"),
    "no routing": (lambda: w4a16_matmul.w4a16_matmul(X, PACKED[None], SCALE[None]), "go with a routing"),
    "pairs": (
        lambda: w4a16_gemv.w4a16_gemv(
            X.repeat(2, 1), PACKED[None], SCALE[None], ids=torch.zeros(1, 3, dtype=torch.int64)
        ),
        "2 rows for 3 pairs",
    ),
    "multiplier": (lambda: w4a16.w4a16(X, PACKED, SCALE, torch.ones(3)), "not float32 [1] or [1]"),
    "FP8 scale": (lambda: fp8_block_dequantize.fp8_block_dequantize(X.byte(), torch.ones(2, 2)), "not (1, 1)"),
    "INT4 groups": (lambda: int4_dequantize.int4_dequantize(PACKED, SCALE[:, :0]), "does not split"),
    "NVFP4 width": (
        lambda: nvfp4_dequantize.nvfp4_dequantize(ALL_BYTES[None, :12], SCALE.to(torch.float8_e4m3fn), torch.ones(1)),
        "K = 24",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    """Shapes and types that do not belong together are refused before a launch, with the value that is wrong."""
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.exhaustive
def test_kernels_compile_for_gpus() -> None:
    """Every launch compiles for sm_90 and sm_100, and takes the registers and memory of the table; no loop spills."""
    rows = compiled_launches("weights")

    assert {row.arch for row in rows} == {90, 100}
    spilled = {(row.launch, row.arch): row.stack for row in rows if row.stack > 0}
    assert spilled == {("NVFP4 M=4096", 100): 8}  # one register, stored and loaded once, ahead of the loop
    assert compiled.as_table(rows) == TABLE.read_text()

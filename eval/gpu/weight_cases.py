"""What `gpu_check.py` runs of the kernels for packed weights: decoding them, and products, dense and for experts."""

from functools import partial
from typing import NamedTuple

import torch

from quantkit.eval.gpu.cases import Case, Problem, Sizes, Wanted
from quantkit.kernels.gpu import fp8_block_dequantize as fp8
from quantkit.kernels.gpu import int4_dequantize as int4
from quantkit.kernels.gpu import nvfp4_dequantize as nvfp4
from quantkit.kernels.gpu import w4a16_gemv as gemv
from quantkit.kernels.gpu import w4a16_matmul as matmul

BF16 = torch.bfloat16
PRODUCT = 5e-3  # bound: sums are float32, results are rounded to BF16, NVFP4's weights too
FORMATS = ("int4 g=32", "int4 g=64", "int4 g=128", "nvfp4")
CHOICES = 8


class _Weight(NamedTuple):
    """Packed 4-bit weights [(E,) N, K]; INT4 has no multiplier."""

    packed: torch.Tensor
    scale: torch.Tensor
    multiplier: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        return self.packed.nbytes + self.scale.nbytes


def weight_cases() -> list[Case]:
    """Decoding is exact; a GEMV is wanted at 2.2 times BF16 cuBLAS."""
    fast = Wanted(speedup=2.2)
    few, many = ([tile for tile in matmul.configs() if (tile.BLOCK_M == 16) == few] for few in (True, False))
    tried = {"int4 g=32": gemv.configs(), "nvfp4": gemv.configs()}
    return [
        Case("FP8 block to BF16", _decode_fp8, 0.0, choices=fp8.configs(), far=True),
        Case("INT4 g=128 to BF16", partial(_decode, "int4 g=128"), 0.0, choices=int4.configs(), far=True),
        Case("NVFP4 to BF16", partial(_decode, "nvfp4"), 0.0, choices=nvfp4.configs(), far=True),
        *(
            Case(f"GEMV {kind}", partial(_product, kind, 1), PRODUCT, fast, choices=tried.get(kind, ()))
            for kind in FORMATS
        ),
        *(Case(f"GEMV {kind} experts", partial(_experts, kind, 1), PRODUCT, fast, far=True) for kind in tried),
        *(
            Case(f"GEMM {kind} M=16", partial(_product, kind, 16), PRODUCT, choices=few if kind in tried else ())
            for kind in FORMATS
        ),
        *(Case(f"GEMM {kind} M=many", partial(_product, kind, 0), PRODUCT, choices=many) for kind in tried),
        *(Case(f"GEMM {kind} experts", partial(_experts, kind, 64), PRODUCT, far=True) for kind in tried),
    ]


def _weight(kind: str, shape: tuple[int, ...], device: torch.device) -> _Weight:
    *lead, columns = shape
    if kind.startswith("int4"):
        group = int(kind.rpartition("=")[2])
        packed = torch.randint(-(2**31), 2**31, (*lead, columns // 8), dtype=torch.int32, device=device)
        return _Weight(packed, (torch.rand(*lead, columns // group, device=device) * 0.01).to(BF16), None)
    packed = torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(0, 0x7F, (*lead, columns // 16), dtype=torch.uint8, device=device)
    return _Weight(packed, scale.view(torch.float8_e4m3fn), torch.full((1,), 1e-4, device=device))


def _decode_fp8(device: torch.device, sizes: Sizes) -> Problem:
    shape = sizes.rows, sizes.columns
    magnitude, sign = (torch.randint(0, end, shape, dtype=torch.uint8, device=device) for end in (0x7F, 2))
    weight = magnitude | sign << 7
    scale = torch.rand(-(-sizes.rows // 128), -(-sizes.columns // 128), device=device)
    out = torch.empty(weight.shape, dtype=BF16, device=device)
    launch = partial(fp8.fp8_block_dequantize, weight, scale, out=out)
    return Problem(launch, (out,), lambda: (fp8.reference(weight, scale, (128, 128)),), weight.nbytes + out.nbytes)


def _decode(kind: str, device: torch.device, sizes: Sizes) -> Problem:
    packed, scale, multiplier = weight = _weight(kind, (sizes.rows, sizes.columns), device)
    out = torch.empty(sizes.rows, sizes.columns, dtype=BF16, device=device)
    nbytes = weight.nbytes + out.nbytes
    if multiplier is None:
        launch = partial(int4.int4_dequantize, packed, scale, out=out)
        return Problem(launch, (out,), lambda: (int4.reference(packed, scale),), nbytes)
    launch = partial(nvfp4.nvfp4_dequantize, packed, scale, multiplier, out=out)
    return Problem(launch, (out,), lambda: (nvfp4.reference(packed, scale, multiplier),), nbytes)


def _product(kind: str, tokens: int, device: torch.device, sizes: Sizes) -> Problem:
    tokens = tokens or sizes.gemm_rows
    weight = _weight(kind, (sizes.rows, sizes.columns), device)
    x = torch.randn(tokens, sizes.columns, device=device).to(BF16)
    out = torch.empty(tokens, sizes.rows, dtype=BF16, device=device)
    plain = torch.randn(sizes.rows, sizes.columns, device=device).to(BF16)
    launch = gemv.w4a16_gemv if tokens == 1 else matmul.w4a16_matmul
    reference = gemv.reference if tokens == 1 else matmul.reference
    return Problem(
        partial(launch, x, *weight, out=out),
        (out,),
        lambda: (reference(x, *weight),),
        x.nbytes + weight.nbytes + out.nbytes,
        2 * x.numel() * sizes.rows,
        partial(torch.nn.functional.linear, x, plain),
    )


def _experts(kind: str, tokens: int, device: torch.device, sizes: Sizes) -> Problem:
    """Every token chooses 8 experts, or all; the peer multiplies every token with as many in BF16."""
    weight = _weight(kind, (sizes.experts, sizes.expert_rows, sizes.columns), device)
    choices = min(CHOICES, sizes.experts)
    ids = torch.rand(tokens, sizes.experts, device=device).argsort(1)[:, :choices].contiguous()
    x = torch.randn(tokens, sizes.columns, device=device).to(BF16)
    out = torch.empty(tokens * choices, sizes.expert_rows, dtype=BF16, device=device)
    plain = torch.randn(choices, sizes.expert_rows, sizes.columns, device=device).to(BF16)
    if tokens == 1:
        launch, reference = partial(gemv.w4a16_gemv, x, *weight, ids, out), gemv.reference
    else:
        launch = partial(matmul.w4a16_matmul, x, *weight, matmul.route(ids, sizes.experts), out)
        reference = matmul.reference

    def exact() -> tuple[torch.Tensor, ...]:
        y = torch.empty(out.shape, dtype=torch.float64, device=device)
        for expert in ids.unique().tolist():  # one by one: all that there are would not fit
            product = reference(x, weight.packed[expert], weight.scale[expert], weight.multiplier)
            pairs = (ids == expert).nonzero()
            y[pairs[:, 0] * choices + pairs[:, 1]] = product[pairs[:, 0]]
        return (y,)

    moved = min(sizes.experts, ids.numel()) * weight.nbytes // sizes.experts
    return Problem(
        launch,
        (out,),
        exact,
        x.nbytes + moved + out.nbytes,
        2 * out.numel() * sizes.columns,
        partial(torch.bmm, x.expand(choices, *x.shape), plain.transpose(1, 2)),
    )

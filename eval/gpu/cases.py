"""What `gpu_check.py` runs: the Triton kernels with inputs of real models' shapes, fresh and random each time.

A problem holds its results as they are before a launch, for the check to poison, and the exact results in float64 (or
whole numbers), which are computed on the same device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quantkit.kernels import pages as layouts
from quantkit.kernels.gpu.kv_write import write_gqa, write_mla
from quantkit.kernels.gpu.page_check import page_check
from quantkit.kernels.gpu.page_digest import page_digest
from quantkit.kernels.gpu.paged_decode import Launch, configs, decode_gqa, decode_mla
from quantkit.kernels.reference import kv_write as write_reference
from quantkit.kernels.reference import page_check as check_reference
from quantkit.kernels.reference import page_digest as digest_reference
from quantkit.kernels.reference import paged_decode as decode_reference
from quantkit.kernels.reference.page_digest import Binding, Spans

LATENT, ROPE, PAGE_SIZE = layouts.DS_LATENT, layouts.DS_ROPE, 64
KV_HEADS, HEAD_SIZE = 8, 128
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
FP16_WEIGHTS, BF16_WEIGHTS = 1e-3, 5e-3  # bounds: the weights of the softmax are rounded to what is multiplied


@dataclass(frozen=True)
class Sizes:
    """How much: requests, their tokens and those of a list, tokens written at once, a dense weight, experts, and the
    rows of x of a GEMM."""

    requests: int
    tokens: int
    topk: int
    written: int
    rows: int
    columns: int
    experts: int
    expert_rows: int
    gemm_rows: int


FULL = Sizes(64, 8192, 2048, 16384, 12288, 6144, 8, 4096, 4096)
QUICK = Sizes(16, 4096, 512, 4096, 4096, 4096, 8, 1024, 1024)
FAR = Sizes(64, 65536, 2048, 3_800_000, 360_000, 6144, 720, 4096, 64)  # 2^31 numbers or words and more of everything


@dataclass(frozen=True)
class Problem:
    """One launch: `results` are written by `launch`; `nbytes` must move and `flops` be done; `peer` does it in BF16."""

    launch: Callable[..., object]
    results: tuple[torch.Tensor, ...]
    exact: Callable[[], tuple[torch.Tensor, ...]]
    nbytes: int
    flops: int = 0
    peer: Callable[[], object] | None = None


@dataclass(frozen=True)
class Wanted:
    """What is wanted on an H200: a share of copy bandwidth, TFLOP/s, or times as fast as BF16 cuBLAS."""

    copy_share: float = 0.0
    tflops: float = 0.0
    speedup: float = 0.0


@dataclass(frozen=True)
class Case:
    """A kernel by name, how to make its problem, and the largest relative Frobenius error; `argument` of its launch
    takes each of `choices`, of which one is chosen where it is left out. `far`: also with sizes beyond 2^31.
    """

    name: str
    make: Callable[[torch.device, Sizes], Problem]
    bound: float
    wanted: Wanted = Wanted()
    argument: str = "config"
    choices: Sequence[object] = ()
    far: bool = False

    def variants(self) -> dict[str, dict[str, object]]:
        """What is added to a launch, by a name for it: nothing, then each of the choices."""
        tried = {f"{self.name}, {getattr(choice, 'tile', choice)}": {self.argument: choice} for choice in self.choices}
        return {self.name: {}, **tried}


def page_cases() -> list[Case]:
    """Writing, attention, and integrity."""
    small, large = Wanted(copy_share=0.7), Wanted(tflops=300)
    others = (8, small), (128, large)
    return [
        *(Case(f"kv_write MLA {kind}", partial(_write_mla, kind), 0.0, far=True) for kind in ("e4m3", "bf16", "ds")),
        Case("kv_write GQA e4m3", _write_gqa, 0.0, far=True),
        *(
            Case(f"MLA e4m3 {heads} heads", partial(_mla, "e4m3", heads), FP16_WEIGHTS, wanted)
            for heads, wanted in others
        ),
        _attention("MLA e4m3 16 heads", partial(_mla, "e4m3", 16), 16, 1, small, far=True),
        _attention("MLA e4m3 64 heads", partial(_mla, "e4m3", 64), 64, 1, large),
        *(_attention(f"MLA bf16 {heads} heads", partial(_mla, "bf16", heads), heads, 2) for heads in (16, 64)),
        _attention("MLA e4m3 64 heads, token lists", partial(_mla, "e4m3", 64, listed=True), 64, 1, far=True),
        _attention("MLA ds 64 heads, token lists", partial(_mla, "ds", 64, listed=True), 64, 1, far=True),
        _attention("GQA e4m3 64 heads", partial(_gqa, E4M3), 8, 1, far=True),
        _attention("GQA bf16 64 heads", partial(_gqa, BF16), 8, 2),
        Case("page_check", _check, 0.0),
        Case("page_digest", _digest, 0.0, Wanted(copy_share=0.5), far=True),
    ]


def _attention(
    name: str, make: Callable[..., Problem], shared: int, itemsize: int, wanted: Wanted = Wanted(), far: bool = False
) -> Case:
    """A case for `shared` heads that read the same rows, with the tiles that fit."""
    width = HEAD_SIZE if name.startswith("GQA") else LATENT + ROPE
    tiles = [Launch(tile=tile) for tile in configs(shared, width, itemsize)]
    return Case(name, make, FP16_WEIGHTS if "e4m3" in name else BF16_WEIGHTS, wanted, "launch", tiles, far)


def _counts(device: torch.device) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.int64, device=device)


def _write_mla(kind: str, device: torch.device, sizes: Sizes) -> Problem:
    latent, rope = (torch.randn(sizes.written, width, device=device).to(BF16) for width in (LATENT, ROPE))
    width, dtype = {"e4m3": (LATENT + ROPE, E4M3), "bf16": (LATENT + ROPE, BF16), "ds": (layouts.DS_ROW, torch.uint8)}[
        kind
    ]
    pages = torch.empty(-(-sizes.written // PAGE_SIZE), PAGE_SIZE, width, dtype=dtype, device=device)
    slots = torch.randperm(pages.shape[0] * PAGE_SIZE, device=device)[: sizes.written]
    scale = 2.0**-7 if kind == "e4m3" else 1.0  # so that some values are clamped

    def exact() -> tuple[torch.Tensor, ...]:
        written = torch.full_like(pages.view(torch.uint8), 0x5A).view(dtype)
        write_reference.write_mla(latent, rope, written, slots, scale, _counts(device))
        return (written.view(torch.uint8),)

    launch = partial(write_mla, latent, rope, pages, slots, scale, _counts(device))
    moved = sizes.written * ((LATENT + ROPE) * 2 + width * dtype.itemsize)
    return Problem(launch, (pages.view(torch.uint8),), exact, moved)


def _write_gqa(device: torch.device, sizes: Sizes) -> Problem:
    key, value = (torch.randn(sizes.written, KV_HEADS, HEAD_SIZE, device=device).to(BF16) for _ in "kv")
    shape = -(-sizes.written // PAGE_SIZE), PAGE_SIZE, KV_HEADS, HEAD_SIZE
    keys, values = (torch.empty(shape, dtype=torch.uint8, device=device) for _ in "kv")
    slots = torch.randperm(shape[0] * PAGE_SIZE, device=device)[: sizes.written]

    def exact() -> tuple[torch.Tensor, ...]:
        written = torch.full_like(keys, 0x5A), torch.full_like(values, 0x5A)
        write_reference.write_gqa(key, value, *written, slots, 0.02, 0.01, _counts(device))
        return written

    launch = partial(write_gqa, key, value, keys, values, slots, 0.02, 0.01, _counts(device))
    return Problem(launch, (keys, values), exact, key.numel() * 2 * 3)


def _requests(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """A block table over shuffled pages on `device`, and on the CPU lengths of which the longest fills it."""
    max_pages = -(-sizes.tokens // PAGE_SIZE)
    table = torch.randperm(sizes.requests * max_pages, device=device).view(sizes.requests, max_pages).int()
    lengths = torch.randint(sizes.tokens * 7 // 8, sizes.tokens + 1, (sizes.requests,)).int()
    lengths[0] = sizes.tokens
    return table, lengths


def _empty_result(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query, dtype=torch.float32), query.new_empty(query.shape[:2], dtype=torch.float32)


def _mla(kind: str, heads: int, device: torch.device, sizes: Sizes, listed: bool = False) -> Problem:
    table, lengths = _requests(device, sizes)
    rows = torch.randn(table.numel() * PAGE_SIZE, LATENT + ROPE, device=device).to(BF16)
    pages = rows.view(-1, PAGE_SIZE, LATENT + ROPE).to({"e4m3": E4M3}.get(kind, BF16))
    if kind == "ds":
        pages = torch.empty(table.numel(), PAGE_SIZE, layouts.DS_ROW, dtype=torch.uint8, device=device)
        if device.type != "meta":  # where nothing is written
            slots = torch.arange(len(rows), device=device)
            write_reference.write_mla(rows[:, :LATENT], rows[:, LATENT:], pages, slots, 1.0, _counts(device))
    query, tail = (torch.randn(sizes.requests, heads, width, device=device).to(BF16) for width in (LATENT, ROPE))
    indices, tokens = None, int(lengths.sum())
    if listed:
        indices = torch.randint(0, sizes.tokens, (sizes.requests, sizes.topk)).int()
        indices = torch.where(indices < lengths[:, None], indices, -1)
        tokens = int((indices >= 0).sum())
        indices = indices.to(device)
    result = _empty_result(query)
    shared = pages, table, lengths.to(device), 0.1, 0.5 if kind == "e4m3" else 1.0, indices

    def exact() -> tuple[torch.Tensor, ...]:
        return decode_reference.decode_mla(query.double(), tail.double(), *shared)

    moved = tokens * pages.shape[2] * pages.element_size() + query.numel() * 6
    flops = 2 * tokens * heads * (2 * LATENT + ROPE)
    return Problem(partial(decode_mla, query, tail, *shared, out=result), result, exact, moved, flops)


def _gqa(dtype: torch.dtype, device: torch.device, sizes: Sizes) -> Problem:
    table, lengths = _requests(device, sizes)
    shape = table.numel(), PAGE_SIZE, KV_HEADS, HEAD_SIZE
    keys, values = (torch.randn(shape, dtype=BF16, device=device).to(dtype) for _ in "kv")
    query = torch.randn(sizes.requests, 64, HEAD_SIZE, device=device).to(BF16)
    result = _empty_result(query)
    scales = (0.5, 2.0) if dtype == E4M3 else (1.0, 1.0)
    shared = keys, values, table, lengths.to(device), 0.1, *scales

    def exact() -> tuple[torch.Tensor, ...]:
        return decode_reference.decode_gqa(query.double(), *shared)

    tokens = int(lengths.sum())
    moved = tokens * 2 * KV_HEADS * HEAD_SIZE * dtype.itemsize + query.numel() * 6
    flops = 4 * tokens * query[0].numel()
    return Problem(partial(decode_gqa, query, *shared, out=result), result, exact, moved, flops)


def _check(device: torch.device, sizes: Sizes) -> Problem:
    table, lengths = _requests(device, sizes)
    counts = ((lengths + PAGE_SIZE - 1) // PAGE_SIZE).to(device)
    generations = torch.randperm(table.numel(), device=device) + 1
    expected = generations[table.long()]
    wrong = torch.randint(0, table.shape[1], (sizes.requests,), device=device)
    half = torch.arange(sizes.requests, device=device)[::2]
    expected[half, wrong[half]] += 1
    result = torch.empty_like(counts)
    arguments = table, expected, counts, generations
    launch = partial(page_check, *arguments, out=result)
    return Problem(launch, (result,), lambda: (check_reference.page_check(*arguments),), table.numel() * 20)


def _digest(device: torch.device, sizes: Sizes) -> Problem:
    count = -(-sizes.written // PAGE_SIZE) * 4
    pages = torch.randint(0, 256, (count, PAGE_SIZE, LATENT + ROPE), dtype=torch.uint8, device=device)
    page = torch.randperm(count, device=device).int()
    carry, *bound = (torch.randint(-(2**62), 2**62, (count,), device=device) for _ in range(4))
    spans = Spans(page, torch.zeros_like(page), torch.full_like(page, PAGE_SIZE), carry)
    result = torch.empty_like(carry), torch.empty_like(carry)
    launch = partial(page_digest, pages, spans, Binding(*bound), out=result)
    return Problem(
        launch, result, lambda: digest_reference.page_digest(pages, spans, Binding(*bound)), pages.numel() + count * 60
    )

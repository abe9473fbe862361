"""Launches of the page kernels in every branch that they have, with the shapes of real models, on any device.

GLM-5.2, DeepSeek-V3 and Kimi K2.6 keep MLA rows of 512 + 64 and have 64 or 128 heads, 8 or 16 on each of 8 GPUs; a
Llama keeps 8 key heads of 128 under 32 to 128 query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from quantkit.kernels import pages as layouts
from quantkit.kernels.gpu.kv_write import write_gqa, write_mla
from quantkit.kernels.gpu.page_check import page_check
from quantkit.kernels.gpu.page_digest import page_digest
from quantkit.kernels.gpu.paged_decode import decode_gqa, decode_mla
from quantkit.kernels.reference.page_digest import Binding, Spans

LATENT, ROPE = layouts.DS_LATENT, layouts.DS_ROPE
KV_HEADS, HEAD_SIZE = 8, 128
E4M3, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
KINDS = {"e4m3": E4M3, "bf16": BF16, "float32": F32, "ds": torch.uint8}


@dataclass(frozen=True)
class World:
    """Empty tensors on `device` for `requests` with up to `max_pages` of the `num_pages` in a pool."""

    device: torch.device
    requests: int = 16
    num_pages: int = 60_000
    page_size: int = 64
    max_pages: int = 2_048

    def empty(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Whole numbers int32 of this shape."""
        return self.empty(*shape, dtype=torch.int32)

    def longs(self, *shape: int) -> torch.Tensor:
        """Whole numbers int64 of this shape."""
        return self.empty(*shape, dtype=torch.int64)

    def mla_pages(self, kind: str) -> torch.Tensor:
        """Rows of 512 + 64 numbers, or ds_mla rows."""
        width = layouts.DS_ROW if kind == "ds" else LATENT + ROPE
        return self.empty(self.num_pages, self.page_size, width, dtype=KINDS[kind])

    def gqa_pages(self, kind: str, head_size: int = HEAD_SIZE, kv_heads: int = KV_HEADS) -> torch.Tensor:
        """Rows of keys or values."""
        return self.empty(self.num_pages, self.page_size, kv_heads, head_size, dtype=KINDS[kind])

    def write_mla(self, kind: str, source: torch.dtype = BF16) -> None:
        """Write latents."""
        latent, rope = (self.empty(self.requests, width, dtype=source) for width in (LATENT, ROPE))
        write_mla(latent, rope, self.mla_pages(kind), self.longs(self.requests), 1.0, self.longs(3))

    def write_gqa(self, kind: str, source: torch.dtype = BF16) -> None:
        """Write keys and values."""
        rows, pages = self.empty(self.requests, KV_HEADS, HEAD_SIZE, dtype=source), self.gqa_pages(kind)
        write_gqa(rows, rows, pages, pages, self.longs(self.requests), 1.0, 1.0, self.longs(3))

    def decode_mla(self, kind: str, heads: int, topk: int | None = None, query: torch.dtype = BF16) -> None:
        """MLA decode."""
        latent, rope = (self.empty(self.requests, heads, width, dtype=query) for width in (LATENT, ROPE))
        indices = None if topk is None else self.numbers(self.requests, topk)
        table, lengths = self.numbers(self.requests, self.max_pages), self.numbers(self.requests)
        decode_mla(latent, rope, self.mla_pages(kind), table, lengths, 0.04, 1.0, indices)

    def decode_gqa(self, kind: str, heads: int, head_size: int = HEAD_SIZE, kv_heads: int = KV_HEADS) -> None:
        """GQA decode."""
        pages, query = self.gqa_pages(kind, head_size, kv_heads), self.empty(self.requests, heads, head_size)
        table, lengths = self.numbers(self.requests, self.max_pages), self.numbers(self.requests)
        decode_gqa(query, pages, pages, table, lengths, 0.09)

    def check(self) -> None:
        """Generations against expectations."""
        table = self.numbers(self.requests, self.max_pages)
        expected = self.longs(self.requests, self.max_pages)
        page_check(table, expected, self.numbers(self.requests), self.longs(self.num_pages))

    def digest(self, row: int = LATENT + ROPE) -> None:
        """The digest of E4M3 pages."""
        pages = self.empty(self.num_pages, self.page_size, row, dtype=torch.uint8)
        page, start, stop = (self.numbers(self.requests) for _ in range(3))
        spans = Spans(page, start, stop, self.longs(self.requests))
        page_digest(pages, spans, Binding(*(self.longs(self.requests) for _ in range(3))))


def page_launches(device: torch.device) -> dict[str, Callable[[], object]]:
    """What runtimes launch, by name."""
    world = World(device)
    heads = {f"decode_mla {kind} {heads} heads": (kind, heads) for kind in ("e4m3", "bf16") for heads in (16, 64)}
    listed = {f"{kind} {heads} heads top 2048": (kind, heads) for kind, heads in (("e4m3", 64), ("ds", 16), ("ds", 64))}
    return {
        **{f"write_mla {kind}": partial(world.write_mla, kind) for kind in ("e4m3", "bf16", "ds")},
        **{f"write_gqa {kind}": partial(world.write_gqa, kind) for kind in ("e4m3", "bf16")},
        **{name: partial(world.decode_mla, *given) for name, given in heads.items()},
        **{f"decode_mla {name}": partial(world.decode_mla, *given, 2048) for name, given in listed.items()},
        **{f"decode_gqa {kind} 64 heads": partial(world.decode_gqa, kind, 64) for kind in ("e4m3", "bf16")},
        "page_check": world.check,
        "page_digest": world.digest,
    }


def page_branches(device: torch.device) -> dict[str, Callable[[], object]]:
    """What those leave out: other types, head sizes and pages."""
    world, small_pages = World(device), World(device, page_size=16)
    return {
        "write_mla float32": partial(world.write_mla, "float32", F32),
        "write_mla e4m3 of float32": partial(world.write_mla, "e4m3", F32),
        "write_mla ds of float16": partial(world.write_mla, "ds", F16),
        "decode_mla float32 16 heads": partial(world.decode_mla, "float32", 16),
        "decode_mla e4m3 16 heads, pages of 16": partial(small_pages.decode_mla, "e4m3", 16),
        "decode_mla e4m3 16 heads of float32": partial(world.decode_mla, "e4m3", 16, None, F32),
        "decode_gqa e4m3 64 heads of 64": partial(world.decode_gqa, "e4m3", 64, 64),
        "decode_gqa bf16 128 heads of 80": partial(world.decode_gqa, "bf16", 128, 80),
        "decode_gqa float32 64 heads": partial(world.decode_gqa, "float32", 64),
        "page_digest 4-byte words": partial(world.digest, 20),
        "page_digest 1-byte words": partial(world.digest, 13),
        **_ones(device),
    }


def _ones(device: torch.device) -> dict[str, Callable[[], object]]:
    """One of everything: Triton makes a constant of an argument that is 1, which is another program."""
    one, nothing = World(device, 1, 1, 1, 1), World(device, 1, 1, 64, 0)
    return {
        "write_gqa e4m3, one": partial(one.write_gqa, "e4m3"),
        "decode_mla e4m3 1 head, one": partial(one.decode_mla, "e4m3", 1),
        "decode_mla ds 1 head top 1, one": partial(one.decode_mla, "ds", 1, 1),
        "decode_gqa bf16 1 head, one": partial(one.decode_gqa, "bf16", 1, HEAD_SIZE, 1),
        "decode_gqa bf16 1 head, no pages": partial(nothing.decode_gqa, "bf16", 1, HEAD_SIZE, 1),
        "page_check, one": one.check,
        "page_check, no pages": nothing.check,
        "page_digest, one": one.digest,
    }

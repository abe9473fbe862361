"""The pool of pages that all requests' tokens lie in, in the layouts of `quantkit.kernels.pages`.

    MLA    a part `latent` of each layer          [num_pages, page_size, kv_rank + rope]
    GQA    parts `key` and `value` of each layer  [num_pages, page_size, kv_heads, head_dim]
    DSA    a part `index` of layers with an indexer    [num_pages, page_size, index_head_dim]

All parts have the same dtype, so FP8 pages hold exactly twice the tokens of BF16 ones. In FP8, index keys have scale 1:
they come out of a layer norm, so they neither overflow nor vanish. (vLLM and SGLang keep them in FP8 whatever the cache
is, with a scale for each token.) A slot is a row's number in the pool: page * page_size + offset.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import CacheError, UsageError
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.runtime.allocator import Allocator
from quantkit.runtime.scales import KvScales

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.bfloat16, torch.float32)
COUNTED = 3  # saturated values, NaN values, refused rows: `quantkit.kernels.pages`


@dataclass(frozen=True)
class Part:
    """What one layer keeps of a token: `row` numbers under a name."""

    layer: int
    name: str
    row: tuple[int, ...]


@dataclass(frozen=True)
class CacheSpec:
    """What the numbers in a page mean. Pages of one spec can take another's place; others never.

    model  stands for the weights that made the numbers, scales folded into them included
    """

    model: str
    dtype: torch.dtype
    page_size: int
    parts: tuple[Part, ...]
    scales: KvScales

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers."""
        return self.page_size * self.dtype.itemsize * sum(math.prod(part.row) for part in self.parts)

    @property
    def digest(self) -> bytes:
        """Of everything in it, 32 bytes."""
        text = repr((self.model, self.dtype, self.page_size, self.parts, self.scales.digest))
        return hashlib.sha256(text.encode()).digest()

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)


def cache_spec(config: ModelConfig, dtype: torch.dtype, page_size: int, scales: KvScales, model: str = "") -> CacheSpec:
    """The spec of a model's pages; `scales` are `unscaled` unless `dtype` is FP8."""
    if dtype not in DTYPES:
        raise UsageError(f"pages cannot be {dtype}", hint=f"Known: {', '.join(map(str, DTYPES))}.")
    if page_size < 1:
        raise UsageError(f"a page of {page_size} tokens holds nothing")
    if len(scales.layers) != config.layers:
        raise CacheError(f"there are KV scales for {len(scales.layers)} layers, and the model has {config.layers}")
    if dtype is not FP8 and not all(layer.is_one for layer in scales.layers):
        raise CacheError(f"pages of {dtype} are not scaled, and the KV scales are not 1", hint="Use FP8 pages.")
    parts: list[Part] = []
    for layer in range(config.layers):
        attention = config.attention
        if isinstance(attention, MlaConfig):
            parts.append(Part(layer, "latent", (attention.kv_rank + attention.rope,)))
        else:
            parts += [Part(layer, name, (attention.kv_heads, attention.head_dim)) for name in ("key", "value")]
        if config.dsa and config.dsa.full[layer]:
            parts.append(Part(layer, "index", (config.dsa.head_dim,)))
    return CacheSpec(model, dtype, page_size, tuple(parts), scales)


class PagePool:
    """Pages of one spec on one device, and who has them.

    counts  int64 [3]: values that saturated, NaN values and refused rows of all that was written
    copied  is told of a page that was copied to another one
    """

    def __init__(self, spec: CacheSpec, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.allocator = Allocator(num_pages)
        self.copied: Callable[[int, int], None] = lambda source, target: None
        self.counts = torch.zeros(COUNTED, dtype=torch.int64, device=device)
        self.tensors = {
            (part.layer, part.name): torch.empty(
                (num_pages, spec.page_size, *part.row), dtype=spec.dtype, device=device
            )
            for part in spec.parts
        }

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self.allocator.num_pages

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.spec.page_size

    def heads(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and the value pages of a layer."""
        return self.tensors[layer, "key"], self.tensors[layer, "value"]

    def slots(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Where the tokens `start` to `stop`, not included, of a request with these pages lie: int64.

        Raises CacheError for tokens beyond the pages and pages beyond the pool.
        """
        size = self.spec.page_size
        if not 0 <= start <= stop <= len(pages) * size:
            raise CacheError(f"tokens {start} to {stop} do not lie in {len(pages)} pages of {size}")
        if bad := [page for page in pages if not 0 <= page < self.num_pages]:
            raise CacheError(f"page {bad[0]} is not in a pool of {self.num_pages}")
        return self.locate(torch.tensor(pages, dtype=torch.int64, device=self.device), start, stop)

    def locate(self, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """`slots` of a request whose pages are `table`, whole numbers [pages], without a look at what they are."""
        size = self.spec.page_size
        position = torch.arange(start, stop, device=self.device)
        return table[position // size].long() * size + position % size

    def copy(self, source: int, target: int) -> None:
        """Copy the bytes of a page to another one."""
        for tensor in self.tensors.values():
            tensor[target].view(torch.uint8).copy_(tensor[source].view(torch.uint8))
        self.copied(source, target)


def open_pool(spec: CacheSpec, memory: int, device: torch.device | str = "cpu") -> PagePool:
    """A pool of as many pages as `memory` bytes hold. Raises UsageError if that is none."""
    num_pages = memory // spec.page_bytes
    if num_pages < 1:
        raise UsageError(
            f"{memory:,} bytes hold no page: one of {spec.page_size} tokens has {spec.page_bytes:,}",
            hint="Give more with --memory, or a smaller --page-size.",
        )
    return PagePool(spec, num_pages, device)

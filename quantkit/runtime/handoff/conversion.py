"""Pages of one kind as pages of another: other page sizes row by row, BF16 to FP8 by the runtime's own writers."""

import torch

from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.runtime.page_set import PageSet, export_pages
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import CacheSpec, PagePool


def convert_pages(pages: PageSet, spec: CacheSpec, config: ModelConfig) -> tuple[PageSet, torch.Tensor]:
    """The numbers of complete `pages`, of a kind that `check_peers` allows, as pages of `spec`.

    Also returned is what a pool counts, int64 [3]: values that saturated, NaN values, refused rows. Pages of the same
    dtype keep their bytes.
    """
    count = len(pages.tokens)
    scratch = PagePool(spec, max(1, spec.pages_for(count)))
    table = tuple(range(spec.pages_for(count)))
    rows = {place: tensor.flatten(0, 1)[:count] for place, tensor in pages.tensors.items()}
    if pages.spec.dtype == spec.dtype:
        for place, tensor in scratch.tensors.items():
            tensor.flatten(0, 1)[:count].view(torch.uint8).copy_(rows[place].view(torch.uint8))
    elif count:
        _write(rows, PagedCache(scratch, [Segment(table, 0, count)]), config)
    return export_pages(scratch, table, pages.tokens), scratch.counts


def _write(rows: dict[tuple[int, str], torch.Tensor], cache: PagedCache, config: ModelConfig) -> None:
    """Append the rows of every layer as a model would."""
    positions = torch.arange(len(next(iter(rows.values()))))
    for (layer, name), values in rows.items():
        if name == "latent":
            assert isinstance(config.attention, MlaConfig)
            rank = config.attention.kv_rank
            cache.append_latent(layer, positions, values[:, :rank], values[:, rank:])
        elif name == "key":
            cache.append_heads(layer, positions, values, rows[layer, "value"])
        elif name == "index":
            cache.append_index(layer, positions, values)

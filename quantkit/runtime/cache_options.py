"""How the command line's options become a pool of pages."""

from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.choices import KvDtype
from quantkit.errors import UsageError
from quantkit.models.decoder import Decoder
from quantkit.runtime.pages import FP8, PagePool, cache_spec, open_pool
from quantkit.runtime.scales import KvScales, read_scale_file, scales_by_layer, uniform_scales, unscaled


@dataclass(frozen=True)
class CacheOptions:
    """The pool.

    scale       of all layers of an FP8 cache
    scale_file  the file of an FP8 cache's scales
    memory      bytes of all pages
    page_size   tokens of a page
    fp8_query   whether what meets an FP8 cache is rounded to E4M3, too: `PagedCache`
    """

    kv: KvDtype = KvDtype.BF16
    scale: float | None = None
    scale_file: Path | None = None
    memory: int = 2 << 30
    page_size: int = 64
    fp8_query: bool = False


def open_cache(decoder: Decoder, options: CacheOptions, model: str) -> PagePool:
    """The pool that the options ask for, for a decoder; `model` as in `CacheSpec`."""
    dtype = FP8 if options.kv is KvDtype.FP8 else torch.bfloat16
    scales = cache_scales(decoder, options)
    return open_pool(cache_spec(decoder.config, dtype, options.page_size, scales, model), options.memory)


def cache_scales(decoder: Decoder, options: CacheOptions) -> KvScales:
    """The scales of a cache: of the checkpoint, a file, or one number; exactly one of them. BF16 pages have none."""
    layers = decoder.config.layers
    given = [option for option in (options.scale, options.scale_file) if option is not None]
    if options.kv is not KvDtype.FP8:
        if given:
            raise UsageError("KV scales are for an FP8 cache", hint="Add --kv fp8.")
        if options.fp8_query:
            raise UsageError("queries are rounded to FP8 for an FP8 cache alone", hint="Add --kv fp8.")
        return unscaled(layers)
    if len(given) + bool(decoder.kv_scales) > 1:
        raise UsageError(
            "the KV scales are given twice: by the checkpoint, --kv-scale or --kv-scales",
            hint="Give them once; a checkpoint's are always used.",
        )
    if options.scale is not None:
        return uniform_scales(layers, options.scale)
    if options.scale_file:
        named = read_scale_file(options.scale_file, decoder.source)
        return scales_by_layer(decoder.config, named, str(options.scale_file))
    return scales_by_layer(decoder.config, decoder.kv_scales, "the checkpoint")

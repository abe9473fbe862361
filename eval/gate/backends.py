"""What runs the two models of the gate.

    hf       transformers, which decodes the weights (`loading`): a second opinion on what quantkit wrote
    runtime  quantkit's own paged runtime (`paged_model`): weights as they are stored, and pages as they are deployed

The runtime reads what transformers would misread, and it gives every arm pages of its own dtype and KV scales. These
belong to what is compared, as the weights do; the backend itself must be the same for both arms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from quantkit.checkpoint.source import open_source
from quantkit.choices import KvDtype
from quantkit.errors import QuantkitError
from quantkit.eval.gate import loading
from quantkit.eval.gate.loading import Loaded, load_tokenizer
from quantkit.eval.gate.paged_model import PagedModel
from quantkit.models.decoder import Decoder
from quantkit.models.loading import load as load_decoder
from quantkit.runtime.cache_options import CacheOptions, cache_scales
from quantkit.runtime.pages import FP8, CacheSpec, cache_spec
from quantkit.runtime.tokenizer import stop_tokens
from quantkit.version import VERSION

HF, RUNTIME = "hf", "runtime"
BACKENDS = (HF, RUNTIME)
BF16_PAGES = CacheOptions()
_PAGE_TOKENS = 64


@dataclass(frozen=True)
class Arm:
    """One side of the comparison, `baseline` or `candidate`; `cache` is for the runtime."""

    name: str
    folder: Path
    cache: CacheOptions = BF16_PAGES


class Backend(Protocol):
    """Loads what it has checked.

    settings  what a run depends on by the backend, the same for both arms
    """

    @property
    def settings(self) -> Mapping[str, str]:
        """The backend's name, and what else decides its numbers."""

    def check(self, arms: Sequence[Arm]) -> list[str]:
        """Notes on how the arms are measured; a QuantkitError for what cannot be. No weights are read."""

    def pages(self, arm: Arm) -> dict[str, str]:
        """`kv`, and of FP8 pages `scales`, where these are from, `scales_digest`, and `query` if it is FP8, too; empty
        without pages."""

    def load(self, arm: Arm) -> Loaded:
        """The arm's model and tokenizer."""


def open_backend(name: str) -> Backend:
    """The backend of that name, which is one of `BACKENDS`."""
    return _Runtime() if name == RUNTIME else _Hf()


@dataclass
class _Hf:
    settings: Mapping[str, str] = field(default_factory=lambda: {"backend": HF})
    _loaded: dict[Path, Loaded] = field(default_factory=dict)

    def check(self, arms: Sequence[Arm]) -> list[str]:
        sources = [loading.check_measurable(arm.folder) for arm in arms]
        loading.check_memory(sources)
        quantized = dict.fromkeys(source.name for source in sources if loading.quantizes_activations(source))
        return [f"{name} is measured with unquantized activations (input_activations null)" for name in quantized]

    def pages(self, arm: Arm) -> dict[str, str]:
        return {}

    def load(self, arm: Arm) -> Loaded:
        if arm.folder not in self._loaded:
            self._loaded[arm.folder] = loading.load(arm.folder)
        return self._loaded[arm.folder]


@dataclass
class _Runtime:
    """`_specs` are the pages of each arm, known once it is checked; arms of one folder share its weights."""

    settings: Mapping[str, str] = field(default_factory=lambda: {"backend": RUNTIME, "quantkit": VERSION})
    _specs: dict[Arm, CacheSpec] = field(default_factory=dict)
    _decoders: dict[Path, Decoder] = field(default_factory=dict)

    def check(self, arms: Sequence[Arm]) -> list[str]:
        sources = {arm.folder: open_source(arm.folder) for arm in arms}
        loading.check_room([(source.name, source.nbytes) for source in sources.values()], "as they are stored")
        notes = []
        for arm in arms:
            unread = load_decoder(arm.folder, torch.float32, "meta")  # all but the numbers
            self._specs[arm] = _spec(arm, unread)
            if unread.kv_scales and arm.cache.kv is not KvDtype.FP8:
                notes.append(f"{arm.name}: the checkpoint's KV scales are not used: BF16 pages need none")
        for folder in sources:
            load_tokenizer(folder)
        quantized = [source.name for source in sources.values() if loading.quantizes_activations(source)]
        told = "is measured with unquantized activations, though its config asks for quantized ones"
        return notes + [f"{name} {told}" for name in quantized]

    def pages(self, arm: Arm) -> dict[str, str]:
        scales, kv = self._specs[arm].scales, str(arm.cache.kv)
        if arm.cache.kv is not KvDtype.FP8:
            return {"kv": kv}
        query = {"query": kv} if arm.cache.fp8_query else {}
        return {"kv": kv, **query, "scales": scales.source, "scales_digest": scales.digest}

    def load(self, arm: Arm) -> Loaded:
        if arm.folder not in self._decoders:
            self._decoders[arm.folder] = load_decoder(arm.folder, torch.float32)
        decoder, spec = self._decoders[arm.folder], self._specs[arm]
        model = PagedModel(decoder, spec, stop_tokens(arm.folder), arm.cache.fp8_query)
        return Loaded(model, load_tokenizer(arm.folder))


def _spec(arm: Arm, decoder: Decoder) -> CacheSpec:
    """The arm's pages; what is wrong with their scales names the arm, and its own options."""
    try:
        scales = cache_scales(decoder, arm.cache)
    except QuantkitError as error:
        hint = error.hint.replace("--kv", "--baseline-kv") if error.hint and arm.name == "baseline" else error.hint
        raise type(error)(f"{arm.name}: {error}", hint=hint) from error
    dtype = FP8 if arm.cache.kv is KvDtype.FP8 else torch.bfloat16
    return cache_spec(decoder.config, dtype, _PAGE_TOKENS, scales, str(arm.folder))

"""The scales of an FP8 cache: from the checkpoint, a file, or one number for all; none is ever assumed.

    stored = value / scale, in E4M3          value = stored * scale

A checkpoint and a file give scales by tensor name. Publishers and engines put other words between the attention and the
scale (`self_attn.k_proj.k_scale`, `self_attn.attn.k_scale`, `self_attn.k_scale`): the layer and the letter decide. MLA
keeps one row that is key and value, so its scales for both must be equal, and the value's may be left out.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CacheError
from quantkit.models.config import MlaConfig, ModelConfig
from quantkit.report import Report

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:\w+\.)*([kv])_scale")
_HINT = "Calibrate the scales, give them with --kv-scales FILE, or say --kv-scale 1.0."


@dataclass(frozen=True)
class LayerScales:
    """What the keys and the values of one layer are divided by."""

    key: float
    value: float


@dataclass(frozen=True)
class KvScales:
    """One entry for each layer, and where they are from."""

    layers: tuple[LayerScales, ...]
    source: str

    @property
    def digest(self) -> str:
        """The sha256 of the numbers."""
        text = "\n".join(f"{layer.key.hex()} {layer.value.hex()}" for layer in self.layers)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class KvScaleFile(Report):
    """What a file of scales holds: by the names that the tensors have in a checkpoint."""

    scales: dict[str, float]


def unscaled(layers: int) -> KvScales:
    """The scales of pages that are not FP8."""
    return KvScales((LayerScales(1.0, 1.0),) * layers, "none: the pages are not FP8")


def uniform_scales(layers: int, scale: float) -> KvScales:
    """One number for all layers, keys and values."""
    _check("the scale for all layers", scale)
    return KvScales((LayerScales(float(scale), float(scale)),) * layers, f"{scale:g} for all layers, as asked")


def read_scale_file(path: Path) -> dict[str, float]:
    """The scales in a file that `KvScaleFile` wrote, by tensor name. Raises CacheError if it is none."""
    try:
        scales = KvScaleFile.from_json(path.read_text(encoding="utf-8")).scales
        return {name: float(scale) for name, scale in scales.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{path}: is no file of KV scales: {error}") from error


def scales_by_layer(config: ModelConfig, named: Mapping[str, float], source: str) -> KvScales:
    """The scales `named` by tensor, in order of layers; those of MTP layers, which are not run, are passed over.

    Raises CacheError, by name, for a layer without its scales, a scale without a layer, two for one place, one that is
    not a positive finite number, and for MLA key and value scales that differ.
    """
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name, scale in named.items():
        match = _NAME.fullmatch(name)
        layer = int(match[1]) if match else -1
        if match is None or layer >= config.layers + config.mtp_layers:
            raise CacheError(f"{source}: {name} is the scale of no layer's cache, and would not be used")
        _check(name, scale)
        known, number = found.setdefault((layer, match[2]), (name, scale))
        if number != scale:
            raise CacheError(f"{source}: {known} is {number:g}, and {name} is {scale:g}")
    mla = isinstance(config.attention, MlaConfig)
    layers = tuple(_layer(layer, found, mla, source) for layer in range(config.layers))
    return KvScales(layers, source)


def _layer(layer: int, found: Mapping[tuple[int, str], tuple[str, float]], mla: bool, source: str) -> LayerScales:
    key, value = found.get((layer, "k")), found.get((layer, "v"))
    if mla and value is None:
        value = key
    for letter, scale in (("k", key), ("v", value)):
        if scale is None:
            raise CacheError(f"{source}: layer {layer} has no {letter}_scale", hint=_HINT)
    assert key is not None
    assert value is not None
    if mla and key[1] != value[1]:
        raise CacheError(
            f"{source}: {key[0]} is {key[1]:g} and {value[0]} is {value[1]:g}, but MLA keeps one row for both",
            hint="Give both the same number, large enough for latent and rope part.",
        )
    return LayerScales(key[1], value[1])


def _check(name: str, scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise CacheError(f"{name} is {scale}, not a positive finite number", hint=_HINT)

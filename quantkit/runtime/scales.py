"""The scales of an FP8 cache: from the checkpoint, a file, or one number for all; none is ever assumed.

    stored = value / scale, in E4M3          value = stored * scale

A checkpoint and a file give scales by tensor name. Publishers and engines put other words between the attention and the
scale (`self_attn.k_proj.k_scale`, `self_attn.attn.k_scale`, `self_attn.k_scale`): the layer and the letter decide. MLA
keeps one row that is key and value, so its scales for both must be equal, and the value's may be left out.

A file may also give the two parts of MLA's row powers of two of their own, `latent_scale` (one, or one for each of
kv_rank channels) and `rope_scale` (one, or one for each rotated pair). Where it does, they are used, and not `k_scale`.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.manifest import ModelIdentity
from quantkit.checkpoint.source import Source
from quantkit.errors import CacheError
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.models.rope import spread_pairs
from quantkit.records import Record
from quantkit.weights.identity import find_other_model

Numbers = float | list[float]  # a list gives the channels of a latent, or the rotated pairs
_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:\w+\.)*(k|v|latent|rope)_scale")
_HINT = "Calibrate the scales, give them with --kv-scales FILE, or say --kv-scale 1.0."
_POWERS = "Give the nearest power of two; k_scale alone may be any number."


@dataclass(frozen=True)
class LayerScales:
    """What the keys and the values of one layer are divided by.

    latent, rope  powers of two for the parts of MLA's row: one number, or one for each channel as the row has them.
                  Both or neither; where they are given, they are used instead of `key`

    Raises CacheError for a number that is not positive and finite, and for a part that is no power of two.
    """

    key: float
    value: float
    latent: tuple[float, ...] = ()
    rope: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, scale in (("the key's scale", self.key), ("the value's scale", self.value)):
            _check(name, scale)
        for name, part in (("the latent's scale", self.latent), ("the rope part's scale", self.rope)):
            _check_powers(name, part)
        if bool(self.latent) != bool(self.rope):
            raise CacheError("one part of the row has a scale of its own, and the other has none", hint="Give both.")

    @property
    def row(self) -> float:
        """What MLA's row is divided by when it is written; its parts were divided before, if they have scales."""
        return 1.0 if self.latent else self.key

    @property
    def is_one(self) -> bool:
        """Whether nothing is divided."""
        return set((*self.latent, *self.rope) or (self.key, self.value)) == {1.0}


@dataclass(frozen=True)
class KvScales:
    """One entry for each layer, and where they are from."""

    layers: tuple[LayerScales, ...]
    source: str

    @property
    def digest(self) -> str:
        """The sha256 of the numbers."""
        rows = ((layer.key, layer.value, *layer.latent, *layer.rope) for layer in self.layers)
        text = "\n".join(" ".join(float(number).hex() for number in row) for row in rows)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class KvScaleFile(Record):
    """What a file of scales holds: by the names that the tensors have in a checkpoint; lists for parts only.

    model  whose cache they are for; None in a file that does not say so, which is taken for any
    """

    scales: dict[str, Numbers]
    model: ModelIdentity | None = None


def unscaled(layers: int) -> KvScales:
    """The scales of pages that are not FP8."""
    return KvScales((LayerScales(1.0, 1.0),) * layers, "none: the pages are not FP8")


def uniform_scales(layers: int, scale: float) -> KvScales:
    """One number for all layers, keys and values."""
    _check("the scale for all layers", scale)
    return KvScales((LayerScales(float(scale), float(scale)),) * layers, f"{scale:g} for all layers, as asked")


def read_scale_file(path: Path, source: Source | None = None) -> dict[str, Numbers]:
    """The scales in a file that `KvScaleFile` wrote, by tensor name.

    source  the checkpoint whose cache they are to be used for

    Raises CacheError if it is none, and if it names another model than the one in `source`.
    """
    try:
        file = KvScaleFile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheError(f"{path}: is no file of KV scales: {error}", hint="quantkit calibrate writes one.") from error
    if file.model and source and (difference := find_other_model(file.model, source)):
        raise CacheError(
            f"{path} holds the KV scales of another model: {difference}",
            hint="Calibrate this checkpoint. If you know that they fit, take `model` out of the file.",
        )
    return file.scales


def scales_by_layer(config: ModelConfig, named: Mapping[str, Numbers], source: str) -> KvScales:
    """The scales `named` by tensor, in order of layers; those of MTP layers, which are not run, are passed over.

    Raises CacheError as `scales_of_layers` does.
    """
    found = scales_of_layers(config, named, source)
    return KvScales(tuple(found[layer] for layer in range(config.layers)), source)


def scales_of_layers(config: ModelConfig, named: Mapping[str, Numbers], source: str) -> dict[int, LayerScales]:
    """The scales `named` by tensor, by layer: all main layers', and those of MTP layers that have some.

    Raises CacheError, by name, for a main layer without its scales, a scale without a layer, two for one place, one
    that is not a positive finite number, parts that are no powers of two or not as many as the row has channels or
    pairs, and for MLA key and value scales that differ.
    """
    found: dict[int, dict[str, tuple[str, Numbers]]] = {layer: {} for layer in range(config.layers)}
    mla = config.attention if isinstance(config.attention, MlaConfig) else None
    for name, scale in named.items():
        match = _NAME.fullmatch(name)
        layer = int(match[1]) if match else -1
        if match is None or layer >= config.layers + config.mtp_layers or (mla is None and len(match[2]) > 1):
            raise CacheError(f"{source}: {name} is the scale of no layer's cache, and would not be used")
        _check_named(name, scale, len(match[2]) > 1)
        known, number = found.setdefault(layer, {}).setdefault(match[2], (name, scale))
        if number != scale:
            raise CacheError(f"{source}: {known} is {_said(number)}, and {name} is {_said(scale)}")
    return {layer: _layer(layer, entries, config, source) for layer, entries in sorted(found.items())}


def _layer(layer: int, found: Mapping[str, tuple[str, Numbers]], config: ModelConfig, source: str) -> LayerScales:
    mla = config.attention if isinstance(config.attention, MlaConfig) else None
    key, value = found.get("k"), found.get("v")
    if mla and value is None:
        value = key
    for letter, scale in (("k", key), ("v", value)):
        if scale is None:
            raise CacheError(f"{source}: layer {layer} has no {letter}_scale", hint=_HINT)
    assert key is not None
    assert value is not None
    assert isinstance(key[1], float | int)
    assert isinstance(value[1], float | int)
    if mla and key[1] != value[1]:
        raise CacheError(
            f"{source}: {key[0]} is {key[1]:g} and {value[0]} is {value[1]:g}, but MLA keeps one row for both",
            hint="Give both the same number, large enough for latent and rope part.",
        )
    if mla is None or not ("latent" in found or "rope" in found):
        return LayerScales(key[1], value[1])
    if len(found.keys() & {"latent", "rope"}) == 1:
        raise CacheError(
            f"{source}: layer {layer} has one of latent_scale and rope_scale", hint="Give both or neither."
        )
    latent, rope = _part(found["latent"], mla.kv_rank), _part(found["rope"], mla.rope // 2)
    if len(rope) > 1:
        rope = spread_pairs(rope, config.rope.interleaved)
    return LayerScales(key[1], value[1], latent, rope)


def _part(named: tuple[str, Numbers], count: int) -> tuple[float, ...]:
    """One number for all, or `count` of them."""
    name, scale = named
    if not isinstance(scale, list):
        return (scale,)
    if len(scale) != count:
        raise CacheError(f"{name} has {len(scale)} numbers; it must be one, or a list of {count}")
    return tuple(scale)


def _check_named(name: str, scale: Numbers, is_part: bool) -> None:
    """Whether numbers are such as a name of that kind may have."""
    if is_part:
        return _check_powers(name, tuple(scale) if isinstance(scale, list) else (scale,))
    if isinstance(scale, list):
        raise CacheError(f"{name} is a list, and only latent_scale and rope_scale may be one")
    return _check(name, scale)


def _check_powers(name: str, scales: tuple[float, ...]) -> None:
    for scale in scales:
        _check(name, scale)
        if math.frexp(scale)[0] != 0.5:
            raise CacheError(f"{name} has {scale:g}, which is no power of two", hint=_POWERS)


def _check(name: str, scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise CacheError(f"{name} is {scale}, not a positive finite number", hint=_HINT)


def _said(scale: Numbers) -> str:
    return "a list" if isinstance(scale, list) else f"{scale:g}"

"""What a fold edits: layer by layer the weights, the powers of two, and the bytes that come of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from quantkit.checkpoint.manifest import Fold, Origin
from quantkit.checkpoint.source import Source
from quantkit.errors import FoldError
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.models.folding import LayerFold, as_record, fold_digest, layer_powers
from quantkit.runtime.scales import LayerScales
from quantkit.weights.encodings import NVFP4, PLAIN
from quantkit.weights.grouping import read_weights
from quantkit.weights.rescale import Extent, Patch, Powers, extent, multiplied
from quantkit.weights.rows import Reader
from quantkit.weights.weight import KV_SCALES, Weight


@dataclass(frozen=True)
class Edit:
    """A weight, what it is multiplied with, and whether engines take its global scale from several weights."""

    weight: Weight
    powers: Powers
    fused: bool

    @cached_property
    def extent(self) -> Extent:
        """How many bytes change, by the headers alone."""
        return extent(self.weight, self.powers, self.fused)

    def patches(self, source: Source) -> Iterator[Patch]:
        """The bytes that change."""
        return multiplied(Reader(source), self.weight, self.powers, self.fused)


@dataclass(frozen=True)
class LayerPlan:
    """A layer's fold, with its free exponents chosen, and its edits; none where the cache is divided by 1."""

    layer: int
    mtp: bool
    fold: LayerFold
    edits: tuple[Edit, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that change."""
        return sum(edit.extent.nbytes for edit in self.edits)


@dataclass(frozen=True)
class FoldPlan:
    """The fold of a checkpoint.

    left  layers for multi-token prediction that have no scales: their caches stay as they are
    """

    source: Source
    config: ModelConfig
    layers: tuple[LayerPlan, ...]
    left: tuple[int, ...]

    @property
    def folds(self) -> dict[int, LayerFold]:
        """The fold of each layer."""
        return {layer.layer: layer.fold for layer in self.layers}

    @property
    def digest(self) -> str | None:
        """Of what the caches are divided by; None if by nothing."""
        return fold_digest(self.folds)

    def record(self, origin: Origin | None) -> Fold | None:
        """What a manifest says of the fold of what was published as `origin`; None if nothing is divided."""
        if self.digest is None:
            return None
        layers = {str(layer): as_record(fold) for layer, fold in self.folds.items() if not fold.is_one}
        return Fold(self.digest, layers, origin)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All layers' edits."""
        return tuple(edit for layer in self.layers for edit in layer.edits)

    def patches(self, shard: str) -> list[Patch]:
        """The bytes of one shard that change, in their order. Raises FoldError as `multiplied` does."""
        concerned = (edit for edit in self.edits if any(tensor.shard == shard for tensor in edit.weight.tensors))
        found = (patch for edit in concerned for patch in edit.patches(self.source))
        return sorted((patch for patch in found if patch.tensor.shard == shard), key=place)


def place(patch: Patch) -> int:
    """Where a patch begins in its file."""
    return patch.tensor.offset + patch.begin


def folds_of(config: ModelConfig, scales: Mapping[int, LayerScales]) -> dict[int, LayerFold]:
    """Scales by layer as powers of two. Raises FoldError, naming the layer, for one that is none."""
    return {layer: _exponents(layer, entry, config) for layer, entry in sorted(scales.items())}


def make_plan(source: Source, config: ModelConfig, folds: Mapping[int, LayerFold]) -> FoldPlan:
    """Plan `folds` by layer into `source`; where its weights are there, every edit is tried.

    Raises FoldError, naming the tensor, for weights that cannot take them exactly, and for KV scales that are stored.
    """
    weights = {_key(weight): weight for weight in read_weights(source)}
    for weight in weights.values():
        _check_unscaled(source, weight)
    planned = [_plan_layer(source, config, layer, fold, weights) for layer, fold in folds.items()]
    mtp = {weight.name.layer for weight in weights.values() if weight.name.is_mtp(config.layers)}
    left = sorted(layer for layer in mtp if layer is not None and layer not in folds)
    return FoldPlan(source, config, tuple(planned), tuple(left))


def _key(weight: Weight) -> str:
    return str(weight.name) if weight.encoding is PLAIN else weight.name.sibling("weight")


def _check_unscaled(source: Source, weight: Weight) -> None:
    if weight.name.leaf in KV_SCALES and (source.folder is None or Reader(source).scalar(weight.data) != 1.0):
        raise FoldError(
            f"{source.name} holds {weight.name}: its cache is scaled already, and would be twice",
            hint="Take the checkpoint without its KV scales, and put their numbers into the file.",
        )


def _exponents(layer: int, scales: LayerScales, config: ModelConfig) -> LayerFold:
    """What a layer's scales are as powers of two."""
    if scales.latent:
        return LayerFold(tuple(map(_exponent, scales.latent)), tuple(map(_exponent, scales.rope)))
    for name, scale in (("k_scale", scales.key), ("v_scale", scales.value)):
        if math.frexp(scale)[0] != 0.5:
            near = 2.0 ** round(math.log2(scale))
            raise FoldError(
                f"layer {layer}: {name} is {scale:g}, and only powers of two can be folded exactly",
                hint=f"Give {near:g}, or latent_scale and rope_scale, or use the file as it is with --kv-scales.",
            )
    if isinstance(config.attention, MlaConfig):
        return LayerFold((_exponent(scales.key),), (_exponent(scales.key),))
    return LayerFold(key=_exponent(scales.key), value=_exponent(scales.value))


def _exponent(power: float) -> int:
    return math.frexp(power)[1] - 1


def _plan_layer(
    source: Source, config: ModelConfig, layer: int, fold: LayerFold, weights: Mapping[str, Weight]
) -> LayerPlan:
    """The free exponents that change scales alone where some do, else the first with which every edit is exact."""
    mtp = layer >= config.layers
    if fold.is_one:
        return LayerPlan(layer, mtp, fold, ())
    choices = [LayerPlan(layer, mtp, choice, _edits(config, layer, choice, weights)) for choice in fold.gauges()]
    choices.sort(key=lambda choice: sum(edit.extent.depends for edit in choice.edits))
    if source.folder is None:
        return choices[0]
    failed: FoldError | None = None
    for choice in choices:
        try:
            for edit in choice.edits:
                for _ in edit.patches(source):
                    pass
            return choice
        except FoldError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _edits(config: ModelConfig, layer: int, fold: LayerFold, weights: Mapping[str, Weight]) -> tuple[Edit, ...]:
    edits = []
    for name, powers in layer_powers(config, layer, fold).items():
        if name in weights:
            edit = Edit(weights[name], powers, _is_fused(weights, weights[name]))
            edits += [edit] if edit.extent.nbytes else []
        elif not name.endswith(".bias"):
            raise FoldError(f"{name} is not in the checkpoint, and would have to be multiplied")
    return tuple(edits)


def _is_fused(weights: Mapping[str, Weight], weight: Weight) -> bool:
    """Whether engines fuse an NVFP4 weight with others, which have one global scale."""
    partners = (weights.get(f"{module}.weight") for module in weight.name.partners)
    return weight.encoding is NVFP4 and sum(bool(other and other.encoding is NVFP4) for other in partners) > 1

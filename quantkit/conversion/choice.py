"""Which recipe a conversion takes: the one that is named, or the built-in one that options ask for."""

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.source import Source
from quantkit.choices import Dialect, Mtp, Rest, ScaleMethod, Scheme
from quantkit.naming import TensorName
from quantkit.recipe import Recipe, Rule, Treatment, default_recipe, load_recipe
from quantkit.weights.encodings import NVFP4
from quantkit.weights.grouping import read_weights


@dataclass(frozen=True)
class Options:
    """Which recipe is taken when none is named, and changes to it: None leaves its own value.

    group_size  of the INT4 weights: 32, 64 or 128
    scale       how the scale of a group is chosen
    rest        what the weights that the recipe's last rule covers stay or become
    mtp         what becomes of the multi-token-prediction layers
    dialect     how NVFP4 is spelled; alone, for a checkpoint that holds NVFP4, nothing else changes
    scheme      that the recipe shall have: INT4, unless NVFP4 is asked for
    """

    group_size: int | None = None
    scale: ScaleMethod | None = None
    rest: Rest | None = None
    mtp: Mtp | None = None
    dialect: Dialect | None = None
    scheme: Scheme | None = None

    def apply(self, recipe: Recipe) -> Recipe:
        """`recipe` with these changes."""
        if self.rest is not None:
            recipe = recipe.with_rest(self.rest)
        if self.mtp is not None:
            recipe = replace(recipe, mtp=self.mtp)
        if self.scale is not None:
            recipe = recipe.with_quantized(scale=self.scale)
        if self.dialect is not None:
            recipe = replace(recipe, dialect=self.dialect)
        return recipe if self.group_size is None else recipe.with_quantized(group_size=self.group_size)


UNCHANGED = Options()


def choose_recipe(source: Source, recipe: Recipe | None, options: Options) -> Recipe:
    """`recipe`, or the built-in one that `options` ask for, with `options` applied."""
    if recipe is None and options.scheme is None and options.dialect is not None and _holds_nvfp4(source):
        recipe, options = _restating(source, options), replace(options, rest=None)
    if recipe is None:
        recipe = default_recipe(source.name, source.model_type, options.scheme or Scheme.INT4, options.dialect)
    return options.apply(recipe)


def _restating(source: Source, options: Options) -> Recipe:
    """All NVFP4 as it is in another format; with a BF16 rest what is FP8 is decoded, and MTP layers that are kept."""
    rules = [Rule(Treatment(Scheme.FP8_TO_BF16 if options.rest is Rest.BF16 else Scheme.KEEP))]
    layers = {TensorName.parse(name).layer for name in source.tensors}
    mtp = [str(layer) for layer in layers if layer is not None and layer >= source.num_hidden_layers]
    if options.rest is Rest.BF16 and options.mtp is Mtp.KEEP and mtp:
        rules.insert(0, Rule(Treatment(Scheme.BF16), modules=rf"(.*\.)?layers\.({'|'.join(mtp)})\..*"))
    return Recipe("restate", "another format, the same numbers", tuple(rules))


def _holds_nvfp4(source: Source) -> bool:
    return any(weight.encoding is NVFP4 for weight in read_weights(source))


def named_recipe(recipe: str | Path | Recipe | None) -> Recipe | None:
    """The recipe of a name or a YAML file; a Recipe, and None, as they are."""
    return load_recipe(recipe) if isinstance(recipe, str | Path) else recipe

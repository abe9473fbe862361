"""Recipes: which weights get which scheme. And the aliases of published models, with the config that plans need.

rules  what a recipe says; this file reads them from YAML (`recipes/README.md` explains the keys)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from quantkit.choices import Dialect, EngineName, Mtp, ScaleMethod, Scheme
from quantkit.errors import RecipeError, UsageError
from quantkit.naming import Role
from quantkit.recipe.rules import QUANTIZED, Layers, Recipe, Rule, Treatment
from quantkit.weights.encodings import target

__all__ = [
    "QUANTIZED",
    "Alias",
    "Layers",
    "Recipe",
    "Rule",
    "Treatment",
    "default_recipe",
    "find_alias",
    "load_recipe",
    "parse_recipe",
    "recipe_names",
    "recipe_text",
]

_YAML = (".yaml", ".yml")
_RECIPE_KEYS = ("description", "model_types", "format", "mtp", "engines", "rules")
_CONDITIONS = ("roles", "modules", "layers", "except_layers")
_RULE_KEYS = (*_CONDITIONS, "scheme", "group_size", "scale")
_WEIGHTS_ONLY = (
    "only weights are quantized: 4-bit or 8-bit activations (W4A4, W8A8) need scales that are calibrated on data, "
    "and a conversion has none"
)


@dataclass(frozen=True)
class Alias:
    """A published model: its Hub repository and revision, and its config.json as text."""

    name: str
    repo: str
    revision: str
    config_text: str


def load_recipe(name: str | Path) -> Recipe:
    """The built-in recipe `name`, or the one in the YAML file `name`."""
    path = Path(name)
    return parse_recipe(path.stem, recipe_text(name)) if path.suffix in _YAML else _built_in(str(name))


def recipe_text(name: str | Path) -> str:
    """The YAML of the built-in recipe `name`, or of the file `name`, as it is."""
    path = Path(name)
    if path.suffix in _YAML:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read: {error}", hint="Give a UTF-8 YAML file.") from error
    if str(name) not in recipe_names():
        raise UsageError(
            f"there is no recipe {str(name)!r}", hint=f"Built in: {', '.join(recipe_names())}; or give a .yaml."
        )
    return _recipe_file(f"{name}.yaml")


def recipe_names() -> tuple[str, ...]:
    """The names of the built-in recipes."""
    files = (entry.name for entry in resources.files("quantkit.recipes").iterdir())
    return tuple(
        sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml") and file != "models.yaml")
    )


def default_recipe(model: str, model_type: str, scheme: Scheme, dialect: Dialect | None = None) -> Recipe:
    """The recipe that `--int4` or `--nvfp4` means: the alias's own, else the first one made for `model_type`.

    dialect  in this one only; None prefers compressed-tensors

    Raises RecipeError where none is built in.
    """
    wanted = dialect or Dialect.COMPRESSED_TENSORS
    if (made := target(scheme)) and wanted not in made.dialects:
        raise RecipeError(
            f"the format {wanted} holds NVFP4, and not INT4, which is made where NVFP4 is not asked for",
            hint="Give --nvfp4 for NVFP4, or leave --format out for INT4.",
        )
    recipes = [recipe for recipe in map(load_recipe, recipe_names()) if recipe.scheme is scheme]
    fitting = [recipe for recipe in recipes if model_type in recipe.model_types and recipe.dialect is wanted]
    own = (recipe for recipe in fitting if recipe.name.startswith(f"{model}-{scheme}"))
    recipe = next(own, next(iter(fitting), None))
    if recipe is None:
        raise RecipeError(
            f"{model}: no built-in recipe makes {scheme} in the format {wanted} of the model type {model_type!r}",
            hint="Write one after recipes/README.md and give it as --recipe FILE.yaml.",
        )
    return recipe


def find_alias(name: str) -> Alias | None:
    """The published model called `name`, or None."""
    entry = yaml.safe_load(_recipe_file("models.yaml")).get(name)
    return entry and Alias(name, entry["repo"], entry["revision"], _recipe_file(entry["config"]))


def parse_recipe(name: str, text: str) -> Recipe:
    """Read a recipe from YAML; RecipeError says which rule is wrong and why."""
    try:
        data = yaml.safe_load(text)
        if not isinstance(data, dict) or not isinstance(data.get("rules"), list) or not data["rules"]:
            raise RecipeError("a recipe is a mapping with a list of rules")
        _check_keys(data, _RECIPE_KEYS, "a recipe")
        rules = tuple(_parse_rule(number, entry) for number, entry in enumerate(data["rules"], start=1))
        if [rule.for_all for rule in rules] != [False] * (len(rules) - 1) + [True]:
            raise RecipeError("the last rule, and only the last, must be for roles: all")
        model_types = data.get("model_types", [])
        if not isinstance(model_types, list) or not all(isinstance(entry, str) for entry in model_types):
            raise RecipeError("model_types is not a list of names")
        mtp = _choice(Mtp, "mtp", data.get("mtp", Mtp.QUANTIZE))
        dialect = _choice(Dialect, "format", data.get("format", Dialect.COMPRESSED_TENSORS))
        engines = data.get("engines", list(EngineName))
        if not isinstance(engines, list) or not engines:
            raise RecipeError("engines is not a list of names")
        targets = tuple(_choice(EngineName, "an entry of engines", engine) for engine in engines)
        return Recipe(name, str(data.get("description", "")), rules, tuple(model_types), mtp, dialect, targets)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"recipe {name}: not valid YAML: {error}") from error
    except RecipeError as error:
        hint = error.hint or "The keys are explained in recipes/README.md."
        raise RecipeError(f"recipe {name}: {error}", hint=hint) from None


def _choice(kind: type[StrEnum], key: str, value: Any) -> Any:
    if value not in tuple(kind):
        weights_only = f"; {_WEIGHTS_ONLY}" if kind is Scheme and re.search(r"a(4|8)\b", str(value).lower()) else ""
        raise RecipeError(f"{key} is {value!r}; it must be one of {', '.join(kind)}{weights_only}")
    return kind(value)


def _parse_rule(number: int, entry: Any) -> Rule:
    try:
        if not isinstance(entry, Mapping):
            raise RecipeError(f"{entry!r} is not a mapping")
        _check_keys(entry, _RULE_KEYS, "a rule")
        if not entry.keys() & set(_CONDITIONS):
            raise RecipeError("roles is missing; the last rule is for roles: all")
        if "scheme" not in entry:
            raise RecipeError("scheme is missing")
        scale = _choice(ScaleMethod, "scale", entry["scale"]) if "scale" in entry else None
        treatment = Treatment(_choice(Scheme, "scheme", entry["scheme"]), entry.get("group_size"), scale)
        layers = (Layers(str(entry[key])) if key in entry else None for key in ("layers", "except_layers"))
        return Rule(treatment, _roles(entry.get("roles", "all")), _regex(entry.get("modules")), *layers)
    except RecipeError as error:
        raise RecipeError(f"rule {number}: {error}") from None


def _check_keys(entry: Mapping[Any, Any], known: tuple[str, ...], what: str) -> None:
    for key in entry:
        if key not in known:
            said = f"unknown key {key!r}; {what} has {', '.join(known)}"
            if entry[key] is None:
                said += ". Within { } a comma begins another key: put values that hold one into quotes"
            if re.search("activation|input", str(key)):
                said += f"; {_WEIGHTS_ONLY}"
            raise RecipeError(said)


def _roles(roles: Any) -> frozenset[Role] | None:
    if roles == "all":
        return None
    if not isinstance(roles, list) or not roles:
        raise RecipeError(f"roles is {roles!r}; it must be all, or a list of {', '.join(Role)}")
    return frozenset(_choice(Role, "a role", role) for role in roles)


def _regex(modules: Any) -> str | None:
    try:
        return modules if modules is None else re.compile(modules).pattern
    except (TypeError, re.error) as error:
        raise RecipeError(f"modules is {modules!r}, which is no regular expression: {error}") from None


@cache
def _built_in(name: str) -> Recipe:
    return parse_recipe(name, recipe_text(name))


def _recipe_file(file: str) -> str:
    return resources.files("quantkit.recipes").joinpath(file).read_text(encoding="utf-8")

"""Recipes: which weights get which scheme. And the aliases of published models, with the config that plans need.

A recipe is a list of rules over roles (see `recipes/README.md`). It knows nothing about files or tensors.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import RecipeError, UsageError
from quantkit.naming import Role

GROUP_SIZES = (32, 64, 128)  # what the engines' INT4 kernels take


class Scheme(StrEnum):
    """What happens to a weight."""

    KEEP = "keep"  # its bytes are copied
    BF16 = "bf16"  # quantized weights are decoded to BF16, plain tensors are copied
    INT4 = "int4"


class ScaleMethod(StrEnum):
    """How the scale of an INT4 group is chosen: its largest magnitude / a divisor."""

    MINMAX = "minmax"  # always 7.5
    SEARCH = "search"  # the divisor of ten that gives the smallest squared error
    SIGNED = "signed"  # the same, with negative scales where they map the group's largest weight to the code -8

    @property
    def divisors(self) -> tuple[tuple[int, int], ...]:
        """The candidates as (numerator, denominator), all of them safe (`quantkit.kernels.int4_tables`).

        Of the 27 safe divisors in 6..14 with denominators up to 10, the ten that give the smallest squared error on
        Gaussian weights rounded to FP8, with and without signs, over g = 32, 64 and 128; all 27 gain 0.15 % more.
        """
        if self is ScaleMethod.MINMAX:
            return ((15, 2),)
        return ((20, 3), (7, 1), (52, 7), (15, 2), (8, 1), (42, 5), (17, 2), (44, 5), (9, 1), (99, 10))


class Mtp(StrEnum):
    """What becomes of the multi-token-prediction layers."""

    QUANTIZE = "quantize"  # they are treated like the main layers
    KEEP = "keep"  # their routed experts are treated like the rest
    DROP = "drop"  # they are left out, and the config's count is set to 0


class Rest(StrEnum):
    """What the weights that stay unquantized are stored as."""

    FP8 = "fp8"  # as published
    BF16 = "bf16"


@dataclass(frozen=True)
class Treatment:
    """A scheme and its parameters; `group_size` and `scale` belong to INT4 and are None otherwise."""

    scheme: Scheme
    group_size: int | None = None
    scale: ScaleMethod | None = None

    def __post_init__(self) -> None:
        if self.scheme is not Scheme.INT4:
            if self.group_size is not None or self.scale is not None:
                raise RecipeError(f"group_size and scale belong to the scheme int4, not to {self.scheme}")
        elif type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise RecipeError(f"group_size is {self.group_size}; the engines take {', '.join(map(str, GROUP_SIZES))}")
        elif self.scale is None:
            raise RecipeError(f"the scheme int4 needs a scale: {', '.join(ScaleMethod)}")


@dataclass(frozen=True)
class Rule:
    """The treatment of all weights that have one of `roles`; None stands for all roles."""

    roles: frozenset[Role] | None
    treatment: Treatment


@dataclass(frozen=True)
class Recipe:
    """A named list of rules; the first that names a role decides, and the last names all.

    model_types  the `model_type`s that the recipe was made for; empty for any
    """

    name: str
    description: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    mtp: Mtp = Mtp.QUANTIZE

    def treatment(self, role: Role, *, mtp: bool = False) -> Treatment:
        """The treatment of the weights of `role` in the main layers, or in the MTP layers."""
        if mtp and self.mtp is Mtp.KEEP and role is Role.ROUTED_EXPERT:
            return self.rules[-1].treatment
        return next(rule.treatment for rule in self.rules if rule.roles is None or role in rule.roles)

    def with_int4(self, **changes: Any) -> "Recipe":
        """The same recipe with other INT4 parameters: `group_size`, `scale`."""
        if not any(rule.treatment.scheme is Scheme.INT4 for rule in self.rules):
            option = next(iter(changes)).replace("_", "-")
            raise UsageError(f"--{option} needs a recipe with INT4 in it; {self.name} has none")
        rules = (
            replace(rule, treatment=replace(rule.treatment, **changes))
            if rule.treatment.scheme is Scheme.INT4
            else rule
            for rule in self.rules
        )
        return replace(self, rules=tuple(rules))

    def with_rest(self, rest: Rest) -> "Recipe":
        """The same recipe with another treatment of all that no other rule names."""
        scheme = Scheme.BF16 if rest is Rest.BF16 else Scheme.KEEP
        return replace(self, rules=(*self.rules[:-1], Rule(None, Treatment(scheme))))

    def as_dict(self) -> dict[str, Any]:
        """The recipe as its YAML file would say it, for manifests."""
        rules = [
            {
                "roles": "all" if rule.roles is None else sorted(rule.roles),
                **{key: value for key, value in asdict(rule.treatment).items() if value is not None},
            }
            for rule in self.rules
        ]
        return {
            "name": self.name,
            "description": self.description,
            "model_types": list(self.model_types),
            "mtp": self.mtp,
            "rules": rules,
        }


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
    if path.suffix in (".yaml", ".yml"):
        try:
            return parse_recipe(path.stem, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read: {error}", hint="Give a UTF-8 YAML file.") from error
    if str(name) not in recipe_names():
        raise UsageError(
            f"there is no recipe {name!r}", hint=f"Built in: {', '.join(recipe_names())}; or give a .yaml."
        )
    return parse_recipe(str(name), _recipe_file(f"{name}.yaml"))


def recipe_names() -> tuple[str, ...]:
    """The names of the built-in recipes."""
    files = (entry.name for entry in resources.files("quantkit.recipes").iterdir())
    return tuple(
        sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml") and file != "models.yaml")
    )


def int4_recipe(model: str, model_type: str) -> Recipe:
    """The recipe that `--int4` means: `<alias>-int4` for an alias, else the first INT4 recipe made for `model_type`."""
    names = [name for name in recipe_names() if name == "int4" or name.endswith("-int4")]
    if f"{model}-int4" in names:
        return load_recipe(f"{model}-int4")
    fitting = (recipe for recipe in map(load_recipe, names) if model_type in recipe.model_types)
    recipe = next(fitting, None)
    if recipe is None:
        raise RecipeError(
            f"{model}: no built-in INT4 recipe is made for the model type {model_type!r}",
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
        known = {"description", "model_types", "mtp", "rules"}
        if not isinstance(data, dict) or not isinstance(data.get("rules"), list) or not data["rules"]:
            raise RecipeError("a recipe is a mapping with a list of rules")
        if unknown := data.keys() - known:
            raise RecipeError(f"unknown key {sorted(unknown, key=str)[0]!r}; a recipe has {', '.join(sorted(known))}")
        rules = tuple(_parse_rule(number, entry) for number, entry in enumerate(data["rules"], start=1))
        if [rule.roles is None for rule in rules] != [False] * (len(rules) - 1) + [True]:
            raise RecipeError("the last rule, and only the last, must be for roles: all")
        model_types = data.get("model_types", [])
        if not isinstance(model_types, list) or not all(isinstance(entry, str) for entry in model_types):
            raise RecipeError("model_types is not a list of names")
        if data.get("mtp", Mtp.QUANTIZE) not in tuple(Mtp):
            raise RecipeError(f"mtp is {data['mtp']!r}; it must be one of {', '.join(Mtp)}")
        mtp = Mtp(data.get("mtp", Mtp.QUANTIZE))
        return Recipe(name, str(data.get("description", "")), rules, tuple(model_types), mtp)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {name}: not valid YAML: {error}") from error
    except RecipeError as error:
        raise RecipeError(f"recipe {name}: {error}", hint="The keys are explained in recipes/README.md.") from None


def _parse_rule(number: int, entry: Any) -> Rule:
    if not isinstance(entry, Mapping):
        raise RecipeError(f"rule {number} is not a mapping")
    if unknown := entry.keys() - {"roles", "scheme", "group_size", "scale"}:
        raise RecipeError(f"rule {number}: unknown key {sorted(unknown, key=str)[0]!r}")
    try:
        roles = None if entry.get("roles") == "all" else frozenset(Role(role) for role in entry["roles"])
        scale = ScaleMethod(entry["scale"]) if "scale" in entry else None
        return Rule(roles, Treatment(Scheme(entry["scheme"]), entry.get("group_size"), scale))
    except KeyError as error:
        raise RecipeError(f"rule {number}: {error.args[0]} is missing") from None
    except (RecipeError, ValueError, TypeError) as error:
        raise RecipeError(f"rule {number}: {error}") from None


def _recipe_file(file: str) -> str:
    return resources.files("quantkit.recipes").joinpath(file).read_text(encoding="utf-8")

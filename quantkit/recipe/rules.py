"""What a recipe says: schemes, and the rules that give them to weights by role, name and layer."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantkit.choices import Dialect, EngineName, Mtp, Rest, ScaleMethod, Scheme
from quantkit.errors import RecipeError, UsageError
from quantkit.naming import Role, TensorName
from quantkit.weights.encodings import target

QUANTIZED = tuple(scheme for scheme in Scheme if target(scheme))
GROUPED = tuple(scheme for scheme in QUANTIZED if (made := target(scheme)) and made.group_sizes)


@dataclass(frozen=True)
class Treatment:
    """A scheme and its parameters; `group_size` belongs to INT4, `scale` to INT4 and NVFP4; None otherwise."""

    scheme: Scheme
    group_size: int | None = None
    scale: ScaleMethod | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None and self.scheme not in GROUPED:
            raise RecipeError(f"group_size belongs to the scheme {' and '.join(GROUPED)}, not to {self.scheme}")
        made = target(self.scheme)
        if made is None:
            if self.scale is not None:
                raise RecipeError(f"scale belongs to the schemes {' and '.join(QUANTIZED)}, not to {self.scheme}")
        elif made.group_sizes and (type(self.group_size) is not int or self.group_size not in made.group_sizes):
            sizes = ", ".join(map(str, made.group_sizes))
            raise RecipeError(f"group_size is {self.group_size}; the engines take {sizes}")
        elif self.scale is None:
            raise RecipeError(f"the scheme {self.scheme} needs a scale: {', '.join(ScaleMethod)}")
        elif self.scale is ScaleMethod.SIGNED and not made.negative_scales:
            raise RecipeError(f"{self.scheme.upper()} scales are never negative; its scale is minmax or search")

    def __str__(self) -> str:
        group = f"g={self.group_size}" if self.group_size else None
        return " ".join(filter(None, (self.scheme, group, self.scale)))


@dataclass(frozen=True)
class Layers:
    """Main layers, as a recipe says them: `0-2, 77`, `first 3`, `last 2`."""

    text: str

    def __post_init__(self) -> None:
        for entry in self.text.split(","):
            if not re.fullmatch(r"\s*(\d+(-\d+)?|(first|last) \d+)\s*", entry):
                raise RecipeError(f"layers {self.text!r} are not understood: write 0-2, 77, first 3 or last 2")
            bounds = re.fullmatch(r"\s*(\d+)-(\d+)\s*", entry)
            if bounds and int(bounds[1]) > int(bounds[2]):
                raise RecipeError(f"layers {entry.strip()} are none: the first comes after the last")

    def __contains__(self, place: tuple[int, int]) -> bool:
        """Whether the layer of (layer, number of main layers) is among them."""
        layer, count = place
        return any(begin <= layer < end for begin, end in (_span(entry, count) for entry in self.text.split(",")))


def _span(entry: str, count: int) -> tuple[int, int]:
    """The half-open range of an entry of `Layers` among `count` layers."""
    word, _, number = entry.strip().partition(" ")
    if number:
        return (0, int(number)) if word == "first" else (count - int(number), count)
    first, _, last = word.partition("-")
    return int(first), int(last or first) + 1


@dataclass(frozen=True)
class Rule:
    """The treatment of the weights that all its conditions fit; one without conditions is for all weights.

    roles          the weight has one of them
    modules        a regex that the module's whole name matches
    layers         the weight is in one of these main layers
    except_layers  the weight is in none of these main layers
    """

    treatment: Treatment
    roles: frozenset[Role] | None = None
    modules: str | None = None
    layers: Layers | None = None
    except_layers: Layers | None = None

    @property
    def for_all(self) -> bool:
        """Whether it has no condition."""
        return (self.roles, self.modules, self.layers, self.except_layers) == (None, None, None, None)

    def fits(self, name: TensorName, num_hidden_layers: int) -> bool:
        """Whether the weight `name` of a model with so many main layers meets the conditions."""
        layer = -1 if name.layer is None else name.layer
        return (
            (self.roles is None or name.role in self.roles)
            and (self.modules is None or re.fullmatch(self.modules, name.module) is not None)
            and (self.layers is None or (layer, num_hidden_layers) in self.layers)
            and (self.except_layers is None or (layer, num_hidden_layers) not in self.except_layers)
        )

    def __str__(self) -> str:
        return "; ".join(
            f"{key}: {', '.join(value) if isinstance(value, list) else value}"
            for key, value in self._conditions().items()
        )

    def _conditions(self) -> dict[str, Any]:
        said: dict[str, Any] = {"roles": "all"} if self.for_all else {}
        if self.roles is not None:
            said["roles"] = sorted(self.roles)
        for key in ("modules", "layers", "except_layers"):
            if (value := getattr(self, key)) is not None:
                said[key] = value.text if isinstance(value, Layers) else value
        return said

    def as_dict(self) -> dict[str, Any]:
        """The rule as a YAML file would say it."""
        return self._conditions() | {key: value for key, value in asdict(self.treatment).items() if value is not None}


@dataclass(frozen=True)
class Recipe:
    """A named list of rules, no two for one weight; the last is for all weights that no other fits.

    model_types  the `model_type`s that the recipe was made for; empty for any
    dialect      how NVFP4 is spelled
    engines      that must load the result; what others could not load is a warning
    """

    name: str
    description: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    mtp: Mtp = Mtp.QUANTIZE
    dialect: Dialect = Dialect.COMPRESSED_TENSORS
    engines: tuple[EngineName, ...] = tuple(EngineName)

    def __post_init__(self) -> None:
        for number, rule in enumerate(self.rules, start=1):
            made = target(rule.treatment.scheme)
            if made and self.dialect not in made.dialects:
                what = f"rule {number} of {self.name} makes {made.name.upper()}"
                raise RecipeError(
                    f"{what}, and the format {self.dialect} holds NVFP4",
                    hint="Give the scheme nvfp4, or the format compressed-tensors.",
                )

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of its quantizing rules; None without one."""
        return next((rule.treatment.scheme for rule in self.rules if rule.treatment.scheme in QUANTIZED), None)

    def rule(self, name: TensorName, num_hidden_layers: int) -> Rule:
        """The rule for the weight `name` of a model with so many main layers.

        Raises RecipeError, naming both rules and the weight, if two fit.
        """
        fitting = [number for number, rule in enumerate(self.rules[:-1]) if rule.fits(name, num_hidden_layers)]
        if len(fitting) > 1:
            raise RecipeError(
                f"recipe {self.name}: rules {fitting[0] + 1} and {fitting[1] + 1} both fit {name}",
                hint="Narrow one by roles, modules, layers or except_layers.",
            )
        return self.rules[fitting[0] if fitting else -1]

    def choose(self, name: TensorName, num_hidden_layers: int) -> tuple[Rule, Treatment]:
        """The rule for the weight `name`, and what happens to it.

        Kept MTP layers are treated as the rest is where others are quantized.
        """
        rule = self.rule(name, num_hidden_layers)
        kept = self.mtp is Mtp.KEEP and rule.treatment.scheme in QUANTIZED and name.is_mtp(num_hidden_layers)
        return rule, self.rules[-1].treatment if kept else rule.treatment

    def with_quantized(self, **changes: Any) -> "Recipe":
        """The same recipe with other parameters of its quantizing rules: `group_size` of INT4, `scale`."""
        schemes = GROUPED if "group_size" in changes else QUANTIZED
        if not any(rule.treatment.scheme in schemes for rule in self.rules):
            option = next(iter(changes)).replace("_", "-")
            raise UsageError(f"--{option} needs a recipe with {' or '.join(schemes)} in it; {self.name} has none")
        rules = (
            replace(rule, treatment=replace(rule.treatment, **changes)) if rule.treatment.scheme in schemes else rule
            for rule in self.rules
        )
        return replace(self, rules=tuple(rules))

    def with_rest(self, rest: Rest) -> "Recipe":
        """The same recipe with another treatment of all that no other rule names."""
        scheme = Scheme.BF16 if rest is Rest.BF16 else Scheme.KEEP
        return replace(self, rules=(*self.rules[:-1], Rule(Treatment(scheme))))

    def as_dict(self) -> dict[str, Any]:
        """The recipe as its YAML file would say it, for manifests."""
        return {
            "name": self.name,
            "description": self.description,
            "model_types": list(self.model_types),
            "mtp": self.mtp,
            "format": self.dialect,
            "engines": list(self.engines),
            "rules": [rule.as_dict() for rule in self.rules],
        }

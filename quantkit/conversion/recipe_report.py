"""What `recipes` reports, and its tables."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.manifest import Group
from quantkit.records import Record, Report
from quantkit.tables import Line, Style, TextTable, role_name


@dataclass(frozen=True)
class RecipeEntry:
    """A built-in recipe in the list.

    scheme       of its quantizing rules; None where it quantizes nothing
    model_types  that it is made for; empty for any
    """

    name: str
    scheme: str | None
    format: str
    model_types: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class RecipeList(Report):
    """The built-in recipes, by name."""

    recipes: tuple[RecipeEntry, ...]

    def tables(self) -> Iterator[TextTable]:
        """One table."""
        rows = (
            (entry.name, entry.scheme or "-", entry.format, ", ".join(entry.model_types) or "any", entry.description)
            for entry in self.recipes
        )
        yield TextTable("built-in recipes", ("name", "scheme:", "format:", "model types:", "description:"), tuple(rows))

    def answer(self) -> Line:
        """How many there are."""
        return Line(f"{len(self.recipes)} recipes; quantkit recipes show NAME prints one")


@dataclass(frozen=True)
class RecipeContent(Record):
    """What a recipe says, defaults filled in."""

    name: str
    description: str
    model_types: tuple[str, ...]
    mtp: str
    format: str
    engines: tuple[str, ...]
    rules: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class RuleFit:
    """What a rule of a recipe does to a model.

    number        from 1, as errors count
    conditions    for which weights it is
    treatment     what they become
    layers        main layers that hold some of its weights, as `0-2, 77`; empty for none
    mtp_layers    the same of MTP layers
    weights       how many in all, in layers and outside of them
    source_bytes  of these weights before, and `nbytes` after
    groups        the same by role and format
    """

    number: int
    conditions: str
    treatment: str
    layers: str
    mtp_layers: str
    weights: int
    source_bytes: int
    nbytes: int
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class RecipeCheck(Report):
    """A recipe that parses and, if a model was given, makes a checkpoint of it that no engine refuses.

    model          None: the recipe alone was read, and nothing is known of weights
    dropped_bytes  of MTP layers that are left out
    warnings       what is odd in the model, and what engines need to serve the result, or serve less well
    """

    recipe: dict[str, Any]
    model: str | None = None
    model_type: str | None = None
    rules: tuple[RuleFit, ...] = ()
    source_bytes: int = 0
    total_bytes: int = 0
    dropped_bytes: int = 0
    warnings: tuple[str, ...] = ()

    def tables(self) -> Iterator[TextTable]:
        """The rules; and with a model what each covers."""
        if self.model is None:
            models = ", ".join(self.recipe["model_types"]) or "any model type"
            title = f"{self.recipe['name']}, for {models}, format {self.recipe['format']}"
            rows = tuple((str(rule.number), rule.conditions, rule.treatment) for rule in self.rules)
            yield TextTable(title, ("rule", "for:", "gives:"), rows)
        else:
            yield self._fits()
            yield self._groups()

    def answer(self) -> Line:
        """What is known of the recipe."""
        if self.model is None:
            return Line(f"{self.recipe['name']} is sound in itself", Style.GOOD)
        return Line(f"{self.recipe['name']} on {self.model}: no engine refuses the result", Style.GOOD)

    def _fits(self) -> TextTable:
        rows = [
            (str(rule.number), rule.conditions, rule.treatment, _layers(rule), *_figures(rule)) for rule in self.rules
        ]
        if self.dropped_bytes:
            rows.append(("", "MTP layers", "dropped", "", "", f"{self.dropped_bytes:,}", "0"))
        weights = sum(rule.weights for rule in self.rules)
        rows.append(("all", "", "", "", f"{weights:,}", f"{self.source_bytes:,}", f"{self.total_bytes:,}"))
        headings = ("rule", "for:", "gives:", "layers:", "weights", "bytes before", "bytes after")
        return TextTable(f"{self.recipe['name']} on {self.model}", headings, tuple(rows))

    def _groups(self) -> TextTable:
        rows = (
            (
                str(rule.number),
                role_name(group.role, group.mtp),
                group.source_format,
                group.format,
                *_figures(group),
            )
            for rule in self.rules
            for group in rule.groups
        )
        headings = ("rule", "role:", "from:", "to:", "weights", "bytes before", "bytes after")
        return TextTable("what each rule covers", headings, tuple(rows))


def _figures(part: RuleFit | Group) -> tuple[str, str, str]:
    return f"{part.weights:,}", f"{part.source_bytes:,}", f"{part.nbytes:,}"


def _layers(rule: RuleFit) -> str:
    return ", ".join(filter(None, (rule.layers, rule.mtp_layers and f"MTP {rule.mtp_layers}"))) or "-"

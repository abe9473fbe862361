"""Which recipes are built in, what one says, and what each of its rules would do to a model."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from quantkit.checkpoint.source import Source
from quantkit.conversion.outcome import summarize
from quantkit.conversion.plan import Step, make_plan
from quantkit.conversion.recipe_report import RecipeCheck, RecipeContent, RecipeEntry, RecipeList, RuleFit
from quantkit.errors import EngineError, PlanError
from quantkit.families.locate import describe_model
from quantkit.inspection import number_ranges
from quantkit.naming import TensorName
from quantkit.recipe import Recipe, load_recipe, recipe_names
from quantkit.weights.grouping import read_weights


def list_recipes() -> RecipeList:
    """The built-in recipes."""
    recipes = map(load_recipe, recipe_names())
    return RecipeList(
        tuple(
            RecipeEntry(recipe.name, recipe.scheme, recipe.dialect, recipe.model_types, recipe.description)
            for recipe in recipes
        )
    )


def show_recipe(recipe: str | Path) -> RecipeContent:
    """What a built-in recipe, or one in a YAML file, says; RecipeError for one that does not parse."""
    said = load_recipe(recipe).as_dict()
    return RecipeContent(**said | {key: tuple(said[key]) for key in ("model_types", "engines", "rules")})


def check_recipe(
    recipe: str | Path | Recipe, model: str | Path | None = None, *, revision: str | None = None
) -> RecipeCheck:
    """Say whether a recipe is sound, and with `model` (alias, folder, config.json or Hub id) what its rules do to it.

    A model that is no folder is judged by its config alone.

    Raises RecipeError for a recipe that does not parse, and for two rules for one weight; PlanError, naming the rules,
    for one that fits no weight, and for what cannot be made or what an engine could not load.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if model is None:
        return RecipeCheck(recipe.as_dict(), rules=tuple(_fits(recipe, (), 0)))
    source = describe_model(model, revision)
    try:
        plan = make_plan(source, recipe)
    except (PlanError, EngineError) as error:
        raise type(error)(f"{error}{_rules_of(str(error), source, recipe)}", hint=error.hint) from error
    fits = tuple(_fits(recipe, plan.steps, source.num_hidden_layers))
    return RecipeCheck(
        recipe=recipe.as_dict(),
        model=source.name,
        model_type=source.model_type,
        rules=fits,
        source_bytes=source.nbytes,
        total_bytes=plan.nbytes,
        dropped_bytes=source.nbytes - sum(fit.source_bytes for fit in fits),
        warnings=plan.warnings,
    )


def _fits(recipe: Recipe, steps: Sequence[Step], num_hidden_layers: int) -> Iterator[RuleFit]:
    by_rule: dict[int, list[Step]] = {number: [] for number in range(1, len(recipe.rules) + 1)}
    for step in steps:
        by_rule[_rule_number(recipe, step.weight.name, num_hidden_layers)].append(step)
    for number, covered in by_rule.items():
        rule = recipe.rules[number - 1]
        groups = summarize(covered, num_hidden_layers)
        yield RuleFit(
            number=number,
            conditions=str(rule),
            treatment=str(rule.treatment),
            layers=_layers_of(covered, num_hidden_layers, mtp=False),
            mtp_layers=_layers_of(covered, num_hidden_layers, mtp=True),
            weights=len(covered),
            source_bytes=sum(group.source_bytes for group in groups),
            nbytes=sum(group.nbytes for group in groups),
            groups=groups,
        )


def _layers_of(steps: Iterable[Step], num_hidden_layers: int, *, mtp: bool) -> str:
    names = (step.weight.name for step in steps if step.weight.name.is_mtp(num_hidden_layers) is mtp)
    return number_ranges(sorted({name.layer for name in names if name.layer is not None}))


def _rule_number(recipe: Recipe, name: TensorName, num_hidden_layers: int) -> int:
    """The rule that decides about a weight: of an MTP layer that is kept, the last instead of a quantizing one."""
    rule = recipe.rule(name, num_hidden_layers)
    decides = recipe.choose(name, num_hidden_layers)[1] == rule.treatment
    return recipe.rules.index(rule) + 1 if decides else len(recipe.rules)


def _rules_of(message: str, source: Source, recipe: Recipe) -> str:
    """Which rules the weights in an error's message have, for its end."""
    words = {word.strip(",.:;()'") for word in message.split()}
    named: dict[int, str] = {}
    for weight in read_weights(source):
        if words & {weight.module, str(weight.name)}:
            named.setdefault(_rule_number(recipe, weight.name, source.num_hidden_layers), weight.module)
    rules = (f"{module} by rule {number} ({recipe.rules[number - 1]})" for number, module in sorted(named.items()))
    return f"; recipe {recipe.name}: {', '.join(rules)}" if named else ""

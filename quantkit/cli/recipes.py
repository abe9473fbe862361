"""`quantkit recipes`."""

from typing import Annotated

import typer

from quantkit.cli.options import Json, Revision

Name = Annotated[str, typer.Argument(help="A built-in recipe's name, or a YAML file.", show_default=False)]
Of = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="A model alias (glm-5.2), a Hub id, a folder or a config.json.", show_default=False
    ),
]

recipes = typer.Typer(
    name="recipes",
    help=(
        "List, show and check recipes: which weights of a model become what.\n\n"
        "Examples:\n\n"
        "quantkit recipes list\n\n"
        "quantkit recipes check glm-5.2-nvfp4 glm-5.2"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)


@recipes.command("list")
def list_(as_json: Json = False) -> None:
    """List the built-in recipes: what they make, in which format, and for which model types.

    Examples:

    quantkit recipes list
    """
    from quantkit import console
    from quantkit.conversion import recipe_check

    console.show(recipe_check.list_recipes(), as_json=as_json)


@recipes.command()
def show(recipe: Name, as_json: Json = False) -> None:
    """Print a recipe's YAML, to be read or to begin one's own with; --json prints what it says, defaults filled in.

    Examples:

    quantkit recipes show glm-5.2-nvfp4
    """
    from quantkit import console
    from quantkit.conversion import recipe_check
    from quantkit.recipe import recipe_text

    content = recipe_check.show_recipe(recipe)
    if as_json:
        console.show_json(content)
    else:
        typer.echo(recipe_text(recipe), nl=False)


@recipes.command()
def check(recipe: Name, model: Of = None, revision: Revision = None, as_json: Json = False) -> None:
    """Say whether a recipe is sound, and what each of its rules does to a model; needs no weights.

    What is wrong is named with its rule, and the exit code is 1.

    Examples:

    quantkit recipes check ./mine.yaml

    quantkit recipes check ./mine.yaml glm-5.2
    """
    from quantkit import console
    from quantkit.conversion import recipe_check

    console.show(recipe_check.check_recipe(recipe, model, revision=revision), as_json=as_json)

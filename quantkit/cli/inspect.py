"""`quantkit inspect`."""

from quantkit.cli.options import Json, Model, Revision


def inspect(model: Model, revision: Revision = None, as_json: Json = False) -> None:
    """Show what a checkpoint holds, by role, layer and format; of an alias or Hub id, from its config alone.

    Examples:

    quantkit inspect ./GLM-5.2-INT4

    quantkit inspect glm-5.2
    """
    from quantkit import console, inspection

    console.show(inspection.inspect(model, revision=revision), as_json=as_json)

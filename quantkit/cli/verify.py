"""`quantkit verify`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json, Revision, Workers
from quantkit.errors import CheckFailed


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.", show_default=False)],
    against: Annotated[str | None, typer.Option("--against", help="Its source: folder, alias or Hub id.")] = None,
    revision: Revision = None,
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Verify a checkpoint: files, index, config, values; and against its source every weight, code and error.

    Leaves with exit code 3 if something is wrong.

    Example:

    quantkit verify ./GLM-5.2-INT4 --against ./GLM-5.2-FP8
    """
    from quantkit import console, verification

    with console.progress("verifying") as start:
        result = verification.verify(checkpoint, against, revision=revision, workers=workers, progress=start)
    console.show(result, as_json=as_json)
    if not result.passed:
        failed = ", ".join(check.name for check in result.checks if check.problems)
        raise CheckFailed(f"{checkpoint} failed: {failed}")

"""`quantkit engines`."""

from typing import Annotated

import typer

from quantkit.cli.options import Json, Model, Revision
from quantkit.errors import CheckFailed


def engines(
    checkpoint: Model,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share the model (1, 2, 4 and 8).")] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say which rules of vLLM, SGLang and transformers a checkpoint keeps, and what fixes the others.

    Leaves with exit code 3 if a rule is broken. Without --tp, what tensor parallelism asks of shapes is a warning.

    Examples:

    quantkit engines ./GLM-5.2-INT4 --tp 8

    quantkit engines glm-5.2
    """
    from quantkit import console
    from quantkit.engines.check import check_compatibility

    result = check_compatibility(checkpoint, tp=tp, revision=revision)
    console.show(result, as_json=as_json)
    if not result.passed:
        broken = sorted({found.rule for found in result.results if found.status == "not ok"})
        raise CheckFailed(f"{checkpoint} breaks {', '.join(broken)}")

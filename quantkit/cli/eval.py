"""`quantkit eval`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json


def evaluate(
    candidate: Annotated[Path, typer.Argument(help="The folder of a converted checkpoint.", show_default=False)],
    baseline: Annotated[Path, typer.Option("--baseline", help="The folder of what to compare it with.")],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file that neither model was made from.")],
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens in one forward pass.")] = 256,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Use at most so many tokens.")] = 16384,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints' next-token distributions on a text, in transformers: bits per byte, KL, top-1.

    Example:

    quantkit eval ./GLM-5.2-INT4 --baseline ./GLM-5.2-BF16 --text heldout.txt
    """
    from quantkit import console
    from quantkit.eval.distribution import compare_distributions

    report = compare_distributions(candidate, baseline, text, window=window, max_tokens=max_tokens)
    console.show(report, as_json=as_json)

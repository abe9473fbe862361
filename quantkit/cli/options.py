"""Arguments and options that several commands share."""

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="A model alias (glm-5.2), a Hub repository id, or a local folder.", show_default=False)
]
Revision = Annotated[str | None, typer.Option("--revision", help="The branch, tag or commit of a Hub repository.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Threads that read, convert and write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

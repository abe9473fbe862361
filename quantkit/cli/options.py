"""Arguments and options that several commands share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from quantkit.choices import Dialect, Mtp, Rest
from quantkit.errors import UsageError

Model = Annotated[
    str, typer.Argument(help="A model alias (glm-5.2), a Hub repository id, or a local folder.", show_default=False)
]
Revision = Annotated[str | None, typer.Option("--revision", help="The branch, tag or commit of a Hub repository.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Threads that read, convert and write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

# of a conversion, done or planned
RecipeName = Annotated[str | None, typer.Option("--recipe", help="A built-in recipe's name, or a YAML file.")]
GroupSize = Annotated[int | None, typer.Option("--group-size", help="INT4 group size: 32, 64 or 128.")]
DialectOption = Annotated[
    Dialect | None, typer.Option("--format", help="How NVFP4 is spelled; alone, what is NVFP4 is only respelled.")
]
RestOption = Annotated[Rest | None, typer.Option("--rest", help="What the other weights are stored as.")]
MtpOption = Annotated[Mtp | None, typer.Option("--mtp", help="What becomes of the MTP layers.")]

# of the runtime's pages
KvScale = Annotated[float | None, typer.Option("--kv-scale", help="One scale for all layers of FP8 pages.")]
KvScales = Annotated[Path | None, typer.Option("--kv-scales", help="The file of the FP8 pages' scales.")]
PageSize = Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")]

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_bytes(text: str) -> int:
    """The bytes that `--memory` names: 2GiB, 500MB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper())
    if match is None:
        raise UsageError(f"--memory {text}: not a number of bytes", hint="Write 2GiB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2] or ""])

"""`quantkit convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.choices import ScaleMethod, Scheme
from quantkit.cli.options import (
    DialectOption,
    GroupSize,
    Json,
    Model,
    MtpOption,
    RecipeName,
    RestOption,
    Revision,
    Workers,
)
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.checkpoint.manifest import Manifest


def convert(
    model: Model,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder to write to.")] = None,
    int4: Annotated[bool, typer.Option("--int4", help="INT4 by the model's built-in recipe (the default).")] = False,
    nvfp4: Annotated[bool, typer.Option("--nvfp4", help="NVFP4 by the model's built-in recipe.")] = False,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Decode everything to BF16: the reference to compare with.")
    ] = False,
    recipe: RecipeName = None,
    group_size: GroupSize = None,
    dialect: DialectOption = None,
    scale: Annotated[ScaleMethod | None, typer.Option("--scale", help="How the scales of groups are chosen.")] = None,
    rest: RestOption = None,
    mtp: MtpOption = None,
    respell: Annotated[
        bool, typer.Option("--respell", help="Give an output of an earlier quantkit the config of this one.")
    ] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="With --respell: change MODEL itself.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; needs no weights.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    trust_source: Annotated[bool, typer.Option("--trust-source", help="On resuming, do not hash the source.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of quantkit.")] = False,
    workers: Workers = 2,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to INT4 or NVFP4, shard by shard.

    Examples:

    quantkit convert glm-5.2 --int4 --dry-run

    quantkit convert ./GLM-5.2-FP8 --int4 --group-size 64 -o ./GLM-5.2-INT4

    quantkit convert ./GLM-5.2-FP8 --nvfp4 --format modelopt -o ./GLM-5.2-NVFP4

    quantkit convert ./GLM-5.2-FP8 --bf16 -o ./GLM-5.2-BF16

    quantkit convert ./GLM-5.2-INT4 --respell --in-place
    """
    from quantkit import console, conversion

    targets = (int4, nvfp4, bf16, recipe is not None)
    if sum(targets) > 1:
        raise UsageError("--int4, --nvfp4, --bf16 and --recipe exclude each other")
    changed = any(value is not None for value in (group_size, dialect, scale, rest, mtp, revision))
    converts = changed or any(targets) or resume or trust_source
    _check(converts=converts, respell=respell, in_place=in_place, resume=resume, overwrite=overwrite)
    if respell:
        manifest = _respell(model, output, in_place=in_place, overwrite=overwrite, dry_run=dry_run)
        return console.show(manifest, as_json=as_json)
    chosen = "bf16" if bf16 else recipe
    scheme = Scheme.NVFP4 if nvfp4 else Scheme.INT4 if int4 else None
    options = conversion.Options(group_size=group_size, scale=scale, rest=rest, mtp=mtp, dialect=dialect, scheme=scheme)
    if dry_run:
        manifest = conversion.preview(model, chosen, options=options, revision=revision)
    elif output is None:
        raise UsageError("where to?", hint="Give -o FOLDER, or --dry-run.")
    else:
        with console.progress("converting") as start:
            manifest = conversion.convert(
                model,
                output,
                chosen,
                options=options,
                revision=revision,
                overwrite=overwrite,
                resume=resume,
                trust_source=trust_source,
                workers=workers,
                progress=start,
                warn=console.warn,
            )
    return console.show(manifest, as_json=as_json)


def _check(*, converts: bool, respell: bool, in_place: bool, resume: bool, overwrite: bool) -> None:
    """Raise UsageError for options that exclude each other; `converts` stands for those of a conversion alone."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if respell and converts:
        raise UsageError("--respell changes no weight: it goes with -o, --overwrite, --in-place and --dry-run only")
    if in_place and not respell:
        raise UsageError("--in-place goes with --respell", hint="A conversion writes a new folder: give -o FOLDER.")


def _respell(folder: str, output: Path | None, *, in_place: bool, overwrite: bool, dry_run: bool) -> "Manifest":
    from quantkit.conversion import respelling

    if sum((output is not None, in_place, dry_run)) != 1:
        raise UsageError("where to?", hint="Give one of -o FOLDER, --in-place and --dry-run.")
    if overwrite and output is None:
        raise UsageError("--overwrite goes with -o FOLDER")
    return respelling.preview(folder) if dry_run else respelling.respell(folder, output, overwrite=overwrite)

"""`quantkit fold`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json, Model, Revision, Workers
from quantkit.errors import UsageError


def fold(
    checkpoint: Model,
    scales: Annotated[Path | None, typer.Option("--scales", help="The file of KV scales that calibrate wrote.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a folded copy to this folder.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Edit the checkpoint itself, behind a journal that --undo takes back.")
    ] = False,
    patch_only: Annotated[
        Path | None, typer.Option("--patch-only", help="Write only the edited tensors to this folder.")
    ] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Store the scales as tensors of the copy instead; few backends honour them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be edited; of an alias from its config alone.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take back a fold in place, or an interrupted one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of quantkit.")] = False,
    workers: Workers = 2,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Put scales of an FP8 KV cache into the weights, exactly, where every engine honours them.

    Only a few per mille of the bytes change, and nothing is written but what passed the proof: with a cache that is not
    FP8 the model computes the same bits.

    Examples:

    quantkit fold kimi-k2.6 --scales scales.json --dry-run

    quantkit fold ./Kimi-K2.6 --scales scales.json -o ./Kimi-K2.6-folded

    quantkit fold ./Kimi-K2.6 --scales scales.json --in-place

    quantkit fold ./Kimi-K2.6 --undo
    """
    ways = {"copy": output, "in place": in_place, "patch": patch_only, "dry run": dry_run, "undo": undo}
    way = _choose([name for name, given in ways.items() if given], scales, embed=embed)
    from quantkit import console, folding
    from quantkit.folding.report import Way

    if scales is None:
        return console.show(folding.undo(checkpoint), as_json=as_json)
    put = partial(folding.fold, checkpoint, scales, output or patch_only, way=Way(way), revision=revision)
    with console.progress("folding") as start:
        report = put(overwrite=overwrite, workers=workers, progress=start)
    return console.show(report, as_json=as_json)


def _choose(ways: list[str], scales: Path | None, *, embed: bool) -> str:
    """The one way that was asked for."""
    if len(ways) != 1:
        raise UsageError("where to?", hint="Give one of -o FOLDER, --in-place, --patch-only FOLDER, --dry-run, --undo.")
    if (ways == ["undo"]) == (scales is not None):
        raise UsageError("--undo takes no --scales" if scales else "which scales?", hint="Give --scales FILE to fold.")
    if embed and ways != ["copy"]:
        raise UsageError("--embed writes a copy", hint="Give -o FOLDER.")
    return "embed" if embed else ways[0]

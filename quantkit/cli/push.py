"""`quantkit push`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json, Workers
from quantkit.errors import UsageError


def push(
    folder: Annotated[Path, typer.Argument(help="The folder of a converted checkpoint.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="The Hub repository: owner/name.", show_default=False)],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="What it must be; a new one is public.", show_default=False),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="The branch; made if it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--pr", help="Open a pull request.")] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="The source, for the card's errors: folder, alias or Hub id.")
    ] = None,
    gate: Annotated[
        Path | None, typer.Option("--gate", help="The accuracy gate's result; default: FOLDER/quantkit-gate.json.")
    ] = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Publish without a result of the gate; the card says so.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the card, send nothing.")] = False,
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Publish a converted checkpoint with a model card on the Hub.

    Everything is checked before a byte is sent. An interrupted upload goes on when it is run again.

    Examples:

    quantkit push ./GLM-5.2-INT4 me/GLM-5.2-INT4 --dry-run

    quantkit push ./GLM-5.2-INT4 me/GLM-5.2-INT4 --against ./GLM-5.2-FP8
    """
    from quantkit import console, publishing

    if not (yes or dry_run or sys.stdin.isatty()):
        raise UsageError("nothing is sent unasked, and there is no terminal to ask on", hint="Give --yes or --dry-run.")
    target = publishing.Target(repo, private, revision, create_pr)
    with console.progress("checking") as start:
        publication = publishing.preflight(
            folder, target, against=against, gate=gate, no_gate=no_gate, workers=workers, progress=start
        )
    report = publication.report()
    if not dry_run:
        visibility = "private" if report.private else "public"
        question = (
            f"Send {report.uploaded} files, {report.uploaded_bytes:,} bytes, to the {visibility} repository {repo}?"
        )
        if not yes:
            typer.confirm(question, abort=True, err=True)
        report = publishing.publish(publication)
    console.show(report, as_json=as_json)

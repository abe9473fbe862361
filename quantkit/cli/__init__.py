"""The command line: each command parses its options, calls one verb of the package and prints what it returns.

Exit codes: 0 ok, 1 known error, 2 usage, 3 a check failed, 4 a check cannot decide. stdout holds the result, one JSON
object under --json; all talk is on stderr. QUANTKIT_DEBUG=1 shows the traceback of a known error.
"""

import gc
import os
import sys
import traceback

import typer

from quantkit.cli.bench import bench
from quantkit.cli.calibrate import calibrate
from quantkit.cli.convert import convert
from quantkit.cli.engines import engines
from quantkit.cli.eval import evaluate
from quantkit.cli.fold import fold
from quantkit.cli.generate import generate
from quantkit.cli.inspect import inspect
from quantkit.cli.plan import plan
from quantkit.cli.push import push
from quantkit.cli.recipes import recipes
from quantkit.cli.verify import verify
from quantkit.errors import QuantkitError

app = typer.Typer(
    name="quantkit",
    help=(
        "Quantize and convert checkpoints offline, and prove that the result is still the model.\n\n"
        "Examples:\n\n"
        "quantkit convert ./GLM-5.2-FP8 --int4 -o ./GLM-5.2-INT4\n\n"
        "quantkit verify ./GLM-5.2-INT4 --against ./GLM-5.2-FP8"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(convert)
app.command()(verify)
app.command()(inspect)
app.command()(engines)
app.command()(plan)
app.command("eval")(evaluate)
app.command()(generate)
app.command()(calibrate)
app.command()(fold)
app.command()(push)
app.add_typer(bench)
app.add_typer(recipes)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True)) -> None:
    if version:
        from quantkit.version import VERSION

        typer.echo(f"quantkit {VERSION}")
        raise typer.Exit


def main() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(100_000, 50, 50)  # a model's headers are half a million objects: looking for garbage took a third
    try:
        app(prog_name="quantkit")
    except QuantkitError as error:
        from quantkit.console import show_error

        if os.environ.get("QUANTKIT_DEBUG") == "1":
            traceback.print_exc()
        show_error(error)
        sys.exit(error.exit_code)

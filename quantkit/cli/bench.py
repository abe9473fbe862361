"""`quantkit bench`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import Json, PageSize, parse_bytes
from quantkit.errors import CheckFailed, NotComparable, UsageError

Checkpoint = Annotated[
    Path | None,
    typer.Argument(help="The folder of the converted checkpoint; without one, a made-up GLM.", show_default=False),
]
Baseline = Annotated[
    Path | None, typer.Option("--baseline", help="What it was converted from, in FP8.", show_default=False)
]
Requests = Annotated[str, typer.Option("--requests", help="How many at the same time: a row for each number.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of each request.")]
NewTokens = Annotated[int, typer.Option("--new-tokens", min=1, help="Of each request in one timed turn.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Of four turns each: A, B, B, A.")]
PrefillTokens = Annotated[int, typer.Option("--prefill-tokens", min=1, help="Of the prompt that times prefill.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Bytes of the pool of BF16, then FP8 pages: 64MiB.", show_default=False)
]
SizeGb = Annotated[float, typer.Option("--size-gb", min=0.1, help="Of the made-up checkpoint in FP8, at least.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where the made-up checkpoints are written.")]
Keep = Annotated[bool, typer.Option("--keep", help="Leave them there, in the folders fp8 and int4.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Of the products; by default torch decides.")]
Timed = Annotated[
    Path | None, typer.Argument(help="The folder of a checkpoint; without one, a made-up GLM.", show_default=False)
]
Pairs = Annotated[int, typer.Option("--pairs", min=1, help="Of steps with off and with tags, for each row.")]
ContentPairs = Annotated[int, typer.Option("--content-pairs", min=0, help="With off and with content; 0: none.")]
OneThread = Annotated[int, typer.Option("--threads", min=1, help="Of the products; CPU time is of all of them.")]
Output = Annotated[Path | None, typer.Option("--output", help="A folder for report.json and report.md.")]

bench = typer.Typer(
    name="bench",
    help=(
        "Measure the runtime: how fast checkpoints of one model decode, and what checking pages costs.\n\n"
        "Examples:\n\n"
        "quantkit bench decode\n\n"
        "quantkit bench decode ./GLM-5.2-INT4 --baseline ./GLM-5.2-FP8\n\n"
        "quantkit bench integrity"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command()
def decode(
    checkpoint: Checkpoint = None,
    baseline: Baseline = None,
    requests: Requests = "1,8,16,32,64",
    prompt_tokens: PromptTokens = 16,
    new_tokens: NewTokens = 4,
    rounds: Rounds = 2,
    prefill_tokens: PrefillTokens = 1024,
    memory: Memory = None,
    page_size: PageSize = 16,
    size_gb: SizeGb = 1.0,
    folder: Folder = None,
    keep: Keep = False,
    threads: Threads = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Tokens per second by number of requests: FP8 and INT4 weights, BF16 and FP8 pages, and prefill.

    Leaves with exit code 1 if the arms did not do the same work: such a run is INVALID.

    Examples:

    quantkit bench decode --size-gb 2

    quantkit bench decode ./GLM-5.2-INT4 --baseline ./GLM-5.2-FP8
    """
    counts = _numbers(requests)
    nbytes = None if memory is None else parse_bytes(memory)
    if (checkpoint is None) != (baseline is None):
        raise UsageError(
            "a checkpoint and its baseline are needed, or neither", hint="quantkit bench decode CKPT --baseline BASE."
        )
    from quantkit import console
    from quantkit.eval.bench import decode_speed
    from quantkit.eval.bench.decode_turns import Turns
    from quantkit.eval.gate.report_files import write_report_files

    turns = Turns(prompt_tokens, new_tokens, rounds)
    options = decode_speed.Options(counts, turns, prefill_tokens, nbytes, page_size, threads)
    with _checkpoints(checkpoint, baseline, folder, size_gb, keep) as (source, converted):
        report = decode_speed.bench_decode(converted, source, options, console.tell)
    if output is not None:
        write_report_files(report, output)
    console.show(report, as_json=as_json)
    if not report.valid:
        raise NotComparable(f"the run is INVALID: {report.problems[0]}")


@bench.command()
def integrity(
    checkpoint: Timed = None,
    requests: Requests = "1,2,4,8",
    pairs: Pairs = 20_000,
    content_pairs: ContentPairs = 200,
    prompt_tokens: PromptTokens = 1_500,
    page_size: PageSize = 16,
    threads: OneThread = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """What it costs to check pages before they are read: decode steps with and without, in turn, with 95 % intervals.

    Leaves with exit code 3 if tags may cost 1 % or more of throughput or p95 in CPU time, or off differs from itself.

    Examples:

    quantkit bench integrity

    quantkit bench integrity ./GLM-5.2-INT4 --requests 8 --pairs 2000
    """
    counts = _numbers(requests)
    from quantkit import console
    from quantkit.eval.bench.integrity_cost import Options, bench_integrity
    from quantkit.eval.gate.report_files import write_report_files

    options = Options(counts, pairs, content_pairs, prompt_tokens, page_size, threads)
    report = bench_integrity(checkpoint, options, console.tell)
    if output is not None:
        write_report_files(report, output)
    console.show(report, as_json=as_json)
    if not report.passed:
        raise CheckFailed(report.problems[0])


@contextmanager
def _checkpoints(
    checkpoint: Path | None, baseline: Path | None, folder: Path | None, size_gb: float, keep: bool
) -> Iterator[tuple[Path, Path]]:
    """The baseline and the candidate: those given, or made-up ones."""
    if checkpoint is not None and baseline is not None:
        yield baseline, checkpoint
        return
    from quantkit.eval.bench.decode_speed import random_checkpoints

    with random_checkpoints(folder, round(size_gb * 1e9), keep=keep) as made:
        yield made


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.replace(",", " ").split()))
    except ValueError:
        raise UsageError(f"--requests {text}: not numbers", hint="Write 1,8,16,32,64.") from None

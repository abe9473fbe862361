"""`quantkit calibrate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import Json, Model, Revision, parse_bytes
from quantkit.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from quantkit.calibration import CalibrationReport

Kv = Annotated[str, typer.Option("--kv", help="What is calibrated: fp8, the scales of an FP8 KV cache.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The folder to write to; MODEL-kv-fp8 if not given.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="A .txt or .jsonl file (text, messages, tokens) or a `datasets` folder; else Python's manual."
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=2, help="Tokens of all sequences together, exactly.")]
Length = Annotated[int | None, typer.Option("--length", min=2, help="Tokens of the longest sequence: 4096, or less.")]
Pack = Annotated[bool, typer.Option("--pack/--rows", help="Samples one after the other, or a sequence for each.")]
Template = Annotated[bool, typer.Option("--chat-template", help="Put texts into the chat template.")]
Memory = Annotated[str, typer.Option("--memory", help="Bytes beside the weights of one layer: 4GiB, 500MB.")]
Dtype = Annotated[str, typer.Option("--dtype", help="What to compute in: float32, or bfloat16, which is faster.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
PerChannel = Annotated[
    bool, typer.Option("--per-channel", help="MLA: also try a scale for each latent channel and rotated pair.")
]
Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit code 3 if a layer loses at scale 1.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="A PNG of ranges and scales, layer by layer.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the scales, or the interrupted run, in the folder.")
]

_DTYPES = ("float32", "bfloat16")


def calibrate(
    model: Model,
    kv: Kv = "fp8",
    output: Output = None,
    data: Data = None,
    tokens: Tokens = 16384,
    length: Length = None,
    pack: Pack = True,
    chat_template: Template = False,
    memory: Memory = "4GiB",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    per_channel: PerChannel = False,
    check: Check = False,
    plot: Plot = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Choose the scales of an FP8 KV cache: real text through the checkpoint, one layer in memory at a time.

    Examples:

    quantkit calibrate kimi-k2.6 --kv fp8 --data chats.jsonl --memory 16GiB

    quantkit calibrate ./GLM-5.2-INT4 --kv fp8 --check
    """
    nbytes = parse_bytes(memory)
    if kv != "fp8":
        raise UsageError(f"--kv {kv}: only fp8 needs calibration", hint="Give --kv fp8.")
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: not one to compute in", hint=f"Choose {' or '.join(_DTYPES)}.")
    if check and (output or resume or overwrite):
        raise UsageError("--check writes nothing: -o, --resume and --overwrite do not go with it")
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    import torch

    from quantkit import calibration, console

    options = calibration.Options(
        data=calibration.DataOptions(data=data, tokens=tokens, length=length, packed=pack, chat_template=chat_template),
        memory=nbytes,
        dtype=getattr(torch, dtype),
        device=device,
        per_channel=per_channel,
    )
    folder = None if check else output or Path(f"{Path(model).resolve().name}-kv-fp8")
    with console.progress("calibrating") as start:
        report = calibration.calibrate(
            model, folder, options, revision=revision, plot=plot, resume=resume, overwrite=overwrite, progress=start
        )
    console.show(report, as_json=as_json)
    if check:
        _leave(report)
    else:
        console.tell(f"scales and report are in {folder}")


def _leave(report: "CalibrationReport") -> None:
    if losing := report.losing:
        layers = ", ".join(f"{layer.layer} ({layer.verdict})" for layer in losing)
        raise CheckFailed(f"{report.model}: an FP8 cache at scale 1 loses in {len(losing)} layers: {layers}")

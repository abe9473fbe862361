"""`quantkit calibrate`: from a checkpoint and text to a folder with scales, resumable after any interruption."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.budget import Budget, plan_memory
from quantkit.calibration.choosing import TOLERANCE
from quantkit.calibration.data import CalibrationData, DataOptions, prepare
from quantkit.calibration.journal import Journal
from quantkit.calibration.judging import judge
from quantkit.calibration.plotting import check_plotting, plot_calibration
from quantkit.calibration.report import CalibrationReport, LayerCalibration
from quantkit.calibration.streaming import LayerStream
from quantkit.checkpoint.journal import CALIBRATE, Opening, source_binding
from quantkit.checkpoint.lock import check_free, lock
from quantkit.checkpoint.manifest import ModelIdentity
from quantkit.checkpoint.occupancy import own_run
from quantkit.checkpoint.source import Source, readable
from quantkit.checkpoint.writer import WORK_FOLDER, OutputFolder, explained, write_whole
from quantkit.errors import OutputError, UsageError
from quantkit.families.config import MlaConfig
from quantkit.families.locate import open_model
from quantkit.models.loading import LayerReader, open_layers
from quantkit.progress import Progress, silent
from quantkit.runtime.scales import KvScaleFile, Numbers
from quantkit.version import VERSION
from quantkit.weights.identity import identify

SCALES_FILE, REPORT_FILE = "kv_scales.json", "calibration.json"


@dataclass(frozen=True)
class Options:
    """How to calibrate.

    memory       bytes beside the weights of one layer: for hidden states, and for what a pass needs
    dtype        of the computation, float32 or bfloat16
    per_channel  also try a scale for each latent channel and each rotated pair of MLA
    """

    data: DataOptions = field(default_factory=DataOptions)
    memory: int = 4 << 30
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    per_channel: bool = False


def calibrate(
    model: str | Path,
    output: Path | None,
    options: Options | None = None,
    *,
    revision: str | None = None,
    plot: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> CalibrationReport:
    """Choose the scales of an FP8 KV cache for `model`, and write them and the report into the folder `output`.

    model     a folder, an alias, or a Hub repository
    output    None: nothing is written, for a check
    plot      a PNG to draw
    progress  is given the bytes of all layers, and returns what is called with the bytes of each that is done

    Raises SourceError for a checkpoint that cannot be run and for data that cannot be used, UsageError for options that
    do not go together and too little memory, OutputError for a folder that is in use, DependencyError for a library
    that is not there.
    """
    started, options = time.monotonic(), options or Options()
    if plot:
        check_plotting(plot)
    source = open_model(model, revision)
    assert source.folder
    if output:
        _check_outside(source.folder, output)
        check_free(output)
        _check_output(output, resume, overwrite)
    reader = open_layers(source, options.dtype, _device(options.device))
    if options.per_channel and not isinstance(reader.config.attention, MlaConfig):
        raise UsageError(f"{source.name}: --per-channel is for models with MLA", hint="Leave --per-channel out.")
    data = prepare(source.folder, options.data, reader.config.vocab, reader.config.max_length)
    budget = plan_memory(reader, [len(sequence) for sequence in data.sequences], options.memory)
    with _work(output, resume, overwrite) as folder:
        opening = Opening(CALIBRATE, frozenset({SCALES_FILE, REPORT_FILE}), _binding(source, data, options))
        journal = Journal(folder, opening, reader.config.layers, resume)
        layers = _run(reader, data, budget, journal, per_channel=options.per_channel, progress=progress)
        report = _report(source, reader, data, budget, options, layers, time.monotonic() - started)
        if output:
            write_whole(output / SCALES_FILE, scale_file(report, identify(source)).to_json().encode())
            write_whole(output / REPORT_FILE, report.to_json().encode())
    if plot:
        plot_calibration(report, plot)
    return report


def scale_file(report: CalibrationReport, model: ModelIdentity | None = None) -> KvScaleFile:
    """The scales of a report, by the names that they have in a checkpoint, and the model that they are for."""
    scales: dict[str, Numbers] = {}
    for layer in report.layers:
        row = layer.row_scale
        for letter, part in (("k", "key"), ("v", "value")):
            scales[f"{layer.attention}.{letter}_scale"] = layer.scales.get(part, (row or 1.0,))[0]
        for part, numbers in layer.scales.items():
            if row is not None:
                scales[f"{layer.attention}.{part}_scale"] = numbers[0] if len(numbers) == 1 else list(numbers)
    return KvScaleFile(scales, model)


def _run(
    reader: LayerReader,
    data: CalibrationData,
    budget: Budget,
    journal: Journal,
    *,
    per_channel: bool,
    progress: Progress,
) -> tuple[LayerCalibration, ...]:
    """Every layer, from where the journal ends."""
    sizes = [reader.parts[number].nbytes for number in range(reader.config.layers)]
    advance = progress(sum(sizes))
    done = list(journal.layers)
    advance(sum(sizes[: len(done)]))
    if len(done) == len(sizes):
        return journal.layers
    _check_space(journal.folder, data, reader)
    stream = LayerStream(reader, data.sequences, journal.folder, budget, len(done))
    for number in range(len(done), reader.config.layers):
        observation = stream.run()
        layer = judge(number, observation, reader.config, data.facts.tokens, per_channel)
        journal.add(layer, stream.keep())
        stream.advance()
        done.append(layer)
        advance(sizes[number])
    stream.close()
    return tuple(done)


def _check_outside(source: Path, output: Path) -> None:
    """Raise OutputError for an output that would become a part of the checkpoint."""
    ours, theirs = (Path(os.path.realpath(path)) for path in (output, source))
    if ours == theirs or theirs in ours.parents:
        raise OutputError(f"{output} lies in the checkpoint {source}", hint="Give -o a folder outside of it.")


def _check_output(output: Path, resume: bool, overwrite: bool) -> None:
    """Raise OutputError for an output in use, unless it is ours and to be gone on with or replaced.

    Other files may lie beside ours: they are never touched.
    """
    with explained(output):
        if output.exists() and not output.is_dir():
            raise OutputError(f"{output} is a file, and the output is a folder", hint="Choose another one.")
        run = own_run(output, CALIBRATE)
        there = [output / name for name in (SCALES_FILE, REPORT_FILE) if os.path.lexists(output / name)]
        for path in there:
            if not _is_ours(path):
                what = f"{path} was not written by quantkit calibrate; it is not overwritten"
                raise OutputError(what, hint="Give another folder.")
    if run and not (resume or overwrite):
        raise OutputError(f"{output}: a run was interrupted here", hint="Go on with --resume, or use --overwrite.")
    if there and not (overwrite or run):
        raise OutputError(f"{output} holds scales already", hint="Give another folder, or --overwrite.")


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    kind = KvScaleFile if path.name == SCALES_FILE else CalibrationReport
    try:
        kind.from_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


@contextmanager
def _work(output: Path | None, resume: bool, overwrite: bool) -> Iterator[Path]:
    """The folder for hidden states and journal, locked; it goes when the run is finished."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
            yield Path(folder)
        return
    with lock(output, CALIBRATE.name):
        _check_output(output, resume, overwrite)
        folder_of_ours = OutputFolder(output)
        if overwrite:
            with explained(output):
                for name in (SCALES_FILE, REPORT_FILE):
                    (output / name).unlink(missing_ok=True)
            folder_of_ours.tidy()
        yield output / WORK_FOLDER
        folder_of_ours.tidy()


def _binding(source: Source, data: CalibrationData, options: Options) -> dict[str, Any]:
    """What a run may only go on with: version, checkpoint, data, and options that change a number."""
    assert source.folder
    with readable(source.folder):
        files = {shard: (source.folder / shard).stat() for shard in source.shards}
    return {
        "version": VERSION,
        **source_binding(source),
        "source files": {shard: [stat.st_size, stat.st_mtime_ns] for shard, stat in files.items()},
        "data": data.digest,
        "options": {"dtype": str(options.dtype), "device": options.device, "per_channel": options.per_channel},
    }


def _check_space(folder: Path, data: CalibrationData, reader: LayerReader) -> None:
    config, tokens = reader.config, data.facts.tokens
    needed = 2 * tokens * config.hidden * reader.dtype.itemsize + (4 * tokens * config.dsa.top_k if config.dsa else 0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"{folder}: hidden states take up to {needed:,} bytes, and {free:,} are free",
            hint="Free some, calibrate on fewer --tokens, or use another disk.",
        )


def _report(
    source: Source,
    reader: LayerReader,
    data: CalibrationData,
    budget: Budget,
    options: Options,
    layers: tuple[LayerCalibration, ...],
    seconds: float,
) -> CalibrationReport:
    config, row = reader.config, reader.config.hidden * reader.dtype.itemsize
    unseen = [f"{layer.layer}: {', '.join(map(str, layer.unseen_experts))}" for layer in layers if layer.unseen_experts]
    warnings = [f"layer {layer.layer}: {note}" for layer in layers for note in layer.notes]
    if unseen:
        warnings.append(f"routed experts that got no token, by layer: {'; '.join(unseen)}")
    if poor := [layer for layer in layers if layer.row_gap > TOLERANCE]:
        warnings.append(
            f"one scale for the whole row (k_scale) has up to {max(layer.row_gap for layer in poor):.3g} times the "
            f"squared error of one for each part, in {len(poor)} layers: fold the parts, do not embed it"
        )
    mtp = range(config.layers, config.layers + config.mtp_layers)
    return CalibrationReport(
        model=source.name,
        model_type=config.model_type,
        revision=source.revision,
        kv="fp8",
        dtype=str(options.dtype).removeprefix("torch."),
        device=str(reader.device),
        data=data.facts,
        data_digest=data.digest,
        max_length=config.max_length,
        layers=layers,
        left_alone=tuple(f"layer {number}, for multi-token prediction" for number in mtp if number in reader.parts),
        largest_layer=budget.largest_layer,
        hidden_bytes=data.facts.tokens * row,
        held_bytes=budget.held * row,
        seconds=seconds,
        warnings=tuple(warnings),
    )


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch sees no GPU", hint="Leave --device out, or install a CUDA build.")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name} is no device", hint="Give cpu or cuda.") from error

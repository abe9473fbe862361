"""The picture of a calibration: the only user of matplotlib."""

from pathlib import Path

from quantkit.calibration.report import CalibrationReport
from quantkit.calibration.statistics import LARGEST
from quantkit.errors import DependencyError, OutputError


def check_plotting(path: Path) -> None:
    """Raise DependencyError unless matplotlib is installed, and OutputError if `path` lies in no folder."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DependencyError("--plot needs matplotlib", hint="pip install 'quantkit[plot]'") from error
    if not path.parent.is_dir():
        raise OutputError(f"--plot {path}: there is no folder {path.parent}")


def plot_calibration(report: CalibrationReport, path: Path) -> None:
    """Draw, layer by layer, the largest magnitude of every part and the scales chosen, as a PNG at `path`.

    Raises OutputError if it cannot be written.
    """
    from matplotlib.figure import Figure

    layers = [layer.layer for layer in report.layers]
    parts = [entry.part for entry in report.layers[0].ranges]
    figure = Figure(figsize=(10, 7), layout="constrained")
    ranges, scales = figure.subplots(2, sharex=True)
    for part in parts:
        style = ":" if part.startswith("q") else "-"
        ranges.plot(layers, [layer.range(part).amax for layer in report.layers], style, marker=".", label=part)
    ranges.axhline(LARGEST, color="black", linewidth=0.8, label="448, the largest of E4M3")
    ranges.axhline(2.0**-6, color="grey", linewidth=0.8, label="2^-6, the smallest normal")
    ranges.set_ylabel("largest magnitude")
    for part in (part for part in parts if not part.startswith("q")):
        for number, bound in enumerate((min, max)):
            chosen = [bound(layer.scales.get(part, (1.0,))) for layer in report.layers]
            label = None if number else part
            scales.step(layers, chosen, where="mid", color=f"C{parts.index(part)}", label=label)
    if any(layer.row_scale is not None for layer in report.layers):
        row = [layer.row_scale or 1.0 for layer in report.layers]
        scales.step(layers, row, where="mid", color="black", linestyle="--", label="one for the row")
    scales.set_ylabel("scale chosen")
    scales.set_xlabel("layer")
    scales.xaxis.get_major_locator().set_params(integer=True)
    for axes in (ranges, scales):
        axes.set_yscale("log", base=2)
        axes.legend(fontsize="small", ncols=3)
    ranges.set_title(f"{report.model}: FP8 KV, {report.data.tokens:,} tokens")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

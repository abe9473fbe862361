"""`make record-speed`: ratios of the benchmarks and core seconds of the program, into speed.md beside the record.

The core seconds of a command are those of its process, the least of five, over those of a yardstick that took turns
with it: a process that imports numpy.
"""

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from support.paths import GLM_TINY, ROOT
from support.program import PROGRAM, environment

SPEED = Path(__file__).parent / "speed.md"
YARDSTICK: tuple[str | Path, ...] = (sys.executable, "-c", "import numpy")
COMMANDS = (
    ("--help",),
    ("convert", GLM_TINY, "--int4", "--dry-run"),
    ("inspect", "glm-5.2"),
    ("plan", "glm-5.2", "--int4"),
)
BENCHMARKS = (("scale_error", str(GLM_TINY.relative_to(ROOT))), ("conversion_speed", "--size-gb", "1"))
_ROUNDS = 5


def core_seconds(commands: Sequence[Sequence[str | Path]]) -> list[float]:
    """The least core seconds of a process of each command; they take turns, as a busy machine slows all of them."""
    rounds = [[_core_seconds(command) for command in commands] for _ in range(_ROUNDS)]
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def _core_seconds(command: Sequence[str | Path]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Write the file."""
    load = os.getloadavg()[0]
    unit, *found = core_seconds((YARDSTICK, *((PROGRAM, *arguments) for arguments in COMMANDS)))
    lines = [
        "# Speed",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {processor()}, {os.cpu_count()} cores, load average {load:.1f} before. "
        f"The yardstick, which imports numpy, took {unit:.3f} core seconds.",
        "",
        "| command | core seconds | of the yardstick |",
        "|---|---|---|",
    ]
    for arguments, seconds in zip(COMMANDS, found, strict=True):
        words = " ".join(argument if isinstance(argument, str) else argument.name for argument in arguments)
        lines.append(f"| `quantkit {words}` | {seconds:.2f} | {seconds / unit:.1f} |")
    for name, *options in BENCHMARKS:
        command = [sys.executable, "-m", f"quantkit.eval.bench.{name}", *options]
        run = subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
        lines += ["", f"`{name} {' '.join(options)}`", "", run.stdout.strip()]
    SPEED.write_text("\n".join(lines) + "\n")


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


if __name__ == "__main__":
    main()

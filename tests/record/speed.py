"""`make record-speed`: ratios of the benchmarks and CPU seconds of the program, into speed.md beside the record.

The seconds of a command are those of its process, the least of five runs, over those of a yardstick of the same run: a
process that imports numpy.
"""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from support.paths import GLM_TINY
from support.program import PROGRAM, environment

SPEED = Path(__file__).parent / "speed.md"
YARDSTICK: list[str | Path] = [sys.executable, "-c", "import numpy"]
COMMANDS = (
    ("--help",),
    ("convert", GLM_TINY, "--int4", "--dry-run"),
    ("inspect", "glm-5.2"),
    ("plan", "glm-5.2", "--int4"),
)
BENCHMARKS = (("conversion_speed", "--size-gb", "2"), ("scale_error", str(GLM_TINY)))


def cpu_seconds(command: list[str | Path]) -> float:
    """The least core seconds of five runs of a process."""

    def once() -> float:
        before = os.times()
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    return min(once() for _ in range(5))


def main() -> None:
    """Write the file."""
    unit = cpu_seconds(YARDSTICK)
    lines = [
        "# Speed",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {processor()}, {os.cpu_count()} cores. The yardstick, which imports numpy, "
        f"took {unit:.2f} core seconds.",
        "",
        "| command | core seconds | of the yardstick |",
        "|---|---|---|",
    ]
    for arguments in COMMANDS:
        seconds = cpu_seconds([PROGRAM, *arguments])
        words = " ".join(argument if isinstance(argument, str) else argument.name for argument in arguments)
        lines.append(f"| `quantkit {words}` | {seconds:.2f} | {seconds / unit:.1f} |")
    for name, *options in BENCHMARKS:
        command = [sys.executable, "-m", f"quantkit.eval.{name}", *options]
        printed = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout
        lines += ["", f"`{name} {' '.join(Path(option).name for option in options)}`", "", printed.strip()]
    SPEED.write_text("\n".join(lines) + "\n")


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


if __name__ == "__main__":
    main()

"""Starts the engines' interpreter, one process for each engine at the same time. Runs in the project's."""

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine_loaders.jobs import Job, Report, read_reports, write_jobs
from support.paths import ROOT, TESTS

PYTHON = ROOT / "build" / "engines" / "bin" / "python"
LOADERS = {"vLLM": "engine_loaders.vllm_loader", "SGLang": "engine_loaders.sglang_loader"}
Reports = dict[Job, Report]


def start(module: str, *arguments: Path | str) -> subprocess.Popen[str]:
    """Start a module of this package in the engines' interpreter, in one thread and without a network."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process and give back what it printed; one that failed fails the test, with its last lines."""
    printed, _ = process.communicate()
    assert process.returncode == 0, printed[-4000:]
    return printed


def load_all(jobs: Mapping[str, Iterable[Job]]) -> dict[str, Reports]:
    """Let each engine do its jobs: engine -> job -> report."""
    lists = {engine: list(dict.fromkeys(asked)) for engine, asked in jobs.items()}
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for engine, asked in lists.items():
            write_jobs(Path(folder) / f"{engine}.jobs", asked)
            started[engine] = start(LOADERS[engine], *(f"{folder}/{engine}.{kind}" for kind in ("jobs", "reports")))
        for process in started.values():
            finish(process)
        reports = {engine: read_reports(Path(folder) / f"{engine}.reports") for engine in lists}
    return {engine: dict(zip(asked, reports[engine], strict=True)) for engine, asked in lists.items()}

"""Starts the engines' interpreter, one process for each engine. Runs in the project's."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from engine_loaders.jobs import Job, Report, ask, hear
from support.paths import ROOT, TESTS

PYTHON = ROOT / "build" / "engines" / "bin" / "python"
LOADERS = {"vLLM": "engine_loaders.vllm_loader", "SGLang": "engine_loaders.sglang_loader"}
Reports = dict[Job, Report]


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return ours | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(module: str, *arguments: Path | str) -> subprocess.Popen[str]:
    """Start a module of this package in the engines' interpreter, in one thread and without a network."""
    command = [PYTHON, "-m", module, *arguments]
    return subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process and give back what it printed; one that failed fails the test, with its last lines."""
    printed, _ = process.communicate()
    assert process.returncode == 0, printed[-4000:]
    return printed


class Engines:
    """The loaders, each in a process that is started when it is first asked, and stays until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # for what they print
        self._running: dict[str, tuple[subprocess.Popen[bytes], Connection]] = {}

    def load(self, jobs: Mapping[str, Iterable[Job]]) -> dict[str, Reports]:
        """Let each engine do its jobs, at the same time: engine -> job -> report."""
        lists = {engine: list(dict.fromkeys(asked)) for engine, asked in jobs.items()}
        for engine, asked in lists.items():
            ask(self._connection(engine), asked)
        return {engine: dict(zip(asked, self._hear(engine), strict=True)) for engine, asked in lists.items()}

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._running.values():
            connection.close()
            process.wait()

    def _connection(self, engine: str) -> Connection:
        if engine not in self._running:
            ours, theirs = Pipe()
            command = [PYTHON, "-m", LOADERS[engine], str(theirs.fileno())]
            with self._printed(engine).open("wb") as printed, theirs:
                process = subprocess.Popen(
                    command, env=_environment(), pass_fds=[theirs.fileno()], stdout=printed, stderr=printed
                )
            self._running[engine] = process, ours
        return self._running[engine][1]

    def _hear(self, engine: str) -> list[Report]:
        try:
            return hear(self._running[engine][1])
        except EOFError:
            pytest.fail(f"{engine} has ended: {self._printed(engine).read_text()[-4000:]}")

    def _printed(self, engine: str) -> Path:
        return self._folder / f"{engine}.log"

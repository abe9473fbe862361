"""What a loader is asked and what it answers, as JSON between the two interpreters. Runs in both."""

import dataclasses
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

_PACKAGES = "site-packages/"
_KEPT = 16  # models that may lie about


@dataclass(frozen=True)
class Job:
    """One model that an engine builds of a checkpoint and loads.

    checkpoint  its folder
    mtp         the draft model of the multi-token-prediction layer instead of the main model
    cuda        the classes that vLLM takes on CUDA for models with DeepSeek's sparse attention
    fusion      SGLang may fuse shared experts with the routed ones, as it does unless --disable-shared-experts-fusion
    ranks       among which tensor parallelism shares the model
    rank        the one of them that is simulated
    against     the folder whose files say what is right, where they are not the checkpoint's own
    """

    checkpoint: str
    mtp: bool = False
    cuda: bool = False
    fusion: bool = True
    ranks: int = 1
    rank: int = 0
    against: str = ""


@dataclass
class Report:
    """What came of a job; an engine that stops leaves the rest empty.

    model      the class that was built
    stopped    the step, the error and the engine's file and line, where it did not load
    modules    how many were compared
    numbers    how many weights they hold
    forms      how many modules there are of each form
    wrong      what differs from the files
    unwritten  parameters that no tensor of the checkpoint filled
    not_taken  weights of the checkpoint that no parameter holds
    """

    model: str = ""
    stopped: str = ""
    modules: int = 0
    numbers: int = 0
    forms: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether it loads and holds what the files say, all of it and nothing else."""
        return bool(self.modules) and not (self.stopped or self.wrong or self.unwritten or self.not_taken)

    @property
    def fault(self) -> str:
        """The first thing that is not right, in one line."""
        kinds = {"wrong": self.wrong, "unwritten": self.unwritten, "not taken": self.not_taken}
        found = [f"{len(rows)} {kind}: {rows[0]}" for kind, rows in kinds.items() if rows]
        return self.stopped or "; ".join(found) or ("" if self.modules else "nothing was compared")


def ask(connection: Connection, jobs: Iterable[Job]) -> None:
    """Give a loader's process its next jobs."""
    connection.send_bytes(json.dumps([dataclasses.asdict(job) for job in jobs]).encode())


def hear(connection: Connection) -> list[Report]:
    """The reports on these jobs, in their order; EOFError if the process has ended."""
    return [Report(**report) for report in json.loads(connection.recv_bytes())]


def serve(do: Callable[[Job, Report], None]) -> None:
    """Be a loader's process: do jobs until nobody asks. `do` fills in a report, and may raise what an engine raises."""
    connection = Connection(int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # the engine's modules are a million objects
    with suppress(EOFError):
        while True:
            jobs = [Job(**job) for job in json.loads(connection.recv_bytes())]
            reports = [_report(number, job, do) for number, job in enumerate(jobs)]
            connection.send_bytes(json.dumps([dataclasses.asdict(report) for report in reports]).encode())


def _report(number: int, job: Job, do: Callable[[Job, Report], None]) -> Report:
    report = Report()
    try:
        do(job, report)
    except Exception as error:  # whatever an engine raises is an answer
        report.stopped = f"{type(error).__name__}: {str(error)[:300]} ({_place(error)})"
    if number % _KEPT == 0:
        gc.collect()  # a model is garbage in cycles
    return report


def _place(error: Exception) -> str:
    """The last lines of an installed package that the error came through, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    inside = [frame for frame in frames if _PACKAGES in frame.filename]
    return " <- ".join(f"{frame.filename.rpartition(_PACKAGES)[2]}:{frame.lineno}" for frame in (inside or frames)[:3])

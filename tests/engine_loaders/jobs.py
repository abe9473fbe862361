"""What a loader is asked and what it answers, as JSON between the two interpreters. Runs in both."""

import dataclasses
import gc
import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PACKAGES = "site-packages/"


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


def write_jobs(path: Path, jobs: Iterable[Job]) -> None:
    """Write the jobs for a loader's process."""
    path.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))


def read_reports(path: Path) -> list[Report]:
    """The reports of a loader's process, in the order of its jobs."""
    return [Report(**report) for report in json.loads(path.read_text())]


def do_jobs(jobs: Path, reports: Path, do: Callable[[Job, Report], None]) -> None:
    """Do the jobs of a file one after the other; `do` fills in a report, and may raise what an engine raises."""
    done = []
    gc.collect()
    gc.freeze()  # the engine's modules are a million objects; a model is garbage in cycles, and goes before the next
    for job in (Job(**job) for job in json.loads(jobs.read_text())):
        report = Report()
        try:
            do(job, report)
        except Exception as error:  # whatever an engine raises is an answer
            report.stopped = f"{type(error).__name__}: {str(error)[:300]} ({_place(error)})"
        done.append(dataclasses.asdict(report))
        gc.collect()
    reports.write_text(json.dumps(done))


def _place(error: Exception) -> str:
    """The last lines of an installed package that the error came through, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    inside = [frame for frame in frames if _PACKAGES in frame.filename]
    return " <- ".join(f"{frame.filename.rpartition(_PACKAGES)[2]}:{frame.lineno}" for frame in (inside or frames)[:3])

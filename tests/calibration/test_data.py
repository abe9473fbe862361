"""Calibration data are what was asked for: so many tokens, whole samples or cut ones, one first token, no padding."""

import builtins
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration import DataOptions
from quantkit.calibration.data import CalibrationData, prepare
from quantkit.errors import DependencyError, SourceError, UsageError
from quantkit.runtime.tokenizer import Tokenizer

VOCAB, MAX_LENGTH = 2048, 2048


@pytest.fixture
def make_tokenizer(glm_tiny: Path, tmp_path: Path) -> Any:
    """Makes a folder with the trained model's tokenizer and these changes to its config."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        for name in ("tokenizer.json", "chat_template.jinja"):
            shutil.copy(glm_tiny / name, folder)
        config = json.loads((glm_tiny / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
        return folder

    return make


@pytest.fixture
def with_bos(make_tokenizer: Any) -> Path:
    """A folder whose tokenizer begins texts with <sop>."""
    folder: Path = make_tokenizer(bos_token="<sop>", add_bos_token=True)
    return folder


def write_lines(path: Path, samples: Sequence[Any]) -> Path:
    """A JSONL file, with an empty line in the middle."""
    lines = [json.dumps(sample) for sample in samples]
    path.write_text("\n".join([*lines[:1], "", *lines[1:]]) + "\n")
    return path


def cut(folder: Path, data: Path | None, **options: Any) -> CalibrationData:
    """The sequences of a data file."""
    return prepare(folder, DataOptions(data, **options), VOCAB, MAX_LENGTH)


def test_samples_of_all_lengths(with_bos: Path, tmp_path: Path) -> None:
    """Rows of 3, 40 and 4,000 tokens and an empty one: a row each, cut at the length, with the first token once."""
    samples = [{"tokens": [7] * length} for length in (3, 40, 4000, 0)]
    data = cut(with_bos, write_lines(tmp_path / "d.jsonl", samples), tokens=4 + 41 + 1024, length=1024, packed=False)
    bos = Tokenizer(with_bos).bos

    assert list(map(len, data.sequences)) == [4, 41, 1024]
    assert all(sequence[0] == bos and sequence.count(bos) == 1 for sequence in data.sequences)
    assert data.facts.lengths == {"4": 1, "64": 1, "1024": 1}
    assert data.facts.bos_of_sequences == {"1": 3}
    assert data.facts.longest == 1024
    with pytest.raises(SourceError, match=r"d.jsonl holds 1,069 tokens, and 1,070 are asked for") as error:
        cut(with_bos, tmp_path / "d.jsonl", tokens=1070, length=1024, packed=False)
    assert error.value.hint == "Give more data, or --tokens 1069."


def test_empty_samples_are_counted(glm_tiny: Path, tmp_path: Path) -> None:
    """Texts of nothing, or of blanks, and lists of no tokens are rejected and told; the others are all used."""
    samples = [{"text": ""}, {"text": " \n"}, {"tokens": []}, {"text": "one two"}, {"text": "three"}]
    tokenizer = Tokenizer(glm_tiny)
    expected = [*tokenizer.encode("one two"), *tokenizer.encode("three")]

    data = cut(glm_tiny, write_lines(tmp_path / "d.jsonl", samples), tokens=len(expected))

    assert (data.facts.empty_samples, data.facts.samples) == (3, 2)
    assert list(data.sequences) == [tuple(expected)]
    assert data.facts.bos_token is None
    assert data.facts.bos_of_sequences == {}


@pytest.mark.parametrize(("tokens", "sizes"), [(100, [32, 32, 32, 4]), (96, [32, 32, 32]), (97, [32, 32, 31, 2])])
def test_packed(with_bos: Path, tmp_path: Path, tokens: int, sizes: list[int]) -> None:
    """Samples follow each other; every sequence but the last is full, and none is only a first token."""
    path = write_lines(tmp_path / "d.jsonl", [{"tokens": [place + 10] * 7} for place in range(30)])

    data = cut(with_bos, path, tokens=tokens, length=32)

    assert list(map(len, data.sequences)) == sizes
    bodies = [token for sequence in data.sequences for token in sequence[1:]]
    assert bodies == [place // 7 + 10 for place in range(len(bodies))]
    assert data.facts.bos_of_sequences == {"1": len(sizes)}


def test_first_tokens_are_not_doubled(with_bos: Path, tmp_path: Path) -> None:
    """A chat template that writes the first token itself, and texts that spell it, give it once all the same."""
    samples = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<sop> Ho"}]}]
    tokenizer = Tokenizer(with_bos)
    template = tokenizer.encode_messages(samples[0]["messages"])
    assert template.count(tokenizer.bos or 0) == 2

    data = cut(with_bos, write_lines(tmp_path / "d.jsonl", samples), tokens=len(template) - 1, packed=False)

    (sequence,) = data.sequences
    assert sequence[0] == tokenizer.bos
    assert list(sequence[1:]) == [token for token in template if token != tokenizer.bos]


@pytest.mark.parametrize(
    ("changes", "bos"),
    [({}, None), ({"bos_token": "<sop>"}, None), ({"bos_token": {"content": "<sop>"}, "add_bos_token": True}, "<sop>")],
)
def test_first_token(make_tokenizer: Any, changes: dict[str, Any], bos: str | None) -> None:
    """A token that is only named is not put before texts by the tokenizer, and not by calibration."""
    tokenizer = Tokenizer(make_tokenizer(**changes))

    assert tokenizer.bos == (tokenizer.encode(bos)[0] if bos else None)


def test_chat_template(glm_tiny: Path, tmp_path: Path) -> None:
    """Texts go into the template as a user's message if so asked; conversations always do, answers included."""
    text, chat = tmp_path / "t.txt", tmp_path / "c.jsonl"
    text.write_text("Who are you?")
    write_lines(chat, [{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}])
    tokenizer = Tokenizer(glm_tiny)

    asked, plain = tokenizer.encode_chat("Who are you?"), tokenizer.encode("Who are you?")

    assert cut(glm_tiny, text, tokens=len(asked), chat_template=True).sequences == (tuple(asked),)
    assert cut(glm_tiny, text, tokens=len(plain)).sequences == (tuple(plain),)
    wanted = tokenizer.encode("[gMASK]<sop><|user|>\nA<|assistant|>\nB")
    assert cut(glm_tiny, chat, tokens=len(wanted)).sequences == (tuple(wanted),)


def test_manual(glm_tiny: Path) -> None:
    """Without data there is Python's manual: the same tokens each time, no more than asked for, as long as can be."""
    first, second = cut(glm_tiny, None, tokens=5000), cut(glm_tiny, None, tokens=5000)

    assert first == second
    assert first.digest == second.digest
    assert list(map(len, first.sequences)) == [2048, 2048, 904]
    assert first.digest != cut(glm_tiny, None, tokens=5000, length=1000).digest


def test_datasets(glm_tiny: Path, tmp_path: Path) -> None:
    """A folder of `datasets`, saved or of data files, with its train split first."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "one two three"}, {"text": "four"}])
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": rows.select([1]), "train": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files" / "train.jsonl", [{"text": "one two three"}, {"text": "four"}])
    tokenizer = Tokenizer(glm_tiny)
    expected = ((*tokenizer.encode("one two three"), *tokenizer.encode("four")),)

    for name in ("saved", "splits", "files"):
        assert cut(glm_tiny, tmp_path / name, tokens=len(expected[0])).sequences == expected, name


def test_datasets_is_optional(glm_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library the error says what to install."""
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(DependencyError) as error:
        cut(glm_tiny, tmp_path)
    assert error.value.hint == "pip install datasets"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x"}', r"sample 1 is not \{\"text\""),
        ('{"tokens": [1, true]}', "sample 1 is not"),
        ('{"tokens": [1, -1]}', "sample 1 is not"),
        ('{"text": 3}', "sample 1 is not"),
        ("{", "line 1 does not parse"),
        ("", "holds 0 tokens"),
        ('{"tokens": [5000, 1, 2]}', "token 5000, and the model's vocabulary ends at 2047"),
    ],
)
def test_bad_data(glm_tiny: Path, tmp_path: Path, content: str, message: str) -> None:
    """What cannot be used is an error that names the file and the place."""
    path = tmp_path / "d.jsonl"
    path.write_text(content)

    with pytest.raises(SourceError, match=message) as error:
        cut(glm_tiny, path, tokens=3)
    assert str(path) in str(error.value)


def test_bad_options(glm_tiny: Path, tmp_path: Path) -> None:
    """Sequences longer than the model's, files that are not there, texts without a tokenizer."""
    with pytest.raises(UsageError, match="--length 4096: the model takes 2,048"):
        cut(glm_tiny, None, length=4096)
    with pytest.raises(SourceError, match="cannot be read"):
        cut(glm_tiny, tmp_path / "none.txt")
    with pytest.raises(SourceError, match=r"tokenizer.json is missing"):
        cut(tmp_path, None)
    tokens = write_lines(tmp_path / "d.jsonl", [{"tokens": [1, 2, 3]}])
    assert cut(tmp_path, tokens, tokens=3).sequences == ((1, 2, 3),)
    with pytest.raises(UsageError, match="two tokens"):
        prepare(tmp_path, replace(DataOptions(tokens), length=1), VOCAB, None)

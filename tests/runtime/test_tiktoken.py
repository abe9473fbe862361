"""A tokenizer published as tiktoken.model gives the tokens of the same one published as tokenizer.json."""

import base64
import json
from pathlib import Path

import pytest

from quantkit.calibration import DataOptions
from quantkit.calibration.data import prepare
from quantkit.errors import SourceError
from quantkit.runtime.tokenizer import Tokenizer, has_tokenizer

TEXTS = (
    "The capital of France is Paris.",
    " a\n\n   b\tc 12345",
    "naïve café 你好 🙂",
    "<|user|>\nHi<|endoftext|>",
    "",
    "İ",
)
PYTHON = '''
"""Never run."""
raise RuntimeError

class TikTokenTokenizer:
    pat_str = "|".join(
        [
            r"""{}""",
            r"""{}""",
        ]
    )
'''


@pytest.fixture
def folder(glm_tiny: Path, tmp_path: Path) -> Path:
    """The trained model's tokenizer as Kimi's is published."""
    published = json.loads((glm_tiny / "tokenizer.json").read_text())
    special = {entry["content"]: entry["id"] for entry in published["added_tokens"]}
    seen = {chr(code): code for code in (*range(33, 127), *range(161, 173), *range(174, 256))}
    hidden = [code for code in range(256) if chr(code) not in seen]
    letters = seen | {chr(256 + place): code for place, code in enumerate(hidden)}
    lines = []
    for token, rank in published["model"]["vocab"].items():
        if token not in special:
            raw = bytes(letters[letter] for letter in token)
            lines.append(f"{base64.b64encode(raw).decode()} {rank}")
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first, rest = published["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].split("|", 1)
    (tmp_path / "tokenization_kimi.py").write_text(PYTHON.format(first, rest))
    config = json.loads((glm_tiny / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(number): {"content": content} for content, number in special.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_bytes((glm_tiny / "chat_template.jinja").read_bytes())
    return tmp_path


def test_tokens_are_the_same(folder: Path, glm_tiny: Path) -> None:
    """On odd texts and on a long one, special tokens included; back to text and in the chat template, too."""
    ours, expected = Tokenizer(folder), Tokenizer(glm_tiny)

    for text in (*TEXTS, (glm_tiny / "heldout.txt").read_text()[:50_000]):
        assert ours.encode(text) == expected.encode(text)
        assert ours.decode(ours.encode(text)) == expected.decode(expected.encode(text))
    assert ours.encode_chat("Hi") == expected.encode_chat("Hi")
    assert ours.bos is None
    assert has_tokenizer(folder)


def test_calibration_reads_it(folder: Path, glm_tiny: Path) -> None:
    """The sequences are those of tokenizer.json."""
    options = DataOptions(tokens=1000)

    assert prepare(folder, options, 2048, 2048).sequences == prepare(glm_tiny, options, 2048, 2048).sequences


def test_damaged_files(folder: Path) -> None:
    """A file that does not parse, and a pattern that is nowhere, are errors by name."""
    (folder / "tokenization_kimi.py").write_text("pat = 1")
    with pytest.raises(SourceError, match=r"tiktoken.model needs a Python file") as error:
        Tokenizer(folder)
    assert error.value.hint
    (folder / "tiktoken.model").write_text("%%% 1\n")
    with pytest.raises(SourceError, match=r"tiktoken.model: is no tokenizer"):
        Tokenizer(folder)

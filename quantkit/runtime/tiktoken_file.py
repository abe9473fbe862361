"""Tokenizers that are published as `tiktoken.model`, as Kimi's is: byte strings by rank, without the merges.

Each line of the file is a token in base64 and its rank, which is its number. Two neighbours merge if together they are
a token, the one of lowest rank first; so the merges are all ways to cut a token into two. How text is cut into words
says `pat_str` in the Python file beside it, which is read and not run; special tokens are in tokenizer_config.json.
"""

import ast
import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quantkit.errors import SourceError

TIKTOKEN = "tiktoken.model"
_PATTERN = "pat_str"


def read_tiktoken(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer in the tiktoken.model of `folder`; `config` is its tokenizer_config.json.

    Raises SourceError if the file does not parse, or if no Python file beside it has the pattern.
    """
    ranks = _read_ranks(folder / TIKTOKEN)
    special = {entry["content"]: int(number) for number, entry in config.get("added_tokens_decoder", {}).items()}
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = sorted(
        (ranks[token], ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    )
    vocab = {names[token]: rank for token, rank in ranks.items()} | special
    pairs = [(names[left], names[right]) for *_, left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    words = pre_tokenizers.Split(tokenizers.Regex(_read_pattern(folder)), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError, binascii.Error) as error:
        raise SourceError(f"{path}: is no tokenizer: {error}") from error


def _read_pattern(folder: Path) -> str:
    for path in sorted(folder.glob("*.py")):
        if (pattern := next(_patterns(path), None)) is not None:
            return pattern
    raise SourceError(
        f"{folder}: {TIKTOKEN} needs a Python file beside it that says how text is cut, as {_PATTERN}",
        hint="Download the checkpoint's Python files, too.",
    )


def _patterns(path: Path) -> Iterator[str]:
    """What a Python file assigns to `pat_str`: a string, or strings joined."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == _PATTERN for target in targets):
            match node.value:  # type: ignore[attr-defined]
                case ast.Constant(value=str(pattern)):
                    yield pattern
                case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[parts]):
                    yield between.join(ast.literal_eval(parts))


def _letters() -> dict[int, str]:
    """What byte-level tokenizers write for each byte: itself if it can be seen, else a letter from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}

"""Text to tokens and back, with a checkpoint's files alone: tokenizer.json or tiktoken.model, and the chat template."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from quantkit.errors import SourceError
from quantkit.runtime.tiktoken_file import TIKTOKEN, read_tiktoken

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_GENERATION, _MODEL = "generation_config.json", "config.json"


class Tokenizer:
    """The tokenizer of the checkpoint in `folder`. Raises SourceError if it has none that can be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / _TOKENIZER
        if not path.exists() and (folder / TIKTOKEN).exists():
            self._backend = read_tiktoken(folder, _read(folder / _CONFIG))
            return
        if not path.exists():
            raise SourceError(
                f"{folder}: {_TOKENIZER} is missing",
                hint='Give tokens instead of text: a .jsonl file with lines like {"tokens": [...]}.',
            )
        try:
            self._backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # what the library raises has no other class
            raise SourceError(f"{path}: is no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts round every text."""
        return list(self._backend.encode(text).ids)

    @property
    def bos(self) -> int | None:
        """The token that texts begin with, where the tokenizer or its `add_bos_token` puts it there."""
        config = _read(self._folder / _CONFIG)
        token = self._backend.token_to_id(str(_content(config.get("bos_token"))))
        return token if config.get("add_bos_token") or token in self.encode("") else None

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a user's message in the chat template, up to where the answer begins."""
        return self._fill([{"role": "user", "content": text}], answer=True)

    def encode_messages(self, messages: Sequence[Any]) -> list[int]:
        """The tokens of a conversation in the chat template, answers included."""
        return self._fill(messages, answer=False)

    def _fill(self, messages: Sequence[Any], answer: bool) -> list[int]:
        config = _read(self._folder / _CONFIG)
        path = self._folder / _TEMPLATE
        template = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        if not isinstance(template, str):
            raise SourceError(f"{self._folder}: there is no chat template", hint="Give text without one.")
        values = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
        try:
            filled = _environment().from_string(template)
            prompt = filled.render(messages=messages, add_generation_prompt=answer, **values)
        except jinja2.TemplateError as error:
            raise SourceError(f"{self._folder}: the chat template cannot be filled: {error}") from error
        return list(self._backend.encode(prompt, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))


class TextStream:
    """The text of a request, piece by piece as its tokens come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = 0

    def push(self, token: int, last: bool) -> str:
        """What a token adds; nothing while a character of several tokens is not whole, unless it is the last."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        piece, self._told = text[self._told :], len(text)
        return piece


def has_tokenizer(folder: Path) -> bool:
    """Whether the checkpoint in `folder` has one."""
    return any((folder / name).exists() for name in (_TOKENIZER, TIKTOKEN))


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text, by generation_config.json, else by config.json."""
    for file in (_GENERATION, _MODEL):
        config = _read(folder / file)
        found = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As chat templates expect it; they come with checkpoints and are not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _content(value: Any) -> Any:
    """A special token as text; it may be stored with how it is matched."""
    return value.get("content") if isinstance(value, dict) else value


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty without one."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error

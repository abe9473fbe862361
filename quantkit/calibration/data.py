"""Calibration data: samples become sequences of tokens, exactly as many as asked for, and nothing is ever padded.

    samples    texts, conversations or tokens: of a file, a `datasets` folder, or the manual that comes with Python
    packed     samples one after the other, cut into sequences of `length` tokens
    rows       a sequence for each sample, cut at `length`

Where a tokenizer begins texts with a token of its own, every sequence begins with it and has it once.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from quantkit.calibration.report import DataFacts
from quantkit.errors import DependencyError, SourceError, UsageError
from quantkit.records import parse_json
from quantkit.runtime.tokenizer import Tokenizer, has_tokenizer

_MANUAL = "the Python manual"
_FORMS = '{"text": ...}, {"messages": [...]} or {"tokens": [...]}'


@dataclass(frozen=True)
class DataOptions:
    """What to calibrate on.

    data           a .txt or .jsonl file, or a `datasets` folder; None is the Python manual
    tokens         in all sequences together
    length         the longest sequence; None is 4,096, or less where the model takes less
    packed         whether samples follow each other in a sequence
    chat_template  put texts into the model's chat template, as a user's message
    """

    data: Path | None = None
    tokens: int = 16384
    length: int | None = None
    packed: bool = True
    chat_template: bool = False


@dataclass(frozen=True)
class CalibrationData:
    """Sequences of tokens, and what there is to say of them."""

    sequences: tuple[tuple[int, ...], ...]
    facts: DataFacts

    @property
    def digest(self) -> str:
        """The sha256 of all tokens and of where sequences end."""
        text = "\n".join(" ".join(map(str, sequence)) for sequence in self.sequences)
        return hashlib.sha256(text.encode()).hexdigest()


def prepare(folder: Path, options: DataOptions, vocab: int, max_length: int | None) -> CalibrationData:
    """The sequences for the checkpoint in `folder`, whose embedding has `vocab` rows.

    Raises SourceError for data that cannot be read or hold too few tokens, naming how many there are, UsageError for
    sequences longer than the model takes, and DependencyError for a `datasets` folder without that library.
    """
    length = _length(options, max_length)
    name = str(options.data) if options.data else _MANUAL
    reader = _Samples(folder, options.chat_template, name)
    samples = reader.tokenized(_read(options.data) if options.data else _manual())
    cut = _pack if options.packed else _rows
    sequences = tuple(tuple(sequence) for sequence in cut(samples, reader, options.tokens, length))
    found = sum(map(len, sequences))
    if found < options.tokens:
        raise SourceError(
            f"{name} holds {found:,} tokens, and {options.tokens:,} are asked for",
            hint=f"Give more data, or --tokens {found}." if found else "Give more data.",
        )
    largest = max(chain.from_iterable(sequences))
    if largest >= vocab:
        raise SourceError(f"{name} holds the token {largest}, and the model's vocabulary ends at {vocab - 1}")
    return CalibrationData(sequences, _facts(name, options, sequences, reader))


def _length(options: DataOptions, max_length: int | None) -> int:
    length = options.length or min(4096, max_length or 4096)
    if max_length and length > max_length:
        raise UsageError(f"--length {length}: the model takes {max_length:,} tokens", hint=f"Give up to {max_length}.")
    if length < 2 or options.tokens < 2:
        raise UsageError("a sequence needs two tokens or more", hint="Give larger --length and --tokens.")
    return length


# --- from samples to sequences


class _Samples:
    """Turns samples into tokens, without the token that sequences begin with; counts what it rejects."""

    def __init__(self, folder: Path, chat_template: bool, name: str) -> None:
        self._folder, self._chat, self._name = folder, chat_template, name
        self._tokenizer = Tokenizer(folder) if has_tokenizer(folder) else None
        self.bos = self._tokenizer.bos if self._tokenizer else None
        self.head = [] if self.bos is None else [self.bos]  # of each sequence
        self.used = self.empty = 0

    def tokenized(self, samples: Iterable[Any]) -> Iterator[list[int]]:
        for number, sample in enumerate(samples, start=1):
            tokens = [token for token in self._encode(number, sample) if token != self.bos]
            if tokens:
                self.used += 1
                yield tokens
            else:
                self.empty += 1

    def _encode(self, number: int, sample: Any) -> list[int]:
        match sample:
            case {"tokens": [*tokens]} if all(type(token) is int and token >= 0 for token in tokens):
                return list(tokens)
            case {"messages": [*messages]}:
                return self._texts().encode_messages(messages)
            case {"text": str(text)}:
                if not text.strip():
                    return []
                return self._texts().encode_chat(text) if self._chat else self._texts().encode(text)
        raise SourceError(f"{self._name}: sample {number} is not {_FORMS}", hint="Each sample is one of these.")

    def _texts(self) -> Tokenizer:
        return self._tokenizer or Tokenizer(self._folder)  # the latter says what is missing


def _pack(samples: Iterator[list[int]], reader: _Samples, tokens: int, length: int) -> Iterator[list[int]]:
    stream = chain.from_iterable(samples)
    left = tokens
    while left:
        size = min(length, left)
        size -= size > 2 and left - size == 1  # no sequence of one token in the end
        body = list(islice(stream, size - len(reader.head)))
        if not body:
            return
        yield [*reader.head, *body]
        left -= len(reader.head) + len(body)


def _rows(samples: Iterator[list[int]], reader: _Samples, tokens: int, length: int) -> Iterator[list[int]]:
    left = tokens
    for sample in samples:
        sequence = [*reader.head, *sample][: min(length, left)]
        yield sequence
        left -= len(sequence)
        if not left:
            return


def _facts(name: str, options: DataOptions, sequences: tuple[Any, ...], reader: _Samples) -> DataFacts:
    lengths = Counter(1 << (len(sequence) - 1).bit_length() for sequence in sequences)
    bos = Counter(sequence.count(reader.bos) for sequence in sequences) if reader.bos is not None else Counter[int]()
    return DataFacts(
        source=name,
        tokens=sum(map(len, sequences)),
        samples=reader.used,
        empty_samples=reader.empty,
        sequences=len(sequences),
        longest=max(map(len, sequences)),
        lengths={str(top): lengths[top] for top in sorted(lengths)},
        bos_token=reader.bos,
        bos_of_sequences={str(count): bos[count] for count in sorted(bos)},
        packed=options.packed,
        chat_template=options.chat_template,
    )


# --- where samples are from


def _read(path: Path) -> Iterator[Any]:
    if path.is_dir():
        return _dataset(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "Give a .txt or .jsonl file, or the folder of a `datasets` data set that lies here."
        raise SourceError(f"{path}: cannot be read as UTF-8 text: {error}", hint=hint) from error
    return _lines(path, text) if path.suffix == ".jsonl" else iter([{"text": text}])


def _lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:
                hint = f"Each line is one JSON object: {_FORMS}."
                raise SourceError(f"{path}: line {number} does not parse: {error}", hint=hint) from error


def _dataset(path: Path) -> Iterator[Any]:
    """The rows of a folder that `save_to_disk` wrote, or of data files in one; of splits, train's or the first's."""
    try:
        import datasets
    except ImportError as error:
        raise DependencyError(f"{path} needs the package datasets", hint="pip install datasets") from error
    try:
        saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # the library raises what its readers raise
        raise SourceError(f"{path}: is no data set that `datasets` reads: {error}") from error
    if isinstance(found, dict):
        found = found.get("train") or next(iter(found.values()))
    return iter(found)


def _manual() -> Iterator[Any]:
    """The topics of Python's language reference, which every Python carries; under the PSF licence."""
    from pydoc_data.topics import topics

    return ({"text": topics[name]} for name in sorted(topics))

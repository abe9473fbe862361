"""Journals of open runs: a JSON object in each line, flushed to the disk before the run goes on.

The last line may be torn by a crash; it then counts as not written.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import Source


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Add a line to the journal `path`, and wait until the disk has it."""
    with path.open("ab") as file:
        file.write(json.dumps(content).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines, and how many bytes they are; a torn line, and what might follow it, is left out."""
    lines: list[dict[str, Any]] = []
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            content = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            break
        lines.append(content)
        whole += len(line)
    return lines, whole


def source_binding(source: Source) -> dict[str, str]:
    """What a journal binds a run to: the digests of the config and of all headers."""
    headers = hashlib.sha256()
    for name, tensor in sorted(source.tensors.items()):
        headers.update(f"{name} {tensor.spec.dtype} {tensor.spec.shape} {tensor.shard} {tensor.offset}\n".encode())
    return {
        "source config": hashlib.sha256(source.config_text.encode()).hexdigest(),
        "source headers": headers.hexdigest(),
    }


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """In words, each field in which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {old} before, {new} now"

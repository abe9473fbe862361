"""The safetensors header: parsed, checked and written by ourselves, so that no tensor is read to know what is there.

    8 bytes   little-endian length n of the JSON
    n bytes   {"name": {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}
    the rest  the tensors; offsets count from here, without holes and without overlaps

Format: https://github.com/huggingface/safetensors/blob/v0.6.2/README.md
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.errors import SourceError
from quantkit.records import parse_json

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMENSIONS = 32
_DAMAGED = "The file is damaged; download it again."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its data begin: `offset` counts from the start of the file `shard`."""

    spec: TensorSpec
    shard: str
    offset: int


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Widest dtype first and then by name, as the safetensors library writes."""
    return sorted(specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))


def lay_out(
    specs: Iterable[TensorSpec], shard: str, *, in_order: bool = False
) -> tuple[bytes, tuple[StoredTensor, ...]]:
    """The header of a file that holds `specs`, and each tensor's place in it, aligned to its own item size.

    They are in `in_file_order`; `in_order` keeps the given order, so that a file can be written as its tensors come:
    only those whose size is no multiple of 8 bytes are moved to the end.
    """
    given = tuple(specs)
    ordered = in_file_order(given)
    if in_order:
        ordered = [spec for spec in given if spec.nbytes % 8 == 0] + [spec for spec in ordered if spec.nbytes % 8]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for spec in ordered:
        begins.append(end)
        end += spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = zip(ordered, begins, strict=True)
    return header, tuple(StoredTensor(spec, shard, len(header) + begin) for spec, begin in places)


def parse_length(prefix: bytes, file_size: int, file: str) -> int:
    """The length of the JSON from the file's first 8 bytes, checked against the file's size."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length < 2 or length > MAX_HEADER_BYTES or 8 + length > file_size:
        raise SourceError(
            f"{file}: not a safetensors file, or cut short ({file_size:,} bytes, header length {length:,})",
            hint="Download the file again.",
        )
    return length


def parse_header(text: bytes, file_size: int, file: str) -> tuple[StoredTensor, ...]:
    """The tensors of a file in the order of their data.

    Raises SourceError, naming file and tensor, for JSON that does not parse, an unknown dtype, a shape that does not
    fit its offsets, overlaps, holes, and a file that is shorter or longer than its header says.
    """
    try:
        entries = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise SourceError(f"{file}: the safetensors header does not parse: {error}", hint=_DAMAGED) from error
    if not isinstance(entries, dict):
        raise SourceError(f"{file}: the safetensors header is not a JSON object", hint=_DAMAGED)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SourceError(f"{file}: __metadata__ is not a mapping of strings to strings")
    begin_of_data = 8 + len(text)
    spans = sorted((_parse_entry(name, entry, file) for name, entry in entries.items()), key=lambda span: span[1:])
    end = 0
    for spec, begin, stop in spans:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            raise SourceError(f"{file}: tensor {spec.name} {what} (offset {begin:,}, expected {end:,})")
        end = stop
    if begin_of_data + end != file_size:
        last = spans[-1][0].name if spans else "(no tensor)"
        raise SourceError(
            f"{file}: {file_size:,} bytes, but its header says {begin_of_data + end:,} (last tensor: {last})",
            hint="The file is cut short or has bytes appended; download it again.",
        )
    return tuple(StoredTensor(spec, file, begin_of_data + begin) for spec, begin, _ in spans)


def _parse_entry(name: str, entry: Any, file: str) -> tuple[TensorSpec, int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if (
            type(begin) is type(end) is int
        ):
            pass
        case _:
            raise SourceError(f"{file}: the header's entry for {name} is malformed: {str(entry)[:200]}")
    if dtype not in DTYPE_BYTES:
        raise SourceError(f"{file}: tensor {name} has the dtype {dtype!r}, which is not known")
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise SourceError(f"{file}: tensor {name} has the shape {str(shape)[:200]}, not a list of sizes")
    spec = TensorSpec(name, dtype, tuple(shape))
    if begin < 0 or end - begin != spec.nbytes:
        raise SourceError(
            f"{file}: tensor {name} ({dtype} {shape}) needs {spec.nbytes:,} bytes, but its offsets are [{begin}, {end}]"
        )
    return spec, begin, end

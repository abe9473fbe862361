"""A damaged safetensors header, or a file of another length, is refused by what is wrong with it."""

import contextlib
import json
from typing import Any

import pytest
import safetensors
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.header import (
    TensorSpec,
    lay_out,
    parse_header,
    parse_length,
)
from quantkit.errors import SourceError
from support.headers import read_header


def file_of(entries: Any, data: bytes = b"") -> bytes:
    """A file whose header is `entries`, dumped as they are."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused_by_library(file: bytes) -> bool:
    try:
        safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return True
    return False


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"x.weight": entry("Q4")}, "x.weight has the dtype 'Q4'"),
        ({"x.weight": entry("f32", (1,))}, "x.weight has the dtype 'f32'"),
        ({"x.weight": entry(None)}, "entry for x.weight is malformed"),  # type: ignore[arg-type]
        ({"x.weight": entry(shape=[-4])}, "x.weight has the shape [-4]"),
        ({"x.weight": entry(shape=[-2, -2])}, "x.weight has the shape [-2, -2]"),
        ({"x.weight": entry(shape=[4, True])}, "x.weight has the shape [4, True]"),
        ({"x.weight": entry(shape=[4.0])}, "x.weight has the shape [4.0]"),
        ({"x.weight": entry(shape=["4"])}, "x.weight has the shape ['4']"),
        ({"x.weight": entry(shape=4)}, "entry for x.weight is malformed"),
        ({"x.weight": entry(shape=None)}, "entry for x.weight is malformed"),
        ({"x.weight": entry(offsets=[0.0, 4.0])}, "entry for x.weight is malformed"),
        ({"x.weight": entry(offsets=["0", "4"])}, "entry for x.weight is malformed"),
        ({"x.weight": entry(offsets=[0, 4, 4])}, "entry for x.weight is malformed"),
        ({"x.weight": entry(offsets=[4])}, "entry for x.weight is malformed"),
        ({"x.weight": entry(shape=[3])}, "x.weight (U8 [3]) needs 3 bytes, but its offsets are [0, 4]"),
        ({"x.weight": entry(offsets=[4, 0])}, "x.weight (U8 [4]) needs 4 bytes, but its offsets are [4, 0]"),
        ({"x.weight": entry(offsets=[-4, 0])}, "its offsets are [-4, 0]"),
        ({"x.weight": entry(shape=[2**62, 4], offsets=[0, 4])}, "x.weight"),
        ({"x.weight": {"dtype": "U8", "shape": [4]}}, "entry for x.weight is malformed"),
        ({"x.weight": [0, 4]}, "entry for x.weight is malformed"),
        ({"x.weight": None}, "entry for x.weight is malformed"),
        ({"x.weight": entry(offsets=[1, 5])}, "x.weight leaves a hole before it (offset 1, expected 0)"),
        (
            {"a": entry(shape=[1], offsets=[0, 1]), "x.weight": entry(shape=[2], offsets=[2, 4])},
            "x.weight leaves a hole before it (offset 2, expected 1)",
        ),
        (
            {"a": entry(shape=[3], offsets=[0, 3]), "x.weight": entry(shape=[2], offsets=[2, 4])},
            "x.weight overlaps the tensor before it (offset 2, expected 3)",
        ),
        ({"a": entry(), "x.weight": entry()}, "x.weight overlaps the tensor before it"),
        (b'{"x.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},' * 2 + b"}", "does not parse"),
        (
            b'{"x.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            b'"x.weight":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
            "'x.weight' occurs twice",
        ),
        (b'{"x.weight":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "'dtype' occurs twice"),
        (b"[]", "not a JSON object"),
        (b"4  ", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\0" * 16, "does not parse"),
        (b"this is not JSON", "does not parse"),
        (b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "does not parse"),
        (b"[" * 100_000, "does not parse"),
        (b'{"a":' * 100_000, "does not parse"),
    ],
)
def test_a_damaged_header_is_refused_by_name(entries: Any, said: str) -> None:
    """The message names the file, the tensor where there is one, and what is wrong with it."""
    with pytest.raises(SourceError) as caught:
        read_header(file_of(entries, b"data"))

    assert "model-7.safetensors" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file_of({"a": entry(shape=[1], offsets=[False, True])}, b"x"), id="bool offsets"),
        pytest.param(file_of({"a": entry(shape=[10**4000, 10**4000])}, b"data"), id="sizes beyond all bounds"),
        pytest.param(file_of("{}".encode("utf-16")), id="UTF-16"),
        pytest.param(file_of(b'{"a\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), id="half a pair"),
        pytest.param(file_of({"__metadata__": ["format", "pt"]}), id="metadata list"),
        pytest.param(file_of({"a": entry(shape=[True, 4])}, b"data"), id="bool shape"),
        pytest.param(file_of({"a": entry()}, b"dat"), id="short"),
        pytest.param(file_of({"a": entry()}, b"datab"), id="long"),
    ],
)
def test_what_the_library_refuses_we_refuse(file: bytes) -> None:
    """A file that no engine could load is no source."""
    assert refused_by_library(file)

    with pytest.raises(SourceError, match=r"model-7\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [(-1, "last tensor: x.weight"), (-4096, "last tensor: x.weight"), (16, "last tensor: x.weight"), (1, "x.weight")],
)
def test_a_file_of_another_length_is_refused(change: int, said: str) -> None:
    """Bytes cut off or appended are found from the header alone; the message holds both sizes and a remedy."""
    header, _ = lay_out([TensorSpec("a", "F32", (2000,)), TensorSpec("x.weight", "U8", (100,))], "x")
    size = len(header) + 8100

    with pytest.raises(SourceError) as caught:
        parse_header(header[8:], size + change, "model-7.safetensors")

    assert f"model-7.safetensors: {size + change:,} bytes, but its header says {size:,}" in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.hint is not None
    assert "download" in caught.value.hint


def test_bytes_after_no_tensor_are_refused() -> None:
    """A header without tensors fits only a file without data."""
    assert read_header(file_of(b"{}")) == ()

    with pytest.raises(SourceError, match=r"\(no tensor\)"):
        read_header(file_of(b"{}", b"x"))


@pytest.mark.parametrize(
    ("prefix", "size"),
    [
        (b"", 0),
        (b"\x10\0\0", 3),
        (b"\0" * 8, 8),
        (b"\0" * 8, 1000),
        (b"\1" + b"\0" * 7, 1000),
        (b"\xff" * 8, 1000),
        ((993).to_bytes(8, "little"), 1000),
        ((100_000_001).to_bytes(8, "little"), 10**12),
        (b"<!DOCTYPE html>"[:8], 5000),
        (b"version https://git-lfs"[:8], 134),
    ],
    ids=[
        "empty",
        "3 bytes",
        "0",
        "0 of more",
        "1",
        "all ones",
        "beyond",
        "over the limit",
        "a web page",
        "LFS pointer",
    ],
)
def test_a_length_that_cannot_be_is_refused(prefix: bytes, size: int) -> None:
    """A file that is empty, cut in its header, or no safetensors file at all is named, with a remedy."""
    with pytest.raises(SourceError, match=r"model-7\.safetensors: not a safetensors file") as caught:
        parse_length(prefix, size, "model-7.safetensors")

    assert caught.value.hint is not None
    assert "Download" in caught.value.hint


@pytest.mark.parametrize(("length", "size"), [(2, 10), (992, 1000), (100_000_000, 10**12)])
def test_a_length_that_just_fits_is_taken(length: int, size: int) -> None:
    """The borders of what is refused are on the right side: `{}` alone, a header to the end, the library's limit."""
    assert parse_length(length.to_bytes(8, "little"), size, "x") == length


VALID = lay_out(
    [
        TensorSpec("model.layers.0.mlp.gate_proj.weight", "F8_E4M3", (5, 7)),
        TensorSpec("model.layers.0.mlp.gate_proj.weight_scale_inv", "F32", (1, 1)),
        TensorSpec("model.norm.weight", "BF16", (3,)),
        TensorSpec("empty", "I32", (0,)),
    ],
    "x",
)[0] + bytes(45)


@settings(derandomize=True, database=None, max_examples=4 * settings.default.max_examples)  # 400, or 60
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 46),
            st.one_of(st.integers(0, 255), st.sampled_from(list(b'0123456789-.,:[]{}"\\eEtTnN '))),
            st.sampled_from(["replace", "insert", "delete"]),
        ),
        min_size=1,
        max_size=4,
    ),
    fix_length=st.booleans(),
)
def test_a_mutated_file_parses_whole_or_is_refused(edits: list[tuple[int, int, str]], fix_length: bool) -> None:
    """Bytes changed at random in a valid header give tensors that cover the file exactly, or a SourceError."""
    mutated = bytearray(VALID)
    for position, byte, kind in edits:
        if kind == "delete":
            del mutated[position]
        elif kind == "insert":
            mutated.insert(position, byte)
        else:
            mutated[position] = byte
    if fix_length:
        mutated[:8] = (len(mutated) - 8 - 45).to_bytes(8, "little")
    places = None
    with contextlib.suppress(SourceError):
        places = read_header(bytes(mutated))
    if places is None:
        return

    end = 8 + int.from_bytes(mutated[:8], "little")
    for place in places:
        assert place.offset == end
        end += place.spec.nbytes
    assert end == len(mutated)
    assert not refused_by_library(bytes(mutated))

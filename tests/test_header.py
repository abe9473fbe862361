"""The safetensors header: what we write the library reads, what it writes we read, and what is damaged is refused."""

import contextlib
import json
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.header import (
    DTYPE_BYTES,
    StoredTensor,
    TensorSpec,
    lay_out,
    parse_header,
    parse_length,
)
from quantkit.errors import SourceError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
SPEC_LISTS = {
    "nothing": [],
    "one": [TensorSpec("a", "BF16", (3, 5))],
    "a scalar": [TensorSpec("a", "F32", ())],
    "empty tensors": [TensorSpec(name, "I32", (0, 7)) for name in "acx"] + [TensorSpec("b", "I32", (1,))],
    "every dtype": [TensorSpec(f"t.{dtype}", dtype, (3,)) for dtype in DTYPE_BYTES],
    "odd names": [TensorSpec(name, "U8", (3,)) for name in ("", "a b", 'quote"\\', "ümläut", "\n", "名前", "😀")],
    "int4 weight": [
        TensorSpec("x.weight_packed", "I32", (5, 12)),
        TensorSpec("x.weight_scale", "BF16", (5, 3)),
        TensorSpec("x.weight_shape", "I64", (2,)),
        TensorSpec("y.weight", "F8_E4M3", (7, 3)),
    ],
}


def random_bytes(count: int, seed: int = 0) -> bytes:
    """Bytes of which none is NaN or infinite in any dtype, and each is a valid BOOL."""
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator).tolist())


def file_of(entries: Any, data: bytes = b"") -> bytes:
    """A file whose header is `entries`, dumped as they are."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(file: bytes, name: str = "model-7.safetensors") -> tuple[StoredTensor, ...]:
    """Read a file's header as a checkpoint is opened: first its length, then the JSON."""
    length = parse_length(file[:8], len(file), name)
    return parse_header(file[8 : 8 + length], len(file), name)


def refused_by_library(file: bytes) -> bool:
    try:
        safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return True
    return False


def test_the_header_of_one_tensor_is_these_bytes() -> None:
    """Little-endian length, JSON without spaces, filled up with spaces to a multiple of eight."""
    header, places = lay_out([TensorSpec("a", "BF16", (2, 3))], "model.safetensors")

    text = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    assert len(text) == 89
    assert header == b"\x60\0\0\0\0\0\0\0" + text + b" " * 7
    assert places == (StoredTensor(TensorSpec("a", "BF16", (2, 3)), "model.safetensors", 104),)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("BF16", (2048, 6144), 25_165_824),
        ("F8_E4M3", (576, 6144), 3_538_944),
        ("F32", (5, 48), 960),
        ("I32", (2048, 768), 6_291_456),
        ("I64", (2,), 16),
        ("F32", (), 4),
        ("U8", (0, 5), 0),
    ],
)
def test_a_tensors_size_is_its_numbers_times_their_width(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    """The byte count of published shapes, of a scalar and of an empty tensor."""
    assert TensorSpec("x", dtype, shape).nbytes == nbytes


@pytest.mark.parametrize("specs", SPEC_LISTS.values(), ids=SPEC_LISTS.keys())
def test_a_laid_out_header_parses_to_the_same_places(specs: list[TensorSpec]) -> None:
    """Names, dtypes, shapes and offsets survive writing and reading, in the order of the data."""
    header, places = lay_out(reversed(specs), "model-7.safetensors")
    file = header + bytes(sum(spec.nbytes for spec in specs))

    assert read(file) == places
    assert sorted(place.spec.name for place in places) == sorted(spec.name for spec in specs)


def test_every_tensor_is_aligned_to_its_item() -> None:
    """However odd the sizes, each tensor begins at a multiple of its item size, and the data at a multiple of 8."""
    specs = [TensorSpec(f"{size}.{dtype}", dtype, (size,)) for size in (1, 3, 5) for dtype in DTYPE_BYTES]
    header, places = lay_out(specs, "x")

    assert len(header) % 8 == 0
    assert [place.offset % DTYPE_BYTES[place.spec.dtype] for place in places] == [0] * len(specs)


def test_the_layout_does_not_depend_on_the_order_of_the_specs() -> None:
    """The same tensors give the same bytes in whatever order they come."""
    specs = SPEC_LISTS["every dtype"]

    assert lay_out(specs, "x") == lay_out(reversed(specs), "x")


def test_a_layout_in_order_moves_odd_sizes_only() -> None:
    """Only tensors that would leave the next one at no multiple of 8 lose their place; all are aligned."""
    shapes = {"c": ("BF16", 4), "odd": ("U8", 3), "b": ("I64", 2), "odder": ("F32", 1), "a": ("F32", 2)}
    specs = [TensorSpec(name, dtype, (size,)) for name, (dtype, size) in shapes.items()]
    header, places = lay_out(specs, "x", in_order=True)

    assert [place.spec.name for place in places] == ["c", "b", "a", "odder", "odd"]
    assert [place.offset % DTYPE_BYTES[place.spec.dtype] for place in places] == [0] * 5
    assert {name for name, _ in safetensors.deserialize(header + bytes(39))} == shapes.keys()


@pytest.mark.parametrize("specs", SPEC_LISTS.values(), ids=SPEC_LISTS.keys())
def test_the_library_reads_what_we_write(specs: list[TensorSpec]) -> None:
    """Every tensor has, in the library's eyes, the dtype, the shape and the bytes that we placed."""
    header, places = lay_out(specs, "x")
    data = random_bytes(sum(spec.nbytes for spec in specs))
    loaded = dict(safetensors.deserialize(header + data))

    assert loaded.keys() == {spec.name for spec in specs}
    for place in places:
        tensor = loaded[place.spec.name]
        begin = place.offset - len(header)
        assert (tensor["dtype"], tuple(tensor["shape"])) == (place.spec.dtype, place.spec.shape)
        assert bytes(tensor["data"]) == data[begin : begin + place.spec.nbytes]


def test_torch_loads_what_we_write() -> None:
    """The tensors of an INT4 weight come out of the library's torch loader with their numbers."""
    specs = SPEC_LISTS["int4 weight"]
    header, _ = lay_out(specs, "x")
    shape, packed = torch.tensor([5, 96]), torch.arange(60, dtype=torch.int32)
    scale, weight = torch.arange(15).to(torch.bfloat16), torch.arange(21).to(torch.float8_e4m3fn)
    data = b"".join(bytes(part.view(torch.uint8).tolist()) for part in (shape, packed, scale, weight))  # widest first
    loaded = safetensors.torch.load(header + data)

    assert loaded["x.weight_shape"].tolist() == [5, 96]
    assert torch.equal(loaded["x.weight_packed"], packed.reshape(5, 12))
    assert torch.equal(loaded["x.weight_scale"], scale.reshape(5, 3))
    assert torch.equal(loaded["y.weight"].view(torch.uint8), weight.reshape(7, 3).view(torch.uint8))


@pytest.mark.parametrize("specs", SPEC_LISTS.values(), ids=SPEC_LISTS.keys())
@pytest.mark.parametrize("metadata", [None, {"format": "pt", "note": "ü"}])
def test_we_read_what_the_library_writes(specs: list[TensorSpec], metadata: dict[str, str] | None) -> None:
    """Every tensor of a file of the library is found with its dtype, its shape and its bytes."""
    tensors = {
        spec.name: torch.frombuffer(bytearray(random_bytes(spec.nbytes, seed)), dtype=TORCH_DTYPES[spec.dtype])
        .clone()
        .reshape(spec.shape)
        if spec.nbytes
        else torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        for seed, spec in enumerate(specs)
    }
    file = safetensors.torch.save(tensors, metadata)
    places = read(file)

    assert {place.spec.name: place.spec for place in places} == {spec.name: spec for spec in specs}
    assert {place.shard for place in places} <= {"model-7.safetensors"}
    for place in places:
        expected = bytes(tensors[place.spec.name].flatten().view(torch.uint8).tolist())
        assert file[place.offset : place.offset + place.spec.nbytes] == expected


def test_our_header_is_the_librarys_byte_for_byte() -> None:
    """For tensors with one dtype of each width, our bytes are those of `save_file(..., metadata={"format": "pt"})`."""
    specs = [TensorSpec(f"{name}.{dtype}", dtype, (3,)) for dtype in ("I64", "F32", "BF16", "U8") for name in "ba"]
    tensors = {spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in specs}

    assert lay_out(specs, "x")[0] + bytes(90) == safetensors.torch.save(tensors, {"format": "pt"})


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
        read(file_of(entries, b"data"))

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
        read(file)


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
    assert read(file_of(b"{}")) == ()

    with pytest.raises(SourceError, match=r"\(no tensor\)"):
        read(file_of(b"{}", b"x"))


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


@settings(deadline=None, derandomize=True, database=None, max_examples=400)
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
        places = read(bytes(mutated))
    if places is None:
        return

    end = 8 + int.from_bytes(mutated[:8], "little")
    for place in places:
        assert place.offset == end
        end += place.spec.nbytes
    assert end == len(mutated)
    assert not refused_by_library(bytes(mutated))

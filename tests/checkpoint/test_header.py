"""The safetensors header: what we write the library reads, and what it writes we read."""

import pytest
import safetensors
import safetensors.torch
import torch

from quantkit.checkpoint.header import (
    DTYPE_BYTES,
    StoredTensor,
    TensorSpec,
    lay_out,
)
from support.headers import TORCH_DTYPES, read_header

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

    assert read_header(file) == places
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
    places = read_header(file)

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

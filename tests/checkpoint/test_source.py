"""Opening a checkpoint finds every tensor's place, and names the file or tensor that is missing or damaged."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.header import StoredTensor, TensorSpec, lay_out
from quantkit.checkpoint.source import INDEX_FILE, Source, open_source, read_header
from quantkit.errors import SourceError

CONFIG = {"model_type": "toy", "num_hidden_layers": 3}
FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def write_checkpoint(
    folder: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor]],
    weight_map: Any = None,
    config: str = json.dumps(CONFIG),
) -> Path:
    """A checkpoint written by the safetensors library; its index is the union of its shards unless one is given."""
    folder.mkdir(exist_ok=True)
    for shard, tensors in shards.items():
        save_file(dict(tensors), folder / shard, metadata={"format": "pt"})
    if weight_map is None:
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards: `a` and `b` in the first, `c` in the second, `d`, which is larger than 4 KiB, in the third."""
    return write_checkpoint(
        tmp_path / "toy",
        {
            FIRST: {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(3, dtype=torch.bfloat16)},
            SECOND: {"c.weight": torch.arange(5, dtype=torch.int32)},
            THIRD: {"d.weight": torch.arange(2000.0)},
        },
    )


def read_tensor(source: Source, name: str) -> bytes:
    """The bytes of one tensor."""
    tensor = source.tensors[name]
    buffer = bytearray(tensor.spec.nbytes)
    source.read_into(tensor, 0, memoryview(buffer))
    return bytes(buffer)


def floats(*numbers: float) -> bytes:
    return torch.tensor(numbers, dtype=torch.float32).numpy().tobytes()


def test_a_checkpoint_is_opened_with_all_its_tensors(folder: Path) -> None:
    """Names, dtypes, shapes, shards, sizes and the config are those of the files."""
    source = open_source(folder, "toy", revision="abc")

    assert {tensor.spec for tensor in source.tensors.values()} == {
        TensorSpec("a.weight", "F32", (2, 3)),
        TensorSpec("b.weight", "BF16", (3,)),
        TensorSpec("c.weight", "I32", (5,)),
        TensorSpec("d.weight", "F32", (2000,)),
    }
    assert source.shards == (FIRST, SECOND, THIRD)
    assert source.nbytes == 24 + 6 + 20 + 8000
    assert (source.name, source.revision, source.warnings) == ("toy", "abc", ())
    assert (source.model_type, source.num_hidden_layers, source.config) == ("toy", 3, CONFIG)
    assert read_tensor(source, "a.weight") == floats(0, 1, 2, 3, 4, 5)


def test_a_checkpoint_is_called_by_its_folder(folder: Path) -> None:
    """Without a name of its own a source has its folder's."""
    assert open_source(folder).name == str(folder)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    """`model.safetensors` without an index is a whole checkpoint."""
    save_file({"a.weight": torch.arange(3.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)

    assert source.shards == ("model.safetensors",)
    assert read_tensor(source, "a.weight") == floats(0, 1, 2)
    assert source.warnings == ()


def test_an_index_decides_before_a_single_file(folder: Path) -> None:
    """A `model.safetensors` beside an index that does not name it is not read."""
    save_file({"stray.weight": torch.zeros(1)}, folder / "model.safetensors")

    assert "stray.weight" not in open_source(folder).tensors


@pytest.mark.parametrize(("home", "other"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_the_index_decides_where_a_tensor_is(home: str, other: str, tmp_path: Path) -> None:
    """Of two copies of a tensor the index's is read, wherever the other lies, and a warning names all three."""
    write_checkpoint(
        tmp_path,
        {
            home: {"x.weight": torch.tensor([1.0, 2.0]), "y.weight": torch.zeros(1)},
            other: {"x.weight": torch.tensor([7.0, 8.0, 9.0]), "z.weight": torch.zeros(1)},
        },
        {"x.weight": home, "y.weight": home, "z.weight": other},
    )
    source = open_source(tmp_path)

    assert source.tensors["x.weight"].shard == home
    assert read_tensor(source, "x.weight") == floats(1, 2)
    assert len(source.tensors) == 3
    (warning,) = source.warnings
    assert all(part in warning for part in ("x.weight", home, other))


def test_a_tensor_that_the_index_forgot_is_used_with_a_warning(tmp_path: Path) -> None:
    """A tensor of a known shard is not lost because the index lacks it."""
    shards = {FIRST: {"a.weight": torch.zeros(1), "b.weight": torch.ones(1)}}
    source = open_source(write_checkpoint(tmp_path, shards, {"a.weight": FIRST}))

    assert source.tensors.keys() == {"a.weight", "b.weight"}
    (warning,) = source.warnings
    assert "b.weight" in warning
    assert FIRST in warning


def test_two_copies_that_the_index_does_not_name_are_refused(tmp_path: Path) -> None:
    """Nobody can say which of two unnamed copies is the model's."""
    shards = {
        FIRST: {"a.weight": torch.zeros(1), "x.weight": torch.zeros(1)},
        SECOND: {"b.weight": torch.zeros(1), "x.weight": torch.ones(1)},
    }
    write_checkpoint(tmp_path, shards, {"a.weight": FIRST, "b.weight": SECOND})

    with pytest.raises(SourceError, match=r"x\.weight is in two shards"):
        open_source(tmp_path)


@pytest.mark.parametrize("dangling", [False, True], ids=["deleted", "dangling link"])
def test_a_missing_shard_is_named(folder: Path, dangling: bool) -> None:
    """A shard that is not there, or is a link to nothing, is refused by its name, with a remedy."""
    (folder / SECOND).unlink()
    if dangling:
        (folder / SECOND).symlink_to(folder / "blobs" / "nowhere")

    with pytest.raises(SourceError, match=f"shard {SECOND} is missing") as caught:
        open_source(folder)

    assert caught.value.hint is not None
    assert "Download" in caught.value.hint


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file[:-4096], "last tensor: d.weight"),
        (lambda file: file + b"\0" * 16, "last tensor: d.weight"),
        (lambda file: file[:40], "cut short"),
        (lambda file: file[:5], "cut short"),
        (lambda file: b"", "cut short"),
        (lambda file: b"\0" * len(file), "not a safetensors file"),
    ],
    ids=["4 KiB cut off", "16 bytes appended", "cut in the header", "5 bytes", "empty", "zeros"],
)
def test_a_damaged_shard_is_named(folder: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    """A shard whose size is not what its header says is refused, naming it and where there is one the tensor."""
    (folder / THIRD).write_bytes(damage((folder / THIRD).read_bytes()))

    with pytest.raises(SourceError, match=THIRD) as caught:
        open_source(folder)

    assert said in str(caught.value)
    assert caught.value.hint is not None


def test_a_shard_that_is_a_folder_is_refused(folder: Path) -> None:
    """What cannot be read as a file is named with the system's reason."""
    (folder / THIRD).unlink()
    (folder / THIRD).mkdir()

    with pytest.raises(SourceError, match=f"{THIRD}: cannot be read: Is a directory"):
        open_source(folder)


def test_a_tensor_that_no_shard_holds_is_named(folder: Path) -> None:
    """An index entry without a tensor is refused by tensor and shard, and the others are counted."""
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"] |= {"x.weight": SECOND, "y.weight": FIRST}
    (folder / INDEX_FILE).write_text(json.dumps(index))

    with pytest.raises(SourceError, match=rf"x\.weight is in {SECOND}, but it is not \(and 1 more") as caught:
        open_source(folder, "toy")

    assert caught.value.hint is not None


def test_a_tensor_that_lies_elsewhere_than_the_index_says_is_refused(folder: Path) -> None:
    """An index that points to the wrong shard is not repaired silently."""
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["a.weight"] = SECOND
    (folder / INDEX_FILE).write_text(json.dumps(index))

    with pytest.raises(SourceError, match=rf"a\.weight is in {SECOND}, but it is not"):
        open_source(folder)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", 5, None, []])
def test_an_index_reaches_only_files_of_the_folder(folder: Path, shard: Any) -> None:
    """A shard that is not the plain name of a file is refused before it is opened."""
    (folder.parent / "x.safetensors").write_bytes((folder / FIRST).read_bytes())
    (folder / "sub").mkdir()
    (folder / "sub" / "x.safetensors").write_bytes((folder / FIRST).read_bytes())
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a.weight": shard}}))

    with pytest.raises(SourceError, match=r"index\.json says that a\.weight .*not a file name"):
        open_source(folder)


def test_a_shard_name_with_a_zero_byte_is_refused(folder: Path) -> None:
    """No string in an index makes anything but a SourceError."""
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a.weight": "x\0.safetensors"}}))

    with pytest.raises(SourceError, match="index"):
        open_source(folder)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'"weight_map"',
        b'{"weight_map": null}',
        b'{"weight_map": ["a.weight"]}',
        b'{"weight_map": "a.weight"}',
        b"\xff\xfe{}",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "no map", "string", "null", "map is a list", "map is a string", "not UTF-8", "deep"],
)
def test_an_index_that_is_none_is_refused(folder: Path, index: bytes) -> None:
    """An index that does not parse or has no weight_map is named."""
    (folder / INDEX_FILE).write_bytes(index)

    with pytest.raises(SourceError, match=r"model\.safetensors\.index\.json"):
        open_source(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Without index and single file the message names both, and says what to give."""
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(SourceError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors") as caught:
        open_source(tmp_path)

    assert caught.value.hint is not None
    assert "safetensors checkpoint" in caught.value.hint


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """The hint says what a model can be called by."""
    with pytest.raises(SourceError, match="nowhere: no such folder") as caught:
        open_source(tmp_path / "nowhere")

    assert caught.value.hint is not None
    assert "alias" in caught.value.hint


def test_a_missing_config_is_refused(folder: Path) -> None:
    """Weights without a config are no checkpoint."""
    (folder / "config.json").unlink()

    with pytest.raises(SourceError, match=r"config\.json is missing") as caught:
        open_source(folder)

    assert caught.value.hint is not None


@pytest.mark.parametrize(
    "config",
    [b"", b"{", b"[]", b"null", b'{"a": 1}}', b"{'a': 1}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "one brace more", "single quotes", "not UTF-8", "byte order mark", "deep"],
)
def test_a_config_that_is_none_is_refused_on_opening(folder: Path, config: bytes) -> None:
    """A config.json that is not a JSON object in UTF-8 is refused at once, by its name."""
    (folder / "config.json").write_bytes(config)

    with pytest.raises(SourceError, match=r"config\.json"):
        open_source(folder)


def test_a_config_that_is_a_folder_is_refused(folder: Path) -> None:
    """What cannot be read is a SourceError with the file's name, as for shards."""
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()

    with pytest.raises(SourceError, match=r"config\.json"):
        open_source(folder)


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{\r\n  "a": "\\u00e9 \u00e9"\r\n}\r\n', '{"a":\t1}\r', '\n\n{"a": 1}\n\n']
)
def test_the_configs_text_is_the_files(folder: Path, text: str) -> None:
    """Every byte of config.json is in `config_text`: line ends, escapes and blanks."""
    (folder / "config.json").write_bytes(text.encode())

    assert open_source(folder).config_text.encode() == text.encode()


@pytest.mark.parametrize("value", ["null", '"many"', "[78]", "{}"])
def test_a_config_without_a_number_of_layers_is_refused_when_asked(value: str) -> None:
    """`num_hidden_layers` that is missing or no number is named."""
    for text in ("{}", f'{{"num_hidden_layers": {value}}}'):
        with pytest.raises(SourceError, match=r"toy: .*num_hidden_layers"):
            _ = Source("toy", None, text, {}).num_hidden_layers


def test_a_snapshot_of_links_is_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Files that are links to blobs without extension, as in a Hub cache, are read through the links."""
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0a1b2c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    source = open_source(snapshot)

    assert source.shards == (FIRST, SECOND, THIRD)
    assert read_tensor(source, "a.weight") == floats(0, 1, 2, 3, 4, 5)


def test_a_source_without_files_has_nothing_to_read() -> None:
    """A source made from a config alone says so when its weights are asked for."""
    tensor = lay_out([TensorSpec("a", "U8", (1,))], FIRST)[1][0]
    source = Source("toy", None, "{}", {"a": tensor})

    with pytest.raises(SourceError, match="toy: only the config is known"):
        source.read_into(tensor, 0, memoryview(bytearray(1)))


def source_of(path: Path, nbytes: int, offset: int) -> Source:
    """A source whose one tensor is said to lie at `offset` of a file that need not be a safetensors file."""
    return Source("toy", path.parent, "{}", {"a": StoredTensor(TensorSpec("a", "U8", (nbytes,)), path.name, offset)})


def test_a_buffer_larger_than_one_read_is_filled(tmp_path: Path) -> None:
    """A buffer beyond the 64 MiB of a single read is filled without a gap at the border, from any offset."""
    border, offset = 64 << 20, 3
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(border + 32)
        file.seek(offset + border - 4)
        file.write(b"the border")
    buffer = bytearray(b"\xff" * (border + 8))
    source = source_of(path, border + 8, offset)

    source.read_into(source.tensors["a"], 0, memoryview(buffer))

    assert buffer[border - 4 :] == b"the border\0\0"
    assert not any(buffer[: border - 4 : 4093])
    assert b"\xff" not in buffer


def test_a_shard_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Bytes that are no longer there are counted, not read as zeros."""
    path = tmp_path / "short"
    path.write_bytes(b"abcdef")
    source = source_of(path, 12, 0)

    with pytest.raises(SourceError, match="short: ended 6 bytes early"):
        source.read_into(source.tensors["a"], 2, memoryview(bytearray(10)))


def test_a_shard_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """A file that was removed after the headers were read is named, with the tensor that was wanted."""
    source = source_of(tmp_path / "gone", 1, 0)

    with pytest.raises(SourceError, match=r"gone: a cannot be read"):
        source.read_into(source.tensors["a"], 0, memoryview(bytearray(1)))


def test_read_header_names_the_file_alone(folder: Path) -> None:
    """The shard of a stored tensor is the file's name without its folder."""
    assert {tensor.shard for tensor in read_header(folder / FIRST)} == {FIRST}

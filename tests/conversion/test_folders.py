"""Folders that other tools read or left half, stale or mixed, as users reported, and the memory that it took them: the
smallest input of each, and what must come out of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import quantkit
from quantkit.errors import OutputError, SourceError
from support.checkpoints import DOWN, FP8, config_of, fp8_codes, normal, write
from support.truth import read_tensors


def three_shards(folder: Path) -> Path:
    """A Llama of three layers, each in a shard of its own."""
    shards = ({f"model.layers.{number}.mlp.down_proj.weight": normal(128, 128)} for number in range(3))
    return write(folder, *shards, num_hidden_layers=3)


def headers(folder: Path) -> list[tuple[str, str]]:
    """Every tensor of every safetensors file in the folder, and the file."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found += [(name, path.name) for name in file.keys()]  # noqa: SIM118 - a safetensors file is no mapping
    return found


# --- shards and the index


def test_shards_of_an_earlier_run(tmp_path: Path) -> None:
    """Shards of an earlier run stay, the old index comes along, and loaders read both (JustVugg/colibri#1479)."""
    six = ({f"model.layers.{number}.mlp.down_proj.weight": normal(128, 128)} for number in range(6))
    quantkit.convert(write(tmp_path / "six", *six, num_hidden_layers=6), tmp_path / "out", "int4")
    source = three_shards(tmp_path / "three")
    with pytest.raises(OutputError, match="out"):
        quantkit.convert(source, tmp_path / "out", "int4")
    assert len(headers(tmp_path / "out")) == 18

    quantkit.convert(source, tmp_path / "out", "int4", overwrite=True)

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = headers(tmp_path / "out")
    assert len(found) == 9
    assert dict(found) == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(data.nbytes for _, data in read_tensors(tmp_path / "out").values())


@pytest.mark.parametrize("home", [0, 1], ids=["first shard", "last shard"])
def test_two_copies_of_a_tensor(tmp_path: Path, home: int) -> None:
    """A loader that reads all files takes the last copy, whatever the index says (Blaizzy/mlx-vlm#624)."""
    copies = [normal(128, 128, seed=seed) for seed in range(2)]
    shards = ({f"{DOWN}.weight": copy, f"model.layers.{i}.norm.weight": normal(128)} for i, copy in enumerate(copies))
    source = write(tmp_path / "source", *shards, num_hidden_layers=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"{DOWN}.weight"] = sorted(set(index["weight_map"].values()))[home]
    path.write_text(json.dumps(index))
    manifest = quantkit.convert(source, tmp_path / "out", "bf16")

    assert any(f"{DOWN}.weight is also in " in warning for warning in manifest.warnings)
    found = read_tensors(tmp_path / "out")[f"{DOWN}.weight"][1]
    assert found.tobytes() == copies[home].view(torch.uint8).numpy().tobytes()
    assert [name for name, _ in headers(tmp_path / "out")].count(f"{DOWN}.weight") == 1


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(16))


@pytest.mark.parametrize("damage", [_remove, _cut, _lengthen])
@pytest.mark.parametrize("recipe", ["int4", "nvfp4", "bf16"])
def test_shard_that_is_not_whole(tmp_path: Path, damage: Callable[[Path], None], recipe: str) -> None:
    """Tensors of a shard that is missing or too short are read as zeros (vllm-project/vllm#34930)."""
    source = three_shards(tmp_path / "source")
    damage(source / "model-00002-of-00003.safetensors")

    with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors"):
        quantkit.convert(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


# --- what goes along

OLD = {"quant_method": "fp8", "old": True}
SIDE_FILES = (
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "modeling_kimi.py",
    "LICENSE",
)
TRAPS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "hf_quant_config.json", "consolidated.pth")


def test_side_files_and_traps(tmp_path: Path) -> None:
    """Templates and code are lost, or old configs and weights come along (kekzl/imp#1429, transformers#42715)."""
    tensors = {f"language_model.{DOWN}.weight": fp8_codes(128, 128)}
    tensors[f"language_model.{DOWN}.weight_scale_inv"] = torch.ones(1, 1)
    text = {"num_hidden_layers": 1, "model_type": "llama", "quantization_config": FP8 | OLD}
    source = write(tmp_path / "source", tensors, text_config=text, quantization_config=FP8 | OLD)
    for name in (*SIDE_FILES, *TRAPS):
        (source / name).write_bytes(f"{name}\r\n".encode())
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    manifest = quantkit.convert(source, tmp_path / "out", "int4")

    for name in SIDE_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        assert name in manifest.files
    ours = {"config.json", "model.safetensors.index.json", "quantkit.json", "model-00001-of-00001.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*SIDE_FILES, *ours}
    config = config_of(tmp_path / "out")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in config["text_config"]
    assert "old" not in json.dumps(config)


# --- memory

PROGRAM = """
import sys, quantkit
quantkit.convert(sys.argv[1], sys.argv[2], "int4")
print(max(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10)
"""
SHARD = 1024 * 8192  # bytes of FP8


def peak_memory(folder: Path, num_shards: int) -> int:
    """The most bytes that the process held that converted a checkpoint of so many shards of 8 MiB each."""
    folder.mkdir()
    codes, scale = fp8_codes(1024, 8192), torch.ones(8, 64)
    modules = [f"model.layers.{number}.mlp.down_proj" for number in range(num_shards)]
    shards = ({f"{module}.weight": codes, f"{module}.weight_scale_inv": scale} for module in modules)
    source = write(folder / "source", *shards, num_hidden_layers=num_shards, quantization_config=FP8)
    command = [sys.executable, "-c", PROGRAM, source, folder / "out"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say how much memory was held")
def test_memory_does_not_grow_with_the_number_of_shards(tmp_path: Path) -> None:
    """A cache of shards that is never emptied ends in a process killed for its memory (unslothai/unsloth-zoo#1126)."""
    few, many = peak_memory(tmp_path / "few", 3), peak_memory(tmp_path / "many", 11)

    assert many < few + 2 * SHARD  # the eight more are 64 MiB

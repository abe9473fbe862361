"""`convert`: what comes out of each weight, that nothing else changes, and which files go along."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import quantkit
from quantkit.choices import Rest, ScaleMethod
from quantkit.conversion import Options
from quantkit.formats import fp8_block, int4
from support.checkpoints import digests, load, same

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def test_routed_experts_become_int4(toy: Path, toy_int4: Path) -> None:
    """Every routed expert, the MTP layer's included, has the reference's packed codes, scales and shape."""
    source, output = load(toy), load(toy_int4)
    experts = [name for name in source if ".mlp.experts." in name and name.endswith(".weight")]

    assert len(experts) == 3 * 4 * 3
    for name in experts:
        exact = fp8_block.dequantize(source[name], source[f"{name}_scale_inv"], dtype=torch.float64)
        codes, scale = int4.quantize(exact, 32, ScaleMethod.SEARCH.divisors)
        assert same(output[f"{name}_packed"], int4.pack(codes))
        assert same(output[f"{name}_scale"], scale)
        assert output[f"{name}_shape"].tolist() == list(exact.shape)
        assert name not in output


def test_the_rest_keeps_its_bytes(toy: Path, toy_int4: Path) -> None:
    """Outside the experts and kv_b_proj every tensor is the source's, byte for byte; block scales get the CT name."""
    source, output = load(toy), load(toy_int4)

    kept = {
        name: name.replace("_scale_inv", "_scale") for name in source if ".experts." not in name and "kv_b" not in name
    }
    assert len(kept) > 60
    for name, new_name in kept.items():
        assert same(output[new_name], source[name]), name
    assert output["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert [name for name in output if name.endswith("_scale_inv")] == []


def test_kv_b_proj_is_decoded(toy: Path, toy_int4: Path) -> None:
    """kv_b_proj is BF16 without a scale, because SGLang cannot load it as FP8 from this format."""
    source, output = load(toy), load(toy_int4)

    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        assert same(output[name], fp8_block.dequantize(source[name], source[f"{name}_scale_inv"]))
        assert f"{name}_scale" not in output


@pytest.mark.parametrize("recipe", ["bf16", "glm-5.2-int4-bf16rest"])
def test_bf16_rest(toy: Path, tmp_path: Path, recipe: str) -> None:
    """Both BF16 recipes leave no FP8 tensor, and decode all weights but INT4 ones as the reference does."""
    quantkit.convert(toy, tmp_path / "out", recipe)

    source, output = load(toy), load(tmp_path / "out")
    fp8 = [name for name, tensor in source.items() if tensor.dtype == torch.float8_e4m3fn]
    for name in fp8:
        if f"{name}_packed" not in output:
            assert same(output[name], fp8_block.dequantize(source[name], source[f"{name}_scale_inv"])), name
    assert {tensor.dtype for tensor in output.values()} & {torch.float8_e4m3fn} == set()
    assert sum(name.endswith("_packed") for name in output) == (0 if recipe == "bf16" else 36)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float_source(make_toy: Callable[..., Path], tmp_path: Path, dtype: torch.dtype) -> None:
    """Experts in BF16, FP16 or FP32 become INT4 by the reference's arithmetic, and verify compares them too."""

    def decode(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            weight = name.removesuffix("_scale_inv")
            tensors[weight] = fp8_block.dequantize(tensors[weight], tensors.pop(name), dtype=torch.float32).to(dtype)

    source = make_toy(decode)
    quantkit.convert(source, tmp_path / "out")

    weight, output = load(source)[EXPERT], load(tmp_path / "out")
    codes, scale = int4.quantize(weight, 32, ScaleMethod.SEARCH.divisors)
    assert same(output[f"{EXPERT}_packed"], int4.pack(codes))
    assert same(output[f"{EXPERT}_scale"], scale)
    result = quantkit.verify(tmp_path / "out", source)
    assert result.passed
    assert {error.role for error in result.errors} == {"routed_expert"}


def test_groups_over_block_borders(make_toy: Callable[..., Path], tmp_path: Path) -> None:
    """FP8 blocks narrower than a group go by way of exact floats."""
    block = (128, 64)

    def requantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            weight = name.removesuffix("_scale_inv")
            decoded = fp8_block.dequantize(tensors[weight], tensors[name], dtype=torch.float32)
            tensors[weight], tensors[name] = fp8_block.quantize(decoded, block)

    source = make_toy(requantize)
    config = source / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"]["weight_block_size"] = list(block)
    config.write_text(json.dumps(content))
    options = Options(group_size=128, rest=Rest.BF16)  # SGLang decodes an indexer in blocks of 128 x 128 only
    quantkit.convert(source, tmp_path / "out", options=options)

    tensors, output = load(source), load(tmp_path / "out")
    exact = fp8_block.dequantize(tensors[EXPERT], tensors[f"{EXPERT}_scale_inv"], block, torch.float64)
    codes, scale = int4.quantize(exact, 128, ScaleMethod.SEARCH.divisors)
    assert same(output[f"{EXPERT}_packed"], int4.pack(codes))
    assert same(output[f"{EXPERT}_scale"], scale)
    assert quantkit.verify(tmp_path / "out", source).passed


def test_index_is_the_union_of_the_headers(toy_int4: Path) -> None:
    """The index names each tensor once, where it is, and its total_size is the sum of the tensors' bytes."""
    index = json.loads((toy_int4 / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for path in toy_int4.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                found[name] = path.name
                tensor = file.get_tensor(name)
                total += tensor.numel() * tensor.element_size()

    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total


def test_scale_is_in_its_weights_shard(toy: Path, toy_int4: Path) -> None:
    """A scale that lay in another shard moves to its weight's."""
    before = json.loads((toy / "model.safetensors.index.json").read_text())["weight_map"]
    after = json.loads((toy_int4 / "model.safetensors.index.json").read_text())["weight_map"]

    apart = [
        name
        for name in before
        if name.endswith("_scale_inv") and before[name] != before[name.removesuffix("_scale_inv")]
    ]
    assert apart
    assert all(after[name] == after[name.replace("_packed", "_scale")] for name in after if name.endswith("_packed"))
    assert all(after[f"{name}_scale"] == after[name] for name in after if f"{name}_scale" in after)


def test_config_keeps_every_other_byte(toy: Path, toy_int4: Path) -> None:
    """config.json is the source's text but for the value of quantization_config."""
    before, after = (toy / "config.json").read_text(), (toy_int4 / "config.json").read_text()

    head = before.index('"quantization_config"')
    assert after[:head] == before[:head]
    assert json.loads(before) | {"quantization_config": None} == json.loads(after) | {"quantization_config": None}


def test_manifest_describes_the_files(toy_int4: Path) -> None:
    """quantkit.json holds size and sha256 of every other file, and convert returns the same content."""
    files = json.loads((toy_int4 / "quantkit.json").read_text())["files"]

    assert files.keys() == digests(toy_int4).keys() - {"quantkit.json"}
    assert {name: entry["sha256"] for name, entry in files.items()}.items() <= digests(toy_int4).items()
    assert all(entry["nbytes"] == (toy_int4 / name).stat().st_size for name, entry in files.items())


def test_convert_returns_the_manifest(toy: Path, tmp_path: Path) -> None:
    """The returned manifest is the one in the folder."""
    manifest = quantkit.convert(toy, tmp_path / "out")

    assert (tmp_path / "out" / "quantkit.json").read_text() == manifest.to_json()
    assert manifest.total_bytes == sum(group.nbytes for group in manifest.groups)
    assert manifest.source.total_bytes == sum(group.source_bytes for group in manifest.groups)


def test_preview_predicts_the_sizes(toy: Path, tmp_path: Path) -> None:
    """A dry run names the exact bytes that the conversion then writes."""
    predicted = quantkit.preview(toy)

    manifest = quantkit.convert(toy, tmp_path / "out")

    assert (predicted.total_bytes, predicted.num_tensors) == (manifest.total_bytes, manifest.num_tensors)
    assert predicted.file_bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))


def test_side_files(make_toy: Callable[..., Path], tmp_path: Path) -> None:
    """Tokenizer, templates, configs, code and licence go along byte for byte; old weights and indexes do not."""
    source = make_toy()
    wanted = (
        "chat_template.jinja",
        "generation_config.json",
        "modeling_x.py",
        "LICENSE",
        "tokenizer.model",
        "tokenizer.json",
    )
    unwanted = ("pytorch_model.bin", "hf_quant_config.json", "old.gguf", "pytorch_model.bin.index.json", "README.md")
    for name in (*wanted, *unwanted):
        (source / name).write_bytes(name.encode() + b"\r\n\xff")
    (source / "original").mkdir()
    (source / "original" / "consolidated.pth").write_bytes(b"x")

    quantkit.convert(source, tmp_path / "out")

    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in wanted)
    assert not [name for name in (*unwanted, "original") if (tmp_path / "out" / name).exists()]


def test_symlinked_cache_is_read_through(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """A snapshot of links into a blob folder converts alike, its output holds no links, and the blobs stay."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(toy.iterdir())):
        blob = tmp_path / "blobs" / str(number)
        blob.write_bytes(path.read_bytes())
        blob.chmod(0o444)
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..") / "blobs" / str(number))
    before = digests(tmp_path / "blobs")

    quantkit.convert(tmp_path / "snapshot", tmp_path / "out")

    assert digests(tmp_path / "blobs") == before
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]
    shards = {name: digest for name, digest in digests(toy_int4).items() if name.endswith(".safetensors")}
    assert shards.items() <= digests(tmp_path / "out").items()


def test_group_of_zeros_decodes_to_zeros(make_toy: Callable[..., Path], tmp_path: Path) -> None:
    """A group of zeros comes out as zeros with a sound scale."""

    def zeros(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT].view(torch.uint8)[7, 32:64] = torch.tensor([0x00, 0x80] * 16, dtype=torch.uint8)

    source = make_toy(zeros)
    quantkit.convert(source, tmp_path / "out")

    output = load(tmp_path / "out")
    assert not int4.unpack(output[f"{EXPERT}_packed"])[7, 32:64].any()
    assert output[f"{EXPERT}_scale"][7, 1] == 2.0**-126
    assert quantkit.verify(tmp_path / "out", source).passed

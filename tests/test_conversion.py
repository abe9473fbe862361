"""`convert`: what comes out, that nothing else changes, and that nothing is half-written."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import quantkit
from quantkit.conversion import Options
from quantkit.errors import OutputError, PlanError, QuantkitError, SourceError, UsageError
from quantkit.formats import fp8_block, int4
from quantkit.recipe import Mtp, Rest, ScaleMethod

ToyMaker = Callable[..., Path]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
ATTENTION = "model.layers.1.self_attn.o_proj.weight"


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in tensors, f"{name} is in two shards"
            tensors[name] = tensor
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())


def tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_routed_experts_become_int4(toy: Path, toy_int4: Path) -> None:
    """Every routed expert, the MTP layer's included, has the reference's packed codes, scales and shape."""
    source, output = load(toy), load(toy_int4)
    experts = [name for name in source if ".mlp.experts." in name and name.endswith(".weight")]

    assert len(experts) == 2 * 4 * 3
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
    assert sum(name.endswith("_packed") for name in output) == (0 if recipe == "bf16" else 24)


@pytest.mark.parametrize("group_size", [64, 128])
def test_group_size_option(toy: Path, tmp_path: Path, group_size: int) -> None:
    """--group-size changes the scales' number and the config, and verify agrees."""
    quantkit.convert(toy, tmp_path / "out", options=Options(group_size=group_size))

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == group_size
    assert load(tmp_path / "out")[f"{EXPERT}_scale"].shape == (128, 256 // group_size)
    assert quantkit.verify(tmp_path / "out", toy).passed


def test_scale_option_lowers_the_error(toy: Path, tmp_path: Path) -> None:
    """On Gaussian weights search has at most .87 of plain rounding's squared error and signed search at most .75; each
    passes verify, and the manifest says which it was."""
    errors = {}
    for method in ScaleMethod:
        manifest = quantkit.convert(toy, tmp_path / method, options=Options(scale=method))
        result = quantkit.verify(tmp_path / method, toy)
        assert result.passed
        assert manifest.recipe["rules"][0]["scale"] == method
        errors[method] = next(error.relative_rms**2 for error in result.errors if error.role == "routed_expert")

    assert errors[ScaleMethod.SEARCH] <= 0.87 * errors[ScaleMethod.MINMAX]
    assert errors[ScaleMethod.SIGNED] <= 0.75 * errors[ScaleMethod.MINMAX]
    scales = load(tmp_path / "signed")[f"{EXPERT}_scale"]
    assert 0.3 < (scales < 0).float().mean() < 0.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float_source(make_toy: ToyMaker, tmp_path: Path, dtype: torch.dtype) -> None:
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


def test_groups_over_block_borders(make_toy: ToyMaker, tmp_path: Path) -> None:
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


def test_mtp_keep(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """--mtp keep leaves the MTP layer's experts as the rest is, with a config that each engine resolves to that."""
    source, default = load(toy), load(toy_int4)
    for rest in Rest:
        quantkit.convert(toy, tmp_path / rest, options=Options(mtp=Mtp.KEEP, rest=rest))
        output = load(tmp_path / rest)
        name = "model.layers.2.mlp.experts.1.up_proj.weight"
        decoded = fp8_block.dequantize(source[name], source[f"{name}_scale_inv"])
        assert same(output[name], source[name] if rest is Rest.FP8 else decoded)
        assert same(output[f"{EXPERT}_packed"], default[f"{EXPERT}_packed"])
        assert quantkit.verify(tmp_path / rest, toy).passed


def test_mtp_drop(toy: Path, tmp_path: Path) -> None:
    """--mtp drop leaves out exactly the MTP layer's tensors, sets the config's count to 0, and verify knows of it."""
    quantkit.convert(toy, tmp_path / "out", "bf16", options=Options(mtp=Mtp.DROP))

    kept = {name for name in load(toy) if not name.endswith("_scale_inv") and ".layers.2." not in name}
    assert load(tmp_path / "out").keys() == kept
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (toy, tmp_path / "out"))
    del before["quantization_config"]
    assert after == before | {"num_nextn_predict_layers": 0}
    assert quantkit.verify(tmp_path / "out", toy).passed


def test_rest_option_equals_the_recipe(toy: Path, tmp_path: Path) -> None:
    """--rest bf16 gives the tensors of the recipe with a BF16 rest."""
    quantkit.convert(toy, tmp_path / "option", options=Options(rest=Rest.BF16))
    quantkit.convert(toy, tmp_path / "recipe", "glm-5.2-int4-bf16rest")

    shards = [name for name in tree(tmp_path / "option") if name.endswith(".safetensors")]
    assert len(shards) == 2
    for name in (*shards, "config.json", "model.safetensors.index.json"):
        assert tree(tmp_path / "option")[name] == tree(tmp_path / "recipe")[name]


def test_bytes_do_not_depend_on_workers(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """One, two and five threads write the same shards."""
    for workers in (1, 5):
        quantkit.convert(toy, tmp_path / str(workers), workers=workers)
        ours, theirs = tree(tmp_path / str(workers)), tree(toy_int4)
        assert {name: digest for name, digest in ours.items() if name != "quantkit.json"} == {
            name: digest for name, digest in theirs.items() if name != "quantkit.json"
        }


def test_pieces_do_not_change_bytes(toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cut into many pieces at block borders come out as if read whole."""
    monkeypatch.setattr("quantkit.checkpoint.pieces.PIECE_BYTES", 20_000)

    quantkit.convert(toy, tmp_path / "out")

    shards = {name: digest for name, digest in tree(toy_int4).items() if name.endswith(".safetensors")}
    assert shards.items() <= tree(tmp_path / "out").items()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_source_sharding_does_not_matter(make_toy: ToyMaker, toy_int4: Path, tmp_path: Path, num_shards: int) -> None:
    """The same tensors come out wherever weights and scales lie."""
    quantkit.convert(make_toy(num_shards=num_shards), tmp_path / "out")

    ours, theirs = load(tmp_path / "out"), load(toy_int4)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)


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

    assert files.keys() == tree(toy_int4).keys() - {"quantkit.json"}
    assert {name: entry["sha256"] for name, entry in files.items()}.items() <= tree(toy_int4).items()
    assert all(entry["nbytes"] == (toy_int4 / name).stat().st_size for name, entry in files.items())


def test_convert_returns_the_manifest(toy: Path, tmp_path: Path) -> None:
    """The returned manifest is the one in the folder."""
    manifest = quantkit.convert(toy, tmp_path / "out")

    assert (tmp_path / "out" / "quantkit.json").read_text() == manifest.to_json()
    assert manifest.total_bytes == sum(group.nbytes for group in manifest.groups)
    assert manifest.source["total_bytes"] == sum(group.source_bytes for group in manifest.groups)


def test_preview_predicts_the_sizes(toy: Path, tmp_path: Path) -> None:
    """A dry run names the exact bytes that the conversion then writes."""
    predicted = quantkit.preview(toy)

    manifest = quantkit.convert(toy, tmp_path / "out")

    assert (predicted.total_bytes, predicted.num_tensors) == (manifest.total_bytes, manifest.num_tensors)
    assert predicted.file_bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))


def test_side_files(make_toy: ToyMaker, tmp_path: Path) -> None:
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
    before = tree(tmp_path / "blobs")

    quantkit.convert(tmp_path / "snapshot", tmp_path / "out")

    assert tree(tmp_path / "blobs") == before
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]
    shards = {name: digest for name, digest in tree(toy_int4).items() if name.endswith(".safetensors")}
    assert shards.items() <= tree(tmp_path / "out").items()


def _nan_in_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT].view(torch.uint8)[100, 17] = 0x7F


def _nan_in_attention(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ATTENTION].view(torch.uint8)[3, 5] = 0xFF


def _tiny_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}_scale_inv"][0, 1] = 1e-40


def _nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{ATTENTION}_scale_inv"][1, 0] = float("nan")


def _no_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERT}_scale_inv"]


def _floor_grid(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_nan_in_expert, EXPERT),
        (_nan_in_attention, ATTENTION),
        (_tiny_scale, f"{EXPERT}_scale_inv"),
        (_nan_scale, f"{ATTENTION}_scale_inv"),
        (_no_scale, EXPERT),
        (_floor_grid, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"),
    ],
)
def test_damaged_source_is_refused_by_name(
    make_toy: ToyMaker, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    """A NaN, an unsound or missing scale and a grid one row short are refused, and no folder that loads is left."""
    with pytest.raises(SourceError) as caught:
        quantkit.convert(make_toy(damage), tmp_path / "out")

    assert named in str(caught.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_group_of_zeros_decodes_to_zeros(make_toy: ToyMaker, tmp_path: Path) -> None:
    """A group of zeros comes out as zeros with a sound scale."""

    def zeros(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT].view(torch.uint8)[7, 32:64] = torch.tensor([0x00, 0x80] * 16, dtype=torch.uint8)

    source = make_toy(zeros)
    quantkit.convert(source, tmp_path / "out")

    output = load(tmp_path / "out")
    assert not int4.unpack(output[f"{EXPERT}_packed"])[7, 32:64].any()
    assert output[f"{EXPERT}_scale"][7, 1] == 2.0**-126
    assert quantkit.verify(tmp_path / "out", source).passed


def test_existing_output_is_refused(toy: Path, tmp_path: Path) -> None:
    """A folder with anything in it is left alone, even with overwrite if it is not quantkit's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("the only copy")

    for overwrite in (False, True):
        with pytest.raises(OutputError, match="out"):
            quantkit.convert(toy, tmp_path / "out", overwrite=overwrite)
    assert tree(tmp_path / "out").keys() == {"thesis.txt"}


def test_overwrite_keeps_the_old_output_until_the_plan_has_passed(toy: Path, tmp_path: Path) -> None:
    """An output of quantkit is replaced on request, but not by a run that is refused."""
    quantkit.convert(toy, tmp_path / "out", "bf16")
    before = tree(tmp_path / "out")
    with pytest.raises(QuantkitError):
        quantkit.convert(tmp_path / "missing", tmp_path / "out", overwrite=True)
    with pytest.raises(UsageError):
        quantkit.convert(toy, tmp_path / "out", "bf16", options=Options(group_size=32), overwrite=True)
    assert tree(tmp_path / "out") == before

    quantkit.convert(toy, tmp_path / "out", overwrite=True)

    assert quantkit.verify(tmp_path / "out", toy).passed


@pytest.mark.parametrize("place", [".", "inside", "..", "link"])
def test_output_that_overlaps_the_source_is_refused(make_toy: ToyMaker, tmp_path: Path, place: str) -> None:
    """The output may not be the source, lie inside it, hold it, or be a link to it; the source stays as it was."""
    source = make_toy(name="nest/toy")
    (source / "quantkit.json").write_text("{}")
    (tmp_path / "link").symlink_to(source)
    before = tree(source)

    with pytest.raises(OutputError):
        quantkit.convert(source, tmp_path / "link" if place == "link" else source / place, overwrite=True)

    assert tree(source) == before


def test_converted_source_is_refused(toy_int4: Path, tmp_path: Path) -> None:
    """An INT4 checkpoint is not converted again."""
    with pytest.raises(PlanError, match="already converted"):
        quantkit.convert(toy_int4, tmp_path / "out")


def test_failed_run_leaves_nothing_that_loads(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up gives an error with the file and a hint, and no partial file has a final name."""
    calls = []
    write = os.write

    def full(file: int, data: memoryview) -> int:
        calls.append(file)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("quantkit.checkpoint.writer.os.write", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        quantkit.convert(toy, tmp_path / "out", workers=1)

    assert caught.value.hint
    assert "model-0000" in str(caught.value)
    assert not (tmp_path / "out" / "config.json").exists()
    for path in (tmp_path / "out").glob("*.safetensors"):
        load_file(path)
    monkeypatch.undo()
    quantkit.convert(toy, tmp_path / "out", overwrite=True)
    assert quantkit.verify(tmp_path / "out", toy).passed


def test_full_disk(toy: Path, tmp_path: Path) -> None:
    """On a file system that is really full the run is refused or breaks off with an error, and nothing loads."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        with pytest.raises(OutputError, match="free"):
            quantkit.convert(toy, tmp_path / "out")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quantkit.checkpoint.writer._check_space", lambda *_: None)
            with pytest.raises(OutputError, match="No space left") as caught:
                quantkit.convert(toy, tmp_path / "out")
        assert caught.value.hint
        assert not (tmp_path / "out" / "config.json").exists()
        for path in (tmp_path / "out").glob("*.safetensors"):
            load_file(path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_many_shards_need_few_open_files(make_toy: ToyMaker, toy_int4: Path, tmp_path: Path) -> None:
    """A checkpoint in 100 shards converts, and verifies, with 64 open files allowed."""
    source = make_toy(num_shards=100)
    program = (
        "import resource, sys, quantkit; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "quantkit.convert(sys.argv[1], sys.argv[2]); sys.exit(not quantkit.verify(sys.argv[2], sys.argv[1]).passed)"
    )

    subprocess.run([sys.executable, "-c", program, source, tmp_path / "out"], check=True)

    ours, theirs = load(tmp_path / "out"), load(toy_int4)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)


def test_too_small_a_disk_is_refused_at_once(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space is checked before anything is written."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)

    with pytest.raises(OutputError, match="free"):
        quantkit.convert(toy, tmp_path / "out")
    assert not (tmp_path / "out").exists()

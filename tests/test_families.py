"""The tiny checkpoints of every family are what they say, and transformers knows their names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from families import FAMILIES, NAMES, config_of, fuse_experts, specs_of, storage_of, write_family
from storages import STORAGES
from truth import E2M1, E4M3, Array, numbers, read_tensors, truth

from quantkit.checkpoint.inventory import inventory
from quantkit.checkpoint.source import open_source
from quantkit.naming import Role, TensorName

Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Writes a checkpoint once; not to be changed."""
    root = tmp_path_factory.mktemp("families")
    return lambda name: root / name if (root / name).is_dir() else write_family(root / name, name)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model of a config where nothing is quantized."""
    tensors = inventory("toy", json.dumps({**config, "quantization_config": None})).tensors
    return {name: tensor.spec.shape for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_its_inventory(checkpoint: Maker, name: str) -> None:
    """The files hold the tensors that the config tells, in more than one shard, and each has a role."""
    source = open_source(checkpoint(name))
    specs = {tensor.spec for tensor in source.tensors.values()}

    assert specs == set(specs_of(name))
    if storage_of(name).experts == "apart" and storage_of(name).fp8_scale is None:
        assert specs == {tensor.spec for tensor in inventory(name, source.config_text).tensors.values()}
    assert Role.OTHER not in {TensorName.parse(name).role for name in source.tensors}
    assert len(source.shards) in (2, 3)
    assert source.warnings == ()


@pytest.mark.parametrize("name", NAMES)
def test_every_storage_decodes_to_the_same_names_and_to_sound_weights(checkpoint: Maker, name: str) -> None:
    """Weights have the names and shapes of the plain model; matrices spread by 0.02, norms are near 1."""
    weights = truth(checkpoint(name))

    plain = config_of(f"{name.rpartition('-')[0]}-bf16")
    assert {name: weight.shape for name, weight in weights.items()} == shapes(plain)
    for name, weight in weights.items():
        role = TensorName.parse(name).role
        if role is Role.NORM and name.endswith("weight"):
            assert 0.4 < weight.min() < 1 < weight.max() < 1.6
        elif weight.size >= 4096:
            assert 0.012 < weight.std() < 0.028
            assert np.abs(weight).max() < 0.2


def test_a_seed_gives_its_own_bytes(tmp_path: Path) -> None:
    """Two checkpoints of a seed are the same files; another seed gives other numbers in the same places."""
    name = "deepseek-v3-fp8_block"
    folders = [write_family(tmp_path / label, name, seed) for label, seed in (("a", 0), ("b", 0), ("c", 1))]

    first, again, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == again
    assert {file for file in first if first[file] != other[file]} == {f for f in first if f.endswith(".safetensors")}
    assert {file: len(data) for file, data in first.items()} == {file: len(data) for file, data in other.items()}


@pytest.mark.parametrize("name", ["glm-5.2-fp8_block", "glm-4.5-fp8_channel", "kimi-k2.5-int4"])
def test_scattered_checkpoints_tear_weights_from_scales_and_partners(checkpoint: Maker, name: str) -> None:
    """Some scales are in another shard than their weight, some gates in another than their up projection."""
    tensors = open_source(checkpoint(name)).tensors
    parsed = [TensorName.parse(name) for name in tensors]
    torn = [
        name
        for name in parsed
        if len({tensors[str(other)].shard for other in parsed if other.module == name.module}) > 1
    ]
    gates = [name for name in tensors if ".experts." in name and "gate_proj.weight" in name]

    assert torn
    assert any(tensors[gate].shard != tensors[gate.replace("gate_proj", "up_proj")].shard for gate in gates)


# --- the truth is true


def test_the_tables_of_bytes_are_torchs() -> None:
    """All bytes of E4M3 and E8M0, and all finite patterns of BF16, mean what torch takes them for."""
    every = torch.arange(256, dtype=torch.uint8)
    bits = np.array([bits for bits in range(65536) if bits & 0x7F80 != 0x7F80], "<u2")

    np.testing.assert_array_equal(E4M3, every.view(torch.float8_e4m3fn).double().numpy())
    np.testing.assert_array_equal(numbers("F8_E8M0", every.numpy()), every.view(torch.float8_e8m0fnu).double().numpy())
    bf16 = torch.from_numpy(bits.view("<i2")).view(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(numbers("BF16", bits), bf16)


def decompressed(folder: Path) -> dict[str, Array]:
    """Every quantized weight as compressed-tensors decodes it."""
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group, format=quantization["format"])
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, (dtype, data) in read_tensors(folder).items():
        tensor = torch.from_numpy(data.copy())
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor.view(kinds[dtype]) if dtype in kinds else tensor
    return {
        f"{module}.weight": compressor.decompress(tensors, scheme)["weight"].double().numpy()
        for module, tensors in modules.items()
        if "weight_scale" in tensors
    }


@pytest.mark.parametrize(
    "storage",
    [
        name
        for name, storage in STORAGES.items()
        if (storage.quantization or {}).get("quant_method") == "compressed-tensors" and name != "int4"
    ],
)
def test_the_truth_is_what_compressed_tensors_decodes(checkpoint: Maker, storage: str) -> None:
    """FP8, INT4 and NVFP4 come out as they do from the library of the format, which rounds to BF16."""
    folder = checkpoint(f"llama-{storage}")
    weights = truth(folder)
    theirs = decompressed(folder)

    assert len(theirs) == 2 * 7
    for name, weight in theirs.items():
        np.testing.assert_allclose(weight, weights[name], rtol=2**-7, atol=0, err_msg=name)


def test_modelopts_nvfp4_is_decoded_as_worked_out_by_hand(tmp_path: Path) -> None:
    """Low half first, times the block's scale, times the global one: byte 0xF2 is 1 and -6, scaled by 1.5 and 0.25."""
    folder = write_family(tmp_path / "toy", "llama-nvfp4_modelopt_w4a16")
    tensors, weights = read_tensors(folder), truth(folder)
    module = "model.layers.1.self_attn.v_proj"
    byte = tensors[f"{module}.weight"][1][3, 17]
    scale, factor = E4M3[tensors[f"{module}.weight_scale"][1][3, 2]], float(tensors[f"{module}.weight_scale_2"][1])

    assert weights[f"{module}.weight"][3, 34:36].tolist() == [
        E2M1[byte & 15] * scale * factor,
        E2M1[byte >> 4] * scale * factor,
    ]
    assert (E2M1[2], E2M1[15], E4M3[0x3C]) == (1, -6, 1.5)


# --- the names are true


@pytest.fixture
def no_remarks() -> Any:
    """Without the loaders' remarks."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.set_verbosity_warning()


def load(folder: Path, copy: Path) -> tuple[Any, dict[str, Any]]:
    """The checkpoint in transformers, and what it says of the names; Kimi K2's text model is a DeepSeek-V3 there."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(copy, dtype=torch.bfloat16, output_loading_info=True)
    return model, info


@pytest.mark.usefixtures("no_remarks")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_name(checkpoint: Maker, tmp_path: Path, family: str) -> None:
    """No parameter of the model is missing or of another shape, and only the MTP layer, which it has not, is left."""
    _, info = load(checkpoint(f"{family}-bf16"), tmp_path / "copy")

    assert (info["missing_keys"], info["mismatched_keys"]) == (set(), set())
    specs = fuse_experts(specs_of(f"{family}-bf16"))
    assert info["unexpected_keys"] == {spec.name for spec in specs if TensorName.parse(spec.name).is_mtp(2)}


@pytest.mark.usefixtures("no_remarks")
def test_transformers_holds_experts_in_3d_as_we_write_them(checkpoint: Maker, tmp_path: Path) -> None:
    """Fused by transformers, gate rows come before up rows; a checkpoint that stores them fused loads as it is."""
    apart, _ = load(checkpoint("glm-5.2-bf16"), tmp_path / "apart")
    fused, info = load(checkpoint("glm-5.2-fused3d"), tmp_path / "fused")

    prefix = "model.layers.1.mlp.experts"
    assert (info["missing_keys"], info["mismatched_keys"]) == (set(), set())
    for model, storage in ((apart, "bf16"), (fused, "fused3d")):
        weights = truth(checkpoint(f"glm-5.2-{storage}"))
        experts = model.model.layers[1].mlp.experts
        ours = np.concatenate([weights[f"{prefix}.3.{part}_proj.weight"] for part in ("gate", "up")])
        np.testing.assert_array_equal(experts.gate_up_proj[3].detach().double().numpy(), ours)
        ours = weights[f"{prefix}.3.down_proj.weight"]
        np.testing.assert_array_equal(experts.down_proj[3].detach().double().numpy(), ours)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek-v3", {"q_lora_rank": None}),
        ("deepseek-v3", {"attention_bias": True}),
        ("deepseek-v3", {"n_shared_experts": 2}),
        ("glm-4.5", {"attention_bias": False, "use_qk_norm": False}),
        ("glm-4.7-flash", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": None, "num_key_value_heads": None}),
        ("llama", {"head_dim": 48, "tie_word_embeddings": True}),
    ],
)
def test_every_option_of_a_config_is_transformers_own(family: str, changes: dict[str, Any]) -> None:
    """Biases, missing ranks, head sizes and tied embeddings change names and shapes as they do in transformers."""
    config = {**config_of(f"{family}-bf16"), "num_nextn_predict_layers": 0, **changes}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))

    tensors = [tensor.spec for tensor in inventory("toy", json.dumps(config)).tensors.values()]
    theirs = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    theirs |= {name: tuple(tensor.shape) for name, tensor in model.named_buffers() if "e_score" in name}
    assert {spec.name: spec.shape for spec in fuse_experts(tensors)} == theirs

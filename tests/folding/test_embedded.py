"""`fold --embed`: KV scales as tensors of the checkpoint, where engines look for them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.errors import FoldError
from quantkit.folding.report import Way
from quantkit.models import load
from quantkit.planning.fingerprint import fingerprint
from quantkit.runtime.scales import Numbers, scales_by_layer
from quantkit.verification import verify
from support.checkpoints import config_of
from support.families import write_family
from support.folds import SCALES
from support.runnable import write_runnable

pytestmark = pytest.mark.usefixtures("one_thread")


def common(layers: int = 2, prefix: str = "") -> dict[str, Numbers]:
    """One number for each layer, other than 1, and no parts."""
    return {
        f"{prefix}model.layers.{layer}.self_attn.{letter}_scale": 0.3 + layer
        for layer in range(layers)
        for letter in "kv"
    }


def test_embedded_scales_are_tensors_that_engines_look_for(tiny_fp8: Path, tmp_path: Path) -> None:
    """One pair for each layer under SGLang's names, F32 [1], and a config that says so; the weights are the source's.

    Our runtime and `verify` take them, and the cache means something else.
    """
    report = folding.fold(tiny_fp8, common(), tmp_path / "out", way=Way.EMBED)
    opened = open_source(tmp_path / "out")
    added = opened.tensors.keys() - open_source(tiny_fp8).tensors.keys()
    assert added == {
        f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale" for layer in range(2) for letter in "kv"
    }
    assert {(opened.tensors[name].spec.dtype, opened.tensors[name].spec.shape) for name in added} == {("F32", (1,))}
    quantization = config_of(tmp_path / "out")["quantization_config"]
    assert quantization["kv_cache_scheme"]["strategy"] == "tensor"
    assert {**quantization, "kv_cache_scheme": None} == {
        **config_of(tiny_fp8)["quantization_config"],
        "kv_cache_scheme": None,
    }
    decoder = load(tmp_path / "out")
    found = scales_by_layer(decoder.config, decoder.kv_scales, "the checkpoint")
    assert [round(layer.key, 6) for layer in found.layers] == [0.3, 1.3]
    assert any("trtllm_mla" in warning and "triton" in warning for warning in report.warnings)
    assert any("vLLM" in warning for warning in report.warnings)
    assert verify(tmp_path / "out", tiny_fp8).passed
    ids = {fingerprint(open_source(folder)).kv_space_id for folder in (tiny_fp8, tmp_path / "out")}
    assert len(ids) == 2
    with pytest.raises(FoldError, match="has embedded KV scales"):
        folding.fold(tmp_path / "out", SCALES, tmp_path / "both")


@pytest.mark.parametrize("change", ["value", "missing", "scheme"])
def test_verify_compares_embedded_scales(tiny_fp8: Path, tmp_path: Path, change: str) -> None:
    """Another number, one that is gone, or a config that does not name them."""
    folding.fold(tiny_fp8, common(), tmp_path / "out", way=Way.EMBED)
    path = tmp_path / "out" / "model-kv-scales.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    if change == "value":
        tensors[name] *= 2
    elif change == "missing":
        del tensors[name]
        index = tmp_path / "out" / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())
        del weight_map["weight_map"][name]
        index.write_text(json.dumps(weight_map))
    else:
        config = config_of(tmp_path / "out")
        config["quantization_config"]["kv_cache_scheme"] = None
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)

    words = {
        "value": f"{name} is 0.6; quantkit.json says 0.3",
        "missing": f"{name} is missing",
        "scheme": "kv_cache_scheme",
    }
    found = {check.name: check.examples for check in verify(tmp_path / "out", tiny_fp8).checks}
    assert any(words[change] in text for text in found["kv scales"])


def test_kimi_gets_its_prefix(tmp_path: Path) -> None:
    """Names under `language_model.`, and the scheme where Kimi's config keeps its quantization."""
    folder = write_runnable(tmp_path / "c", "kimi-k2.5-int4")
    folding.fold(folder, common(prefix="language_model."), tmp_path / "out", way=Way.EMBED)

    names = open_source(tmp_path / "out").tensors.keys() - open_source(folder).tensors.keys()
    assert min(names) == "language_model.model.layers.0.self_attn.k_proj.k_scale"
    text = config_of(tmp_path / "out")["text_config"]
    assert text["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert text | {"quantization_config": None} == config_of(folder)["text_config"] | {"quantization_config": None}
    assert verify(tmp_path / "out", folder).passed


def test_one_file_becomes_two_and_an_index(tiny_fp8: Path, tmp_path: Path) -> None:
    """A loader that prefers model.safetensors to an index must not miss the scales."""
    single = tmp_path / "single"
    single.mkdir()
    tensors = {name: tensor for path in tiny_fp8.glob("model-*") for name, tensor in load_file(path).items()}
    save_file(tensors, single / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(tiny_fp8 / "config.json", single)
    folding.fold(single, common(), tmp_path / "out", way=Way.EMBED)

    assert open_source(tmp_path / "out").shards == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert verify(tmp_path / "out", single).passed


def test_embedding_needs_a_quantization_config(tmp_path: Path) -> None:
    """Engines do not look for scales in a plain checkpoint; nor are scales written twice."""
    folder = write_runnable(tmp_path / "plain", "glm-5.2-bf16")
    with pytest.raises(FoldError, match="has no quantization_config") as caught:
        folding.fold(folder, common(), tmp_path / "out", way=Way.EMBED)
    assert "leave --embed out" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_modelopt_says_it_in_its_own_file_too(tmp_path: Path) -> None:
    """`hf_quant_config.json` is what ModelOpt's readers look at first."""
    folder = write_family(tmp_path / "c", "llama-modelopt_fp8")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}')
    report = folding.fold(folder, common(), tmp_path / "out", way=Way.EMBED)

    told = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert told["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert report.warnings

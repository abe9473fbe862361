"""The headers made from a published GLM config are those of the published model."""

import json
from collections import Counter
from typing import Any

import pytest

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.families.inventory import inventory
from quantkit.naming import Role, TensorName
from support.headers import config_of, layers_with, published, specs_below

# after the published layout: every Linear for each channel, activations for each token, routers and head left out
CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3, 93))],
}
FULL_LAYERS_OF_GLM_5_2 = [0, 1, 2, *range(6, 75, 4)]


@pytest.fixture
def glm() -> Source:
    """GLM-5.2-FP8 from its alias."""
    return published("glm-5.2")


def test_glm_5_2_fp8_has_the_published_totals(glm: Source) -> None:
    """118,629 tensors with 755,617,140,416 bytes, as the index of the Hub repository says."""
    assert len(glm.tensors) == 118_629
    assert glm.nbytes == 755_617_140_416


def test_glm_5_2_fp8_has_the_published_dtypes(glm: Source) -> None:
    """FP8 weights with a scale each, the router's bias of 76 sparse layers and the scales in F32, all else BF16."""
    counts = Counter(tensor.spec.dtype for tensor in glm.tensors.values())
    biases = [name for name in glm.tensors if name.endswith("e_score_correction_bias")]

    # per layer 5 attention projections, 22 indexers of 2, 3 dense MLPs and 76 shared experts of 3, 19,456 experts of 3
    fp8 = 79 * 5 + 22 * 2 + 3 * 3 + 76 * 3 + 19_456 * 3
    assert counts == {"F8_E4M3": fp8, "F32": fp8 + 76, "BF16": 118_629 - 2 * fp8 - 76}
    assert len(biases) == 76
    assert {glm.tensors[name].spec for name in biases} == {TensorSpec(name, "F32", (256,)) for name in biases}


@pytest.mark.parametrize(
    ("module", "weight", "scale"),
    [
        ("self_attn.q_a_proj", (2048, 6144), (16, 48)),
        ("self_attn.kv_a_proj_with_mqa", (576, 6144), (5, 48)),
        ("self_attn.q_b_proj", (16384, 2048), (128, 16)),
        ("self_attn.kv_b_proj", (28672, 512), (224, 4)),
        ("self_attn.o_proj", (6144, 16384), (48, 128)),
        ("self_attn.indexer.wq_b", (4096, 2048), (32, 16)),
        ("self_attn.indexer.wk", (128, 6144), (1, 48)),
        ("mlp.experts.255.down_proj", (6144, 2048), (48, 16)),
        ("mlp.shared_experts.up_proj", (2048, 6144), (16, 48)),
    ],
)
def test_glm_5_2_fp8_has_the_published_scale_shapes(
    glm: Source, module: str, weight: tuple[int, int], scale: tuple[int, int]
) -> None:
    """Weights and scales of a sparse layer and of the MTP layer have the shapes read from the published headers."""
    for layer in (6, 78):
        assert specs_below(glm, f"model.layers.{layer}.{module}") == {
            "weight": ("F8_E4M3", weight),
            "weight_scale_inv": ("F32", scale),
        }


def test_glm_5_2_shares_its_indexers_as_published(glm: Source) -> None:
    """21 of the 78 layers carry an indexer, 0, 1, 2, 6, 10 to 74, and the MTP layer has its own."""
    assert layers_with(glm, ".indexer.") == [*FULL_LAYERS_OF_GLM_5_2, 78]
    assert len(FULL_LAYERS_OF_GLM_5_2) == 21


def test_glm_5_2_has_dense_sparse_and_mtp_layers_as_published(glm: Source) -> None:
    """Layers 0 to 2 are dense, 3 to 78 have 256 experts, and only layer 78 has the MTP tensors."""
    assert layers_with(glm, ".mlp.gate_proj.") == [0, 1, 2]
    assert layers_with(glm, ".mlp.experts.255.") == list(range(3, 79))
    assert layers_with(glm, ".mlp.experts.256.") == []
    assert specs_below(glm, "model.layers.78.eh_proj") == {"weight": ("BF16", (6144, 12288))}
    mtp = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert mtp <= specs_below(glm, "model.layers.78").keys()
    assert specs_below(glm, "model.layers.77").keys().isdisjoint(mtp)


def test_glm_5_2_in_bf16_has_the_published_number_of_tensors() -> None:
    """Without `quantization_config` the same model is 59,585 tensors of 1,506.66 GB, none of them FP8."""
    config = json.loads(config_of("glm-5.2"))
    del config["quantization_config"]
    source = inventory("glm-5.2-bf16", json.dumps(config))

    assert len(source.tensors) == 59_585
    assert round(source.nbytes / 1e9, 2) == 1506.66
    assert {tensor.spec.dtype for tensor in source.tensors.values()} == {"BF16", "F32"}


def test_every_published_name_is_understood(glm: Source) -> None:
    """No tensor of GLM-5.2 has the role `other` (one expert stands for all), and each tensor's place is its own."""
    names = [name for name in glm.tensors if ".experts." not in name or ".experts.255." in name]
    assert Role.OTHER not in {TensorName.parse(name).role for name in names}
    places = {(tensor.shard, tensor.offset) for tensor in glm.tensors.values()}
    assert len(places) == len(glm.tensors)


def test_glm_4_has_kv_heads_biases_and_norms() -> None:
    """GLM-4.x has 96 query and 8 KV heads of 128; q, k and v have a bias, q and k a norm."""
    attention = specs_below(published("glm-4.7"), "model.layers.5.self_attn")

    assert attention == {
        "q_proj.weight": ("BF16", (12288, 5120)),
        "q_proj.bias": ("BF16", (12288,)),
        "k_proj.weight": ("BF16", (1024, 5120)),
        "k_proj.bias": ("BF16", (1024,)),
        "v_proj.weight": ("BF16", (1024, 5120)),
        "v_proj.bias": ("BF16", (1024,)),
        "o_proj.weight": ("BF16", (5120, 12288)),
        "q_norm.weight": ("BF16", (128,)),
        "k_norm.weight": ("BF16", (128,)),
    }


def test_glm_4s_mtp_layer_has_its_own_embedding_and_head() -> None:
    """GLM-4.x repeats embedding and head in its MTP layer, unlike GLM-5.x."""
    source = published("glm-4.5-air")

    vocabulary = ("BF16", (151552, 4096))
    mtp = specs_below(source, "model.layers.46")
    assert (mtp["embed_tokens.weight"], mtp["shared_head.head.weight"]) == (vocabulary, vocabulary)
    assert not layers_with(source, "q_norm")


@pytest.mark.exhaustive
def test_nvfp4_has_two_codes_in_a_byte_and_a_scale_for_16() -> None:
    """A ModelOpt weight is U8 with FP8 scales and two numbers for the whole; what the config ignores is BF16."""
    source = published("nvidia-glm-5.2-nvfp4")

    assert specs_below(source, "model.layers.3.mlp.experts.0.gate_proj") == {
        "weight": ("U8", (2048, 3072)),
        "weight_scale": ("F8_E4M3", (2048, 384)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }
    assert specs_below(source, "model.layers.78.mlp.experts.0.gate_proj") == {"weight": ("BF16", (2048, 6144))}


def test_glm_4_5_fp8_has_a_scale_for_each_row() -> None:
    """GLM-4.5 to 4.7 come in compressed-tensors' FP8 for each channel, MTP too, with a plain router and head."""
    source = inventory("glm-4.5-fp8", json.dumps(json.loads(config_of("glm-4.5")) | {"quantization_config": CHANNELS}))

    assert specs_below(source, "model.layers.92.mlp.experts.159.down_proj") == {
        "weight": ("F8_E4M3", (5120, 1536)),
        "weight_scale": ("BF16", (5120, 1)),
    }
    assert specs_below(source, "model.layers.0.self_attn.k_proj") == {
        "weight": ("F8_E4M3", (1024, 5120)),
        "weight_scale": ("BF16", (1024, 1)),
        "bias": ("BF16", (1024,)),
    }
    plain = {TensorName.parse(name).role for name, tensor in source.tensors.items() if tensor.spec.dtype == "BF16"}
    assert {Role.ROUTER, Role.LM_HEAD, Role.EMBEDDING, Role.MTP_PROJECTION} < plain
    weights = {name for name, tensor in source.tensors.items() if tensor.spec.dtype == "F8_E4M3"}
    assert weights == {name.removesuffix("_scale") for name in source.tensors if name.endswith(".weight_scale")}
    assert len(weights) == 93 * 4 + 3 * 3 + 90 * 3 + 90 * 160 * 3

"""The headers made from a config alone are those of the published models."""

import gc
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.inventory import inventory
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.naming import Role, TensorName
from quantkit.recipe import find_alias

# A GLM with a ragged block in every place where one can be: one dense layer, two sparse ones and the MTP layer.
TOY: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 320,
    "intermediate_size": 448,
    "moe_intermediate_size": 192,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 160,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 96,
    "vocab_size": 1000,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
CONFIGS = Path(__file__).parent / "fixtures" / "configs"
FULL_LAYERS_OF_GLM_5_2 = [0, 1, 2, *range(6, 75, 4)]


def toy(**changes: Any) -> Source:
    """The toy's headers with some keys changed; a key set to `...` is left out."""
    config = {key: value for key, value in {**TOY, **changes}.items() if value is not ...}
    return inventory("toy", json.dumps(config))


def layers_with(source: Source, part: str) -> list[int]:
    """The layers that hold a tensor with `part` in its name."""
    names = [TensorName.parse(name) for name in source.tensors if part in name]
    return sorted({name.layer for name in names if name.layer is not None})


def specs_below(source: Source, module: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor below `module`, by the rest of its name."""
    return {
        name.removeprefix(f"{module}."): (tensor.spec.dtype, tensor.spec.shape)
        for name, tensor in source.tensors.items()
        if name.startswith(f"{module}.")
    }


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """The published headers are half a million objects; looking for garbage in them takes longer than making them."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def published() -> Source:
    """GLM-5.2-FP8 from its alias."""
    alias = find_alias("glm-5.2")
    assert alias is not None
    return inventory("glm-5.2", alias.config_text)


def test_glm_5_2_fp8_has_the_published_totals(published: Source) -> None:
    """118,629 tensors with 755,617,140,416 bytes, as the index of the Hub repository says."""
    assert len(published.tensors) == 118_629
    assert published.nbytes == 755_617_140_416


def test_glm_5_2_fp8_has_the_published_dtypes(published: Source) -> None:
    """FP8 weights with a scale each, the router's bias of 76 sparse layers and the scales in F32, all else BF16."""
    counts = Counter(tensor.spec.dtype for tensor in published.tensors.values())
    biases = [name for name in published.tensors if name.endswith("e_score_correction_bias")]

    # per layer 5 attention projections, 22 indexers of 2, 3 dense MLPs and 76 shared experts of 3, 19,456 experts of 3
    fp8 = 79 * 5 + 22 * 2 + 3 * 3 + 76 * 3 + 19_456 * 3
    assert counts == {"F8_E4M3": fp8, "F32": fp8 + 76, "BF16": 118_629 - 2 * fp8 - 76}
    assert len(biases) == 76
    assert {published.tensors[name].spec for name in biases} == {TensorSpec(name, "F32", (256,)) for name in biases}


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
    published: Source, module: str, weight: tuple[int, int], scale: tuple[int, int]
) -> None:
    """Weights and scales of a sparse layer and of the MTP layer have the shapes read from the published headers."""
    for layer in (6, 78):
        assert specs_below(published, f"model.layers.{layer}.{module}") == {
            "weight": ("F8_E4M3", weight),
            "weight_scale_inv": ("F32", scale),
        }


def test_glm_5_2_shares_its_indexers_as_published(published: Source) -> None:
    """21 of the 78 layers carry an indexer, 0, 1, 2, 6, 10 to 74, and the MTP layer has its own."""
    assert layers_with(published, ".indexer.") == [*FULL_LAYERS_OF_GLM_5_2, 78]
    assert len(FULL_LAYERS_OF_GLM_5_2) == 21


def test_glm_5_2_has_dense_sparse_and_mtp_layers_as_published(published: Source) -> None:
    """Layers 0 to 2 are dense, 3 to 78 have 256 experts, and only layer 78 has the MTP tensors."""
    assert layers_with(published, ".mlp.gate_proj.") == [0, 1, 2]
    assert layers_with(published, ".mlp.experts.255.") == list(range(3, 79))
    assert layers_with(published, ".mlp.experts.256.") == []
    assert specs_below(published, "model.layers.78.eh_proj") == {"weight": ("BF16", (6144, 12288))}
    mtp = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert mtp <= specs_below(published, "model.layers.78").keys()
    assert specs_below(published, "model.layers.77").keys().isdisjoint(mtp)


def test_glm_5_2_in_bf16_has_the_published_number_of_tensors() -> None:
    """Without `quantization_config` the same model is 59,585 tensors of 1,506.66 GB, none of them FP8."""
    alias = find_alias("glm-5.2")
    assert alias is not None
    config = json.loads(alias.config_text)
    del config["quantization_config"]
    source = inventory("glm-5.2-bf16", json.dumps(config))

    assert len(source.tensors) == 59_585
    assert round(source.nbytes / 1e9, 2) == 1506.66
    assert {tensor.spec.dtype for tensor in source.tensors.values()} == {"BF16", "F32"}


def test_every_published_name_is_understood(published: Source) -> None:
    """No tensor of GLM-5.2 has the role `other` (one expert stands for all), and each tensor's place is its own."""
    names = [name for name in published.tensors if ".experts." not in name or ".experts.255." in name]
    assert Role.OTHER not in {TensorName.parse(name).role for name in names}
    places = {(tensor.shard, tensor.offset) for tensor in published.tensors.values()}
    assert len(places) == len(published.tensors)


def test_a_dense_layer_is_made_of_these_tensors() -> None:
    """Shapes follow from the config by hand, and a started block of 128 counts as a whole one."""
    assert specs_below(toy(), "model.layers.0") == {
        "input_layernorm.weight": ("BF16", (320,)),
        "post_attention_layernorm.weight": ("BF16", (320,)),
        "self_attn.q_a_proj.weight": ("F8_E4M3", (160, 320)),
        "self_attn.q_a_proj.weight_scale_inv": ("F32", (2, 3)),
        "self_attn.q_a_layernorm.weight": ("BF16", (160,)),
        "self_attn.q_b_proj.weight": ("F8_E4M3", (192, 160)),  # 3 heads of 48 + 16
        "self_attn.q_b_proj.weight_scale_inv": ("F32", (2, 2)),
        "self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", (144, 320)),  # 128 + 16
        "self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", (2, 3)),
        "self_attn.kv_a_layernorm.weight": ("BF16", (128,)),
        "self_attn.kv_b_proj.weight": ("F8_E4M3", (240, 128)),  # 3 heads of 48 + 32
        "self_attn.kv_b_proj.weight_scale_inv": ("F32", (2, 1)),
        "self_attn.o_proj.weight": ("F8_E4M3", (320, 96)),  # 3 heads of 32
        "self_attn.o_proj.weight_scale_inv": ("F32", (3, 1)),
        "self_attn.indexer.wq_b.weight": ("F8_E4M3", (192, 160)),  # 2 heads of 96
        "self_attn.indexer.wq_b.weight_scale_inv": ("F32", (2, 2)),
        "self_attn.indexer.wk.weight": ("F8_E4M3", (96, 320)),
        "self_attn.indexer.wk.weight_scale_inv": ("F32", (1, 3)),
        "self_attn.indexer.weights_proj.weight": ("BF16", (2, 320)),
        "self_attn.indexer.k_norm.weight": ("BF16", (96,)),
        "self_attn.indexer.k_norm.bias": ("BF16", (96,)),
        "mlp.gate_proj.weight": ("F8_E4M3", (448, 320)),
        "mlp.gate_proj.weight_scale_inv": ("F32", (4, 3)),
        "mlp.up_proj.weight": ("F8_E4M3", (448, 320)),
        "mlp.up_proj.weight_scale_inv": ("F32", (4, 3)),
        "mlp.down_proj.weight": ("F8_E4M3", (320, 448)),
        "mlp.down_proj.weight_scale_inv": ("F32", (3, 4)),
    }


def test_a_sparse_layer_has_router_shared_and_routed_experts() -> None:
    """The router is BF16 with an F32 bias, the shared expert is as wide as two, and each expert is its own three."""
    mlp = specs_below(toy(), "model.layers.1.mlp")

    assert {name: spec for name, spec in mlp.items() if name.startswith(("gate.", "shared_experts."))} == {
        "gate.weight": ("BF16", (4, 320)),
        "gate.e_score_correction_bias": ("F32", (4,)),
        "shared_experts.gate_proj.weight": ("F8_E4M3", (384, 320)),
        "shared_experts.gate_proj.weight_scale_inv": ("F32", (3, 3)),
        "shared_experts.up_proj.weight": ("F8_E4M3", (384, 320)),
        "shared_experts.up_proj.weight_scale_inv": ("F32", (3, 3)),
        "shared_experts.down_proj.weight": ("F8_E4M3", (320, 384)),
        "shared_experts.down_proj.weight_scale_inv": ("F32", (3, 3)),
    }
    assert len(mlp) == 8 + 4 * 3 * 2
    assert mlp["experts.3.gate_proj.weight"] == ("F8_E4M3", (192, 320))
    assert mlp["experts.3.down_proj.weight_scale_inv"] == ("F32", (3, 2))


def test_the_mtp_layer_is_a_sparse_layer_and_four_more() -> None:
    """The MTP layer holds what the layer before it holds, and its two norms, projection and head norm."""
    source = toy()
    sparse, mtp = specs_below(source, "model.layers.2"), specs_below(source, "model.layers.3")

    assert sparse.items() <= mtp.items()
    assert {name: mtp[name] for name in mtp.keys() - sparse.keys()} == {
        "enorm.weight": ("BF16", (320,)),
        "hnorm.weight": ("BF16", (320,)),
        "eh_proj.weight": ("BF16", (320, 640)),
        "shared_head.norm.weight": ("BF16", (320,)),
    }


def test_the_top_is_embedding_norm_and_head() -> None:
    """Outside the layers there are three tensors, in a shard of their own; each layer has a shard."""
    source = toy()
    top = {name: tensor.spec.shape for name, tensor in source.tensors.items() if ".layers." not in name}

    assert top == {"model.embed_tokens.weight": (1000, 320), "model.norm.weight": (320,), "lm_head.weight": (1000, 320)}
    assert len(source.shards) == 1 + 3 + 1
    assert (source.name, source.folder, source.num_hidden_layers) == ("toy", None, 3)


@pytest.mark.parametrize("count", [None, 0, ...], ids=["null", "0", "missing"])
def test_a_model_without_mtp_has_no_mtp_layer(count: Any) -> None:
    """`num_nextn_predict_layers` of null or 0, or none at all, leaves the main layers as they are."""
    source = toy(num_nextn_predict_layers=count)

    assert layers_with(source, "input_layernorm") == [0, 1, 2]
    assert source.tensors.keys() < toy().tensors.keys()


def test_two_mtp_layers_are_two() -> None:
    """The number of MTP layers is the config's."""
    assert layers_with(toy(num_nextn_predict_layers=2), "eh_proj") == [3, 4]


@pytest.mark.parametrize(("frequency", "offset"), [(4, 3), (4, 2), (2, 1), (1, 0), (3, 0)])
def test_indexer_types_and_frequency_agree(frequency: int, offset: int) -> None:
    """A list of full and shared layers gives the same tensors as frequency and offset, which vLLM reads."""
    types = ["full" if max(layer - offset + 1, 0) % frequency == 0 else "shared" for layer in range(12)]
    keys = {"index_topk_freq": frequency, "index_skip_topk_offset": offset}

    by_list = toy(num_hidden_layers=12, indexer_types=types)
    by_frequency = toy(num_hidden_layers=12, **keys)
    assert by_list.tensors == by_frequency.tensors
    assert layers_with(by_list, ".indexer.") == [layer for layer in range(12) if types[layer] == "full"] + [12]


def test_glm_5_2s_frequency_and_offset_give_its_21_layers() -> None:
    """A frequency of 4 with an offset of 3 is the published schedule, without the list."""
    source = toy(num_hidden_layers=78, n_routed_experts=1, index_topk_freq=4, index_skip_topk_offset=3)

    assert layers_with(source, ".indexer.") == [*FULL_LAYERS_OF_GLM_5_2, 78]


@pytest.mark.parametrize("keys", [{}, {"index_topk_freq": None, "index_skip_topk_offset": None, "indexer_types": None}])
def test_without_a_schedule_every_layer_has_an_indexer(keys: dict[str, Any]) -> None:
    """GLM-5 and 5.1 have no IndexShare keys: each layer carries its indexer."""
    assert layers_with(toy(**keys), ".indexer.") == [0, 1, 2, 3]


@pytest.mark.parametrize("quantization", [None, ..., {}], ids=["null", "missing", "empty"])
def test_a_model_that_is_not_quantized_is_bf16(quantization: Any) -> None:
    """Without a quantization in the config every weight is one BF16 tensor, and the bias stays F32."""
    source = toy(quantization_config=quantization)

    assert specs_below(source, "model.layers.0.self_attn.kv_a_proj_with_mqa") == {"weight": ("BF16", (144, 320))}
    counts = Counter(tensor.spec.dtype for tensor in source.tensors.values())
    assert counts["F32"] == 3
    assert set(counts) == {"BF16", "F32"}


def test_another_block_size_is_the_configs() -> None:
    """Scale grids follow `weight_block_size`."""
    source = toy(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 32]})

    assert source.tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].spec.shape == (3, 10)


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "first_k_dense_replace",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
        "vocab_size",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    """A config that lacks a size that shapes need is refused by the name of the model and of the key."""
    with pytest.raises(SourceError, match=f"toy: .*{key}"):
        toy(**{key: ...})


def test_a_schedule_for_fewer_layers_is_refused() -> None:
    """`indexer_types` that does not cover the layers is a SourceError, not a layer without an indexer."""
    with pytest.raises(SourceError, match=r"toy: .*config"):
        toy(indexer_types=["full", "shared"])


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "320"), ("n_routed_experts", None), ("v_head_dim", -32)])
def test_a_size_that_is_none_is_refused(key: str, value: Any) -> None:
    """A size that is no positive number is a SourceError that names the model, whatever it is."""
    with pytest.raises(SourceError, match=r"toy: .*config"):
        toy(**{key: value})


@pytest.mark.parametrize("model_type", ["llama", "glm5_next", "", None, ...])
def test_an_unknown_model_type_is_refused(model_type: Any) -> None:
    """The message names the model and its type; the hint says which are known and what to give instead."""
    with pytest.raises(SourceError, match=r"toy: .*model type") as caught:
        toy(model_type=model_type)

    assert repr(None if model_type is ... else model_type) in str(caught.value)
    assert caught.value.hint is not None
    assert "glm_moe_dsa" in caught.value.hint
    assert "folder" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"glm_moe_dsa"'])
def test_text_that_is_no_config_is_refused(text: str) -> None:
    """A config.json that is not a JSON object is a SourceError, as it is for a folder."""
    with pytest.raises(SourceError, match="toy: config"):
        inventory("toy", text)


# --- other families and other kinds of storage


def config_of(model: str) -> str:
    """The published config of a model: an alias, or a file of the fixtures."""
    alias = find_alias(model)
    return alias.config_text if alias else (CONFIGS / f"{model}.json").read_text()


@pytest.mark.parametrize(
    ("model", "tensors", "nbytes"),
    [
        ("glm-5.2", 118_629, 755_617_140_416),
        ("nvidia-glm-5.2-nvfp4", 232_385, 464_795_267_072),
        ("kimi-k2.6", 208_550, 595_148_192_736),
        ("kimi-k2.5", 208_550, 595_148_192_736),
    ],
)
def test_published_totals_are_exact(model: str, tensors: int, nbytes: int) -> None:
    """FP8 blocks, NVFP4 and native INT4 with a vision tower have the published number of tensors and bytes."""
    source = inventory(model, config_of(model))

    assert (len(source.tensors), source.nbytes) == (tensors, nbytes)


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [("kimi-k2-thinking", 594.2), ("kimi-k2-instruct", 1029.2), ("glm-4.5", 716.7), ("glm-5", 1507.7)],
)
def test_published_sizes_come_out(model: str, gigabytes: float) -> None:
    """Where only a size is published, it is ours to its last digit."""
    assert round(inventory(model, config_of(model)).nbytes / 1e9, 1) == gigabytes


def test_glm_4_has_kv_heads_biases_and_norms() -> None:
    """GLM-4.x has 96 query and 8 KV heads of 128; q, k and v have a bias, q and k a norm."""
    attention = specs_below(inventory("glm-4.7", config_of("glm-4.7")), "model.layers.5.self_attn")

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
    source = inventory("glm-4.5-air", config_of("glm-4.5-air"))

    vocabulary = ("BF16", (151552, 4096))
    mtp = specs_below(source, "model.layers.46")
    assert (mtp["embed_tokens.weight"], mtp["shared_head.head.weight"]) == (vocabulary, vocabulary)
    assert not layers_with(source, "q_norm")


def test_kimi_is_int4_in_its_experts_only() -> None:
    """Native INT4 packs eight codes into a word with a BF16 scale for each 32; all else is BF16."""
    source = inventory("kimi-k2.6", config_of("kimi-k2.6"))

    assert specs_below(source, "language_model.model.layers.1.mlp.experts.383.down_proj") == {
        "weight_packed": ("I32", (7168, 256)),
        "weight_scale": ("BF16", (7168, 64)),
        "weight_shape": ("I32", (2,)),
    }
    packed = [TensorName.parse(name).role for name in source.tensors if name.endswith("weight_packed")]
    assert Counter(packed) == {Role.ROUTED_EXPERT: 60 * 384 * 3}
    assert source.num_hidden_layers == 61


def test_every_name_of_kimi_is_understood() -> None:
    """Behind the prefix `language_model.` and in the vision tower no tensor has the role `other`."""
    names = [
        name
        for name in inventory("kimi-k2.6", config_of("kimi-k2.6")).tensors
        if ".experts." not in name or ".experts.7." in name
    ]

    roles = Counter(TensorName.parse(name).role for name in names)
    assert roles[Role.VISION] == 335
    assert Role.OTHER not in roles


def test_nvfp4_has_two_codes_in_a_byte_and_a_scale_for_16() -> None:
    """A ModelOpt weight is U8 with FP8 scales and two numbers for the whole; what the config ignores is BF16."""
    source = inventory("nvfp4", config_of("nvidia-glm-5.2-nvfp4"))

    assert specs_below(source, "model.layers.3.mlp.experts.0.gate_proj") == {
        "weight": ("U8", (2048, 3072)),
        "weight_scale": ("F8_E4M3", (2048, 384)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }
    assert specs_below(source, "model.layers.78.mlp.experts.0.gate_proj") == {"weight": ("BF16", (2048, 6144))}


FP8_GROUP = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "block_structure": [128, 128]}}


def test_compressed_tensors_fp8_blocks_are_understood() -> None:
    """A config group of FP8 blocks gives `weight_scale`, and `ignore` takes modules out of it."""
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": FP8_GROUP},
        "ignore": ["re:.*kv_b_proj$"],
    }
    attention = specs_below(toy(quantization_config=quantization), "model.layers.0.self_attn")

    assert attention["kv_a_proj_with_mqa.weight_scale"] == ("F32", (2, 3))
    assert attention["kv_b_proj.weight"] == ("BF16", (240, 128))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt' FP8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_7": {
                        "targets": ["Linear"],
                        "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                    }
                },
            },
            "group_7 .*type float, num_bits 8, strategy channel",
        ),
    ],
    ids=["no groups", "awq", "modelopt fp8", "channel"],
)
def test_storage_that_is_not_understood_is_named(quantization: dict[str, Any], words: str) -> None:
    """Another quantization is refused by the name of its method or group, instead of being taken for BF16."""
    with pytest.raises(SourceError, match=f"toy: .*{words}"):
        toy(quantization_config=quantization)


def test_all_missing_keys_are_named() -> None:
    """A config that lacks several sizes is refused once, with all their names."""
    with pytest.raises(SourceError, match=r"toy: its config has no hidden_size, kv_lora_rank, index_head_dim,"):
        toy(hidden_size=..., kv_lora_rank=..., index_head_dim=...)


@pytest.mark.parametrize(
    ("model", "words"),
    [("glm-4.7-flash", "n_shared_experts"), ("glm-5.3", "model type None"), ("glm-5.3-flash", "'glm5_next'")],
)
def test_an_incomplete_config_is_refused_by_name(model: str, words: str) -> None:
    """What is published of these models does not say their tensors, and the message says what is missing."""
    with pytest.raises(SourceError, match=f"{model}: .*{words}"):
        inventory(model, config_of(model))

"""The headers made from a config alone follow from its sizes."""

import json
from collections import Counter
from typing import Any

import pytest

from quantkit.checkpoint.source import Source
from quantkit.engines.rules import Facts, Status, judge
from quantkit.errors import SourceError
from quantkit.families.inventory import inventory
from quantkit.weights.grouping import read_weights
from support.headers import layers_with, specs_below

# A GLM with a ragged block in every place where one can be: one dense layer, two sparse ones and the MTP layer.
TOY: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
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
FULL_LAYERS_OF_GLM_5_2 = [0, 1, 2, *range(6, 75, 4)]


def toy(**changes: Any) -> Source:
    """The toy's headers with some keys changed; a key set to `...` is left out."""
    config = {key: value for key, value in {**TOY, **changes}.items() if value is not ...}
    return inventory("toy", json.dumps(config))


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


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({"index_topk_freq": 4}, [0, 1, 5, 9, 12]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": None}, [0, 1, 5, 9, 12]),
        ({"index_topk_pattern": "FSSFSSFSSFSS", "index_topk_freq": 4}, [0, 3, 6, 9, 12]),
        ({"index_topk_pattern": "FSSS"}, [0, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    ],
)
def test_a_schedule_is_read_as_the_engines_read_it(keys: dict[str, Any], full: list[int]) -> None:
    """A pattern comes before the frequency, whose offset is 2 unless a number is given; no rule finds a layer that has
    an indexer and should have none."""
    source = toy(num_hidden_layers=12, **keys)

    assert layers_with(source, ".indexer.") == full
    facts = Facts.of(source, read_weights(source))
    found = [each for each in judge(facts) if each.rule.id == "surplus-indexer" and each.status is Status.BROKEN]
    assert found == []


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


@pytest.mark.parametrize("model_type", ["deepseek_v4", "glm5_next", "", None, ...])
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


def test_all_missing_keys_are_named() -> None:
    """A config that lacks several sizes is refused once, with all their names."""
    with pytest.raises(SourceError, match=r"toy: its config has no hidden_size, kv_lora_rank, index_head_dim,"):
        toy(hidden_size=..., kv_lora_rank=..., index_head_dim=...)


@pytest.mark.parametrize("frequency", [1, 2])
def test_sparse_layers_come_at_their_frequency(frequency: int) -> None:
    """`moe_layer_freq` counts from layer 0; the layers between are dense, as the first are."""
    source = toy(num_hidden_layers=6, num_nextn_predict_layers=0, moe_layer_freq=frequency)

    sparse = [layer for layer in range(1, 6) if layer % frequency == 0]
    assert layers_with(source, ".experts.") == sparse
    assert layers_with(source, ".mlp.gate_proj.") == [layer for layer in range(6) if layer not in sparse]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("value", "dtype"), [("float16", "F16"), ("float32", "F32"), ("bfloat16", "BF16")])
def test_what_is_not_quantized_has_the_dtype_of_the_config(key: str, value: str, dtype: str) -> None:
    """Norms, embeddings and plain weights are in the config's dtype, under both names of the key; FP8 is untouched."""
    source = toy(**{key: value})

    assert {tensor.spec.dtype for tensor in source.tensors.values()} == {"F8_E4M3", "F32", dtype}
    assert source.tensors["model.norm.weight"].spec.dtype == dtype
    assert source.tensors["model.layers.1.mlp.gate.e_score_correction_bias"].spec.dtype == "F32"
    assert source.tensors["model.layers.0.mlp.up_proj.weight"].spec.dtype == "F8_E4M3"


def test_tied_embeddings_are_stored_once() -> None:
    """`tie_word_embeddings` leaves the head out, and nothing else."""
    assert toy().tensors.keys() - toy(tie_word_embeddings=True).tensors.keys() == {"lm_head.weight"}

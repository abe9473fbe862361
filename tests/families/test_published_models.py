"""The headers made from a published config are those of the published model."""

import json
from collections import Counter
from math import prod
from typing import Any

import pytest

from quantkit.checkpoint.header import lay_out
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.families.inventory import inventory
from quantkit.naming import Role, TensorName
from support.headers import config_of, layers_with, published, specs_below
from support.tiers import exhaustive


@pytest.mark.parametrize(
    ("model", "tensors", "nbytes"),
    [
        ("glm-5.2", 118_629, 755_617_140_416),
        exhaustive("nvidia-glm-5.2-nvfp4", 232_385, 464_795_267_072),
        ("kimi-k2.6", 208_550, 595_148_192_736),
        exhaustive("kimi-k2.5", 208_550, 595_148_192_736),
    ],
)
def test_published_totals_are_exact(model: str, tensors: int, nbytes: int) -> None:
    """FP8 blocks, NVFP4 and native INT4 with a vision tower have the published number of tensors and bytes."""
    source = published(model)

    assert (len(source.tensors), source.nbytes) == (tensors, nbytes)


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [("glm-4.5", 716.7), *map(exhaustive, ("kimi-k2-thinking", "kimi-k2-instruct", "glm-5"), (594.2, 1029.2, 1507.7))],
)
def test_published_sizes_come_out(model: str, gigabytes: float) -> None:
    """Where only a size is published, it is ours to its last digit."""
    assert round(published(model).nbytes / 1e9, 1) == gigabytes


def test_kimi_is_int4_in_its_experts_only() -> None:
    """Native INT4 packs eight codes into a word with a BF16 scale for each 32; all else is BF16."""
    source = published("kimi-k2.6")

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
    names = [name for name in published("kimi-k2.6").tensors if ".experts." not in name or ".experts.7." in name]

    roles = Counter(TensorName.parse(name).role for name in names)
    assert roles[Role.VISION] == 335
    assert Role.OTHER not in roles


@pytest.mark.parametrize(
    ("model", "words"),
    [("glm-4.7-flash", "n_shared_experts"), ("glm-5.3", "model type None"), ("glm-5.3-flash", "'glm5_next'")],
)
def test_an_incomplete_config_is_refused_by_name(model: str, words: str) -> None:
    """What is published of these models does not say their tensors, and the message says what is missing."""
    with pytest.raises(SourceError, match=f"{model}: .*{words}"):
        published(model)


def parameters(source: Source, part: str = "") -> int:
    """The numbers in the tensors with `part` in their name, scales included, as the Hub counts them."""
    return sum(prod(tensor.spec.shape) for name, tensor in source.tensors.items() if part in name)


@pytest.mark.exhaustive
def test_deepseek_v3_has_the_published_parameters() -> None:
    """671 B and 11.5 B more for MTP without its embedding and head (README_WEIGHTS.md); 684,531,386,000 on the Hub."""
    source = published("deepseek-v3")
    mtp = "model.layers.61."
    vocabulary = parameters(source, f"{mtp}embed_tokens") + parameters(source, f"{mtp}shared_head.head")

    assert parameters(source) == 684_531_386_000
    assert vocabulary == 2 * 129_280 * 7168
    plain = inventory("plain", json.dumps({**json.loads(config_of("deepseek-v3")), "quantization_config": None}))
    main = parameters(plain) - parameters(plain, mtp)
    assert main == 671_026_419_200
    assert 11.4e9 < parameters(plain, mtp) - vocabulary < 11.7e9
    assert parameters(source) - parameters(plain) == parameters(source, "_scale_inv")


def test_deepseek_v3s_mtp_layer_is_named_as_vllm_loads_it() -> None:
    """Beside a whole sparse layer: two norms, the projection, embedding, and a head with its norm (deepseek_mtp.py)."""
    source = published("deepseek-v3")
    sparse, mtp = (specs_below(source, f"model.layers.{layer}") for layer in (60, 61))

    assert sparse.items() <= mtp.items()
    assert {name: mtp[name] for name in mtp.keys() - sparse.keys()} == {
        "embed_tokens.weight": ("BF16", (129_280, 7168)),
        "enorm.weight": ("BF16", (7168,)),
        "hnorm.weight": ("BF16", (7168,)),
        "eh_proj.weight": ("BF16", (7168, 14336)),
        "shared_head.norm.weight": ("BF16", (7168,)),
        "shared_head.head.weight": ("BF16", (129_280, 7168)),
    }
    assert mtp["self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == ("F32", (5, 56))


def test_deepseek_v32_adds_an_indexer_to_every_layer() -> None:
    """DeepSeek-V3.2 is V3 with 64 index heads of 128 in all 61 layers and the MTP layer."""
    changes = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    old = published("deepseek-v3")
    new = inventory("deepseek-v3.2", json.dumps(json.loads(config_of("deepseek-v3")) | changes))

    assert old.tensors.keys() < new.tensors.keys()
    assert layers_with(new, ".indexer.") == list(range(62))
    assert specs_below(new, "model.layers.61.self_attn.indexer") == {
        "wq_b.weight": ("F8_E4M3", (8192, 1536)),
        "wq_b.weight_scale_inv": ("F32", (64, 12)),
        "wk.weight": ("F8_E4M3", (128, 7168)),
        "wk.weight_scale_inv": ("F32", (1, 56)),
        "weights_proj.weight": ("BF16", (64, 7168)),
        "k_norm.weight": ("BF16", (128,)),
        "k_norm.bias": ("BF16", (128,)),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layers", "nbytes"), [("0", 2_846_451_040), ("9", 17_066_593_104), ("10", 17_066_595_432)])
def test_kimi_k2_instructs_files_have_the_published_sizes(layers: str, nbytes: int) -> None:
    """A shard is a layer, the first one has the embedding too; each has 192 bytes more than ours in its header.

    Sizes as listed in https://github.com/ggml-org/llama.cpp/issues/14781: so all Linears but the router are FP8.
    """
    source = published("kimi-k2-instruct")
    parts = [f"model.layers.{layers}.", *(["model.embed_tokens."] if layers == "0" else [])]
    specs = [tensor.spec for name, tensor in source.tensors.items() if name.startswith(tuple(parts))]

    header, _ = lay_out(specs, "shard")
    assert len(header) + sum(spec.nbytes for spec in specs) + 192 == nbytes


LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("changes", "tensors", "total"), [({}, 291, 8_030_261_248), (LLAMA_1B, 146, 1_235_814_400)], ids=["8b", "1b"]
)
def test_llama_has_the_published_parameters(changes: dict[str, Any], tensors: int, total: int) -> None:
    """Llama 3.1 8B has a head of its own, Llama 3.2 1B shares the embedding: 8.03 B and 1.24 B parameters."""
    source = inventory("llama", json.dumps(json.loads(config_of("llama-3.1-8b")) | changes))

    assert (len(source.tensors), parameters(source)) == (tensors, total)

"""The fixture `glm-tiny-fp8` keeps what its README promises: trained, every part of use, stored as published."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from glm_tiny import measure
from safetensors import safe_open
from torch import Tensor

FIXTURES = Path(__file__).parent / "fixtures"
FOLDER = FIXTURES / "glm-tiny-fp8"
MTP_PREFIX = "model.layers.4."
SCALE = "_scale_inv"

BFLOAT16 = re.compile(
    r"(model\.embed_tokens|lm_head|model\.norm|\w*layernorm|mlp\.gate|indexer\.weights_proj|enorm|hnorm|eh_proj"
    r"|shared_head\.norm)\.weight$|indexer\.k_norm\.(weight|bias)$"
)
FLOAT8 = re.compile(
    r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)\.weight$|indexer\.(wq_b|wk)\.weight$"
    r"|mlp\.(\w+\.)*(gate|up|down)_proj\.weight$"
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return parsed


@pytest.fixture(scope="module")
def headers() -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and shard of each stored tensor."""
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - the handle cannot be iterated
                piece = shard.get_slice(name)
                found[name] = (piece.get_dtype(), tuple(piece.get_shape()), path.name)
    return found


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = measure.read_published(FOLDER)
    return tensors


@pytest.fixture(scope="module")
def model(published: dict[str, Tensor]) -> Any:
    return measure.build(FOLDER, published)


@pytest.fixture(scope="module")
def windows() -> Any:
    """Every eleventh window of the held-out text, 40 in all: a part of many documents."""
    full = measure.read_windows(FOLDER)
    return measure.Windows(full.tokens[::11][:40], full.byte_lengths[::11][:40])


@pytest.fixture(scope="module")
def score(model: Any, windows: Any) -> Any:
    return measure.evaluate(model, windows)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts as transformers holds them: gate_up [E, 2 * intermediate, hidden], down [E, hidden, ...]."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in tensors if ".mlp.experts." in name}):
        names = [[f"{layer}.experts.{e}.{p}_proj.weight" for p in ("gate", "up", "down")] for e in range(16)]
        fused[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat((tensors[g], tensors[u])) for g, u, _ in names])
        fused[f"{layer}.experts.down_proj"] = torch.stack([tensors[d] for _, _, d in names])
    return fused


def test_fits_into_twelve_megabytes() -> None:
    """The whole folder, text and tokenizer included, is at most 12 MB."""
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 12_000_000


def test_config_has_the_publishers_keys(config: dict[str, Any]) -> None:
    """The configuration names the family, and its indexer types follow from frequency and offset as in GLM-5.2."""
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    derived = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(config["num_hidden_layers"])]
    assert config["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert config["indexer_types"] == derived
    assert set(derived) == {"full", "shared"}
    assert config["index_topk"] * 4 <= measure.WINDOW
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    excluded = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.self_attn.indexers_proj" in excluded


def test_tensors_have_the_publishers_dtypes_and_shapes(headers: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    """FP8 weights carry one F32 scale per started block of 128 x 128; the router bias is F32, all else BF16."""
    for name, (dtype, shape, _) in headers.items():
        if name.endswith(SCALE):
            assert name.removesuffix(SCALE) in headers
            assert dtype == "F32"
        elif name.endswith("e_score_correction_bias"):
            assert (dtype, shape) == ("F32", (16,))
        elif FLOAT8.search(name):
            assert dtype == "F8_E4M3"
            assert headers[f"{name}{SCALE}"][1] == tuple(-(-size // 128) for size in shape)
        else:
            assert BFLOAT16.search(name), name
            assert dtype == "BF16"
    assert headers[f"{MTP_PREFIX}self_attn.kv_a_proj_with_mqa.weight"][1] == (144, 256)
    assert headers[f"{MTP_PREFIX}self_attn.kv_a_proj_with_mqa.weight{SCALE}"][1] == (2, 2)


def test_shared_layers_carry_no_indexer(
    config: dict[str, Any], headers: dict[str, tuple[str, tuple[int, ...], str]]
) -> None:
    """Indexer tensors exist exactly on full layers and on the MTP layer."""
    layers = {int(name.split(".")[2]) for name in headers if ".indexer." in name}
    full = {i for i, kind in enumerate(config["indexer_types"]) if kind == "full"}
    assert layers == full | {config["num_hidden_layers"]}


def test_index_matches_the_shards(headers: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    """The index names each tensor's shard and the sum of all tensors' bytes."""
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    width = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    sizes = [width[dtype] * torch.Size(shape).numel() for dtype, shape, _ in headers.values()]
    assert index["weight_map"] == {name: shard for name, (_, _, shard) in headers.items()}
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len(set(index["weight_map"].values())) == 3


def test_scales_stray_in_both_directions(headers: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    """Some scales lie in a later shard than their weight and some in an earlier one, experts' and attention's too."""
    later, earlier = set(), set()
    for name, (_, _, shard) in headers.items():
        if name.endswith(SCALE):
            home = headers[name.removesuffix(SCALE)][2]
            later |= {name} if shard > home else set()
            earlier |= {name} if shard < home else set()
    for strays in (later, earlier):
        assert any(".mlp.experts." in name for name in strays)
        assert any(".self_attn." in name for name in strays)


def test_gate_and_up_are_parted(headers: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    """An expert's gate and up projection lie in different shards at each of the two cuts."""
    gates = [name for name in headers if ".mlp.experts." in name and name.endswith(".gate_proj.weight")]
    assert sum(headers[name][2] != headers[name.replace(".gate_", ".up_")][2] for name in gates) == 2


def test_tokenizer_round_trip(windows: Any) -> None:
    """transformers loads the tokenizer, counts as the fixture's own code does, and decodes to the same bytes."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = (FOLDER / "heldout.txt").read_bytes().decode()[:40_000] + "naïve\t  ☃\r\n\r\n<|user|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[:256] == measure.read_windows(FOLDER).tokens[0].tolist()
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "[gMASK]<sop><|user|>\nHi<|assistant|>\n"


def test_logits_equal_transformers(
    config: dict[str, Any], published: dict[str, Tensor], model: Any, windows: Any
) -> None:
    """The lean module computes transformers' logits; the tensors transformers does not expect are the MTP layer's."""
    transformers = pytest.importorskip("transformers")
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    reference_config = transformers.GlmMoeDsaConfig(**settings, attn_implementation="eager")
    reference = transformers.GlmMoeDsaForCausalLM(reference_config).float().eval()
    result = reference.load_state_dict(fuse_experts(published), strict=False)
    assert result.missing_keys == []
    assert set(result.unexpected_keys) == {name for name in fuse_experts(published) if name.startswith(MTP_PREFIX)}
    tokens = windows.tokens[:2]
    with torch.no_grad():
        ours, theirs = model(tokens, sparse=True).logits, reference(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_no_logit_sees_a_later_token(model: Any, windows: Any) -> None:
    """A changed token leaves all logits before it as they were, the MTP layer's before its embedding too."""
    tokens = windows.tokens[:1, :128]
    changed = tokens.clone()
    changed[0, 100:] = 7
    with torch.no_grad():
        before, after = model(tokens, sparse=True), model(changed, sparse=True)
    torch.testing.assert_close(after.logits[:, :100], before.logits[:, :100])
    torch.testing.assert_close(after.mtp_logits[:, :99], before.mtp_logits[:, :99])
    assert not torch.equal(after.mtp_logits[:, 99], before.mtp_logits[:, 99])


def test_it_has_learnt_the_text(score: Any) -> None:
    """With sparse attention on, the published weights need at most 1.65 bits per byte of text they have never seen."""
    assert score.bits_per_byte <= 1.65


def test_routed_experts_matter(published: dict[str, Tensor], windows: Any, score: Any) -> None:
    """Without its routed experts the model needs at least 0.4 bits per byte more."""
    zeroed = measure.build(FOLDER, measure.edit(published, ".mlp.experts.", torch.zeros_like))
    assert measure.evaluate(zeroed, windows).bits_per_byte >= score.bits_per_byte + 0.4


def test_indexers_are_trained(model: Any, windows: Any, score: Any) -> None:
    """Attending to the 64 selected tokens costs at most 0.05 bits per byte against attending to all."""
    dense = measure.evaluate(model, windows, sparse=False)
    assert score.bits_per_byte - dense.bits_per_byte <= 0.05


def test_every_expert_is_used(score: Any) -> None:
    """Every expert of every MoE layer, the MTP layer's included, receives tokens."""
    assert sorted(score.loads) == [1, 2, 3, 4]
    assert all(min(load) > 0 for load in score.loads.values())


def test_mtp_layer_is_trained(score: Any) -> None:
    """Two tokens ahead, the MTP layer needs less than half the bits of the order-0 byte model."""
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    assert score.mtp_bits_per_byte <= 0.5 * metrics["corpus"]["order_0_bits_per_byte"]
    assert score.mtp_accuracy >= 3 * metrics["mtp_unigram"]["accuracy"]

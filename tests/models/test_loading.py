"""Loading a checkpoint to run it: weights stay packed, each tensor has its place, and what does not fit is named."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.source import open_source
from quantkit.errors import SourceError, UsageError
from quantkit.models import Decoder, PlainCache, load
from quantkit.models.mla import Mla
from quantkit.models.moe import Moe
from quantkit.weights.encodings import FP8, INT4, NVFP4, PLAIN, Encoding
from support.runnable import Checkpoint, edit_config

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def changed(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint in one file, its tensors changed by a function."""

    def make(name: str, change: Callable[[Tensors], Any]) -> Path:
        folder = shutil.copytree(checkpoint(name), tmp_path / "changed")
        tensors: Tensors = {}
        for path in folder.glob("*.safetensors"):
            tensors |= load_file(path)
            path.unlink()
        (folder / "model.safetensors.index.json").unlink()
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def run(decoder: Decoder) -> torch.Tensor:
    """Logits of a few tokens."""
    return decoder.logits(decoder.forward(torch.arange(5, 25), torch.arange(20), PlainCache()))


def tensors_in(part: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a decoder, each once."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor) and value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            yield value
        elif is_dataclass(value):
            for item in fields(value):
                yield from walk(getattr(value, item.name))
        elif isinstance(value, dict | tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from walk(inner)

    return walk(part)


@pytest.mark.parametrize(
    ("name", "encoding", "dtype"),
    [
        ("glm-5.2-fp8_block", FP8, torch.float8_e4m3fn),
        ("glm-5.2-fp8_channel", FP8, torch.float8_e4m3fn),
        ("glm-5.2-int4", INT4, torch.int32),
        ("glm-5.2-nvfp4", NVFP4, torch.uint8),
        ("glm-5.2-nvfp4_modelopt", NVFP4, torch.uint8),
        ("glm-5.2-fused3d", PLAIN, torch.bfloat16),
        ("glm-5.2-f16", PLAIN, torch.float16),
    ],
)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_experts_stay_packed_and_stacked(
    checkpoint: Checkpoint, name: str, encoding: Encoding, dtype: torch.dtype, compute: torch.dtype
) -> None:
    """[E, ...] for each projection, in the stored dtype whatever is computed in."""
    moe = load(checkpoint(name), compute).layers[1].mlp

    assert isinstance(moe, Moe)
    for stack, shape in ((moe.gate, (256, 128)), (moe.up, (256, 128)), (moe.down, (128, 256))):
        assert stack.encoding is encoding
        assert stack.shape == shape
        assert stack.codes.dtype is dtype
        assert len(stack.codes) == 4


@pytest.mark.parametrize(
    "name", ["glm-5.2-fp8_block", "glm-5.2-nvfp4", "kimi-k2-thinking-int4", "llama-bf16", "llama-tied-bf16"]
)
def test_a_decoder_takes_the_checkpoints_bytes(checkpoint: Checkpoint, name: str) -> None:
    """In the dtype of its plain tensors exactly as many, but for kv_b, which is decoded, and INT4's `weight_shape`."""
    decoder = load(checkpoint(name))
    source = open_source(checkpoint(name))

    expected = 0
    for tensor in source.tensors.values():
        is_kv_b = ".kv_b_proj." in tensor.spec.name and ".layers.2." not in tensor.spec.name  # 2: the MTP layer
        expected += 0 if is_kv_b or tensor.spec.name.endswith("weight_shape") else tensor.spec.nbytes
    for layer in decoder.layers:
        if isinstance(layer.attention, Mla):
            expected += layer.attention.key_up.nbytes + layer.attention.value_up.nbytes
    assert sum(tensor.nbytes for tensor in tensors_in(decoder)) == expected


def test_mtp_is_read_and_listed(checkpoint: Checkpoint) -> None:
    """All weights of the layer after the last, and no others."""
    decoder = load(checkpoint("deepseek-v3-fp8_block"))

    assert all(name.startswith("model.layers.2.") for name in decoder.mtp)
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.down_proj.weight"} <= decoder.mtp.keys()
    assert not any(name.endswith(("_scale_inv", "_packed")) for name in decoder.mtp)
    assert decoder.passed == ()


def test_what_is_not_needed_is_listed(checkpoint: Checkpoint) -> None:
    """A vision tower, and static scales of activations."""
    vision = load(checkpoint("kimi-k2.5-int4")).passed
    static = load(checkpoint("llama-fp8_tensor_static")).passed

    assert len(vision) > 20
    assert all(name.startswith(("vision_tower.", "mm_projector.")) for name in vision)
    assert len(static) == 14
    assert all(name.endswith(".input_scale") for name in static)


def test_kv_scales_are_handed_over(changed: Callable[..., Path]) -> None:
    """By name, for the runtime to use or to refuse; one that is no scale is refused here."""
    name = "model.layers.0.self_attn.k_proj.k_scale"
    folder = changed("glm-5.2-bf16", lambda tensors: tensors.update({name: torch.tensor([0.5])}))

    assert load(folder).kv_scales == {name: 0.5}

    save_file(load_file(folder / "model.safetensors") | {name: torch.tensor([0.0])}, folder / "model.safetensors")
    with pytest.raises(SourceError, match=r"k_scale is 0\.0"):
        load(folder)


def remove(name: str) -> Callable[[Tensors], Any]:
    """Removes a tensor."""
    return lambda tensors: tensors.pop(name)


def cut(name: str) -> Callable[[Tensors], Any]:
    """Leaves the last row of a tensor away."""
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


def add(name: str, *shape: int) -> Callable[[Tensors], Any]:
    """Adds a tensor of ones."""
    return lambda tensors: tensors.update({name: torch.ones(shape)})


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("glm-5.2-bf16", remove("model.layers.0.self_attn.q_b_proj.weight"), "q_b_proj.weight is missing"),
        ("glm-5.2-bf16", remove("model.layers.0.self_attn.indexer.k_norm.bias"), "k_norm.bias is missing"),
        ("glm-5.2-bf16", remove("model.layers.1.mlp.gate.e_score_correction_bias"), "correction_bias is missing"),
        ("glm-5.2-bf16", remove(EXPERT), "experts.2.up_proj.weight is missing"),
        ("llama-bf16", remove("lm_head.weight"), "lm_head.weight is missing"),
        ("glm-4.5-bf16", remove("model.layers.0.self_attn.q_proj.bias"), "q_proj.bias is missing"),
        ("llama-bf16", cut("model.norm.weight"), r"model.norm.weight is \[127\], not \[128\]"),
        ("glm-5.2-bf16", cut(EXPERT), r"up_proj.weight is \[255, 128\], not \[256, 128\]"),
        ("llama-bf16", add("model.layers.0.self_attn.q_proj.bias", 128), "q_proj.bias has no place in the model"),
        ("glm-5.2-bf16", add("model.layers.1.self_attn.indexer.wk.weight", 64, 128), "wk.weight has no place"),
        ("llama-bf16", add("model.layers.2.mlp.up_proj.lora_A", 4, 4), "lora_A has no place in the model"),
    ],
)
def test_tensors_must_be_those_of_the_config(
    changed: Callable[..., Path], name: str, change: Callable[[Tensors], Any], message: str
) -> None:
    """A missing, a misshapen and an unused tensor are named."""
    with pytest.raises(SourceError, match=message):
        load(changed(name, change))


def test_all_that_is_wrong_is_said_at_once(changed: Callable[..., Path]) -> None:
    """Before a byte of weights is read."""

    def change(tensors: Tensors) -> None:
        for layer in range(2):
            del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
        tensors |= {f"odd.{number:02}": torch.ones(1) for number in range(10)}

    with pytest.raises(SourceError) as caught:
        load(changed("llama-bf16", change))

    assert "model.layers.0.mlp.up_proj.weight is missing; model.layers.1.mlp.up_proj.weight is missing" in str(
        caught.value
    )
    assert "odd.05 has no place in the model; and 4 more" in str(caught.value)


def test_experts_of_a_layer_are_stored_alike(changed: Callable[..., Path]) -> None:
    """One plain expert among FP8 ones is refused by name: they are stacked."""

    def change(tensors: Tensors) -> None:
        tensors[EXPERT] = tensors[EXPERT].float().bfloat16()
        del tensors[f"{EXPERT}_scale_inv"]

    with pytest.raises(SourceError, match=r"experts.0.up_proj.weight \(fp8 128x128\) and .*2.up_proj.weight \(bf16\)"):
        load(changed("glm-5.2-fp8_block", change))


@pytest.mark.parametrize("stored", [False, True])
def test_tied_embeddings(changed: Callable[..., Path], checkpoint: Checkpoint, stored: bool) -> None:
    """With and without a copy of the embedding in the file the logits are the same, and it is kept once."""

    def change(tensors: Tensors) -> None:
        if stored:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    decoder = load(changed("llama-tied-bf16", change))

    assert torch.equal(run(decoder), run(load(checkpoint("llama-tied-bf16"))))
    assert decoder.head.weight.codes.data_ptr() == decoder.embedding.data_ptr()


def test_tied_embeddings_that_differ(changed: Callable[..., Path]) -> None:
    """An output layer of its own contradicts the config."""

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    with pytest.raises(SourceError, match=r"ties the embedding to the output layer, but lm_head\.weight is another"):
        load(changed("llama-tied-bf16", change))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-bf16", {"rms_norm_eps": None}, "has no rms_norm_eps"),
        ("llama-bf16", {"rope_theta": None}, "has no rope_theta"),
        ("glm-4.5-bf16", {"partial_rotary_factor": None}, "has no partial_rotary_factor"),
        ("deepseek-v3-bf16", {"routed_scaling_factor": None}, "has no routed_scaling_factor"),
        ("deepseek-v3-bf16", {"n_group": None}, "has no n_group"),
        ("glm-5.2-bf16", {"index_topk": None}, "has no index_topk"),
        ("glm-5.2-bf16", {"index_topk": 0}, "index_topk in config.json is 0, not a positive whole number"),
        ("glm-5.2-bf16", {"indexer_types": ["shared", "full"]}, "the first layer has no indexer"),
        ("llama-bf16", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ("deepseek-v3-bf16", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ("llama-bf16", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' cannot be run"),
        ("llama-bf16", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "no original_max_position_embeddings"),
        ("llama-bf16", {"model_type": "mamba"}, "model type 'mamba' cannot be run"),
    ],
)
def test_a_config_that_cannot_be_run(
    checkpoint: Checkpoint, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    """The key is named; nothing is guessed."""
    folder = shutil.copytree(checkpoint(name), tmp_path / "copy")
    edit_config(folder, lambda config: config.update(changes))

    with pytest.raises(SourceError, match=message):
        load(folder)


def test_float16_is_refused(checkpoint: Checkpoint) -> None:
    """Activations of these models do not fit its range."""
    with pytest.raises(UsageError, match=r"cannot be run in torch\.float16"):
        load(checkpoint("llama-bf16"), torch.float16)


def test_a_published_head_dim_is_not_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """GLM-5.2's config says 192, which is neither what is rotated nor a head's width."""
    folder = shutil.copytree(checkpoint("glm-5.2-bf16"), tmp_path / "copy")
    edit_config(folder, lambda config: config.update(head_dim=192))

    assert json.loads((folder / "config.json").read_text())["qk_rope_head_dim"] == 32
    assert torch.equal(run(load(folder)), run(load(checkpoint("glm-5.2-bf16"))))

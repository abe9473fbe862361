"""The fixture `kimi-tiny-int4` keeps what its README promises: trained, stored as published; and so do its variants."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from glm_tiny.measure import Windows, edit, read_windows
from glm_tiny.model import next_token_nats
from kimi_tiny import measure, variants
from model_reference import reference_logits, reference_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from truth import read_tensors, truth

import quantkit
from quantkit.checkpoint.inventory import inventory
from quantkit.compatibility.check import check_compatibility
from quantkit.models import PlainCache, load

FIXTURES = Path(__file__).parent / "fixtures"
FOLDER = FIXTURES / "kimi-tiny-int4"
PREFIX = "language_model."
EDITED = ("kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return parsed


@pytest.fixture(scope="module")
def long_windows() -> Windows:
    """Three windows of 1,024 tokens from different documents; the variants were not made on them."""
    full = read_windows(FOLDER, 1024)
    return Windows(full.tokens[20::40][:3], full.byte_lengths[20::40][:3])


@pytest.fixture(scope="module")
def short_windows() -> Windows:
    """Sixteen windows of 256 tokens, from all over the text."""
    full = read_windows(FOLDER)
    return Windows(full.tokens[::28][:16], full.byte_lengths[::28][:16])


def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    """Float32 logits [T, vocab] of quantkit's decoder for tokens [T]."""
    decoder = load(folder, torch.float32)
    return decoder.logits(decoder.forward(tokens, torch.arange(len(tokens)), PlainCache()))


def bits_per_byte(logits: Tensor, tokens: Tensor, byte_lengths: Tensor) -> float:
    """Of tokens [T] but the first, by logits [T, vocab]."""
    nats = next_token_nats(logits[None], tokens[None], 1).sum()
    return float(nats / math.log(2) / byte_lengths[1:].sum())


def write_deepseek(config: dict[str, Any], output: Path) -> Path:
    """The language model's numbers in float32 as the DeepSeek-V3 that it is, for transformers."""
    output.mkdir()
    text = {key: value for key, value in config["text_config"].items() if key != "quantization_config"}
    (output / "config.json").write_text(json.dumps(text | {"model_type": "deepseek_v3"}))
    tensors = {
        name.removeprefix(PREFIX): torch.from_numpy(values).float()
        for name, values in truth(FOLDER).items()
        if name.startswith(PREFIX)
    }
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


@pytest.fixture(scope="module")
def exact(long_windows: Windows) -> Tensor:
    """Logits of the first long window, [1024, vocab]."""
    return logits_of(FOLDER, long_windows.tokens[0])


def test_fits_into_seven_megabytes() -> None:
    """The whole folder is at most 7.2 MB, of which text and tokenizer are those of `glm-tiny-fp8`."""
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 7_200_000
    for name in ("tokenizer.json", "heldout.txt", "LICENSE"):
        assert (FOLDER / name).read_bytes() == (FIXTURES / "glm-tiny-fp8" / name).read_bytes()


def test_config_has_the_publishers_keys(config: dict[str, Any]) -> None:
    """The keys are those of Kimi K2.5; the quantization settings too, and YaRN's but its lengths. The tower's sizes,
    which are not the published ones, also stand under the names that engines read."""
    published = json.loads((FIXTURES / "configs" / "kimi-k2.5.json").read_text())
    assert config.keys() == published.keys()
    text, wanted = config["text_config"], published["text_config"]
    assert text.keys() == wanted.keys()
    assert config["vision_config"].keys() > published["vision_config"].keys()
    assert text["quantization_config"] == wanted["quantization_config"]
    lengths = {"factor": 8.0, "original_max_position_embeddings": 256}
    assert text["rope_scaling"] == wanted["rope_scaling"] | lengths


def test_tensors_are_those_that_the_config_tells() -> None:
    """Names, shapes and dtypes, vision tower included; the experts alone are INT4, the router's bias alone is F32."""
    stored = {name: (dtype, data.shape) for name, (dtype, data) in read_tensors(FOLDER).items()}
    told = inventory("kimi-tiny", (FOLDER / "config.json").read_text()).tensors
    assert stored == {name: (tensor.spec.dtype, tensor.spec.shape) for name, tensor in told.items()}
    dtypes = {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I32", "e_score_correction_bias": "F32"}
    assert all(dtype == dtypes.get(name.rpartition(".")[2], "BF16") for name, (dtype, _) in stored.items())
    assert {name.partition(".experts.")[1] for name in stored if name.endswith("_packed")} == {".experts."}


def test_quantkit_finds_nothing_wrong() -> None:
    """`verify` passes, `engines` sees no broken rule, and `inspect` names the method, which stands in `text_config`."""
    assert quantkit.verify(FOLDER).passed
    assert list(check_compatibility(FOLDER).findings()) == []
    assert quantkit.inspect(FOLDER).quantization == "compressed-tensors"


def test_gate_and_up_are_parted() -> None:
    """The cut between the two shards parts an expert's gate and up projection."""
    shards = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    gates = [name for name in shards if name.endswith(".gate_proj.weight_packed")]
    assert sum(shards[name] != shards[name.replace(".gate_", ".up_")] for name in gates) == 1


def test_bf16_copy_holds_the_same_numbers(tmp_path: Path) -> None:
    """`convert` to BF16 writes each weight's exact number, rounded once."""
    quantkit.convert(FOLDER, tmp_path / "bf16", "bf16")
    wanted, found = truth(FOLDER), truth(tmp_path / "bf16")
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        rounded = torch.from_numpy(values).float()
        if not name.endswith("e_score_correction_bias"):
            rounded = rounded.bfloat16().float()
        assert torch.equal(rounded, torch.from_numpy(found[name]).float()), name


def test_logits_equal_transformers(
    config: dict[str, Any], exact: Tensor, long_windows: Windows, tmp_path: Path
) -> None:
    """In float32, to positions beyond YaRN's original ones; quantkit's decoder and the lean module alike."""
    tokens = long_windows.tokens[0, :600]
    expected = reference_logits(reference_model(write_deepseek(config, tmp_path / "deepseek")), tokens)
    with torch.no_grad():
        lean = measure.build(FOLDER, measure.read_published(FOLDER))(tokens[None])[0]
    for actual in (exact[:600], lean):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_it_has_learnt_the_text(exact: Tensor, long_windows: Windows) -> None:
    """At most 1.6 bits per byte of text it has never seen, and no more beyond the positions YaRN started from."""
    tokens, sizes = long_windows.tokens[0], long_windows.byte_lengths[0]
    assert bits_per_byte(exact, tokens, sizes) <= 1.6
    assert bits_per_byte(exact[512:], tokens[512:], sizes[512:]) <= 1.6


def test_routed_experts_matter(short_windows: Windows) -> None:
    """Every expert of every MoE layer receives tokens; without them 0.2 bits per byte more are needed."""
    published = measure.read_published(FOLDER)
    whole = measure.evaluate(measure.build(FOLDER, published), short_windows)
    zeroed = measure.evaluate(measure.build(FOLDER, edit(published, ".mlp.experts.", torch.zeros_like)), short_windows)
    assert sorted(whole.loads) == [1, 2, 3, 4]
    assert all(min(load) > 0 for load in whole.loads.values())
    assert zeroed.bits_per_byte >= whole.bits_per_byte + 0.2


@pytest.fixture(scope="module", params=[0, 1])
def variant(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variants.hard_variant(FOLDER, tmp_path_factory.mktemp("kimi") / "hard", request.param)


def test_variant_computes_the_same(variant: Path, exact: Tensor, long_windows: Windows) -> None:
    """In float32, to 1e-4 of the largest logit."""
    actual = logits_of(variant, long_windows.tokens[0])
    assert (actual - exact).abs().max() <= 1e-4 * exact.abs().max()


def test_variant_is_hard_to_keep_in_fp8(variant: Path, long_windows: Windows) -> None:
    """On other text than it was made on: roped keys around 2,000, half of the latents' channels around .004."""
    for rows in variants.cached_rows(variant, long_windows.tokens[1]):
        rms = rows.latent.square().mean(0).sqrt().sort().values
        half = len(rms) // 2
        assert 1200 <= rows.rope.abs().max() <= 3000
        assert rms[0] >= variants.LATENT_RMS / variants.SPREAD / 1.5
        assert rms[half - 1] <= variants.LATENT_RMS * variants.SPREAD * 1.5
        assert rms[half] >= 0.1


def test_variant_differs_in_four_tensors_of_a_layer(variant: Path) -> None:
    """They and q_a_proj are float32, the factors no powers of two, all else is as it was, and the index fits."""
    before, after = (
        {n: t for s in sorted(f.glob("*.safetensors")) for n, t in load_file(s).items()} for f in (FOLDER, variant)
    )
    changed = {name for name, tensor in after.items() if not torch.equal(tensor.double(), before[name].double())}
    widened = {name for name, tensor in after.items() if tensor.dtype != before[name].dtype}
    attention = f"{PREFIX}model.layers.{{}}.self_attn.{{}}.weight"
    assert before.keys() == after.keys()
    assert changed == {attention.format(layer, module) for layer in range(5) for module in EDITED}
    assert widened == changed | {attention.format(layer, "q_a_proj") for layer in range(5)}
    for layer in range(5):
        name = attention.format(layer, "kv_a_layernorm")
        factors = after[name] / before[name].float()
        assert int((factors.frexp().mantissa != 0.5).sum()) == 64
    index = json.loads((variant / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert quantkit.verify(variant).passed

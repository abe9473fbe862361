"""Wrong numbers that users of other tools met and reported: the smallest input of each, and what must come out of it.

Missing modules and wrong configs are in `test_modules.py`, broken folders in `test_folders.py`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import quantkit
from quantkit.errors import QuantkitError, SourceError
from quantkit.recipe import Recipe
from support.checkpoints import DOWN, FP8, MLP, fp8_codes, normal, write
from support.plans import custom
from support.toys import Tensors
from support.truth import E2M1, E4M3, numbers, read_tensors, truth

LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"
FUSED_QKV_A = ("q_a_proj", "kv_a_proj_with_mqa")
KEEP_DOWN = custom("{modules: .*(gate|up)_proj, scheme: int4, group_size: 32, scale: minmax}")


def gate_and_up() -> Tensors:
    """What a recipe can make 4-bit beside the weight that a case is about."""
    return {f"{MLP}.{part}_proj.weight": normal(128, 128, seed=seed) for seed, part in enumerate(("gate", "up"))}


def refusal(source: Path, output: Path, recipe: str | Recipe) -> QuantkitError:
    """The error of a conversion that is refused; nothing that loads is left."""
    with pytest.raises(QuantkitError) as caught:
        quantkit.convert(source, output, recipe)
    assert not (output / "config.json").exists()
    return caught.value


# --- FP8 with a scale for each block


def test_fp8_weight_and_scale_in_different_shards(tmp_path: Path) -> None:
    """A converter that reads shard by shard lacks the scale, or goes on without it (ModelCloud/GPTQModel#2875)."""
    weight, scale = {f"{DOWN}.weight": fp8_codes(256, 384)}, {f"{DOWN}.weight_scale_inv": torch.rand(2, 3) + 0.5}
    layouts = {"after": (weight, scale), "before": (scale, weight), "beside": (weight | scale,)}
    for name, shards in layouts.items():
        quantkit.convert(write(tmp_path / name, *shards, quantization_config=FP8), tmp_path / f"{name}-out", "int4")

    beside = read_tensors(tmp_path / "beside-out")
    assert {name.rpartition(".")[2] for name in beside} == {"weight_packed", "weight_scale", "weight_shape"}
    for name in ("after", "before"):
        found = read_tensors(tmp_path / f"{name}-out")
        assert found.keys() == beside.keys()
        assert all(found[tensor][1].tobytes() == data.tobytes() for tensor, (_, data) in beside.items())


def test_fp8_rows_and_columns_that_are_no_multiple_of_the_block(tmp_path: Path) -> None:
    """Where blocks are counted by floor division, the last rows get another block's scale, or none (GPTQModel#2875)."""
    scale = 2.0 ** -torch.arange(12).reshape(3, 4)
    tensors = {f"{DOWN}.weight": fp8_codes(320, 448), f"{DOWN}.weight_scale_inv": scale}
    quantkit.convert(write(tmp_path / "source", tensors, quantization_config=FP8), tmp_path / "out", "bf16")

    rows, columns = np.ogrid[:320, :448]
    codes = E4M3[tensors[f"{DOWN}.weight"].view(torch.uint8).numpy()]
    expected = codes * scale.numpy()[rows // 128, columns // 128]
    np.testing.assert_array_equal(truth(tmp_path / "out")[f"{DOWN}.weight"], expected)


def test_fp8_scales_of_a_fused_pair_of_which_the_last_has_part_of_a_block(tmp_path: Path) -> None:
    """Counted over the stacked rows of q_a and kv_a, the last scale row is lost (vllm-project/vllm-ascend#15346)."""
    scales = {part: torch.rand(2, 2) for part in FUSED_QKV_A}
    tensors = gate_and_up() | {f"{ATTENTION}.{part}.weight_scale_inv": scale for part, scale in scales.items()}
    tensors[f"{ATTENTION}.q_a_proj.weight"] = fp8_codes(256, 256)
    tensors[f"{ATTENTION}.kv_a_proj_with_mqa.weight"] = fp8_codes(192, 256, seed=1)
    source = write(tmp_path / "source", tensors, model_type="glm_moe_dsa", quantization_config=FP8)
    quantkit.convert(source, tmp_path / "out", KEEP_DOWN)

    kept = read_tensors(tmp_path / "out")
    stacked = np.concatenate([kept[f"{ATTENTION}.{part}.weight_scale"][1] for part in scales])
    np.testing.assert_array_equal(stacked, np.concatenate([scale.numpy() for scale in scales.values()]))
    assert stacked.shape == (256 // 128 + 2, 2)  # rows 384 to 447 of the pair use the last
    assert quantkit.verify(tmp_path / "out", source).passed


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_powers_of_two(tmp_path: Path, dtype: torch.dtype) -> None:
    """Exponent bytes in a U8 tensor are multiplied with as if they were numbers (jundot/omlx#2159)."""
    scale = torch.tensor([[120, 127, 134]], dtype=torch.uint8).view(dtype)
    tensors = gate_and_up() | {f"{DOWN}.weight": fp8_codes(128, 384), f"{DOWN}.weight_scale_inv": scale}
    source = write(tmp_path / "source", tensors, quantization_config=FP8 | {"scale_fmt": "ue8m0"})
    quantkit.convert(source, tmp_path / "bf16", "bf16")
    quantkit.convert(source, tmp_path / "kept", KEEP_DOWN)

    expected = np.array([2.0**-7, 1, 2.0**7])
    codes = E4M3[tensors[f"{DOWN}.weight"].view(torch.uint8).numpy()]
    np.testing.assert_array_equal(truth(tmp_path / "bf16")[f"{DOWN}.weight"], codes * expected.repeat(128))
    stored = read_tensors(tmp_path / "kept")[f"{DOWN}.weight_scale"]
    assert (stored[0], stored[1].tolist()) == ("F32", [expected.tolist()])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("recipe", ["bf16", "int4", KEEP_DOWN], ids=["bf16", "int4", "keep"])
def test_scale_that_is_the_nan_of_powers_of_two(tmp_path: Path, dtype: torch.dtype, recipe: str | Recipe) -> None:
    """The byte 255 is no exponent but a NaN: taken for 2^128 or copied, it spoils its block (transformers#46763)."""
    scale = torch.tensor([[120, 255, 134]], dtype=torch.uint8).view(dtype)
    tensors = gate_and_up() | {f"{DOWN}.weight": fp8_codes(128, 384), f"{DOWN}.weight_scale_inv": scale}
    source = write(tmp_path / "source", tensors, quantization_config=FP8)

    assert f"{DOWN}.weight_scale_inv" in str(refusal(source, tmp_path / "out", recipe))


@pytest.mark.parametrize("leaf", ["weight_scale_inv", "weight_scale", "scale", None])
def test_fp8_scale_under_another_name_or_none(tmp_path: Path, leaf: str | None) -> None:
    """A loader that knows one spelling takes the scale for 1: weights 200 times too large (unslothai/unsloth#6978)."""
    scale = {f"{DOWN}.{leaf}": torch.full((1, 1), 2.0**-8)} if leaf else {}
    source = write(tmp_path / "source", {f"{DOWN}.weight": fp8_codes(128, 128)} | scale, quantization_config=FP8)
    if leaf in ("scale", None):
        error = refusal(source, tmp_path / "out", "bf16")
        assert f"{DOWN}.weight is FP8 and has no scale" in str(error)
        assert not (tmp_path / "out").exists()
        return
    quantkit.convert(source, tmp_path / "out", "bf16")

    codes = E4M3[fp8_codes(128, 128).view(torch.uint8).numpy()]
    np.testing.assert_array_equal(truth(tmp_path / "out")[f"{DOWN}.weight"], codes / 256)


# --- NVFP4

PARTNERS = {
    "gate and up": ("nvfp4", [f"{MLP}.gate_proj", f"{MLP}.up_proj"]),
    "q, k and v": ("nvfp4", [f"{ATTENTION}.{part}_proj" for part in "qkv"]),
    "gate and up, ModelOpt": ("nvfp4-modelopt", [f"{MLP}.gate_proj", f"{MLP}.up_proj"]),
    "q_a and kv_a, ModelOpt": ("nvfp4-modelopt", [f"{ATTENTION}.{part}" for part in FUSED_QKV_A]),
}


@pytest.mark.parametrize(("recipe", "modules"), PARTNERS.values(), ids=PARTNERS.keys())
def test_fused_weights_of_different_magnitudes(tmp_path: Path, recipe: str, modules: list[str]) -> None:
    """An engine takes the first part's global scale for all, which scales the others wrongly (llm-compressor#1869)."""
    tensors = {f"{module}.weight": normal(128, 128, seed=seed) for seed, module in enumerate(modules)}
    for largest, weight in zip((6, 18, 2), tensors.values(), strict=False):
        weight *= largest / weight.abs().max()
    source = write(tmp_path / "source", *({name: weight} for name, weight in tensors.items()))
    quantkit.convert(source, tmp_path / "out", recipe)

    stored, after = read_tensors(tmp_path / "out"), truth(tmp_path / "out")
    leaf = "weight_global_scale" if recipe == "nvfp4" else "weight_scale_2"
    (shared,) = {float(stored[f"{module}.{leaf}"][1].reshape(())) for module in modules}
    for module in modules:
        step = numbers(*stored[f"{module}.weight_scale"]) * (1 / shared if recipe == "nvfp4" else shared)
        before = tensors[f"{module}.weight"].double().numpy()
        error = np.abs(after[f"{module}.weight"] - before).reshape(*step.shape, 16)
        largest = np.abs(before).reshape(error.shape).max(-1)
        assert (error.max(-1) <= np.maximum(step, largest - 6 * step)).all()  # half the widest gap, or what is cut off
    assert quantkit.verify(tmp_path / "out", source).passed


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-modelopt"])
def test_order_and_convention_of_nvfp4(tmp_path: Path, recipe: str) -> None:
    """A global scale used upside down, or halves of bytes swapped, give fluent garbage (modular/modular#6600)."""
    row = torch.from_numpy(E2M1).repeat(2) * 448
    source = write(tmp_path / "source", {f"{DOWN}.weight": row.expand(4, 32).float()})
    quantkit.convert(source, tmp_path / "out", recipe)

    stored = read_tensors(tmp_path / "out")
    packed = stored[f"{DOWN}.{'weight_packed' if recipe == 'nvfp4' else 'weight'}"][1]
    codes = E2M1[np.stack([packed & 15, packed >> 4], axis=2).reshape(4, 32)]
    scaled = codes * numbers(*stored[f"{DOWN}.weight_scale"]).repeat(16, axis=1)
    if recipe == "nvfp4":
        shared = stored[f"{DOWN}.weight_global_scale"][1]
        assert shared.tolist() == [2688 / (6 * 448)]  # a power of two at most 2688 / amax, which it is here
        scaled = scaled / shared
    else:
        scaled = scaled * stored[f"{DOWN}.weight_scale_2"][1]
    np.testing.assert_array_equal(scaled, row.expand(4, 32).numpy())


@pytest.mark.parametrize(("codes", "shared"), [("weight_packed", "weight_scale_2"), ("weight", "weight_global_scale")])
def test_nvfp4_in_a_mix_of_two_conventions(tmp_path: Path, codes: str, shared: str) -> None:
    """Only its name tells a divisor from a multiplier: a mix of both is not guessed (ggml-org/llama.cpp#21095)."""
    tensors = {
        f"{DOWN}.{codes}": torch.zeros(16, 16, dtype=torch.uint8),
        f"{DOWN}.weight_scale": torch.ones(16, 2).to(torch.float8_e4m3fn),
        f"{DOWN}.{shared}": torch.ones(1),
    }
    error = refusal(write(tmp_path / "source", tensors), tmp_path / "out", "bf16")

    assert isinstance(error, SourceError)
    assert f"{DOWN}.{codes} is U8" in str(error)


@pytest.mark.parametrize("largest", [2687.0, 2688.0, 2690.0, 2700.0, 5400.0, 2688.0 * 2.0**40])
def test_nvfp4_block_scale_beyond_e4m3(tmp_path: Path, largest: float) -> None:
    """A block scale above 448 becomes a NaN, and the text one repeated character (NVIDIA/Model-Optimizer#1633)."""
    tensors = {name: weight.float() for name, weight in gate_and_up().items()}
    tensors[f"{MLP}.gate_proj.weight"][0, 0] = 2688  # alone, its global scale would be 1
    tensors[f"{MLP}.up_proj.weight"][5, 17] = largest
    source = write(tmp_path / "source", tensors)
    quantkit.convert(source, tmp_path / "out", "nvfp4")

    stored, after = read_tensors(tmp_path / "out"), truth(tmp_path / "out")
    scales = [data for name, (_, data) in stored.items() if name.endswith(".weight_scale")]
    assert len(scales) == 2
    assert all(((data >= 0x08) & (data <= 0x7E)).all() for data in scales)
    assert after[f"{MLP}.up_proj.weight"][5, 17] == pytest.approx(largest, rel=1 / 16)
    assert quantkit.verify(tmp_path / "out", source).passed


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_small_nvfp4_block_scales(tmp_path: Path, dialect: str) -> None:
    """A decoder that assumes a set exponent bit flushes small block scales to zero (vllm-project/vllm#34577)."""
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    scale = 2.0 ** torch.tensor([-9, -8, -7, -6]).expand(8, 4)
    tensors = {f"{DOWN}.weight_scale": scale.to(torch.float8_e4m3fn)}
    if dialect == "modelopt":
        tensors |= {f"{DOWN}.weight": packed, f"{DOWN}.weight_scale_2": torch.tensor(1.0)}
    else:
        tensors |= {f"{DOWN}.weight_packed": packed, f"{DOWN}.weight_global_scale": torch.ones(1)}
    quantkit.convert(write(tmp_path / "source", tensors), tmp_path / "out", "bf16")

    codes = E2M1[np.stack([packed & 15, packed >> 4], axis=2).reshape(8, 64)]
    expected = codes * scale.double().numpy().repeat(16, axis=1)
    np.testing.assert_array_equal(truth(tmp_path / "out")[f"{DOWN}.weight"], expected)


# --- groups of nothing, and features that are half supported


def test_groups_of_zeros_and_of_tiny_numbers(tmp_path: Path) -> None:
    """A scale of 0 gives NaN codes, and nonzero groups vanish without a word (NVIDIA/Model-Optimizer#2243)."""
    weight = normal(64, 128, dtype=torch.float32)
    weight[0, :32], weight[1, :32] = 0, 1e-30
    weight[2, :16], weight[2, 16:32], weight[3, 0] = 0, 6 * 2.0**-11, 2688
    source = write(tmp_path / "source", {f"{DOWN}.weight": weight})
    groups = {name: quantkit.convert(source, tmp_path / name, name).nvfp4_groups for name in ("int4", "nvfp4")}

    for name in groups:
        stored, after = read_tensors(tmp_path / name), truth(tmp_path / name)[f"{DOWN}.weight"]
        scale = numbers(*stored[f"{DOWN}.weight_scale"])
        assert (np.isfinite(scale) & (scale > 0)).all()
        assert not after[0, :32].any()
        assert np.isfinite(after).all()
        assert quantkit.verify(tmp_path / name, source).passed
    assert np.abs(truth(tmp_path / "int4")[f"{DOWN}.weight"][1, :32] - 1e-30).max() < 1e-31
    assert groups["int4"] == {}
    assert groups["nvfp4"]["flushed"] >= 3  # two of 1e-30 and one of 6 * 2^-11; zeros are not lost


def integers(num_bits: int) -> Tensors:
    """A weight of 64 x 128 packed in so many bits, with groups of 32, beside plain ones."""
    return gate_and_up() | {
        f"{DOWN}.weight_packed": torch.zeros(64, -(-128 // (32 // num_bits)), dtype=torch.int32),
        f"{DOWN}.weight_scale": torch.ones(64, 4, dtype=torch.bfloat16),
        f"{DOWN}.weight_shape": torch.tensor([64, 128]),
    }


FEATURES: dict[str, tuple[int, Tensors, str]] = {
    "act-order": (4, {f"{DOWN}.weight_g_idx": torch.arange(128).int() // 32}, "weight_g_idx"),
    "zero points": (4, {f"{DOWN}.weight_zero_point": torch.zeros(8, 4).int()}, "weight_zero_point"),
    "3 bits": (3, {}, "num_bits 3"),
    "8 bits": (8, {}, "num_bits 8"),
}


@pytest.mark.parametrize("recipe", ["bf16", KEEP_DOWN], ids=["bf16", "keep"])
@pytest.mark.parametrize(("num_bits", "more", "named"), FEATURES.values(), ids=FEATURES.keys())
def test_features_of_integer_formats(
    tmp_path: Path, num_bits: int, more: Tensors, named: str, recipe: str | Recipe
) -> None:
    """Act-order left out, zero points clamped, 3 bits read as 4: wrong weights, no error (compressed-tensors#458)."""
    weights = {"num_bits": num_bits, "type": "int", "strategy": "group", "group_size": 32}
    config = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    source = write(tmp_path / "source", integers(num_bits) | more, quantization_config=config)

    assert named in str(refusal(source, tmp_path / "out", recipe))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", KEEP_DOWN], ids=["bf16", "nvfp4", "keep"])
def test_width_that_no_config_tells(tmp_path: Path, recipe: str | Recipe) -> None:
    """8-bit codes look like 4-bit ones of twice the columns; `weight_shape` alone tells (ModelCloud/GPTQModel#2251)."""
    scale = {f"{DOWN}.weight_scale": torch.ones(64, 8, dtype=torch.bfloat16)}  # as of groups of 32 in 256 columns
    source = write(tmp_path / "source", integers(8) | scale)

    assert f"{DOWN}.weight_shape is [64, 128]" in str(refusal(source, tmp_path / "out", recipe))

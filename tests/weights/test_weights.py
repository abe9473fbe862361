"""Stored tensors are grouped into weights by dtype and siblings, and what does not fit together is refused by name."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from quantkit.checkpoint.header import TensorSpec, lay_out
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.weights.encodings import FP8, INT4, PLAIN, fp8, int4
from quantkit.weights.grouping import read_weights
from quantkit.weights.weight import Weight

MODULE = "model.layers.0.self_attn.kv_a_proj_with_mqa"
WEIGHT, SCALE_INV, SCALE = f"{MODULE}.weight", f"{MODULE}.weight_scale_inv", f"{MODULE}.weight_scale"
PACKED, SHAPE = f"{MODULE}.weight_packed", f"{MODULE}.weight_shape"
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def make_source(shards: Mapping[str, Sequence[TensorSpec]], config: Mapping[str, Any] = FP8_CONFIG) -> Source:
    """The headers of a checkpoint with the given tensors in each shard."""
    tensors = {place.spec.name: place for shard, specs in shards.items() for place in lay_out(specs, shard)[1]}
    return Source("toy", None, json.dumps(config), tensors)


def weights_of(*specs: TensorSpec, config: Mapping[str, Any] = FP8_CONFIG) -> tuple[Weight, ...]:
    return read_weights(make_source({"x": specs}, config))


def refusal(*specs: TensorSpec, config: Mapping[str, Any] = FP8_CONFIG) -> SourceError:
    """The error for a checkpoint with `specs`."""
    with pytest.raises(SourceError) as caught:
        weights_of(*specs, config=config)
    return caught.value


@pytest.mark.parametrize("spelling", [SCALE_INV, SCALE], ids=["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((576, 6144), (5, 48)),  # GLM-5.2's kv_a_proj_with_mqa: the last of five rows covers 64
        ((320, 448), (3, 4)),
        ((28672, 512), (224, 4)),
        ((128, 6144), (1, 48)),
        ((1, 1), (1, 1)),
        ((129, 128), (2, 1)),
    ],
)
def test_an_fp8_weight_is_paired_with_its_scale(spelling: str, shape: tuple[int, int], grid: tuple[int, int]) -> None:
    """Weight and scale, in either spelling, are one weight; a started block counts as a whole one."""
    (weight,) = weights_of(TensorSpec(WEIGHT, "F8_E4M3", shape), TensorSpec(spelling, "F32", grid))

    assert weight.encoding is FP8
    assert (weight.module, weight.shape, weight.block) == (MODULE, shape, (128, 128))
    assert weight.scale is not None
    assert [tensor.spec.name for tensor in weight.tensors] == [WEIGHT, spelling]
    assert weight.nbytes == shape[0] * shape[1] + 4 * grid[0] * grid[1]
    assert weight.label == "fp8 128x128"


@pytest.mark.parametrize(
    ("weight_shard", "scale_shard"), [("1", "1"), ("1", "2"), ("2", "1")], ids=["together", "later", "earlier"]
)
def test_a_scale_may_lie_in_any_shard(weight_shard: str, scale_shard: str) -> None:
    """The pair is found whether the scale is in the weight's shard, a later or an earlier one."""
    shards: dict[str, list[TensorSpec]] = {"1": [TensorSpec("a", "BF16", (1,))], "2": [TensorSpec("b", "BF16", (1,))]}
    shards[weight_shard].append(TensorSpec(WEIGHT, "F8_E4M3", (576, 256)))
    shards[scale_shard].append(TensorSpec(SCALE_INV, "F32", (5, 2)))
    weights = {str(weight.name): weight for weight in read_weights(make_source(shards))}

    assert weights.keys() == {WEIGHT, "a", "b"}
    fp8 = weights[WEIGHT]
    assert [(tensor.spec.name, tensor.shard) for tensor in fp8.tensors] == [
        (WEIGHT, weight_shard),
        (SCALE_INV, scale_shard),
    ]


@pytest.mark.parametrize("others", [[], [f"{MODULE}.scale"], [f"{MODULE}.weight_scale_2"], [f"{MODULE}.input_scale"]])
def test_an_fp8_weight_without_its_scale_is_refused(others: list[str]) -> None:
    """A missing scale is never taken for 1: both spellings are named, and another spelling does not stand in."""
    error = refusal(TensorSpec(WEIGHT, "F8_E4M3", (128, 128)), *(TensorSpec(name, "F32", (1, 1)) for name in others))

    assert all(name in str(error) for name in (WEIGHT, SCALE_INV, SCALE))
    assert error.hint is not None
    assert "download" in error.hint


@pytest.mark.parametrize("name", [SCALE_INV, SCALE, SHAPE])
def test_a_scale_without_its_weight_is_refused(name: str) -> None:
    """A scale or shape whose weight is nowhere is named; the checkpoint is not whole."""
    error = refusal(TensorSpec("model.norm.weight", "BF16", (128,)), TensorSpec(name, "F32", (1, 1)))

    assert name in str(error)
    assert error.hint is not None


def test_a_second_scale_is_refused() -> None:
    """A weight with both spellings of a scale is ambiguous, and no tensor is ever dropped."""
    grid = (1, 1)
    error = refusal(
        TensorSpec(WEIGHT, "F8_E4M3", (128, 128)), TensorSpec(SCALE_INV, "F32", grid), TensorSpec(SCALE, "F32", grid)
    )

    assert SCALE in str(error)


@pytest.mark.parametrize(
    ("shape", "grid", "needed"),
    [
        ((576, 6144), (4, 48), "[5, 48]"),  # floor instead of ceil
        ((576, 6144), (48, 5), "[5, 48]"),
        ((576, 6144), (5, 49), "[5, 48]"),
        ((576, 6144), (240,), "[5, 48]"),
        ((576, 6144), (1, 6144), "[5, 48]"),  # one for each column
        ((576, 6144), (2,), "[5, 48]"),
        ((128, 128), (2, 1), "[1, 1]"),
    ],
)
def test_a_scale_that_does_not_cover_its_weight_is_refused(
    shape: tuple[int, ...], grid: tuple[int, ...], needed: str
) -> None:
    """A scale of another grid is refused with both names, what is there and what is needed."""
    error = refusal(TensorSpec(WEIGHT, "F8_E4M3", shape), TensorSpec(SCALE_INV, "F32", grid))

    assert all(part in str(error) for part in (WEIGHT, SCALE_INV, f"F32 {list(grid)}", needed))
    assert error.hint is not None
    assert "weight_block_size" in error.hint


@pytest.mark.parametrize(
    ("grid", "block", "label"),
    [
        ((5, 48), (128, 128), "fp8 128x128"),
        ((), (576, 6144), "fp8 tensor"),
        ((1,), (576, 6144), "fp8 tensor"),
        ((1, 1), (576, 6144), "fp8 tensor"),
        ((576,), (1, 6144), "fp8 channel"),
        ((576, 1), (1, 6144), "fp8 channel"),
    ],
)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E8M0", "U8"])
def test_the_scales_shape_says_what_shares_it(
    grid: tuple[int, ...], block: tuple[int, int], label: str, dtype: str
) -> None:
    """Blocks, rows or the whole tensor, in any dtype that scales come in; the unpacked grid is the block's."""
    (weight,) = weights_of(TensorSpec(WEIGHT, "F8_E4M3", (576, 6144)), TensorSpec(SCALE, dtype, grid))

    assert (weight.encoding, weight.block, weight.label) == (FP8, block, label)
    assert weight.grid == (-(-576 // block[0]), -(-6144 // block[1]))


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "F8_E4M3", "F8_E5M2"])
def test_a_scale_of_another_dtype_is_refused(dtype: str) -> None:
    """A dtype that no publisher's scales have is refused by name."""
    error = refusal(TensorSpec(WEIGHT, "F8_E4M3", (128, 128)), TensorSpec(SCALE, dtype, (1, 1)))

    assert all(part in str(error) for part in (SCALE, dtype, "BF16"))


def test_a_static_activation_scale_belongs_to_its_weight() -> None:
    """`input_scale` is a part of the FP8 weight; one that is no single number is refused by name."""
    specs = TensorSpec(WEIGHT, "F8_E4M3", (128, 256)), TensorSpec(SCALE, "F32", ())
    (weight,) = weights_of(*specs, TensorSpec(f"{MODULE}.input_scale", "F32", ()))

    assert weight.input_scale is not None
    assert [tensor.spec.name for tensor in weight.tensors] == [WEIGHT, SCALE, f"{MODULE}.input_scale"]
    assert f"{MODULE}.input_scale is F32 [2]" in str(refusal(*specs, TensorSpec(f"{MODULE}.input_scale", "F32", (2,))))


@pytest.mark.parametrize("shape", [(128,), (), (2, 128, 128)])
def test_an_fp8_weight_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    """Fused 3-D experts and vectors in FP8 are not understood, and named."""
    error = refusal(TensorSpec(WEIGHT, "F8_E4M3", shape), TensorSpec(SCALE_INV, "F32", (1, 1)))

    assert WEIGHT in str(error)
    assert str(list(shape)) in str(error)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (f"{MODULE}.bias", "F8_E4M3"),
        ("model.layers.3.mlp.experts.gate_up_proj", "F8_E4M3"),
        (WEIGHT, "F8_E5M2"),
        (WEIGHT, "F8_E8M0"),
    ],
)
def test_other_tensors_in_fp8_are_refused(name: str, dtype: str) -> None:
    """Raw FP8 bytes never pass for a plain tensor."""
    error = refusal(TensorSpec(name, dtype, (128, 128)))

    assert name in str(error)
    assert dtype in str(error)


@pytest.mark.parametrize(
    ("config", "block", "grid"),
    [
        ({}, (128, 128), (5, 3)),
        ({"quantization_config": None}, (128, 128), (5, 3)),
        ({"quantization_config": {"quant_method": "fp8"}}, (128, 128), (5, 3)),
        ({"quantization_config": {"weight_block_size": [64, 128]}}, (64, 128), (9, 3)),
        ({"quantization_config": {"weight_block_size": [1, 96]}}, (1, 96), (576, 4)),
        (
            {
                "quantization_config": {
                    "config_groups": {
                        "group_0": {"weights": {"block_structure": None}},
                        "group_1": {"weights": {"block_structure": [64, 64]}},
                    }
                }
            },
            (64, 64),
            (9, 6),
        ),
    ],
    ids=["no config", "null", "default", "64x128", "1x96", "compressed-tensors"],
)
def test_the_configs_block_decides(config: dict[str, Any], block: tuple[int, int], grid: tuple[int, int]) -> None:
    """The block size is `weight_block_size`, or a group's `block_structure`, or 128 x 128."""
    (weight,) = weights_of(TensorSpec(WEIGHT, "F8_E4M3", (576, 384)), TensorSpec(SCALE_INV, "F32", grid), config=config)

    assert weight.block == block
    assert weight.label == f"fp8 {block[0]}x{block[1]}"


@pytest.mark.parametrize(
    "quantization",
    [
        {"weight_block_size": 128},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 128, 1]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": [-128, 128]},
        {"weight_block_size": [128.0, 128]},
        {"weight_block_size": "128x128"},
        {"config_groups": {"group_0": {"weights": {"block_structure": [128]}}}},
        {"config_groups": {"group_0": "fp8"}},
        {"config_groups": ["group_0"]},
        "fp8",
    ],
)
def test_a_block_size_that_is_none_is_refused(quantization: Any) -> None:
    """A config that says something else than two positive numbers is named, whatever it holds."""
    error = refusal(TensorSpec("model.norm.weight", "BF16", (1,)), config={"quantization_config": quantization})

    assert "toy" in str(error)
    assert "config" in str(error)


def test_the_config_never_says_what_is_fp8() -> None:
    """A BF16 tensor is plain and an FP8 one is FP8, though the config's list of exclusions has them the other way."""
    config = {"quantization_config": {"weight_block_size": [128, 128], "modules_to_not_convert": [MODULE]}}
    plain = TensorSpec("model.layers.0.self_attn.indexer.weights_proj.weight", "BF16", (32, 6144))
    weights = weights_of(
        plain, TensorSpec(WEIGHT, "F8_E4M3", (128, 128)), TensorSpec(SCALE_INV, "F32", (1, 1)), config=config
    )

    assert {str(weight.name): weight.encoding for weight in weights} == {
        plain.name: PLAIN,
        WEIGHT: FP8,
    }


@pytest.mark.parametrize(
    ("dtype", "shape", "label"),
    [("BF16", (2, 3), "bf16"), ("F32", (256,), "f32"), ("F16", (), "f16"), ("I64", (4,), "i64"), ("U8", (0,), "u8")],
)
def test_any_other_tensor_is_plain(dtype: str, shape: tuple[int, ...], label: str) -> None:
    """A tensor of any dtype and shape that is no part of another weight is one of its own, and keeps its dtype."""
    spec = TensorSpec("model.layers.3.mlp.gate.e_score_correction_bias", dtype, shape)
    (weight,) = weights_of(spec)

    assert (weight.encoding, weight.shape, weight.label) == (PLAIN, shape, label)
    assert weight.data.spec == spec
    assert weight.tensors == (weight.data,)
    assert weight.block is None


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shape_dtype", ["I64", "I32"])  # Kimi's checkpoints have I32
def test_an_int4_weight_is_codes_scale_and_shape(group_size: int, shape_dtype: str) -> None:
    """Three tensors are one weight of the unpacked shape, and the group size is read from the shapes."""
    (weight,) = weights_of(
        TensorSpec(PACKED, "I32", (2048, 768)),
        TensorSpec(SCALE, "BF16", (2048, 6144 // group_size)),
        TensorSpec(SHAPE, shape_dtype, (2,)),
    )

    assert weight.encoding is INT4
    assert (weight.shape, weight.block) == ((2048, 6144), (1, group_size))
    assert {tensor.spec.name for tensor in weight.tensors} == {PACKED, SCALE, SHAPE}
    assert weight.label == f"int4 g={group_size}"


@pytest.mark.parametrize(("missing", "there"), [(SCALE, SHAPE), (SHAPE, SCALE)])
def test_an_int4_weight_that_is_not_whole_is_refused(missing: str, there: str) -> None:
    """Packed codes without scale or shape are refused with both names."""
    specs = {SCALE: TensorSpec(SCALE, "BF16", (8, 2)), SHAPE: TensorSpec(SHAPE, "I64", (2,))}
    error = refusal(TensorSpec(PACKED, "I32", (8, 8)), specs[there])

    assert PACKED in str(error)
    assert missing in str(error)


@pytest.mark.parametrize(
    ("packed", "scale"),
    [
        (TensorSpec(PACKED, "I8", (8, 32)), TensorSpec(SCALE, "BF16", (8, 2))),
        (TensorSpec(PACKED, "I32", (8, 8)), TensorSpec(SCALE, "F32", (8, 2))),
        (TensorSpec(PACKED, "I32", (8, 8)), TensorSpec(SCALE, "F8_E4M3", (8, 4))),
        (TensorSpec(PACKED, "I32", (8, 8)), TensorSpec(SCALE, "BF16", (7, 2))),
        (TensorSpec(PACKED, "I32", (8, 8)), TensorSpec(SCALE, "BF16", (8, 3))),
        (TensorSpec(PACKED, "I32", (8, 8)), TensorSpec(SCALE, "BF16", (8, 0))),
        (TensorSpec(PACKED, "I32", (64,)), TensorSpec(SCALE, "BF16", (8, 2))),
        (TensorSpec(PACKED, "I32", (2, 8, 8)), TensorSpec(SCALE, "BF16", (2, 8, 2))),
    ],
    ids=["bytes", "F32 scale", "FP8 scale", "rows", "groups", "no group", "vector", "3-D"],
)
def test_an_int4_weight_of_another_layout_is_refused(packed: TensorSpec, scale: TensorSpec) -> None:
    """Codes and scale that are not I32 [N, K/8] and BF16 [N, K/g] are refused with what they are."""
    error = refusal(packed, scale, TensorSpec(SHAPE, "I64", (2,)))

    assert PACKED in str(error)
    assert f"{packed.dtype} {list(packed.shape)}" in str(error)
    assert f"{scale.dtype} {list(scale.shape)}" in str(error)


def test_every_tensor_is_in_exactly_one_weight() -> None:
    """No tensor is lost and none is used twice, whatever the formats and however the shards cut them apart."""
    shards = {
        "1": [
            TensorSpec("model.embed_tokens.weight", "BF16", (64, 256)),
            TensorSpec("a.weight", "F8_E4M3", (300, 256)),
            TensorSpec("b.weight_scale", "F32", (1, 2)),
            TensorSpec("c.weight_packed", "I32", (4, 16)),
            TensorSpec("a.bias", "BF16", (300,)),
        ],
        "2": [
            TensorSpec("a.weight_scale_inv", "F32", (3, 2)),
            TensorSpec("b.weight", "F8_E4M3", (64, 256)),
            TensorSpec("c.weight_scale", "BF16", (4, 4)),
            TensorSpec("c.weight_shape", "I64", (2,)),
            TensorSpec("weight", "BF16", (1,)),
        ],
    }
    weights = read_weights(make_source(shards))

    counts = Counter(tensor.spec.name for weight in weights for tensor in weight.tensors)
    assert counts == Counter(spec.name for specs in shards.values() for spec in specs)
    assert len(weights) == 6


@pytest.mark.parametrize("spelling", ["weight_scale_inv", "weight_scale"])
def test_the_tensors_of_an_fp8_weight_are_these(spelling: str) -> None:
    """A weight of 576 x 6144 has 5 x 48 scales, the last row for 64 rows, in the spelling asked for."""
    assert tuple(fp8.blocks((128, 128), spelling)("a.b", 576, 6144)) == (
        TensorSpec("a.b.weight", "F8_E4M3", (576, 6144)),
        TensorSpec(f"a.b.{spelling}", "F32", (5, 48)),
    )


@pytest.mark.parametrize(("group_size", "groups"), [(32, 192), (64, 96), (128, 48)])
def test_the_tensors_of_an_int4_weight_are_these(group_size: int, groups: int) -> None:
    """An expert's 2048 x 6144: eight codes a word, a scale a group, the shape as two I64."""
    assert int4.specs("a.b", (2048, 6144), group_size) == (
        TensorSpec("a.b.weight_packed", "I32", (2048, 768)),
        TensorSpec("a.b.weight_scale", "BF16", (2048, groups)),
        TensorSpec("a.b.weight_shape", "I64", (2,)),
    )

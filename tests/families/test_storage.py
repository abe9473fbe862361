"""A config says in which tensors a linear layer is stored: names, dtypes and shapes of every dialect."""

import json
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

from quantkit.errors import SourceError
from quantkit.families.inventory import inventory
from quantkit.families.storage import storage
from support.storages import STORAGES

Specs = dict[str, tuple[str, tuple[int, ...]]]
UP = "model.layers.1.mlp.up_proj"
ROWS, COLUMNS = 160, 384
FP8 = ("F8_E4M3", (ROWS, COLUMNS))
PLAIN: Specs = {"weight": ("BF16", (ROWS, COLUMNS))}
BLOCKS: Specs = {"weight": FP8, "weight_scale_inv": ("F32", (2, 3))}
MODELOPT_NVFP4: Specs = {
    "weight": ("U8", (ROWS, COLUMNS // 2)),
    "weight_scale": ("F8_E4M3", (ROWS, COLUMNS // 16)),
    "weight_scale_2": ("F32", ()),
}
STORED: dict[str, Specs] = {
    "bf16": PLAIN,
    "fp8_block": BLOCKS,
    "fp8_block_ue8m0": BLOCKS,  # powers of two, and F32 all the same
    "autofp8": {"weight": FP8, "weight_scale": ("F32", ())},
    "autofp8_static": {"weight": FP8, "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
    "modelopt_fp8": {"weight": FP8, "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
    "nvfp4_modelopt": {**MODELOPT_NVFP4, "input_scale": ("F32", ())},
    "nvfp4_modelopt_w4a16": MODELOPT_NVFP4,
}
COMPRESSED = [
    name
    for name, kind in STORAGES.items()
    if (kind.quantization or {}).get("quant_method") == "compressed-tensors" and name != "int4" and not kind.fp8_scale
]
KINDS = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def stored(quantization: dict[str, Any] | None, module: str = UP, rows: int = ROWS, columns: int = COLUMNS) -> Specs:
    """Dtypes and shapes of the tensors of a linear layer, by leaf."""
    specs = storage("toy", quantization or {})(module, rows, columns)
    return {spec.name.removeprefix(f"{module}."): (spec.dtype, spec.shape) for spec in specs}


@pytest.mark.parametrize("name", STORED)
def test_a_storage_is_made_of_these_tensors(name: str) -> None:
    """Names, dtypes and shapes as vLLM 0.33 creates them, with ragged blocks rounded up."""
    assert stored(STORAGES[name].quantization) == STORED[name]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_makes_the_same_tensors(name: str) -> None:
    """The library itself gives a BF16 Linear of this scheme these names, dtypes and shapes.

    Its block scales are BF16 here; quantkit writes them in F32, as DeepSeek does.
    """
    quantization = STORAGES[name].quantization
    assert quantization is not None
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    scheme = QuantizationScheme(**quantization["config_groups"]["group_0"], format=quantization["format"])
    initialize_module_for_quantization(linear, scheme, force_zero_point=False)
    state = {leaf: torch.ones_like(tensor) for leaf, tensor in linear.state_dict().items()}

    theirs = BaseCompressor.get_value_from_registry(quantization["format"]).compress(state, scheme)
    specs = {leaf: (KINDS[tensor.dtype], tuple(tensor.shape)) for leaf, tensor in theirs.items()}
    if name == "fp8_block_ct":
        specs["weight_scale"] = ("F32", specs["weight_scale"][1])
    assert stored(quantization) == specs


@pytest.mark.parametrize(
    ("inputs", "leaves"),
    [
        (None, set()),
        ({"dynamic": True}, set()),
        ({"dynamic": "local"}, {"input_global_scale"}),
        ({"dynamic": False}, {"input_global_scale"}),
    ],
)
def test_nvfp4_has_a_global_scale_for_static_activations(inputs: dict[str, Any] | None, leaves: set[str]) -> None:
    """Activations that are scaled for each group at run time still share a stored global scale."""
    quantization = json.loads(json.dumps(STORAGES["nvfp4"].quantization))
    quantization["config_groups"]["group_0"]["input_activations"] = inputs

    assert stored(quantization).keys() == {"weight_packed", "weight_scale", "weight_global_scale", *leaves}


def test_fp8_channels_may_have_static_activations() -> None:
    """One scale for the activations of the whole layer, beside one for each row of the weight."""
    quantization = json.loads(json.dumps(STORAGES["fp8_channel"].quantization))
    quantization["config_groups"]["group_0"]["input_activations"] = {"strategy": "tensor", "dynamic": False}

    assert stored(quantization) == {
        "weight": FP8,
        "weight_scale": ("BF16", (ROWS, 1)),
        "input_scale": ("BF16", (1,)),
    }


@pytest.mark.parametrize(
    ("groups", "leaves"),
    [
        ({}, {"input_scale"}),
        ({"group_0": {"input_activations": None}}, set()),
        ({"group_0": {"input_activations": None}, "group_1": {"input_activations": {"num_bits": 4}}}, {"input_scale"}),
    ],
)
def test_modelopts_groups_tell_weight_only_nvfp4(groups: dict[str, Any], leaves: set[str]) -> None:
    """NVFP4 whose groups all leave activations alone has no scale for them, as vLLM takes it."""
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}

    assert stored(quantization) == {**MODELOPT_NVFP4, **dict.fromkeys(leaves, ("F32", ()))}


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_fp8_leaves_out_whole_names_only(key: str) -> None:
    """A module that is named is plain; one whose name only begins so, or that does not exist, changes nothing."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], key: [UP, "model.layers.0.indexers_proj"]}

    assert stored(quantization) == PLAIN
    assert stored(quantization, UP.replace("1", "0")) == BLOCKS
    assert stored(quantization, f"{UP}_b") == BLOCKS


@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_modelopt_leaves_out_what_its_patterns_match(key: str) -> None:
    """Both spellings of the list hold globs, and expert 0 stands for its layer."""
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        key: ["lm_head", "model.layers.1.*", "*.2.mlp.experts.0.*"],
    }

    assert stored(quantization) == PLAIN
    assert stored(quantization, "model.layers.10.mlp.up_proj") == MODELOPT_NVFP4
    assert stored(quantization, "model.layers.2.mlp.experts.3.up_proj") == PLAIN
    assert stored(quantization, "model.layers.2.mlp.shared_experts.up_proj") == MODELOPT_NVFP4


def test_compressed_tensors_ignore_and_targets_choose_the_group() -> None:
    """A config with two groups and a list gives each module the tensors of its own group."""
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": [r"re:.*experts\..*"],
                "weights": {"type": "int", "num_bits": 4, "symmetric": True, "group_size": 32},
            },
            "group_1": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "block_structure": [128, 128]},
            },
        },
        "ignore": ["re:.*kv_b_proj$"],
    }

    assert stored(quantization) == {"weight": FP8, "weight_scale": ("F32", (2, 3))}
    assert stored(quantization, "model.layers.1.self_attn.kv_b_proj") == PLAIN
    assert stored(quantization, "model.layers.1.mlp.experts.3.up_proj") == {
        "weight_packed": ("I32", (ROWS, COLUMNS // 8)),
        "weight_scale": ("BF16", (ROWS, COLUMNS // 32)),
        "weight_shape": ("I64", (2,)),
    }


def group(**weights: Any) -> dict[str, Any]:
    """A compressed-tensors config with one group of such weights."""
    groups = {"group_7": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "'modelopt' FP8_PB_WO"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'modelopt' MIXED_PRECISION"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "store_dtype": "mxfp4"}, "'fp8' mxfp4"),
        (group(type="float", num_bits=8, strategy="group", group_size=128), "group_7 .*type float, num_bits 8"),
        (group(type="float", num_bits=8, strategy="channel", symmetric=False), "group_7 .*symmetric False"),
        (group(type="float", num_bits=4, strategy="group", group_size=32), "group_7 .*type float, num_bits 4"),
        (group(type="int", num_bits=8, strategy="channel"), "group_7 .*type int, num_bits 8"),
        (group(type="int", num_bits=4, group_size=32, symmetric=False), "group_7 .*symmetric False"),
    ],
    ids=["no groups", "awq", "fp8 pb", "mixed", "fp4 experts", "groups", "asymmetric", "mxfp4", "int8", "zero points"],
)
def test_storage_that_is_not_understood_is_named(quantization: dict[str, Any], words: str) -> None:
    """Another quantization is refused by the name of its method or group, instead of being taken for BF16."""
    with pytest.raises(SourceError, match=f"toy: .*{words}") as caught:
        storage("toy", quantization)

    assert caught.value.hint is None or "Known" in caught.value.hint


@pytest.mark.parametrize("name", ["int4_all", "nvfp4", "nvfp4_modelopt_w4a16"])
def test_columns_that_groups_do_not_divide_are_refused(name: str) -> None:
    """Half a group has no place in a packed tensor: the config is refused by the module's name."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "intermediate_size": 200,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "quantization_config": STORAGES[name].quantization,
    }

    with pytest.raises(SourceError, match=r"toy: .*layers\.0\.mlp\.down_proj has 200 columns"):
        inventory("toy", json.dumps(config))

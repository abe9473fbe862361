"""The storages of weights that quantkit reads: a `quantization_config` for each, and what no config tells."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Storage:
    """A storage of weights.

    quantization   the `quantization_config`
    dtype          the config's `dtype`
    fp8_scale      the dtype of FP8 scales, or None for the inventory's
    powers_of_two  FP8 scales are such
    experts        `fused`: in 3-D tensors [E, 2I, H] and [E, H, I]; `transposed`: [E, H, 2I] and [E, I, H]
    """

    quantization: dict[str, Any] | None = None
    dtype: str = "bfloat16"
    fp8_scale: str | None = None
    powers_of_two: bool = False
    experts: str = "apart"


_KEPT = ["lm_head", r"re:.*mlp\.gate$", r"re:.*eh_proj$", r"re:.*embed_tokens$", r"re:.*head$", r"re:.*weights_proj$"]
_KIMI_KEPT = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_BLOCKS = {**_TENSOR, "strategy": "block", "block_structure": [128, 128]}
_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
_NVFP4 = {**_GROUPS, "type": "float", "strategy": "tensor_group", "group_size": 16}


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, kept: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": kept,
    }


def _modelopt(algorithm: str, kept: list[str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head", *kept]}


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_FP8_BLOCK = {**_FP8, "weight_block_size": [128, 128]}
_UE8M0 = {**_FP8_BLOCK, "scale_fmt": "ue8m0"}
_FLOAT = "float-quantized", _KEPT
_FP8_BLOCK_CT = _compressed(_BLOCKS, {**_TOKENS, "strategy": "group", "group_size": 128}, *_FLOAT)
_FP8_CHANNEL = _compressed({**_TENSOR, "strategy": "channel"}, _TOKENS, *_FLOAT)
_FP4 = "nvfp4-pack-quantized", [*_KEPT, "re:.*kv_b_proj$"]

STORAGES = {
    "bf16": Storage(),
    "f16": Storage(dtype="float16"),
    "f32": Storage(dtype="float32"),
    "fused3d": Storage(experts="fused"),
    "fused3d_transposed": Storage(experts="transposed"),
    "fp8_block": Storage(_FP8_BLOCK),
    "fp8_block_ue8m0": Storage(_UE8M0, powers_of_two=True),
    "fp8_block_bf16": Storage(_FP8_BLOCK, fp8_scale="BF16"),
    "fp8_block_e8m0": Storage(_UE8M0, fp8_scale="F8_E8M0", powers_of_two=True),
    "fp8_block_u8": Storage(_UE8M0, fp8_scale="U8", powers_of_two=True),
    "fp8_block_ct": Storage(_FP8_BLOCK_CT),
    "fp8_block_ct_bf16": Storage(_FP8_BLOCK_CT, fp8_scale="BF16"),
    "fp8_channel": Storage(_FP8_CHANNEL),
    "fp8_channel_f32": Storage(_FP8_CHANNEL, fp8_scale="F32"),
    "fp8_tensor": Storage(_compressed(_TENSOR, _TOKENS, *_FLOAT)),
    "fp8_tensor_static": Storage(_compressed(_TENSOR, _TENSOR, *_FLOAT)),
    "autofp8": Storage({**_FP8, "ignored_layers": ["lm_head"]}),
    "autofp8_static": Storage({**_FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "modelopt_fp8": Storage(_modelopt("FP8", [])),
    "int4": Storage(_compressed(_GROUPS, None, "pack-quantized", _KIMI_KEPT)),
    "int4_all": Storage(_compressed(_GROUPS, None, "pack-quantized", _KEPT)),
    "nvfp4": Storage(_compressed(_NVFP4, None, *_FP4)),
    "nvfp4_w4a4": Storage(_compressed(_NVFP4, {**_NVFP4, "dynamic": "local"}, *_FP4)),
    "nvfp4_modelopt": Storage(_modelopt("NVFP4", ["*self_attn*", "*shared_experts*", "*.layers.0.mlp*"])),
    "nvfp4_modelopt_w4a16": Storage(_modelopt("W4A16_NVFP4", ["*kv_b_proj"])),
}

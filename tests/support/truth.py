"""What a checkpoint means: every weight decoded by plain numpy from the files, with nothing of quantkit in it.

E4M3    sign, 4 exponent bits, 3 mantissa bits; bias 7, no infinities, NaN where all seven bits are set
E8M0    2^(byte - 127)
E2M1    sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; the low half of a byte comes first
INT4    code + 8 in 4 bits, eight in an int32, the lowest bits first
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY = {"U8": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4"}
_NUMPY |= {"I64": "<i8"}
_PARTS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_shape")
_PARTS += ("input_scale", "input_global_scale")


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 128 else value


E4M3 = np.array([_e4m3(byte) for byte in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def truth(folder: Path) -> dict[str, Array]:
    """Every weight of the checkpoint in `folder` as float64, under the name that it has where nothing is quantized.

    Experts in 3-D tensors come out one by one. Scales of activations are left out.
    """
    config = json.loads((folder / "config.json").read_text())
    stored = read_tensors(folder)
    weights: dict[str, Array] = {}
    for name, (dtype, data) in stored.items():
        module, _, leaf = name.rpartition(".")
        parts = {part: stored[f"{module}.{part}"] for part in _PARTS if f"{module}.{part}" in stored}
        if leaf == "weight_packed" and dtype == "I32":
            weights[f"{module}.weight"] = _int4(data, parts)
        elif leaf in ("weight", "weight_packed") and dtype == "U8":
            weights[f"{module}.weight"] = _nvfp4(data, parts)
        elif dtype == "F8_E4M3" and leaf == "weight":
            weights[name] = _fp8(data, parts, _block(config))
        elif data.ndim == 3 and module.endswith(".experts"):
            weights |= _experts(module, leaf, numbers(dtype, data), config.get("text_config", config))
        elif leaf not in _PARTS:
            weights[name] = numbers(dtype, data)
    return weights


def read_tensors(folder: Path) -> dict[str, tuple[str, Array]]:
    """The dtype and the stored numbers of every tensor of the index; of BF16 and FP8 their bits."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        content = (folder / file).read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in entry["data_offsets"])
                data = np.frombuffer(content[first:last], _NUMPY[entry["dtype"]]).reshape(entry["shape"])
                tensors[name] = entry["dtype"], data
    assert tensors.keys() == weight_map.keys()
    return tensors


def numbers(dtype: str, data: Array) -> Array:
    """Stored numbers as float64; U8 is E8M0."""
    match dtype:
        case "BF16":
            return (data.astype("<u4") << 16).view("<f4").astype(np.float64)
        case "F8_E4M3":
            return E4M3[data]
        case "F8_E8M0" | "U8":
            return np.where(data == 255, np.nan, 2.0 ** (data.astype(np.float64) - 127))
    return data.astype(np.float64)


def _fp8(data: Array, parts: dict[str, tuple[str, Array]], block: tuple[int, int]) -> Array:
    scale = numbers(*(parts.get("weight_scale_inv") or parts["weight_scale"]))
    rows, columns = data.shape
    if scale.size == 1 or scale.shape == (rows, 1):
        return E4M3[data] * scale
    assert scale.shape == (-(-rows // block[0]), -(-columns // block[1]))
    return E4M3[data] * scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]


def _int4(data: Array, parts: dict[str, tuple[str, Array]]) -> Array:
    rows, words = data.shape
    codes = np.stack([data >> 4 * place & 15 for place in range(8)], axis=2).reshape(rows, words * 8) - 8
    assert parts["weight_shape"][1].tolist() == [rows, words * 8]
    scale = numbers(*parts["weight_scale"])
    return codes * scale.repeat(words * 8 // scale.shape[1], 1)


def _nvfp4(data: Array, parts: dict[str, tuple[str, Array]]) -> Array:
    rows, half = data.shape
    values = E2M1[np.stack([data & 15, data >> 4], axis=2)].reshape(rows, half * 2)
    scaled = values * numbers(*parts["weight_scale"]).repeat(16, 1)
    if "weight_global_scale" in parts:
        return scaled / numbers(*parts["weight_global_scale"])
    return scaled * numbers(*parts["weight_scale_2"])


def _experts(module: str, leaf: str, data: Array, config: dict[str, Any]) -> dict[str, Array]:
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    straight = (2 * intermediate, hidden) if leaf == "gate_up_proj" else (hidden, intermediate)
    if data.shape[1:] != straight:
        data = data.transpose(0, 2, 1)
    assert data.shape[1:] == straight
    experts = {}
    for number, weight in enumerate(data):
        if leaf == "gate_up_proj":
            experts[f"{module}.{number}.gate_proj.weight"] = weight[:intermediate]
            experts[f"{module}.{number}.up_proj.weight"] = weight[intermediate:]
        else:
            experts[f"{module}.{number}.down_proj.weight"] = weight
    return experts


def _block(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 block: the config's, of the first group that has one, else 128 x 128."""
    text = config.get("text_config", config)
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    groups = quantization.get("config_groups", {}).values()
    found = (group["weights"]["block_structure"] for group in groups if group["weights"].get("block_structure"))
    rows, columns = quantization.get("weight_block_size") or next(found, (128, 128))
    return rows, columns

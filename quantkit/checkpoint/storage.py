"""How a config says that its linear layers are stored: which tensors stand for a weight of N rows and K columns.

    no quantization_config            weight BF16 [N, K]
    fp8                               weight F8_E4M3 [N, K], weight_scale_inv F32 for each block
    compressed-tensors, float 8 bit   weight F8_E4M3 [N, K], weight_scale F32 for each block
    compressed-tensors, int 4 bit     weight_packed I32 [N, K/8], weight_scale BF16 [N, K/g], weight_shape [2]
    modelopt NVFP4                    weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2, input_scale

Sources: `checkpoint/weights.py`; for NVFP4 `modelopt.py` of vLLM 0.33 (ModelOptNvFp4LinearMethod.create_weights).
"""

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from quantkit.checkpoint.engines import ENGINES, ConfigMatcher
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.weights import fp8_block_specs, int4_specs
from quantkit.errors import SourceError
from quantkit.naming import TensorName

NVFP4_GROUP = 16  # weights that share an FP8 scale
_BLOCK = (128, 128)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_TRANSFORMERS = next(engine for engine in ENGINES if engine.name == "transformers")  # it fuses nothing

Storage = Callable[[str, int, int], Iterator[TensorSpec]]


def storage(name: str, quantization: dict[str, Any], num_hidden_layers: int, shape_dtype: str = "I64") -> Storage:
    """What gives the tensors of a linear layer from its module, rows and columns.

    name         of the model, for errors
    shape_dtype  of INT4's `weight_shape`, which no config tells

    Raises SourceError, naming the method or the config group, for a kind of storage that is not understood.
    """
    method = quantization.get("quant_method")
    if not quantization:
        return _plain
    if method == "fp8":
        return _fp8(tuple(quantization.get("weight_block_size") or _BLOCK), "weight_scale_inv")
    if method == "compressed-tensors":
        return _compressed_tensors(name, quantization, num_hidden_layers, shape_dtype)
    if method == "modelopt" and quantization.get("quant_algo") == "NVFP4":
        return _modelopt(quantization.get("ignore") or [])
    algorithm = f" {quantization['quant_algo']}" if "quant_algo" in quantization else ""
    raise SourceError(
        f"{name}: the tensors of a checkpoint quantized with {method!r}{algorithm} cannot be told from its config",
        hint="Known: fp8, compressed-tensors (INT4 groups, FP8 blocks), modelopt NVFP4.",
    )


def _plain(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.weight", "BF16", (rows, columns))


def _fp8(block: tuple[int, ...], scale: str) -> Storage:
    rows_columns = (block[0], block[1])
    return lambda module, rows, columns: iter(fp8_block_specs(module, (rows, columns), rows_columns, scale))


def _nvfp4(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.weight", "U8", (rows, columns // 2))
    yield TensorSpec(f"{module}.weight_scale", "F8_E4M3", (rows, columns // NVFP4_GROUP))
    yield TensorSpec(f"{module}.weight_scale_2", "F32", ())
    yield TensorSpec(f"{module}.input_scale", "F32", ())


def _int4(group_size: int, shape_dtype: str) -> Storage:
    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        packed, scale, shape = int4_specs(module, (rows, columns), group_size)
        yield from (packed, scale, TensorSpec(shape.name, shape_dtype, shape.shape))

    return specs


def _compressed_tensors(name: str, config: dict[str, Any], num_hidden_layers: int, shape_dtype: str) -> Storage:
    if not config.get("config_groups"):
        raise SourceError(f"{name}: its quantization_config has no config_groups, which its tensors' dtypes need")
    groups = {key: _group(name, key, group, shape_dtype) for key, group in config["config_groups"].items()}
    matcher = ConfigMatcher(config, _TRANSFORMERS, num_hidden_layers)

    @cache
    def choose(module: str) -> Storage:
        key = matcher.group(TensorName(module, "weight"))
        return _plain if key is None else groups[key]

    return _by_module(choose)


def _group(name: str, key: str, group: dict[str, Any], shape_dtype: str) -> Storage:
    weights = group.get("weights") or {}
    match weights:
        case {"type": "int", "num_bits": 4, "symmetric": True, "group_size": int(group_size)}:
            return _int4(group_size, shape_dtype)
        case {"type": "float", "num_bits": 8, "block_structure": [rows, columns]}:
            return _fp8((rows, columns), "weight_scale")
    kind = ", ".join(f"{field} {weights.get(field)}" for field in ("type", "num_bits", "strategy", "symmetric"))
    raise SourceError(
        f"{name}: {key} of its quantization_config ({kind}) is not understood",
        hint="Known: symmetric INT4 groups and FP8 blocks.",
    )


def _modelopt(ignore: list[str]) -> Storage:
    @cache
    def choose(module: str) -> Storage:
        return _plain if any(fnmatchcase(module, pattern) for pattern in ignore) else _nvfp4

    return _by_module(choose)


def _by_module(choose: Callable[[str], Storage]) -> Storage:
    """A storage that depends on the module; expert 0 stands for all of its layer, as it does for the engines."""
    return lambda module, rows, columns: choose(_EXPERT.sub(".experts.0.", module))(module, rows, columns)

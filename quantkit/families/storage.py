"""How a config says that its linear layers are stored: which tensors stand for a weight of N rows and K columns.

    no quantization_config                      weight [N, K]
    fp8, with weight_block_size                 weight F8_E4M3 [N, K], weight_scale_inv F32 for each block
    fp8, without (AutoFP8)                      weight F8_E4M3 [N, K], weight_scale F32 [], input_scale F32 [] if static
    compressed-tensors, float 8 bit, block      weight F8_E4M3 [N, K], weight_scale F32 for each block
    compressed-tensors, float 8 bit, channel    weight F8_E4M3 [N, K], weight_scale [N, 1], input_scale [1] if static
    compressed-tensors, float 8 bit, tensor     weight F8_E4M3 [N, K], weight_scale [1], input_scale [1] if static
    compressed-tensors, float 4 bit             NVFP4 as `spelling` says, with input_global_scale unless weight-only
    compressed-tensors, int 4 bit, group        weight_packed I32 [N, K/8], weight_scale [N, K/g], weight_shape [2]
    compressed-tensors, int 4 bit, block        of no module: `description` says why such a group is written
    modelopt NVFP4, W4A16_NVFP4                 NVFP4 as `spelling` says; only the first has an input_scale
    modelopt FP8                                weight F8_E4M3 [N, K], weight_scale F32 [], input_scale F32 []

Where no dtype is named it is the model's, BF16 here: compressed-tensors makes scales in the weight's own dtype. Block
scales are F32, as quantkit writes them. Sources: `spelling`; `quantization/lifecycle/initialize.py` of
compressed-tensors 0.19; `fp8.py` (Fp8LinearMethod) and `modelopt.py` (KFp8StaticTensor, KNvfp4Static) of vLLM 0.33.
"""

import re
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from quantkit.checkpoint.header import TensorSpec
from quantkit.choices import Dialect
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.config_groups import ConfigGroups
from quantkit.weights.layout import NVFP4_GROUP, fp8_block_specs, int4_specs, nvfp4_specs

_EXPERT = re.compile(r"\.experts\.\d+\.")

Storage = Callable[[str, int, int], Iterator[TensorSpec]]


def storage(name: str, quantization: dict[str, Any], shape_dtype: str = "I64") -> Storage:
    """What gives the tensors of a linear layer from its module, rows and columns.

    name         of the model, for errors
    shape_dtype  of INT4's `weight_shape`, which no config tells

    Raises SourceError, naming the method or the config group, for a kind of storage that is not understood. The storage
    itself raises ValueError, naming the module, for columns that its groups do not divide.
    """
    method, algorithm = quantization.get("quant_method"), quantization.get("quant_algo")
    match method, algorithm:
        case _ if not quantization:
            return plain
        case "fp8", _ if not quantization.get("store_dtype"):
            return _fp8(quantization)
        case "compressed-tensors", _:
            return _compressed_tensors(name, quantization, shape_dtype)
        case "modelopt", "FP8":
            return _modelopt(quantization, fp8(lambda rows: (), "F32", ()))
        case "modelopt", "NVFP4" | "W4A16_NVFP4":
            activations = algorithm == "NVFP4" and not _weight_only(quantization)
            return _modelopt(quantization, nvfp4(Dialect.MODELOPT, activations=activations))
    more = "".join(f" {quantization[key]}" for key in ("quant_algo", "store_dtype") if quantization.get(key))
    raise SourceError(
        f"{name}: the tensors of a checkpoint quantized with {method!r}{more} cannot be told from its config",
        hint="Known: fp8, compressed-tensors (INT4 groups, FP8, NVFP4), modelopt (FP8, NVFP4, W4A16_NVFP4).",
    )


def plain(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    """A weight that is not quantized: BF16 [N, K]."""
    yield TensorSpec(f"{module}.weight", "BF16", (rows, columns))


def fp8_blocks(block: tuple[int, int], scale: str) -> Storage:
    """FP8 with a scale F32 for each `block` of rows and columns; `scale` is its leaf."""
    return lambda module, rows, columns: iter(fp8_block_specs(module, (rows, columns), block, scale))


def fp8(scale_shape: Callable[[int], tuple[int, ...]], dtype: str, input_shape: tuple[int, ...] | None) -> Storage:
    """FP8 without blocks.

    scale_shape  from the weight's rows to its scale's shape
    dtype        of the scales
    input_shape  of the static scale of the activations, or None where there is none
    """

    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns))
        yield TensorSpec(f"{module}.weight_scale", dtype, scale_shape(rows))
        if input_shape is not None:
            yield TensorSpec(f"{module}.input_scale", dtype, input_shape)

    return specs


def nvfp4(dialect: Dialect, *, activations: bool) -> Storage:
    """NVFP4 in the spelling of `dialect`, with a scale for the `activations` or not."""

    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        _check_groups(module, columns, NVFP4_GROUP)
        return iter(nvfp4_specs(module, (rows, columns), dialect, activations=activations))

    return specs


def int4(group_size: int, shape_dtype: str) -> Storage:
    """INT4 with a scale BF16 for each `group_size` columns."""

    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        _check_groups(module, columns, group_size)
        packed, scale, shape = int4_specs(module, (rows, columns), group_size)
        return iter((packed, scale, TensorSpec(shape.name, shape_dtype, shape.shape)))

    return specs


def _check_groups(module: str, columns: int, group_size: int) -> None:
    if columns % group_size:
        raise ValueError(f"{module} has {columns} columns, which groups of {group_size} do not divide")


def _fp8(quantization: dict[str, Any]) -> Storage:
    """Modules are left out by their whole names only: GLM's list also holds one that does not exist."""
    if block := quantization.get("weight_block_size"):
        quantized = fp8_blocks((block[0], block[1]), "weight_scale_inv")
    else:
        quantized = fp8(lambda rows: (), "F32", () if quantization.get("activation_scheme") == "static" else None)
    kept = frozenset(quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or ())
    return _by_module(lambda module: plain if module in kept else quantized) if kept else quantized


def _compressed_tensors(name: str, config: dict[str, Any], shape_dtype: str) -> Storage:
    if not config.get("config_groups"):
        raise SourceError(f"{name}: its quantization_config has no config_groups, which its tensors' dtypes need")
    groups = {key: _group(name, key, group, shape_dtype) for key, group in config["config_groups"].items()}
    config_groups = ConfigGroups(config)

    def choose(module: str) -> Storage:
        key = config_groups.group(TensorName(module, "weight"))
        return plain if key is None else groups[key]

    return _by_module(choose)


def _group(name: str, key: str, group: dict[str, Any], shape_dtype: str) -> Storage:
    weights = {"symmetric": True} | (group.get("weights") or {})
    inputs = group.get("input_activations")
    static = inputs is not None and inputs.get("dynamic") is not True  # `local`: a global scale is static
    match weights:
        case {"type": "int", "num_bits": 4, "symmetric": True, "group_size": int(group_size)}:
            return int4(group_size, shape_dtype)
        case {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "block"}:
            return _of_no_module(key)
        case {"type": "float", "num_bits": 8, "symmetric": True, "block_structure": [rows, columns]}:
            return fp8_blocks((rows, columns), "weight_scale")
        case {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"}:
            return fp8(lambda rows: (rows, 1), "BF16", (1,) if static else None)
        case {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor"}:
            return fp8(lambda rows: (1,), "BF16", (1,) if static else None)
        case {"type": "float", "num_bits": 4, "symmetric": True, "strategy": "tensor_group", "group_size": 16}:
            return nvfp4(Dialect.COMPRESSED_TENSORS, activations=static)
    kind = ", ".join(f"{field} {weights.get(field)}" for field in ("type", "num_bits", "strategy", "symmetric"))
    raise SourceError(
        f"{name}: {key} of its quantization_config ({kind}) is not understood",
        hint="Known, if symmetric: INT4 groups; FP8 blocks, channels and tensors; NVFP4.",
    )


def _of_no_module(key: str) -> Storage:
    """INT4 in blocks, which quantkit writes under the class `Linear` for SGLang to read, with no module of its own."""

    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        raise ValueError(f"{module} is left to {key} of the quantization_config, INT4 in blocks, which nothing stores")

    return specs


def _weight_only(quantization: dict[str, Any]) -> bool:
    """Whether ModelOpt's config groups, if there are any, all leave activations alone."""
    groups: Collection[dict[str, Any]] = (quantization.get("config_groups") or {}).values()
    return bool(groups) and all(group.get("input_activations") is None for group in groups)


def _modelopt(quantization: dict[str, Any], quantized: Storage) -> Storage:
    kept = quantization.get("ignore") or quantization.get("exclude_modules") or ()
    return _by_module(lambda module: plain if any(fnmatchcase(module, entry) for entry in kept) else quantized)


def _by_module(choose: Callable[[str], Storage]) -> Storage:
    """A storage that depends on the module; expert 0 stands for all of its layer, as it does for the engines."""
    cached = cache(choose)
    return lambda module, rows, columns: cached(_EXPERT.sub(".experts.0.", module))(module, rows, columns)

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
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from quantkit.choices import Dialect
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.config_groups import ConfigGroups
from quantkit.weights.encodings import PLAIN, encoding_of, fp8, nvfp4
from quantkit.weights.encodings.encoding import Storage

_EXPERT = re.compile(r"\.experts\.\d+\.")


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
            return PLAIN.specs
        case "fp8", _ if not quantization.get("store_dtype"):
            return _fp8(quantization)
        case "compressed-tensors", _:
            return _compressed_tensors(name, quantization, shape_dtype)
        case "modelopt", "FP8":
            return _modelopt(quantization, fp8.without_blocks(lambda rows: (), "F32", ()))
        case "modelopt", "NVFP4" | "W4A16_NVFP4":
            activations = algorithm == "NVFP4" and not _weight_only(quantization)
            return _modelopt(quantization, nvfp4.stored(Dialect.MODELOPT, activations=activations))
    more = "".join(f" {quantization[key]}" for key in ("quant_algo", "store_dtype") if quantization.get(key))
    raise SourceError(
        f"{name}: the tensors of a checkpoint quantized with {method!r}{more} cannot be told from its config",
        hint="Known: fp8, compressed-tensors (INT4 groups, FP8, NVFP4), modelopt (FP8, NVFP4, W4A16_NVFP4).",
    )


def _fp8(quantization: dict[str, Any]) -> Storage:
    """Modules are left out by their whole names only: GLM's list also holds one that does not exist."""
    if block := quantization.get("weight_block_size"):
        quantized = fp8.blocks((block[0], block[1]), "weight_scale_inv")
    else:
        quantized = fp8.without_blocks(
            lambda rows: (), "F32", () if quantization.get("activation_scheme") == "static" else None
        )
    kept = frozenset(quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or ())
    return _by_module(lambda module: PLAIN.specs if module in kept else quantized) if kept else quantized


def _compressed_tensors(name: str, config: dict[str, Any], shape_dtype: str) -> Storage:
    if not config.get("config_groups"):
        raise SourceError(f"{name}: its quantization_config has no config_groups, which its tensors' dtypes need")
    groups = {key: _group(name, key, group, shape_dtype) for key, group in config["config_groups"].items()}
    config_groups = ConfigGroups(config)

    def choose(module: str) -> Storage:
        key = config_groups.group(TensorName(module, "weight"))
        return PLAIN.specs if key is None else groups[key]

    return _by_module(choose)


def _group(name: str, key: str, group: dict[str, Any], shape_dtype: str) -> Storage:
    weights = {"symmetric": True} | (group.get("weights") or {})
    inputs = group.get("input_activations")
    static = inputs is not None and inputs.get("dynamic") is not True  # `local`: a global scale is static
    try:
        found = encoding_of({"weights": weights}) if weights.get("symmetric") is True else None
    except (KeyError, ValueError):
        found = None
    if found and (tensors := found.storage(key, weights, static, shape_dtype)):
        return tensors
    kind = ", ".join(f"{field} {weights.get(field)}" for field in ("type", "num_bits", "strategy", "symmetric"))
    raise SourceError(
        f"{name}: {key} of its quantization_config ({kind}) is not understood",
        hint="Known, if symmetric: INT4 groups; FP8 blocks, channels and tensors; NVFP4.",
    )


def _weight_only(quantization: dict[str, Any]) -> bool:
    """Whether ModelOpt's config groups, if there are any, all leave activations alone."""
    groups: Collection[dict[str, Any]] = (quantization.get("config_groups") or {}).values()
    return bool(groups) and all(group.get("input_activations") is None for group in groups)


def _modelopt(quantization: dict[str, Any], quantized: Storage) -> Storage:
    kept = quantization.get("ignore") or quantization.get("exclude_modules") or ()
    return _by_module(lambda module: PLAIN.specs if any(fnmatchcase(module, entry) for entry in kept) else quantized)


def _by_module(choose: Callable[[str], Storage]) -> Storage:
    """A storage that depends on the module; expert 0 stands for all of its layer, as it does for the engines."""
    cached = cache(choose)
    return lambda module, rows, columns: cached(_EXPERT.sub(".experts.0.", module))(module, rows, columns)

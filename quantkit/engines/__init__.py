"""What vLLM, SGLang and transformers accept.

profiles            the engines, and how they build and name modules
compressed_tensors  which group of a compressed-tensors config a module gets
modelopt            which modules a ModelOpt config quantizes
"""

from collections.abc import Mapping
from typing import Any

from quantkit.engines.compressed_tensors import ConfigMatcher
from quantkit.engines.modelopt import ModeloptMatcher
from quantkit.engines.profiles import ENGINES, LINEAR_ROLES, Engine, is_linear

__all__ = ["ENGINES", "LINEAR_ROLES", "ConfigMatcher", "Engine", "ModeloptMatcher", "is_linear", "matchers"]


def matchers(
    quantization_config: Mapping[str, Any], num_hidden_layers: int
) -> tuple[ConfigMatcher | ModeloptMatcher, ...]:
    """One for each engine that reads configs of this dialect."""
    if quantization_config.get("quant_method") == "modelopt":
        engines = (engine for engine in ENGINES if engine.reads_modelopt)
        return tuple(ModeloptMatcher(quantization_config, engine, num_hidden_layers) for engine in engines)
    return tuple(ConfigMatcher(quantization_config, engine, num_hidden_layers) for engine in ENGINES)

"""How vLLM and SGLang decide which modules a ModelOpt config leaves unquantized; transformers 5.17 reads none.

Everything is quantized but what the list of excluded names covers. It is matched

    vLLM 0.33      whole names, then any part of a name, then shell patterns (modelopt.py: is_layer_excluded)
    SGLang 0.5.23  shell patterns of the whole name or of one part between dots; an entry that ends in q_a_proj,
                   q_b_proj, kv_a_proj_with_mqa or kv_b_proj also every module whose last part holds that word, in all
                   layers (modelopt_quant.py: is_layer_excluded); the MTP layer is never quantized (deepseek_nextn.py)

A prefix `language_model.` may be missing from an entry, but in vLLM not from a shell pattern.

Both look up the experts of a layer by the name of the module that holds them, `mlp.experts`.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from quantkit.engines.profiles import Engine
from quantkit.naming import Role, TensorName

WEIGHT_ONLY, FP8 = "W4A16_NVFP4", "FP8"
_IN_ALL_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


class ModeloptMatcher:
    """Answers, for one engine and one `quantization_config`, whether a module is quantized: to NVFP4, or FP8."""

    def __init__(self, quantization_config: Mapping[str, Any], engine: Engine, num_hidden_layers: int) -> None:
        self.engine = engine
        self.num_hidden_layers = num_hidden_layers
        inner = quantization_config.get("quantization") or quantization_config
        self.excluded: tuple[str, ...] = tuple(inner.get("ignore") or inner.get("exclude_modules") or ())
        self.algorithm = str(inner.get("quant_algo"))

    def is_quantized(self, name: TensorName) -> bool:
        """Whether the engine takes the module of `name` for a quantized one."""
        if self.engine.mtp_prefix and name.is_mtp(self.num_hidden_layers):
            return False
        built = self.engine.built(name, self.num_hidden_layers)
        if name.role is Role.ROUTED_EXPERT:
            built = name.module.partition(".experts.")[0] + ".experts"
        return not self.excludes(built)

    def excludes(self, built: str) -> bool:
        """Whether the engine leaves the module that it calls `built` unquantized."""
        return any(self.covers(entry, built) for entry in self.excluded)

    def leaves(self, name: TensorName) -> frozenset[str]:
        """The leaves that the engine expects on disk for the weight of the module of `name`."""
        if not self.is_quantized(name):
            return frozenset({"weight"})
        second = () if self.algorithm == FP8 else ("weight_scale_2",)
        activations = () if self.algorithm == WEIGHT_ONLY else ("input_scale",)
        return frozenset({"weight", "weight_scale", *second, *activations})

    def covers(self, entry: str, built: str) -> bool:
        """Whether an entry of the list covers the module that the engine calls `built`."""
        names = {built, built.removeprefix("language_model.")}
        if self.engine.excludes_substrings:
            return fnmatchcase(built, entry) or any(entry in name for name in names)
        tail = entry.rpartition(".")[2]
        if tail in _IN_ALL_LAYERS and tail in built.rpartition(".")[2]:
            return True
        return any(fnmatchcase(part, entry) for name in names for part in (name, *name.split(".")))

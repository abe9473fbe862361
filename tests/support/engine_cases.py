"""Checkpoints of a few modules and their configs, and what a rule of an engine says of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.choices import Dialect
from quantkit.engines.rules import Facts, Judgement, Module, judge
from quantkit.naming import TensorName
from quantkit.weights.encodings import FP8, INT4, NVFP4, Format
from quantkit.weights.quantization_config import describe

LAYERS = 78
MLA = {"model_type": "glm_moe_dsa", "kv_lora_rank": 512, "n_routed_experts": 256, "n_shared_experts": 1}
PACKED = frozenset({"weight_packed", "weight_scale", "weight_shape"})
CT_NVFP4 = frozenset({"weight_packed", "weight_scale", "weight_global_scale"})
MODELOPT = frozenset({"weight", "weight_scale", "weight_scale_2"})


def module(name: str, kind: str = "bf16", shape: tuple[int, int] = (2048, 2048), leaf: str = "weight") -> Module:
    """A module below `model.`, of a kind like `int4 g=32`, `nvfp4`, `modelopt nvfp4`, `fp8 128x128` or a dtype."""
    full = TensorName(name if name == "lm_head" else f"model.{name}", leaf)
    match kind.split():
        case ["int4", group]:
            form = INT4.made_format(int(group.removeprefix("g=")))
            return Module(TensorName(full.module, "weight_packed"), shape, kind, PACKED, form)
        case ["nvfp4", *activations]:
            form = replace(NVFP4.made_format(None), activations=bool(activations))
            leaves = CT_NVFP4 | ({"input_global_scale"} if activations else set())
            return Module(TensorName(full.module, "weight_packed"), shape, kind, leaves, form)
        case ["modelopt", _]:
            return Module(full, shape, "nvfp4", MODELOPT, NVFP4.made_format(None))
        case ["fp8", ("channel" | "tensor") as strategy]:
            form = Format(FP8, strategy)
            return Module(full, shape, kind, frozenset({"weight", "weight_scale"}), form)
        case ["fp8", block]:
            rows, columns = map(int, block.split("x"))
            form = Format(FP8, "block", (rows, columns))
            return Module(full, shape, kind, frozenset({"weight", "weight_scale"}), form)
    return Module(full, shape, kind, frozenset({leaf}))


def modules(
    parent: str, parts: Sequence[str], kind: str = "bf16", shape: tuple[int, int] = (2048, 2048)
) -> list[Module]:
    return [module(f"{parent}.{part}", kind, shape) for part in parts]


def described(found: Sequence[Module], dialect: Dialect = Dialect.COMPRESSED_TENSORS, **changes: Any) -> dict[str, Any]:
    """The config that quantkit writes for these modules, with some keys changed."""
    weights = [(entry.name, entry.format) for entry in found if len(entry.shape) == 2]
    return describe(weights, LAYERS, dialect) | changes


@dataclass(frozen=True)
class Case:
    """A checkpoint and what a rule says of it: a status for each engine.

    config        that of the model, beyond `MLA`
    quantization  `...` for the one that quantkit writes
    """

    rule: str
    says: dict[str, str]
    modules: Sequence[Module]
    config: dict[str, Any] = field(default_factory=dict)
    quantization: Any = ...
    signed: bool = False
    unequal: dict[str, str] | None = None
    ranks: int | None = None
    folded: bool = False
    whole: dict[str, Any] | None = None

    def judgements(self) -> dict[str, Judgement]:
        """What the rule says, by engine."""
        quantization = self.quantization
        if quantization is ...:
            four_bits = any(entry.format and entry.format.encoding is not FP8 for entry in self.modules)
            quantization = described(self.modules) if four_bits else None
        known = MLA | self.config, quantization, LAYERS, self.signed, self.unequal
        facts = Facts(tuple(self.modules), *known, folded=self.folded, whole=self.whole)
        return {found.engine: found for found in judge(facts, self.ranks) if found.rule.id == self.rule}


def both(status: str) -> dict[str, str]:
    return {"vLLM": status, "SGLang": status}


def sglang(status: str) -> dict[str, str]:
    return {"SGLang": status}


def modelopt(*excluded: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": list(excluded)}


def module_name(module: str) -> TensorName:
    return TensorName(module, "weight")


def config_with(targets: dict[str, list[str]], ignore: list[str]) -> dict[str, Any]:
    """A config with these groups; the first is INT4 and all others are FP8."""
    kinds = ["int"] + ["float"] * (len(targets) - 1)
    return {
        "config_groups": {
            key: {"targets": entries, "weights": {"type": kind}}
            for (key, entries), kind in zip(targets.items(), kinds, strict=True)
        },
        "ignore": ignore,
    }

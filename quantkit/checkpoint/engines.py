"""How vLLM, SGLang and transformers decide which config group a module belongs to.

A plan proves with these rules that the config alone gives every module the format that is on disk. All three match
names before classes, and a regex with `re.match`; they differ in the names of the modules that they build:

    vLLM 0.33      `gate_up_proj` and `fused_qkv_a_proj`, each ignored if its own name or all of its members' match;
                   a mix of members is an error (compressed_tensors/utils.py:53-70, config_utils.py:384-420)
    SGLang 0.5.23  `gate_up_proj` under that name only, `fused_qkv_a_proj_with_mqa` also by members; an entry matches
                   a dotted suffix too; the MTP layer runs under the prefix `model.decoder.`; a module with neither
                   target nor ignore is an error (compressed_tensors/utils.py)
    transformers   the checkpoint's own names (compressed-tensors 0.19, utils/match.py)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantkit.naming import Role, TensorName

# What every engine builds as a quantizable Linear; a router or an embedding never takes a scheme from the config.
LINEAR_ROLES = frozenset(
    {
        Role.ATTENTION,
        Role.KV_B,
        Role.INDEXER,
        Role.INDEXER_WEIGHTS,
        Role.DENSE_MLP,
        Role.SHARED_EXPERT,
        Role.ROUTED_EXPERT,
        Role.MTP_PROJECTION,
        Role.LM_HEAD,
    }
)
_MEMBERS = {"gate_up_proj": ("gate_proj", "up_proj"), "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


@dataclass(frozen=True)
class Engine:
    """The naming habits of one engine.

    fused             checkpoint fusion -> the name that the engine builds; a fusion not listed is not fused
    by_members        the built names that are also looked up by their members
    matches_suffix    whether a plain entry matches a dotted suffix of the name
    mtp_prefix        what replaces `model.layers.N` for the MTP layer
    """

    name: str
    fused: Mapping[str, str] = field(default_factory=dict)
    by_members: frozenset[str] = frozenset()
    matches_suffix: bool = False
    mtp_prefix: str | None = None


ENGINES = (
    Engine(
        "vLLM",
        fused={"gate_up_proj": "gate_up_proj", "fused_qkv_a_proj": "fused_qkv_a_proj"},
        by_members=frozenset({"gate_up_proj", "fused_qkv_a_proj"}),
    ),
    Engine(
        "SGLang",
        fused={"gate_up_proj": "gate_up_proj", "fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa"},
        by_members=frozenset({"fused_qkv_a_proj_with_mqa"}),
        matches_suffix=True,
        mtp_prefix="model.decoder",
    ),
    Engine("transformers"),
)


class ConfigMatcher:
    """Answers, for one engine and one `quantization_config`, which config group a module gets."""

    def __init__(self, quantization_config: Mapping[str, Any], engine: Engine, num_hidden_layers: int) -> None:
        self.engine = engine
        self.num_hidden_layers = num_hidden_layers
        self.groups: dict[str, Mapping[str, Any]] = dict(quantization_config["config_groups"])
        self._ignore = self._pattern(quantization_config.get("ignore", ()))
        self._targets = {key: self._pattern(group["targets"]) for key, group in self.groups.items()}

    def group(self, name: TensorName) -> str | None:
        """The key of the group that the module of `name` belongs to, or None when it is left unquantized.

        A module that neither an ignore entry nor a target covers is left unquantized by vLLM and transformers and is
        an error in SGLang; it is reported as None, so give the plan's configs a catch-all target.
        """
        names = self._built_names(name)
        if self._matches(self._ignore, names):
            return None
        by_name = (key for key, pattern in self._targets.items() if self._matches(pattern, names))
        return next(by_name, self._class_group)

    def leaves(self, name: TensorName) -> frozenset[str]:
        """The leaves that the engine expects on disk for the weight of the module of `name`."""
        key = self.group(name)
        if key is None:
            return frozenset({"weight"})
        if self.groups[key]["weights"]["type"] == "int":
            return frozenset({"weight_packed", "weight_scale", "weight_shape"})
        return frozenset({"weight", "weight_scale"})

    @cached_property
    def _class_group(self) -> str | None:
        return next((key for key, group in self.groups.items() if "Linear" in group["targets"]), None)

    def _built_names(self, name: TensorName) -> tuple[tuple[str, ...], ...]:
        """The names by which the engine looks: one is enough, and a tuple of members counts only as a whole."""
        module = name.module
        if self.engine.mtp_prefix and name.layer is not None and name.layer >= self.num_hidden_layers:
            module = re.sub(r"^.*?layers\.\d+", self.engine.mtp_prefix, module)
        parent = module.rpartition(".")[0]
        fusion = (name.fused_module or "").rpartition(".")[2]
        if fusion not in self.engine.fused:
            return ((module,),)
        built = self.engine.fused[fusion]
        members = tuple(f"{parent}.{member}" for member in _MEMBERS[fusion])
        return ((f"{parent}.{built}",), *((members,) if built in self.engine.by_members else ()))

    def _matches(self, pattern: re.Pattern[str], names: tuple[tuple[str, ...], ...]) -> bool:
        return any(all(pattern.match(name) for name in alternative) for alternative in names)

    def _pattern(self, entries: Any) -> re.Pattern[str]:
        """One regex for all entries: `re:` ones as they are, plain ones as exact names (or suffixes)."""
        before = r"(?:.*\.)?" if self.engine.matches_suffix else ""
        parts = [
            f"(?:{entry.removeprefix('re:')})" if entry.startswith("re:") else f"(?:{before}{re.escape(entry)}$)"
            for entry in entries
        ]
        return re.compile("|".join(parts) or r"(?!)")

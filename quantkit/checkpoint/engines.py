"""How vLLM, SGLang and transformers decide which config group a module belongs to.

A plan proves with these rules that the config alone gives every module the format that is on disk. All three test
`ignore` first, then targets by name (exact, or `re:` with `re.match`) in the order of the groups, and know `Linear` as
a class. They differ in the names of the modules that they build and in the order of the tests:

    vLLM 0.33      builds `gate_up_proj` and `fused_qkv_a_proj`; looks for the built name, then for all of its members,
                   then for the class (compressed_tensors/utils.py, config_utils.py: find_matching_patterns)
    SGLang 0.5.23  builds `gate_up_proj`, known by that name only, and `fused_qkv_a_proj_with_mqa`, which is ignored by
                   its members or its exact name; looks for the built name, then for the class; a plain `ignore`
                   entry matches a dotted suffix; the MTP layer runs under `model.decoder.`; no match is an error
                   (compressed_tensors/utils.py, models/deepseek_v2.py, deepseek_nextn.py)
    transformers   builds the checkpoint's own modules (compressed-tensors 0.19, utils/match.py)

Both engines look up the experts of a layer by the names of expert 0.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.weights import Weight
from quantkit.errors import EngineError
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


def is_linear(weight: Weight) -> bool:
    """Whether the config decides how an engine builds the module that `weight` belongs to, unlike its bias, say."""
    return weight.name.role in LINEAR_ROLES and weight.name.leaf in ("weight", "weight_packed")


_MEMBERS = {"gate_up_proj": ("gate_proj", "up_proj"), "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


@dataclass(frozen=True)
class Engine:
    """The habits of one engine.

    fused                 checkpoint fusion -> the name that the engine builds; a fusion not listed is not fused
    expanded              the built names that are also looked up by their members
    ignores_members_only  whether `ignore` is tested against an expanded module's members and not against its own name
    class_before_members  whether the class `Linear` is tested before the members
    ignores_suffix        whether a plain `ignore` entry matches a dotted suffix of the name
    mtp_prefix            what stands for `model.layers.N` in the MTP layer
    """

    name: str
    fused: Mapping[str, str] = field(default_factory=dict)
    expanded: frozenset[str] = frozenset()
    ignores_members_only: bool = False
    class_before_members: bool = False
    ignores_suffix: bool = False
    mtp_prefix: str | None = None


ENGINES = (
    Engine(
        "vLLM",
        fused={"gate_up_proj": "gate_up_proj", "fused_qkv_a_proj": "fused_qkv_a_proj"},
        expanded=frozenset({"gate_up_proj", "fused_qkv_a_proj"}),
    ),
    Engine(
        "SGLang",
        fused={"gate_up_proj": "gate_up_proj", "fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa"},
        expanded=frozenset({"fused_qkv_a_proj_with_mqa"}),
        ignores_members_only=True,
        class_before_members=True,
        ignores_suffix=True,
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
        self._ignore = [_pattern(entry, engine.ignores_suffix) for entry in quantization_config.get("ignore") or ()]
        self._ignored_by_name = frozenset(quantization_config.get("ignore") or ())
        self._targets = {key: [_pattern(entry) for entry in group["targets"]] for key, group in self.groups.items()}
        self._class_group = next((key for key, group in self.groups.items() if "Linear" in group["targets"]), None)

    def group(self, name: TensorName) -> str | None:
        """The key of the group that the module of `name` belongs to, or None when it is left unquantized.

        Raises EngineError, naming the module, where the engine refuses the config: a fused module of which only some
        members are ignored.
        """
        built, members = self._built(name)
        if self._ignored(built, members):
            return None
        by_members = self._by_members(members)
        by_class = self._class_group
        last = (by_class, by_members) if self.engine.class_before_members else (by_members, by_class)
        return next((key for key in (self._by_name(built), *last) if key is not None), None)

    def leaves(self, name: TensorName) -> frozenset[str]:
        """The leaves that the engine expects on disk for the weight of the module of `name`."""
        key = self.group(name)
        if key is None:
            return frozenset({"weight"})
        if self.groups[key]["weights"]["type"] == "int":
            return frozenset({"weight_packed", "weight_scale", "weight_shape"})
        return frozenset({"weight", "weight_scale"})

    def _built(self, name: TensorName) -> tuple[str, tuple[str, ...]]:
        """The name of the module that the engine builds, and its members' names if it looks these up, too."""
        module = name.module
        if self.engine.mtp_prefix and name.is_mtp(self.num_hidden_layers):
            module = re.sub(r"^.*?layers\.\d+", self.engine.mtp_prefix, module)
        parent = module.rpartition(".")[0]
        fusion = (name.fused_module or "").rpartition(".")[2]
        if fusion not in self.engine.fused:
            return module, ()
        built = self.engine.fused[fusion]
        members = _MEMBERS[fusion] if built in self.engine.expanded else ()
        return f"{parent}.{built}", tuple(f"{parent}.{member}" for member in members)

    def _ignored(self, built: str, members: tuple[str, ...]) -> bool:
        by_itself = _matches(self._ignore, built)
        if not members or built in self._ignored_by_name:
            return by_itself
        ignored = [member for member in members if _matches(self._ignore, member)]
        if by_itself and not self.engine.ignores_members_only:
            return True
        if 0 < len(ignored) < len(members):
            raise EngineError(f"{self.engine.name} refuses {built}: its config ignores only {', '.join(ignored)}")
        return bool(ignored)

    def _by_name(self, name: str) -> str | None:
        return next((key for key, patterns in self._targets.items() if _matches(patterns, name)), None)

    def _by_members(self, members: tuple[str, ...]) -> str | None:
        groups = [self._by_name(member) for member in members]
        return groups[0] if groups and None not in groups else None


def _matches(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.match(name) for pattern in patterns)


def _pattern(entry: str, suffix: bool = False) -> re.Pattern[str]:
    """An entry's regex: `re:` ones as they are, plain ones as whole names, or as dotted suffixes."""
    if entry.startswith("re:"):
        return re.compile(entry.removeprefix("re:"))
    return re.compile((r"(?:.*\.)?" if suffix else "") + re.escape(entry) + "$")

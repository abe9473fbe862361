"""How vLLM, SGLang and transformers decide which group of a compressed-tensors config a module belongs to.

A plan proves with these rules that the config alone gives every module the format that is on disk. All three test
`ignore` first, then targets by name (exact, or `re:` with `re.match`) in the order of the groups, and know `Linear` as
a class. They differ in the names of the modules that they build and in the order of the tests:

    vLLM 0.33      builds `gate_up_proj`, `fused_qkv_a_proj` and `qkv_proj`; looks for the built name, then for all of
                   its members, then for the class (compressed_tensors/utils.py, config_utils.py:
                   find_matching_patterns)
    SGLang 0.5.23  builds `gate_up_proj` and `qkv_proj`, known by these names only, and `fused_qkv_a_proj_with_mqa`,
                   which is ignored by its members or its exact name; looks for the built name, then for the class; a
                   plain `ignore` entry matches a dotted suffix; the MTP layer runs under `model.decoder.`; no match is
                   an error (compressed_tensors/utils.py, models/deepseek_v2.py, deepseek_nextn.py)
    transformers   builds the checkpoint's own modules (compressed-tensors 0.19, utils/match.py)

Both engines look up the experts of a layer by the names of expert 0, and quantize the head only if it is targeted by
name: its class is `ParallelLMHead` (compressed_tensors.py of both; SGLang: get_lm_head_scheme).
"""

from collections.abc import Mapping
from typing import Any

from quantkit.engines.profiles import Engine
from quantkit.errors import EngineError
from quantkit.naming import FUSED_PARTS, Role, TensorName
from quantkit.weights.config_groups import ConfigGroups, matches
from quantkit.weights.encodings import encoding_of


class ConfigMatcher(ConfigGroups):
    """Answers, for one engine and one `quantization_config`, which config group a module gets."""

    def __init__(self, quantization_config: Mapping[str, Any], engine: Engine, num_hidden_layers: int) -> None:
        super().__init__(quantization_config, ignores_suffix=engine.ignores_suffix)
        self.engine = engine
        self.num_hidden_layers = num_hidden_layers
        self._ignored_by_name = frozenset(quantization_config.get("ignore") or ())

    def group(self, name: TensorName) -> str | None:
        """The key of the group that the module of `name` belongs to, or None when it is left unquantized.

        Raises EngineError, naming the module, where the engine refuses the config: a fused module of which only some
        members are ignored.
        """
        built, members = self._built(name)
        if self._ignored(built, members):
            return None
        by_members = self._by_members(members)
        by_class = self.class_group if self.engine.head_is_linear or name.role is not Role.LM_HEAD else None
        last = (by_class, by_members) if self.engine.class_before_members else (by_members, by_class)
        return next((key for key in (self.by_name(built), *last) if key is not None), None)

    def is_unmatched(self, name: TensorName) -> bool:
        """Whether the engine refuses the module of `name`, because nothing ignores it and no target is its own."""
        if not self.engine.needs_target or (name.role is Role.LM_HEAD and not self.engine.head_is_linear):
            return False
        return self.group(name) is None and not self._ignored(*self._built(name))

    def leaves(self, name: TensorName) -> frozenset[str]:
        """The leaves that the engine expects on disk for the weight of the module of `name`."""
        key = self.group(name)
        return frozenset({"weight"}) if key is None else self.leaves_of(key)

    def leaves_of(self, key: str) -> frozenset[str]:
        """The leaves that stand for a weight of the group `key`."""
        group = self.groups[key]
        inputs = group.get("input_activations")
        return encoding_of(group).leaves(inputs is not None and inputs["dynamic"] is not True)

    def _built(self, name: TensorName) -> tuple[str, tuple[str, ...]]:
        """The name of the module that the engine builds, and its members' names if it looks these up, too."""
        built = self.engine.built(name, self.num_hidden_layers)
        parent, _, last = built.rpartition(".")
        if last not in self.engine.expanded:
            return built, ()
        members = FUSED_PARTS[(name.fused_module or "").rpartition(".")[2]]
        return built, tuple(f"{parent}.{member}" for member in members)

    def _ignored(self, built: str, members: tuple[str, ...]) -> bool:
        by_itself = matches(self.ignore, built)
        if not members or built in self._ignored_by_name:
            return by_itself
        ignored = [member for member in members if matches(self.ignore, member)]
        if by_itself and not self.engine.ignores_members_only:
            return True
        if 0 < len(ignored) < len(members):
            raise EngineError(f"{self.engine.name} refuses {built}: its config ignores only {', '.join(ignored)}")
        return bool(ignored)

    def _by_members(self, members: tuple[str, ...]) -> str | None:
        groups = [self.by_name(member) for member in members]
        return groups[0] if groups and None not in groups else None

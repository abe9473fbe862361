"""Which group of a compressed-tensors config a module gets.

`ignore` is tested first, then targets by name (exact, or `re:` with `re.match`) in the order of the groups, then
`Linear`, the class of every module that multiplies (compressed-tensors 0.19, utils/match.py). How engines differ, which
fuse modules: `engines.compressed_tensors`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.naming import TensorName

Patterns = Iterable[re.Pattern[str]]


class ConfigGroups:
    """The config groups of one `quantization_config`, for modules that are not fused."""

    def __init__(self, quantization_config: Mapping[str, Any], *, ignores_suffix: bool = False) -> None:
        """`ignores_suffix`: a plain `ignore` entry matches a dotted suffix of the name, too."""
        self.groups: dict[str, Mapping[str, Any]] = dict(quantization_config["config_groups"])
        self.ignore = [_pattern(entry, ignores_suffix) for entry in quantization_config.get("ignore") or ()]
        self._targets = {key: [_pattern(entry) for entry in group["targets"]] for key, group in self.groups.items()}
        self.class_group = next((key for key, group in self.groups.items() if "Linear" in group["targets"]), None)

    def group(self, name: TensorName) -> str | None:
        """The key of the group that the module of `name` belongs to, or None when it is left unquantized."""
        if matches(self.ignore, name.module):
            return None
        return next((key for key in (self.by_name(name.module), self.class_group) if key is not None), None)

    def by_name(self, module: str) -> str | None:
        """The key of the first group that has a target for the name of a module, or None."""
        return next((key for key, patterns in self._targets.items() if matches(patterns, module)), None)


def matches(patterns: Patterns, module: str) -> bool:
    """Whether one of `patterns` matches the name of a module."""
    return any(pattern.match(module) for pattern in patterns)


def _pattern(entry: str, suffix: bool = False) -> re.Pattern[str]:
    """An entry's regex: `re:` ones as they are, plain ones as whole names, or as dotted suffixes."""
    if entry.startswith("re:"):
        return re.compile(entry.removeprefix("re:"))
    return re.compile((r"(?:.*\.)?" if suffix else "") + re.escape(entry) + "$")

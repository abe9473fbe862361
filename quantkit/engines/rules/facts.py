"""What the rules look at: the modules of a checkpoint, planned or stored, and what its config says."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantkit.checkpoint.config import KEY
from quantkit.checkpoint.source import Source
from quantkit.engines import ENGINES, ConfigMatcher, ModeloptMatcher, is_linear, matchers
from quantkit.errors import EngineError
from quantkit.naming import Role, TensorName
from quantkit.weights.encodings import FP8, PLAIN, Encoding, Format
from quantkit.weights.weight import Weight

ALL_ENGINES = frozenset(engine.name for engine in ENGINES)
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Module:
    """A weight as an engine meets it.

    shape   its own, unpacked
    label   its format as reports call it; the dtype of a plain one
    leaves  of the tensors that hold it
    format  as a config describes it; None for a plain one
    scales  the dtype of an FP8 weight's scales, where it is known
    within  of an expert that is stored with all others of its layer, their tensor
    turned  whether that is transposed
    """

    name: TensorName
    shape: tuple[int, ...]
    label: str
    leaves: frozenset[str]
    format: Format | None = None
    scales: str | None = None
    within: str | None = None
    turned: bool = False

    @classmethod
    def of(cls, weight: Weight) -> "Module":
        """The module of a stored weight."""
        leaves = frozenset(tensor.spec.name.rpartition(".")[2] for tensor in weight.tensors)
        scales = weight.scale.spec.dtype if weight.encoding is FP8 and weight.scale else None
        return cls(
            name=weight.name,
            shape=weight.shape,
            label=weight.label,
            leaves=leaves,
            format=weight.encoding.format(weight),
            scales=scales,
            within=weight.within,
            turned=weight.fused_columns is not None,
        )

    @property
    def encoding(self) -> Encoding:
        """How it is stored."""
        return self.format.encoding if self.format else PLAIN

    @property
    def projection(self) -> str:
        """The last part of its name."""
        return self.name.module.rpartition(".")[2]


@dataclass(frozen=True)
class Site:
    """The weights of one name but for the number of their expert that are stored alike, and whose global scales are
    equal to their partners' or not: the first, and their number."""

    module: Module
    count: int


@dataclass(frozen=True)
class Facts:
    """A checkpoint, planned or stored.

    config           of the language model
    quantization     the `quantization_config`
    signed           whether INT4 scales may be negative
    targets          the engines that must load it
    folded           whether KV scales were folded into the weights
    whole            all of config.json, of which `config` may be a part; None where it is not known
    unequal_globals  fused projections whose parts have different NVFP4 global scales, with the values in words; None
                     where the values are not known
    """

    modules: tuple[Module, ...]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    num_hidden_layers: int
    signed: bool = False
    unequal_globals: Mapping[str, str] | None = None
    targets: frozenset[str] = ALL_ENGINES
    folded: bool = False
    whole: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        source: Source,
        weights: Iterable[Weight],
        *,
        signed: bool = False,
        unequal_globals: Mapping[str, str] | None = None,
        targets: frozenset[str] = ALL_ENGINES,
        folded: bool = False,
    ) -> "Facts":
        """The facts of a stored checkpoint."""
        quantization = source.quantization_config or None
        return cls(
            modules=tuple(map(Module.of, weights)),
            config=source.text_config,
            quantization=quantization,
            num_hidden_layers=source.num_hidden_layers,
            signed=signed,
            unequal_globals=unequal_globals,
            targets=targets,
            folded=folded,
            whole=source.config,
        )

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """All modules, those that differ in the number of their expert only counted together, unless their global
        scales say otherwise."""
        found: dict[Any, list[Module]] = {}
        for module in self.modules:
            name = module.name
            place = _EXPERT.sub(".experts.0.", name.module) if ".experts." in name.module else name.module
            alike = (name.leaf, module.shape, module.label, module.leaves, module.format, module.scales)
            key = (place, self.unequal(module), *alike, module.within, module.turned)
            found.setdefault(key, []).append(module)
        return tuple(Site(group[0], len(group)) for group in found.values())

    def unequal(self, module: Module) -> str | None:
        """The global scales of `module` and of what it is fused with, in words, where they are known to differ."""
        return (self.unequal_globals or {}).get(module.name.fused_projection or "")

    @cached_property
    def linear(self) -> tuple[Mapping[str, Any], ...]:
        """The `weights` of the config groups whose target is the class `Linear`; SGLang looks at no others for some."""
        groups = ((self.quantization or {}).get("config_groups") or {}).values()
        return tuple(group["weights"] for group in groups if "Linear" in group["targets"])

    @property
    def model_type(self) -> str:
        """Of the language model."""
        return str(self.config.get("model_type"))

    @property
    def method(self) -> str | None:
        """The config's `quant_method`."""
        return self.quantization.get("quant_method") if isinstance(self.quantization, Mapping) else None

    @cached_property
    def four_bits(self) -> bool:
        """Whether there are 4-bit weights."""
        return any(module.encoding.is_main for module in self.modules)

    @cached_property
    def matchers(self) -> Mapping[str, ConfigMatcher | ModeloptMatcher]:
        """What tells how an engine reads the config, by the engine's name; none for configs of other methods.

        Raises EngineError for a malformed one.
        """
        if self.quantization is None or self.method not in ("compressed-tensors", "modelopt"):
            return {}
        try:
            found = matchers(self.quantization, self.num_hidden_layers)
            for matcher in (matcher for matcher in found if isinstance(matcher, ConfigMatcher)):
                for key in matcher.groups:
                    matcher.leaves_of(key)
            return {matcher.engine.name: matcher for matcher in found}
        except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
            raise EngineError(f"{KEY} is malformed: {error!r}") from error

    @cached_property
    def routed(self) -> Mapping[int | None, Format | None]:
        """The format of the routed experts of each layer."""
        experts = (site.module for site in self.sites if site.module.name.role is Role.ROUTED_EXPERT)
        return {module.name.layer: module.format for module in experts}

    @cached_property
    def partners(self) -> Mapping[str, tuple[Module, ...]]:
        """The linear modules that engines fuse into one, by its name; of experts, one for each way to store them."""
        found: dict[str, list[Module]] = {}
        for site in self.sites:
            if (fused := site.module.name.fused_module) and is_linear(site.module):
                found.setdefault(fused, []).append(site.module)
        return {fused: tuple(parts) for fused, parts in found.items()}

    def is_mtp_layer(self, layer: int | None) -> bool:
        """Whether `layer` is a multi-token-prediction layer."""
        return layer is not None and layer >= self.num_hidden_layers

    def is_mtp(self, module: Module) -> bool:
        """Whether `module` belongs to a multi-token-prediction layer."""
        return module.name.is_mtp(self.num_hidden_layers)

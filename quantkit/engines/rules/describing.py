"""What the config must say of the modules."""

import re
from collections.abc import Collection, Iterable, Mapping

from quantkit.engines import ENGINES, ConfigMatcher, ModeloptMatcher, is_linear
from quantkit.engines.rules.facts import Facts, Module
from quantkit.engines.rules.rule import BOTH, Rule, Status
from quantkit.naming import Role, TensorName
from quantkit.weights.encodings import INT4, NVFP4, Format

RULE_OF_NAMES = "modules-described"
_CT_UTILS = {
    "vLLM": "model_executor/layers/quantization/compressed_tensors/utils.py",
    "SGLang": "srt/layers/quantization/compressed_tensors/utils.py",
}
_MODELOPT = {
    "vLLM": "model_executor/layers/quantization/modelopt.py",
    "SGLang": "srt/layers/quantization/modelopt_quant.py",
}
_WORDS = ("num_bits", "type", "strategy", "group_size", "block_structure")
_TOWER_SIZE = 1152  # of Kimi K2.5, where vision_config has no hidden_size; vt_hidden_size is not read
_NAMED_BY_TYPE = ("llama",)  # what vLLM takes without architectures: LlamaModel is one of its names for the class
_NUMBERED_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\*?")


def config_problem(
    matcher: ConfigMatcher | ModeloptMatcher, name: TensorName, leaves: Iterable[str], form: Format | None
) -> str | None:
    """What is wrong if `matcher`'s engine reads the config for a weight that is held by tensors with these leaves."""
    actual, expected = frozenset(leaves), matcher.leaves(name)
    if actual != expected:
        return f"holds {', '.join(sorted(actual))}; the config says {', '.join(sorted(expected))}"
    if form is None or isinstance(matcher, ModeloptMatcher) or (group := matcher.group(name)) is None:
        return None
    said, true = matcher.groups[group]["weights"], form.encoding.described(form)["weights"]
    different = (word for word in _WORDS if true.get(word) is not None and said.get(word) != true[word])
    return next((f"has {word} {true[word]}; the config says {said.get(word)}" for word in different), None)


def _names(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    return config_problem(facts.matchers[engine], module.name, module.leaves, module.format)


def _homeless(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    matcher = facts.matchers[engine]
    unmatched = isinstance(matcher, ConfigMatcher) and matcher.is_unmatched(module.name)
    return f"is neither ignored nor targeted, which {engine} refuses" if unmatched else None


def _mtp_prefix(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """The config must say the same of `model.decoder` as of the layer's number."""
    matcher = facts.matchers[engine]
    assert isinstance(matcher, ConfigMatcher)
    assert facts.quantization is not None
    other = next(engine for engine in ENGINES if engine.mtp_prefix is None and not engine.fused)
    said = ConfigMatcher(facts.quantization, other, facts.num_hidden_layers).group(module.name)
    under = matcher.engine.built(module.name, facts.num_hidden_layers)
    if (found := matcher.group(module.name)) == said:
        return None
    return f"is called {under} by {engine}, for which the config says {found or 'plain'} and not {said or 'plain'}"


def _top_format(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    said = (facts.quantization or {}).get("format")
    return None if said == "pack-quantized" else f"is INT4 in a checkpoint whose top-level format is {said!r}"


def _excluded_too(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """A list entry for layer 1 or 7 that covers layers 10 to 19 or 70 to 77, too."""
    matcher = facts.matchers[engine]
    assert isinstance(matcher, ModeloptMatcher)
    for entry in matcher.excluded:
        number = _NUMBERED_LAYER.fullmatch(entry)
        if number and int(number[1]) != module.name.layer and matcher.covers(entry, module.name.module):
            return f"is {module.label}, and {engine} excludes it by the entry {entry}"
    return None


def _mtp_head(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    """vLLM calls the MTP layer's head by the layer's name and `head`, whatever the checkpoint calls it."""
    matcher = facts.matchers[engine]
    assert isinstance(matcher, ModeloptMatcher)
    head = f"{module.name.module.rpartition('.')[0]}.head"
    return None if matcher.excludes(head) else f"comes with {head}, which {engine} builds as NVFP4"


def _experts_target(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    matcher = facts.matchers[engine]
    assert isinstance(matcher, ConfigMatcher)
    groups = matcher.groups.items()
    named = (key for key, group in groups if any(t.startswith("re:") and "experts" in t for t in group["targets"]))
    by_class = (key for key, group in groups if any(not target.startswith("re:") for target in group["targets"]))
    taken = next(named, next(by_class, None))
    found = matcher.group(module.name)
    return None if taken == found else f"is {found or 'plain'}; {engine} takes all experts for {taken}"


def _no_architecture(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    known = engine == "vLLM" and facts.model_type in _NAMED_BY_TYPE
    if facts.whole is None or facts.whole.get("architectures") or known:
        return None
    result = "builds an embedding model without a head" if engine == "vLLM" else "stops"
    return f"comes with a config.json that names no architectures: {engine} {result}"


def _tower_size(facts: Facts, module: Module, engine: str, ranks: int) -> str | None:
    read = ((facts.whole or {}).get("vision_config") or {}).get("hidden_size", _TOWER_SIZE)
    rows = module.shape[0]
    return None if rows == read else f"has {rows} rows; for {engine}, vision_config has the hidden_size {read}"


def _names_rule(sources: Mapping[str, str], methods: Collection[str]) -> Rule:
    """The rule for the engines that read configs of these methods."""
    return Rule(
        id=RULE_OF_NAMES,
        demand="the config alone predicts the tensors of every module, fused names included",
        why="engines build a module by the config and then look for its tensors; what is missing stays uninitialised",
        sources=sources,
        fix="No config that is known to load describes this; use a built-in recipe, or its patterns.",
        concerns=lambda facts, module: facts.method in methods and is_linear(module),
        problem=_names,
    )


RULES = (
    Rule(
        id="architectures",
        demand="config.json names the model's class in architectures",
        why="the class is chosen by it",
        sources={
            "vLLM": "model_executor/models/registry.py: inspect_model_cls; config/model.py: ModelConfig",
            "SGLang": "srt/configs/model_config.py: ModelConfig",
        },
        fix='Add it as the publisher has it, as in "architectures": ["Glm4MoeForCausalLM"].',
        concerns=lambda facts, module: (
            facts.whole is not None and module.name.role is Role.EMBEDDING and not facts.is_mtp(module)
        ),
        problem=_no_architecture,
    ),
    Rule(
        id="vision-sizes",
        demand="vision_config gives sizes of a Kimi's tower other than the published ones as hidden_size and so on",
        why="keys that begin with vt_ are not read; a tower of other sizes is built, and the load stops",
        sources=dict(zip(BOTH, ("model_executor/models/kimi_k25_vit.py", "srt/models/kimi_k25.py"), strict=True)),
        fix="Give vision_config the sizes without the prefix vt_, too, and pos_emb_height and so on with the "
        "prefix init_.",
        concerns=lambda facts, module: (
            facts.whole is not None
            and module.name.role is Role.VISION
            and str(module.name).endswith("patch_embed.proj.weight")
        ),
        problem=_tower_size,
    ),
    Rule(
        id="mtp-prefix",
        demand="the config says the same of the MTP layer under model.decoder as under its number",
        why="SGLang builds the MTP layer under another prefix",
        sources={
            "SGLang": "srt/models/deepseek_nextn.py, glm4_moe_nextn.py, glm4_moe_lite_nextn.py: prefix of the decoder"
        },
        fix="Write (layers.N|decoder) in patterns that hold the layer's number.",
        concerns=lambda facts, module: (
            facts.method == "compressed-tensors" and facts.is_mtp(module) and is_linear(module)
        ),
        problem=_mtp_prefix,
    ),
    Rule(
        id="exclude-layers",
        demand="an entry of ModelOpt's list for one layer covers no other",
        why="an entry covers every name that it is a part of, and `*` any digits",
        sources={engine: f"{path}: is_layer_excluded" for engine, path in _MODELOPT.items()},
        fix="Write model.layers.7.* for layer 7.",
        concerns=lambda facts, module: (
            facts.method == "modelopt" and module.encoding is NVFP4 and module.name.layer is not None
        ),
        problem=_excluded_too,
    ),
    Rule(
        id="modelopt-mtp-head",
        demand="ModelOpt's list covers the MTP layer's head as vLLM calls it, model.layers.N.head",
        why="it is built with the quantization config, and stops at scales that were never loaded",
        sources={
            "vLLM": f"model_executor/models/deepseek_mtp.py: SharedHead; {_MODELOPT['vLLM']}: get_quant_method, "
            "KNvfp4Static.process"
        },
        fix="Add *.layers.N.head to the list.",
        concerns=lambda facts, module: facts.method == "modelopt" and module.name.role is Role.MTP_PROJECTION,
        problem=_mtp_head,
    ),
    _names_rule(
        {engine: f"{path}: should_ignore_layer, find_matched_target" for engine, path in _CT_UTILS.items()},
        ("compressed-tensors", "modelopt"),
    ),
    _names_rule(
        {"transformers": "compressed_tensors/utils/match.py: is_match, match_targets"}, ("compressed-tensors",)
    ),
    Rule(
        id="no-target",
        demand="every linear module is ignored or has a target",
        why="the lookup stops at a module that matches nothing",
        sources={"SGLang": f"{_CT_UTILS['SGLang']}: find_matched_target"},
        fix="Give one group the target Linear, or name the module in `ignore`.",
        concerns=lambda facts, module: facts.method == "compressed-tensors" and is_linear(module),
        problem=_homeless,
    ),
    Rule(
        id="top-level-format",
        demand="the top-level format of INT4 experts is pack-quantized",
        why="the experts' scheme looks at no other, mixed-precision is refused",
        sources={
            "SGLang": "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py: "
            "CompressedTensorsWNA16MoE"
        },
        fix='Set "format": "pack-quantized" in quantization_config.',
        concerns=lambda facts, module: module.name.role is Role.ROUTED_EXPERT and module.encoding is INT4,
        problem=_top_format,
    ),
    Rule(
        id="experts-target",
        demand="the first regex target with the word experts is that of the routed experts' group",
        why="all experts get the scheme of the group that it belongs to",
        sources={"transformers": "integrations/compressed_tensors.py: get_experts_scheme"},
        fix="Give the routed experts of all main layers one format.",
        concerns=lambda facts, module: (
            facts.method == "compressed-tensors"
            and module.name.role is Role.ROUTED_EXPERT
            and not facts.is_mtp(module)
            and any(form for layer, form in facts.routed.items() if not facts.is_mtp_layer(layer))
        ),
        problem=_experts_target,
    ),
    Rule(
        id="modelopt-unread",
        demand="the checkpoint is not in ModelOpt's format",
        why="there is no quantizer of that name",
        sources={"transformers": "quantizers/auto.py: AUTO_QUANTIZER_MAPPING"},
        fix="Convert with --format compressed-tensors to load it there.",
        concerns=lambda facts, module: facts.method == "modelopt" and module.encoding is NVFP4,
        problem=lambda facts, module, engine, ranks: f"is {module.label} of ModelOpt, which {engine} does not read",
        severity=Status.WARNING,
    ),
)

"""`quantization_config`: what a converted checkpoint says about itself, and how that gets into config.json.

config.json is never parsed and dumped again: the value of one key is replaced in the source's text, and every other
byte stays. (A round trip through transformers would drop IndexShare keys that vLLM reads.)
"""

import json
from typing import Any

from quantkit.errors import SourceError

KEY = "quantization_config"
MTP_KEY = "num_nextn_predict_layers"

# The names cover the fused modules of vLLM (gate_up_proj, fused_qkv_a_proj) and of SGLang (fused_qkv_a_proj_with_mqa).
# No pattern holds a layer number, because SGLang runs the MTP layer under the prefix `model.decoder.`.
_IGNORE_BF16_REST = (
    "lm_head",
    r"re:.*embed_tokens$",
    r"re:.*mlp\.gate$",
    r"re:.*eh_proj$",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
_IGNORE_DENSE = ("lm_head", r"re:.*embed_tokens$", r"re:.*mlp\.gate$")
_IGNORE_FP8_REST = (
    "lm_head",
    r"re:.*kv_b_proj$",
    r"re:.*mlp\.gate$",
    r"re:.*eh_proj$",
    r"re:.*embed_tokens$",
    r"re:.*weights_proj$",
)
# transformers takes the experts' scheme from the first regex that contains "experts": without this one it would find
# the shared experts' and fail.
_ROUTED_EXPERTS = r"re:.*mlp\.experts\..*"
_FP8_TARGETS = (
    r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|fused_qkv_a_proj_with_mqa|q_b_proj|o_proj"
    r"|indexer\.wq_b|indexer\.wk)$",
    r"re:.*shared_experts\..*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj$",
)


def dense_int4_config(group_size: int) -> dict[str, Any]:
    """The compressed-tensors block for a model whose every Linear but `lm_head` is INT4."""
    return _config([_group(["Linear"], _int4_weights(group_size))], list(_IGNORE_DENSE))


def int4_config(
    group_size: int, fp8_block: tuple[int, int] | None, kept_layers: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The compressed-tensors block for INT4 routed experts with a BF16 rest, or an FP8 rest in blocks of `fp8_block`.

    kept_layers  MTP layers whose routed experts are as the rest is

    The top-level format is `pack-quantized` in both: SGLang's INT4 MoE refuses `mixed-precision`. Engines take the
    first group whose target matches a module's name; kept experts come first, because INT4's target matches them too.
    """
    layer = rf"(layers\.({'|'.join(map(str, kept_layers))})|decoder)"  # `model.decoder`: the MTP layer in SGLang
    groups = [_group(["Linear", *([_ROUTED_EXPERTS] if fp8_block else [])], _int4_weights(group_size))]
    ignore = [*(_IGNORE_FP8_REST if fp8_block else _IGNORE_BF16_REST)]
    if fp8_block:
        fp8 = _fp8_weights(fp8_block), _fp8_activations(), "float-quantized"
        groups.append(_group(list(_FP8_TARGETS), *fp8))
        if kept_layers:  # `exp\w+` and not "experts": transformers would take these for all experts' scheme
            groups.insert(0, _group([rf"re:.*{layer}\.mlp\.exp\w+\.\d+\.(gate|up|down)_proj$"], *fp8))
    elif kept_layers:
        ignore.append(rf"re:.*{layer}\.mlp\.experts\..*")
    return _config(groups, ignore)


def _config(groups: list[dict[str, Any]], ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ignore,
    }


def replace_value(config_text: str, key: str, value: Any) -> str:
    """`config_text` with the value of the top-level `key` replaced; a key that is not there is not added."""
    for member in _members(config_text):
        if member.key == key:
            return config_text[: member.value_begin] + json.dumps(value) + config_text[member.value_end :]
    return config_text


def splice(config_text: str, quantization_config: dict[str, Any] | None) -> str:
    """`config_text` with its `quantization_config` replaced, added before the closing brace, or taken out (None).

    One inside another object, as in `text_config` of models with vision, described the old weights and is taken out.
    """
    for member in reversed(_members(config_text)):
        value = config_text[member.value_begin : member.value_end]
        if member.key != KEY and value.startswith("{"):
            config_text = config_text[: member.value_begin] + _without_key(value) + config_text[member.value_end :]
    if quantization_config is None:
        return _without_key(config_text)
    members = _members(config_text)
    value = json.dumps(quantization_config, indent=2).replace("\n", "\n  ")
    if found := _find(members):
        return config_text[: found.value_begin] + value + config_text[found.value_end :]
    if members:
        end = members[-1].value_end
        return f'{config_text[:end]},\n  "{KEY}": {value}{config_text[end:]}'
    begin = config_text.index("{") + 1
    return f'{config_text[:begin]}\n  "{KEY}": {value}\n{config_text[begin:]}'


class _Member:
    """Where a key and its value lie in the text of the top-level object."""

    def __init__(self, key: str, key_begin: int, value_begin: int, value_end: int) -> None:
        self.key = key
        self.key_begin = key_begin
        self.value_begin = value_begin
        self.value_end = value_end


def _members(text: str) -> list[_Member]:
    decoder = json.JSONDecoder()
    try:
        position = _skip(text, text.index("{") + 1)
        members: list[_Member] = []
        while text[position] != "}":
            key, end = decoder.raw_decode(text, position)
            value_begin = _skip(text, text.index(":", end) + 1)
            _, value_end = decoder.raw_decode(text, value_begin)
            members.append(_Member(key, position, value_begin, value_end))
            position = _skip(text, value_end)
            if text[position] == ",":
                position = _skip(text, position + 1)
        return members
    except (ValueError, IndexError) as error:
        raise SourceError(f"config.json is not a JSON object: {error}") from error


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position


def _find(members: list[_Member]) -> _Member | None:
    found = [member for member in members if member.key == KEY]
    if len(found) > 1:
        raise SourceError(f"config.json has {KEY} twice", hint="Remove the one that does not describe the weights.")
    return found[0] if found else None


def _without_key(text: str) -> str:
    members = _members(text)
    gone = _find(members)
    if gone is None:
        return text
    number = members.index(gone)
    if number + 1 < len(members):
        return text[: gone.key_begin] + text[members[number + 1].key_begin :]
    begin = members[number - 1].value_end if number else text.index("{") + 1
    return text[:begin] + text[gone.value_end :]


def _group(
    targets: list[str],
    weights: dict[str, Any],
    input_activations: dict[str, Any] | None = None,
    group_format: str = "pack-quantized",
) -> dict[str, Any]:
    return {
        "targets": targets,
        "input_activations": input_activations,
        "output_activations": None,
        "format": group_format,
        "weights": weights,
    }


def _int4_weights(group_size: int) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _fp8_weights(block: tuple[int, int]) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "block",
        "block_structure": list(block),
        "dynamic": False,
    }


def _fp8_activations() -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": True}

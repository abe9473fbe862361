"""How a new `quantization_config` gets into config.json; what it says: `description`.

config.json is never parsed and dumped again: the value of one key is replaced in the source's text, and every other
byte stays. (A round trip through transformers would drop IndexShare keys that vLLM reads.)
"""

import json
from typing import Any

from quantkit.errors import SourceError

KEY = "quantization_config"
MTP_KEY = "num_nextn_predict_layers"
MODELOPT_FILE = "hf_quant_config.json"


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

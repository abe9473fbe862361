"""`quantization_config` is the published one, and gets into config.json without touching another byte."""

import json
from typing import Any

import pytest

from quantkit.checkpoint.config import splice
from quantkit.errors import SourceError

NEW: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head", r"re:.*mlp\.gate$"], "x": None}

# what comes before the old value, the old value, what comes after it
FOUND = {
    "first": ('{"quantization_config": ', "{}", ', "a": 1}'),
    "middle": ('{\n  "a": 1,\n  "quantization_config": ', '{\n    "b": [1, 2]\n  }', ',\n  "c": 3\n}\n'),
    "last": ('{"a": 1, "quantization_config": ', '{"b": {"c": {}}}', "}"),
    "only": ('{"quantization_config":', "null", "}"),
    "crowded": ('{"a":[{"quantization_config":1}],"quantization_config":', "[1,2]", ',"b":{}}'),
    "spread": ('\n\n{ \t"a"\n:\n1 ,\n"quantization_config"  :\t ', "7", ' \n , "b" : 2 }  \n\n'),
    "braces in strings": ('{"a": "}{\\"quantization_config\\": 1", "quantization_config": ', '{"b": "}}"}', "}"),
    "CRLF": ('{\r\n  "a": 1,\r\n  "quantization_config": ', "{\r\n    }", ',\r\n  "b": 2\r\n}\r\n'),
    "escapes": ('{"\\u0061": "\\ud83d\\ude00\\u007d", "quantization\\u005fconfig": ', '{"b": "\\u0022"}', "}"),
    "text": ('{"ä": "名前 😀", "quantization_config": ', "{}", "}"),
    "numbers": (
        '{"eps": 1.00e-05, "n": 1E400, "f": -0.0, "i": 123456789012345678, "quantization_config": ',
        "0",
        "}",
    ),
}
# the text, and where the new member goes
ADDED = {
    "one line": ('{"a": 1', "}"),
    "lines": ('{\n  "a": 1,\n  "b": [1, 2]', "\n}\n"),
    "CRLF": ('{\r\n  "a": "x"', "\r\n}\r\n"),
    "string": ('{"a": "quantization_config\\": {"', "}"),
    "crowded": ('{"a":{"b":{}}', "}"),
}
# before, the member with its comma, after
REMOVED = {
    "first": ("{", '"quantization_config": {"a": "},"}, ', '"b": 1}'),
    "first of lines": ("{\n  ", '"quantization_config": {\n    "a": 1\n  },\n  ', '"b": 1\n}\n'),
    "middle": ('{\n  "a": 1,\n  ', '"quantization_config": {\n    "x": [{}]\n  },\n  ', '"b": 1\n}\n'),
    "last": ('{\n  "a": 1', ',\n  "quantization_config": {\n    "x": 1\n  }', "\n}\n"),
    "last after space": ('{"a": 1', ' , "quantization_config" : null', " }"),
    "only": ("{", '"quantization_config": 1', "}"),
    "only, in lines": ("{", '\n  "quantization_config": {}', "\n}\n"),
    "CRLF": ('{\r\n  "a": 1', ',\r\n  "quantization_config": {\r\n  }', "\r\n}\r\n"),
    "escaped": ('{"\\u0061": "\\u007d"', ', "quantization\\u005fconfig": 1', "}"),
}

WEIGHTS_INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
BF16_REST = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
            "weights": WEIGHTS_INT4,
        }
    },
    "ignore": [
        "lm_head",
        "re:.*embed_tokens$",
        "re:.*mlp\\.gate$",
        "re:.*eh_proj$",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
FP8_REST = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "re:.*mlp\\.experts\\..*"],
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
            "weights": WEIGHTS_INT4,
        },
        "group_1": {
            "targets": [
                "re:.*self_attn\\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|fused_qkv_a_proj_with_mqa|q_b_proj|o_proj"
                "|indexer\\.wq_b|indexer\\.wk)$",
                "re:.*shared_experts\\..*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj$",
            ],
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
                "dynamic": True,
            },
            "output_activations": None,
            "format": "float-quantized",
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "block",
                "block_structure": [128, 128],
                "dynamic": False,
            },
        },
    },
    "ignore": [
        "lm_head",
        "re:.*kv_b_proj$",
        "re:.*mlp\\.gate$",
        "re:.*eh_proj$",
        "re:.*embed_tokens$",
        "re:.*weights_proj$",
    ],
}


@pytest.mark.parametrize(("before", "old", "after"), FOUND.values(), ids=FOUND.keys())
def test_splice_replaces_the_value_and_nothing_else(before: str, old: str, after: str) -> None:
    """The bytes before and after the old value stay as they are, however odd; in between stands the new value."""
    result = splice(before + old + after, NEW)

    assert result.startswith(before)
    assert result.endswith(after)
    assert json.loads(result[len(before) : len(result) - len(after)]) == NEW
    assert json.loads(result)["quantization_config"] == NEW


@pytest.mark.parametrize(("before", "after"), ADDED.values(), ids=ADDED.keys())
def test_splice_adds_the_key_after_the_last(before: str, after: str) -> None:
    """Without the key, one member is put in after the last; the bytes on both sides stay as they are."""
    result = splice(before + after, NEW)

    assert result.startswith(before)
    assert result.endswith(after)
    assert json.loads("{" + result[len(before) : len(result) - len(after)].lstrip(",") + "}") == {
        "quantization_config": NEW
    }
    assert json.loads(result) == {**json.loads(before + after), "quantization_config": NEW}


@pytest.mark.parametrize("text", ["{}", "{ }", "{}\n", "\n{\n}\n\n"])
def test_splice_adds_the_key_to_an_empty_object(text: str) -> None:
    """An object without keys gets its first, and what stands around its braces stays."""
    result = splice(text, NEW)

    assert json.loads(result) == {"quantization_config": NEW}
    assert result.partition("{")[0] == text.partition("{")[0]
    assert result.rpartition("}")[2] == text.rpartition("}")[2]


@pytest.mark.parametrize(("before", "gone", "after"), REMOVED.values(), ids=REMOVED.keys())
def test_splice_takes_out_the_key_and_its_comma(before: str, gone: str, after: str) -> None:
    """Without a new value the member goes with one comma, and every other byte stays."""
    assert splice(before + gone + after, None) == before + after


@pytest.mark.parametrize("text", ["{}", '{"a": "quantization_config"}', '{\r\n "b": [{"quantization_config": 1}]}\r\n'])
def test_splice_leaves_alone_what_has_no_key(text: str) -> None:
    """Taking out a key that is not there changes nothing."""
    assert splice(text, None) == text


def test_splice_takes_out_the_key_of_a_nested_config() -> None:
    """The one inside `text_config` described the old weights too: it goes, and all round it stays."""
    text = '{"text_config": {"a": 1, "quantization_config": {"b": "}"}, "c": 2}, "z": [ ]}'

    assert splice(text, None) == '{"text_config": {"a": 1, "c": 2}, "z": [ ]}'
    assert splice(text, NEW).startswith('{"text_config": {"a": 1, "c": 2}, "z": [ ],')


@pytest.mark.parametrize("new", [NEW, None])
def test_splice_refuses_a_key_that_is_there_twice(new: dict[str, Any] | None) -> None:
    """JSON readers take the last of two values, so the old one, left in place, would describe other weights."""
    text = '{"quantization_config": {"quant_method": "fp8"}, "a": 1, "quantization_config": {"quant_method": "old"}}'

    with pytest.raises(SourceError, match="quantization_config"):
        splice(text, new)


def test_the_new_value_is_indented_like_a_member() -> None:
    """In a config as Hugging Face writes it, the result is what `json.dumps(indent=2)` gives."""
    config = {"model_type": "toy", "quantization_config": {"quant_method": "fp8"}, "z": [1, {"a": None}]}

    assert splice(json.dumps(config, indent=2), NEW) == json.dumps({**config, "quantization_config": NEW}, indent=2)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"a": 1', '{"a": }', '{"a": 1,', "{a: 1}", '{"a": "}'])
def test_splice_refuses_what_is_no_object(text: str) -> None:
    """Text that is not a JSON object is a SourceError that names config.json."""
    with pytest.raises(SourceError, match=r"config\.json"):
        splice(text, NEW)

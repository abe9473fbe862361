"""`--embed`: the scales as tensors beside the weights, under names that engines look for, and a config that says so.

    ...layers.N.self_attn.k_proj.k_scale, .v_proj.v_scale    F32 [1]

SGLang rewrites these names to its attention's; vLLM's loader has them for GQA, and for MLA finds no parameter. Which
backend uses, ignores or misuses a scale that is not 1: `engines.rules.kernels`, and the warnings here.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.config import KEY, MODELOPT_FILE, replace_value, splice
from quantkit.checkpoint.header import TensorSpec, lay_out
from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Source
from quantkit.errors import FoldError
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.folding.copying import Additions
from quantkit.models.folding import attention_prefix
from quantkit.records import parse_json
from quantkit.runtime.scales import LayerScales
from quantkit.weights.quantization_config import KV_CACHE_SCHEME

_SHARD = "model-kv-scales.safetensors"
_SPLIT = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")  # of what was one file
_MLA_WARNINGS = (
    "SGLang 0.5.23 honours embedded scales of an MLA cache with --attention-backend triton; fa3, flashinfer and the "
    "sparse flashmla_kv ignore them; trtllm_mla and the sparse trtllm (Blackwell's defaults), cutedsl_mla and flashmla "
    "compute wrong attention unless they are 1",
    "vLLM 0.26 to 0.33 loads no scale of an MLA cache, whatever its name: the cache is kept at 1.0",
    "fold the scales instead where every engine and backend shall honour them",
)


def embed(source: Source, config: ModelConfig, scales: Mapping[int, LayerScales]) -> Additions:
    """What a copy of `source` with the scales of its layers holds besides.

    Raises FoldError for a checkpoint without a quantization_config: engines would not look for scales.
    """
    numbers = {
        f"{attention_prefix(config, layer)}.{letter}_proj.{letter}_scale": number
        for layer, entry in sorted(scales.items())
        for letter, number in (("k", entry.key), ("v", entry.value))
    }
    names, shard = ({SINGLE_FILE: _SPLIT[0]}, _SPLIT[1]) if source.shards == (SINGLE_FILE,) else ({}, _SHARD)
    header, places = lay_out((TensorSpec(name, "F32", (1,)) for name in numbers), shard)
    data = header + b"".join(struct.pack("<f", numbers[place.spec.name]) for place in places)
    weight_map = {name: names.get(tensor.shard, tensor.shard) for name, tensor in source.tensors.items()}
    weight_map |= dict.fromkeys(numbers, shard)
    total = source.nbytes + sum(place.spec.nbytes for place in places)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    texts = {CONFIG_FILE: _config_text(source), INDEX_FILE: _json(index), **_modelopt_text(source)}
    stored = {name: struct.unpack("<f", struct.pack("<f", number))[0] for name, number in numbers.items()}
    return Additions(names, {shard: data}, texts, stored)


def embedding_warnings(config: ModelConfig) -> tuple[str, ...]:
    """What each backend makes of the scales."""
    if isinstance(config.attention, MlaConfig):
        return _MLA_WARNINGS
    return ("vLLM and SGLang read embedded scales of a GQA cache; they were read from source, and not served",)


def _config_text(source: Source) -> str:
    """The config with `kv_cache_scheme` in its quantization_config, wherever that is."""
    if quantization := source.config.get(KEY):
        return splice(source.config_text, {**quantization, "kv_cache_scheme": KV_CACHE_SCHEME})
    if quantization := source.text_config.get(KEY):
        inner = {**source.text_config, KEY: {**quantization, "kv_cache_scheme": KV_CACHE_SCHEME}}
        return replace_value(source.config_text, "text_config", inner)
    raise FoldError(
        f"{source.name} has no {KEY}, without which no engine looks for scales of a KV cache",
        hint="Fold the scales into the weights: leave --embed out.",
    )


def _modelopt_text(source: Source) -> dict[str, str]:
    """ModelOpt's own file, which says the same as the config."""
    path = source.folder / MODELOPT_FILE if source.folder else None
    if path is None or not path.exists():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        content["quantization"]["kv_cache_quant_algo"] = "FP8"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FoldError(f"{path} cannot be read: {error!r}", hint="Fix it, or take it out.") from error
    return {MODELOPT_FILE: _json(content)}


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

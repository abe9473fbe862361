"""Tiny checkpoints with the true names of every family that quantkit knows, in every storage that it reads.

A checkpoint is called `family-storage`, as in `deepseek-v3-fp8_block`. Its config.json is a published one with small
numbers; its tensors are those of the inventory of that config, filled with random numbers that decode to weights of a
standard deviation of about 0.02. What they decode to says `truth.py`, which shares nothing with quantkit.
"""

import json
import re
import zlib
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.checkpoint.header import TensorSpec
from quantkit.families.inventory import inventory
from support.headers import TORCH_DTYPES
from support.paths import CONFIGS
from support.storages import STORAGES, Storage
from support.toys import write
from support.truth import E2M1, E4M3, Array

_NUMPY = {"F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}
_FP8_SCALE = re.compile(r".*\.weight_scale(_inv)?")
_SHARED = ("weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale")  # by fused partners
_PARTNER = re.compile(r"\b(gate|up|q|k|v|q_a|kv_a)_proj(_with_mqa)?\.")

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LAYERS = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 128, **_TOKENS}
_MOE = {
    **_LAYERS,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 256,  # not half of the hidden size, or else fused experts have two orientations
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
_MLA = {  # 160 rows of kv_a and q_b, 224 of kv_b: no multiples of 128
    **_MOE,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_V32 = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
_DSA = {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 16}
_SHARED_INDEXERS = {
    "indexer_types": ["full", "shared"],
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "qk_head_dim": 80,
    "head_dim": 32,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
_VISION = {  # transformers leaves the prefix away
    **{f"vt_{key}": value for key, value in _TOWER.items()},
    **_TOWER,
    "text_hidden_size": 128,
    "patch_size": 4,
    **{f"{prefix}pos_emb_{side}": 4 for prefix in ("", "init_") for side in ("height", "width")},  # init_: SGLang
}


@dataclass(frozen=True)
class Family:
    """A family of models.

    config      the published config that the toy is made of
    changes     its small numbers; in `text_config`, if the model has one
    published   the storages that it comes in
    scattered   the tensors go round three shards in turn, so that scales and fused partners lie apart; else the toy is
                cut in two
    """

    config: str
    changes: dict[str, Any]
    published: tuple[str, ...]
    scattered: bool = False


FAMILIES = {
    "glm-5.2": Family("glm-5.2", {**_MLA, **_DSA, **_SHARED_INDEXERS}, ("fp8_block",), scattered=True),
    "glm-5.1": Family("glm-5.1", {**_MLA, **_DSA, "qk_head_dim": 80, "head_dim": 32}, ("fp8_block",)),
    "glm-4.5": Family("glm-4.5", {**_MOE, **_GQA}, ("bf16", "fp8_channel"), scattered=True),
    "glm-4.5-air": Family("glm-4.5-air", {**_MOE, **_GQA}, ("bf16", "fp8_channel")),
    "glm-4.7-flash": Family("glm-4.7-flash", {**_MLA, "num_nextn_predict_layers": 1}, ("bf16",)),
    "deepseek-v3": Family("deepseek-v3", {**_MLA, "n_group": 2, "topk_group": 1}, ("fp8_block", "fp8_block_ue8m0")),
    "deepseek-v3.2": Family("deepseek-v3", {**_MLA, **_DSA, "n_group": 2, "topk_group": 1, **_V32}, ("fp8_block",)),
    "kimi-k2-instruct": Family("kimi-k2-instruct", _MLA, ("fp8_block",)),
    "kimi-k2-thinking": Family("kimi-k2-thinking", _MLA, ("int4",)),
    "kimi-k2.5": Family("kimi-k2.5", _MLA, ("int4",), scattered=True),
    "llama": Family("llama-3.1-8b", {**_LAYERS, **_GQA}, ("bf16",), scattered=True),
    "llama-tied": Family("llama-3.1-8b", {**_LAYERS, **_GQA, "tie_word_embeddings": True}, ("bf16",)),
}

PUBLISHED = tuple(f"{name}-{storage}" for name, family in FAMILIES.items() for storage in family.published)
STORED = tuple(f"glm-5.2-{storage}" for storage in STORAGES)  # every storage of one family
_DENSE = (storage for storage, kind in STORAGES.items() if kind.experts == "apart" and storage != "int4")
NAMES = tuple(
    dict.fromkeys(
        (*PUBLISHED, *STORED, *(f"{family}-bf16" for family in FAMILIES), *(f"llama-{storage}" for storage in _DENSE))
    )
)
DIAGONAL = frozenset((*PUBLISHED, *STORED))  # of all families and storages


def family_of(name: str) -> Family:
    """The family of the checkpoint `name`."""
    return FAMILIES[name.rpartition("-")[0]]


def storage_of(name: str) -> Storage:
    """The storage of the checkpoint `name`."""
    return STORAGES[name.rpartition("-")[2]]


Changes = Mapping[str, Any]  # to a family's small numbers


def config_of(name: str, changes: Changes | None = None) -> dict[str, Any]:
    """The config.json of the checkpoint `name`: the published keys, small numbers, the storage's quantization."""
    family, storage = family_of(name), storage_of(name)
    config: dict[str, Any] = json.loads((CONFIGS / f"{family.config}.json").read_text())
    if "vision_config" in config:
        config["vision_config"] |= _VISION
        config |= {**_TOKENS, "projection_hidden_size": _TOWER["hidden_size"]}
    text: dict[str, Any] = config.get("text_config", config)
    text.pop("quantization_config", None)
    text.update({**family.changes, **(changes or {})})
    config.pop("torch_dtype", None)
    text["dtype"] = storage.dtype
    if storage.quantization is not None:
        text["quantization_config"] = storage.quantization
    return config


def specs_of(name: str, changes: Changes | None = None) -> tuple[TensorSpec, ...]:
    """The tensors of the checkpoint `name`: the inventory's, with what no config tells."""
    storage = storage_of(name)
    specs = [tensor.spec for tensor in inventory(name, json.dumps(config_of(name, changes))).tensors.values()]
    if storage.experts != "apart":
        specs = list(fuse_experts(specs, storage.experts == "transposed"))
    return tuple(
        replace(spec, dtype=storage.fp8_scale) if storage.fp8_scale and _FP8_SCALE.fullmatch(spec.name) else spec
        for spec in specs
    )


def fuse_experts(specs: Iterable[TensorSpec], transposed: bool = False) -> Iterator[TensorSpec]:
    """The same tensors with the experts of a layer in two 3-D ones, as transformers has them, or `transposed`."""
    experts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(gate|down)_proj\.weight", spec.name):
            fused = "gate_up_proj" if match[2] == "gate" else "down_proj"
            experts.setdefault(f"{match[1]}.{fused}", []).append(spec)
        elif ".mlp.experts." not in spec.name:
            yield spec
    for name, members in experts.items():
        rows, columns = members[0].shape
        shape = (2 * rows if name.endswith("gate_up_proj") else rows, columns)
        yield TensorSpec(name, members[0].dtype, (len(members), *(shape[::-1] if transposed else shape)))


# --- writing


def write_family(folder: Path, name: str, seed: int = 0, changes: Changes | None = None) -> Path:
    """Write the checkpoint `name` into the new `folder`: shards, index, config, side files; a seed's bytes are its own.

    Its weights are near N(0, 0.02), its norms near 1; FP8 bytes are no NaN, and scales are positive.
    """
    specs = {spec.name: spec for spec in specs_of(name, changes)}
    storage, scattered = storage_of(name), family_of(name).scattered
    shards = (
        {spec.name: _tensor(spec, _random(spec, specs, storage, seed)) for spec in shard}
        for shard in _shards(tuple(specs.values()), scattered)
    )
    write(folder, shards, config_of(name, changes))
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}\n')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    return folder


def _tensor(spec: TensorSpec, stored: Array) -> torch.Tensor:
    """The stored numbers, of BF16 and FP8 their bits, as a tensor of the dtype that they are of."""
    assert stored.shape == spec.shape
    return torch.from_numpy(np.ascontiguousarray(stored).reshape(spec.shape)).view(TORCH_DTYPES[spec.dtype])


def _shards(specs: tuple[TensorSpec, ...], scattered: bool) -> tuple[tuple[TensorSpec, ...], ...]:
    if scattered:
        return tuple(specs[number::3] for number in range(3))
    *begins, nbytes = accumulate((spec.nbytes for spec in specs), initial=0)
    first = bisect(begins, nbytes / 2)
    return specs[:first], specs[first:]


def _random(spec: TensorSpec, specs: dict[str, TensorSpec], storage: Storage, seed: int) -> Array:
    """The stored numbers of a tensor; fused partners get the same scalars, as the engines want."""
    module, _, leaf = spec.name.rpartition(".")
    packed = specs.get(f"{module}.weight_packed")
    if leaf == "weight_shape" and packed:
        return np.array([packed.shape[0], packed.shape[1] * 8], _NUMPY[spec.dtype])
    source = _PARTNER.sub("fused.", spec.name) if leaf in _SHARED else spec.name
    rng = np.random.default_rng([seed, zlib.crc32(source.encode())])
    if leaf in _CODES and spec.dtype in _WEIGHTS:
        return _WEIGHTS[spec.dtype](rng, spec.shape)
    uniform = rng.uniform(0.8, 1.2, spec.shape)
    scales = {  # 0.02 over what the codes below are on average
        "weight_scale": 64.0 if spec.dtype == "F8_E4M3" else 0.008 if packed else 2e-4,
        "weight_scale_inv": 2e-4,
        "weight_global_scale": 4800.0,
        "weight_scale_2": 1 / 4800,
        "input_scale": 0.02,
        "input_global_scale": 100.0,
    }
    if leaf in scales:
        scale = scales[leaf] * uniform
        return _store(2.0 ** np.round(np.log2(scale)) if storage.powers_of_two else scale, spec.dtype)
    normal = rng.standard_normal(spec.shape)
    is_norm = leaf == "weight" and "norm" in module.rpartition(".")[2]
    return _store(1 + 0.1 * normal if is_norm else 0.02 * normal, spec.dtype)


def _fp8_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return _nearest(100 * rng.standard_normal(shape), E4M3[:127], 128).astype("u1")


def _int4_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    codes = np.clip(np.round(2.5 * rng.standard_normal((*shape, 8))), -8, 7).astype("i8") + 8
    return (codes << 4 * np.arange(8)).sum(-1).astype("<u4").view("<i4")


def _nvfp4_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    codes = _nearest(1.5 * rng.standard_normal((*shape, 2)), E2M1[:8], 8)
    return (codes[..., 0] | codes[..., 1] << 4).astype("u1")


def _nearest(values: Array, magnitudes: Array, sign: int) -> Array:
    """The code of the nearest magnitude; `sign` is added to a negative one's."""
    return np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values)) + sign * np.signbit(values)


def _store(values: Array, dtype: str) -> Array:
    match dtype:
        case "BF16":
            return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")
        case "F8_E4M3":
            return _nearest(values, E4M3[:127], 128).astype("u1")
        case "F8_E8M0" | "U8":
            return (np.log2(values) + 127).astype("u1")
    return np.asarray(values, _NUMPY[dtype])


_CODES = ("weight", "weight_packed")
_WEIGHTS = {"F8_E4M3": _fp8_codes, "I32": _int4_codes, "U8": _nvfp4_codes}

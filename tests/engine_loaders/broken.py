"""Checkpoints that break a rule of the engines, or seem to: what quantkit writes, changed.

A variant is an output of quantkit and a row of changes to its tensors and config. Modules are stored anew from what
`truth.py` decodes, so that a change of format is no change of the weights but for rounding. Runs in the project's
interpreter.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantkit.formats import fp8_block, int4, nvfp4
from support.truth import truth

_SHARD = "model-00001-of-00001.safetensors"
_PARTS = re.compile(r"\.(weight\w*|input\w*scale)$")


@dataclass
class Checkpoint:
    """A checkpoint in memory, to be changed."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    weights: dict[str, Any]  # decoded

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """The checkpoint in `folder`."""
        tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
        return cls(tensors, json.loads((folder / "config.json").read_text()), truth(folder))

    def write(self, folder: Path) -> Path:
        """Write it into the new `folder`, in one shard."""
        folder.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / _SHARD)
        index = {"metadata": {}, "weight_map": dict.fromkeys(self.tensors, _SHARD)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        return folder

    @property
    def text(self) -> dict[str, Any]:
        """The config of the language model."""
        found: dict[str, Any] = self.config.get("text_config", self.config)
        return found

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config`."""
        found: dict[str, Any] = self.config.get("quantization_config") or self.text["quantization_config"]
        return found

    @property
    def groups(self) -> dict[str, Any]:
        """The groups of a compressed-tensors config."""
        found: dict[str, Any] = self.quantization["config_groups"]
        return found

    def matching(self, pattern: str) -> list[str]:
        """The tensors whose names hold the pattern; there is one, or else the variant changes nothing."""
        names = [name for name in self.tensors if re.search(pattern, name)]
        assert names, f"no tensor is called {pattern}"
        return names

    def store(self, pattern: str, encode: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        """Store the modules of the pattern in another format: `encode` makes their tensors by the leaf of the name."""
        modules = {name.rpartition(".")[0] for name in self.matching(pattern) if _PARTS.search(name)}
        assert modules
        for module in sorted(modules):
            weight = torch.from_numpy(self.weights[f"{module}.weight"])
            for name in [name for name in self.tensors if name.rpartition(".")[0] == module and _PARTS.search(name)]:
                del self.tensors[name]
            self.tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in encode(weight).items()}


Change = Callable[[Checkpoint], None]


# --- what is stored


def as_int4(pattern: str, group_size: int = 32) -> Change:
    """The modules of the pattern in INT4."""

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = int4.quantize(weight, group_size)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": int4.pack(codes), "weight_scale": scale, "weight_shape": shape}

    return lambda checkpoint: checkpoint.store(pattern, encode)


def as_nvfp4(pattern: str, exponent: int = -12) -> Change:
    """The modules of the pattern in compressed-tensors' NVFP4 under the global scale 2^exponent."""

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = nvfp4.quantize(weight, exponent)
        divisor = torch.tensor([2.0**-exponent])
        return {"weight_packed": nvfp4.pack(codes), "weight_scale": scale, "weight_global_scale": divisor}

    return lambda checkpoint: checkpoint.store(pattern, encode)


def as_fp8(pattern: str, block: tuple[int, int] = (128, 128)) -> Change:
    """The modules of the pattern in FP8 blocks, as compressed-tensors names them."""

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(("weight", "weight_scale"), fp8_block.quantize(weight, block), strict=True))

    return lambda checkpoint: checkpoint.store(pattern, encode)


def as_plain(pattern: str, dtype: torch.dtype = torch.bfloat16) -> Change:
    """The modules of the pattern as plain numbers."""
    return lambda checkpoint: checkpoint.store(pattern, lambda weight: {"weight": weight.to(dtype)})


def cast(pattern: str, dtype: torch.dtype) -> Change:
    """The tensors of the pattern in another dtype."""
    return lambda checkpoint: checkpoint.tensors.update(
        {name: checkpoint.tensors[name].to(dtype) for name in checkpoint.matching(pattern)}
    )


def times(pattern: str, factor: float) -> Change:
    """The tensors of the pattern multiplied by a factor."""
    return lambda checkpoint: checkpoint.tensors.update(
        {name: checkpoint.tensors[name] * factor for name in checkpoint.matching(pattern)}
    )


def without(pattern: str) -> Change:
    """No tensors of the pattern."""

    def change(checkpoint: Checkpoint) -> None:
        for name in checkpoint.matching(pattern):
            del checkpoint.tensors[name]

    return change


def copied(pattern: str, replacement: str) -> Change:
    """The tensors of the pattern once more, under other names."""
    return lambda checkpoint: checkpoint.tensors.update(
        {re.sub(pattern, replacement, name): checkpoint.tensors[name].clone() for name in checkpoint.matching(pattern)}
    )


def with_scales(*modules: str) -> Change:
    """Scales of a KV cache, 2.0, for these modules of every layer."""

    def change(checkpoint: Checkpoint) -> None:
        attention = {name.partition(".self_attn.")[0] for name in checkpoint.matching(r"\.self_attn\.")}
        names = [f"{layer}.self_attn.{module}" for layer in sorted(attention) for module in modules]
        checkpoint.tensors |= {name: torch.tensor(2.0) for name in names}

    return change


# --- what the config says


def said(path: str, value: Any) -> Change:
    """Another value in the `quantization_config`, at a path like `config_groups.group_0.weights.group_size`."""

    def change(checkpoint: Checkpoint) -> None:
        place = checkpoint.quantization
        *parents, last = path.split(".")
        for key in parents:
            place = place[key]
        assert place.get(last) != value
        place[last] = value

    return change


def set_to(key: str, value: Any) -> Change:
    """Another value in the config; None takes the key out."""

    def change(checkpoint: Checkpoint) -> None:
        place = checkpoint.config if key in checkpoint.config else checkpoint.text
        if value is None:
            del place[key]
        else:
            place[key] = value

    return change


def not_ignored(word: str) -> Change:
    """No entry that holds the word in the list of what is left plain."""

    def change(checkpoint: Checkpoint) -> None:
        ignored = checkpoint.quantization["ignore"]
        checkpoint.quantization["ignore"] = [entry for entry in ignored if word not in entry]
        assert checkpoint.quantization["ignore"] != ignored, f"nothing ignored holds {word}"

    return change


def ignored(*entries: str) -> Change:
    """More entries in the list of what is left plain."""
    return lambda checkpoint: checkpoint.quantization["ignore"].extend(entries)


def not_targeted(word: str) -> Change:
    """No target that holds the word, in any group."""

    def change(checkpoint: Checkpoint) -> None:
        found = False
        for group in checkpoint.groups.values():
            kept = [target for target in group["targets"] if word not in target]
            found |= kept != group["targets"]
            group["targets"] = kept
        assert found, f"no target holds {word}"
        for key in [key for key, group in checkpoint.groups.items() if not group["targets"]]:
            del checkpoint.groups[key]

    return change


def targeted(bits: int, *targets: str) -> Change:
    """More targets for the first group of so many bits."""

    def change(checkpoint: Checkpoint) -> None:
        groups = checkpoint.groups.values()
        group = next(group for group in groups if group["weights"]["num_bits"] == bits)
        group["targets"].extend(targets)

    return change


@dataclass(frozen=True)
class Variant:
    """A checkpoint of `outputs.py` with changes."""

    toy: str
    way: str
    changes: tuple[Change, ...]


_ATTENTION = r"\.self_attn\."
_MAIN = r"layers\.[01]\."
_KV_B = r"\.self_attn\.kv_b_proj\.weight"
_O = r"\.self_attn\.o_proj\.weight"
_QKV_A = r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight"
_WK, _WEIGHTS = r"\.indexer\.wk\.weight", r"\.indexer\.weights_proj\.weight"
_ROUTER, _EH = r"\.mlp\.gate\.weight", r"\.eh_proj\.weight"
_SHARED = r"\.mlp\.shared_experts\."
_INDEXER_0 = r"layers\.0\.self_attn\.indexer\."


def _variants(toy: str, way: str, **changes: tuple[Change, ...]) -> dict[str, Variant]:
    """The variants of one output, by their names with underscores for hyphens."""
    return {f"{toy} {way}: {name.replace('_', ' ')}": Variant(toy, way, made) for name, made in changes.items()}


_GLM = "glm-5.2-fp8_block"
VARIANTS = {
    **_variants(
        _GLM,
        "int4",
        o_proj_is_int4=(as_int4(_O), not_targeted("o_proj"), targeted(4, "re:.*o_proj$")),
        gate_is_plain_beside_fp8_up=(
            as_plain(r"layers\.0\.mlp\.gate_proj\.weight"),
            ignored("model.layers.0.mlp.gate_proj"),
        ),
        router_is_int4=(as_int4(_ROUTER), not_ignored(r"mlp\.gate$"), targeted(4, r"re:.*mlp\.gate$")),
        eh_proj_is_int4=(as_int4(_EH), not_ignored("eh_proj"), targeted(4, "re:.*eh_proj$")),
        kv_b_is_int4=(as_int4(_KV_B), not_ignored("kv_b"), targeted(4, "re:.*kv_b_proj$")),
        kv_b_is_fp8=(as_fp8(_KV_B), not_ignored("kv_b"), targeted(8, "re:.*kv_b_proj$")),
        kv_b_is_not_described=(not_ignored("kv_b"),),
        qkv_a_is_int4=(as_int4(_QKV_A), not_targeted("q_a_proj"), targeted(4, "re:.*(q_a_proj|kv_a|qkv_a).*")),
        indexer_wk_is_int4=(as_int4(_WK), not_targeted(r"indexer\.wk"), targeted(4, r"re:.*indexer\.wk$")),
        indexer_wk_is_plain=(as_plain(_WK), not_targeted(r"indexer\.wk"), ignored(r"re:.*indexer\.wk$")),
        indexer_weights_are_fp8=(as_fp8(_WEIGHTS), not_ignored("weights_proj"), targeted(8, "re:.*weights_proj$")),
        indexer_where_none_is=(copied(r"layers\.0\.self_attn\.indexer\.", "layers.1.self_attn.indexer."),),
        groups_are_said_to_be_of_64=(said("config_groups.group_0.weights.group_size", 64),),
        format_is_mixed_precision=(said("format", "mixed-precision"),),
        linear_is_no_target=(not_targeted("Linear"),),
        linear_is_fp8=(not_targeted("Linear"), targeted(8, "Linear")),
        router_bias_is_bf16=(cast("e_score_correction_bias", torch.bfloat16),),
        scales_of_the_cache=(with_scales("k_proj.k_scale", "v_proj.v_scale"),),
        scales_of_the_cache_in_attention=(with_scales("attn.k_scale", "attn.v_scale"),),
        a_scale_is_missing=(without(r"layers\.1\.mlp\.experts\.3\.up_proj\.weight_scale$"),),
        an_expert_is_missing=(without(r"layers\.1\.mlp\.experts\.3\.up_proj\."),),
        a_norm_is_missing=(without(r"layers\.1\.input_layernorm\."),),
        an_expert_has_groups_of_64=(as_int4(r"layers\.1\.mlp\.experts\.2\.up_proj\.weight", 64),),
        an_expert_is_plain=(as_plain(r"layers\.1\.mlp\.experts\.2\.\w+_proj\.weight"),),
        dense_mlp_is_ignored=(ignored(r"re:.*layers\.0\.mlp\..*"),),
        blocks_are_said_to_be_of_64=(said("config_groups.group_1.weights.block_structure", [64, 64]),),
        no_architecture=(set_to("architectures", None),),
    ),
    **_variants(
        _GLM,
        "int4-bf16",
        shared_experts_are_int4=(as_int4(_SHARED), not_ignored("shared_exp")),
        kv_b_is_int4=(as_int4(_KV_B), not_ignored("kv_b")),
        qkv_a_is_int4=(as_int4(_QKV_A), not_ignored("q_a_proj")),
        o_proj_is_int4=(as_int4(_O), not_ignored("o_proj")),
        indexer_wk_is_int4=(as_int4(_WK), not_ignored(r"indexer\.wk$")),
        router_is_int4_and_ignored=(as_int4(_ROUTER),),
        o_proj_has_no_target=(
            said("config_groups.group_0.targets", [r"re:.*mlp\.experts\..*"]),
            not_ignored("o_proj"),
        ),
    ),
    **_variants(
        _GLM,
        "nvfp4",
        unequal_globals=(times(r"layers\.1\.mlp\.experts\.1\.up_proj\.weight_global_scale", 2.0),),
        unequal_globals_of_expert_0=(times(r"layers\.1\.mlp\.experts\.0\.up_proj\.weight_global_scale", 2.0),),
        unequal_globals_of_shared=(times(r"shared_experts\.up_proj\.weight_global_scale", 2.0),),
        other_globals_of_an_expert=(times(r"layers\.1\.mlp\.experts\.1\.(gate|up)_proj\.weight_global_scale", 2.0),),
        shared_experts_are_plain=(as_plain(_SHARED), not_targeted("shared_exp"), ignored("re:.*shared_exp.*")),
        kv_b_is_nvfp4=(as_nvfp4(_KV_B), not_ignored("kv_b"), targeted(4, "re:.*kv_b_proj$")),
        qkv_a_is_nvfp4=(as_nvfp4(_QKV_A), not_targeted("q_a_proj"), targeted(4, "re:.*(q_a_proj|kv_a|qkv_a).*")),
        qkv_a_is_ignored_by_half=(
            as_plain(r"\.self_attn\.q_a_proj\.weight"),
            ignored(r"re:.*self_attn\.q_a_proj$"),
        ),
    ),
    **_variants(
        _GLM,
        "modelopt",
        mtp_head_is_not_excluded=(not_ignored("layers.2.head"),),
        says_nvfp4=(said("quant_algo", "NVFP4"),),
        router_is_not_excluded=(not_ignored("*mlp.gate"),),
        a_layer_is_excluded=(ignored("model.layers.1*"),),
        attention_is_not_excluded=(not_ignored("o_proj"),),
        unequal_globals=(times(r"layers\.1\.mlp\.experts\.1\.up_proj\.weight_scale_2", 2.0),),
    ),
    **_variants(
        "glm-4.5-bf16",
        "int4",
        shared_experts_are_plain=(as_plain(_SHARED), ignored("re:.*shared_exp.*")),
        a_key_is_plain=(as_plain(r"layers\.0\.self_attn\.k_proj\.weight"), ignored("model.layers.0.self_attn.k_proj")),
        scales_of_the_cache=(with_scales("k_proj.k_scale", "v_proj.v_scale"),),
    ),
    **_variants(
        "llama-bf16",
        "int4",
        a_value_is_plain=(
            as_plain(r"layers\.0\.self_attn\.v_proj\.weight"),
            ignored("model.layers.0.self_attn.v_proj"),
        ),
        all_attention_is_plain=(as_plain(_ATTENTION), ignored("re:.*self_attn.*")),
        no_architecture=(set_to("architectures", None),),
        a_bias_is_stored=(
            lambda checkpoint: checkpoint.tensors.update({"model.layers.0.mlp.down_proj.bias": torch.zeros(128)}),
        ),
    ),
    **_variants(
        "glm-5.2-256",
        "int4",
        linear_is_no_target=(not_targeted("Linear"),),
        linear_is_fp8=(not_targeted("Linear"), targeted(8, "Linear")),
    ),
    **_variants(
        "glm-5.2-256",
        "nvfp4",
        shared_experts_are_plain=(as_plain(_SHARED), not_targeted("shared_exp"), ignored("re:.*shared_exp.*")),
        linear_is_nvfp4=(not_targeted("Linear"), targeted(4, "Linear")),
    ),
}

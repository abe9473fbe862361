"""Each rule of an engine says what is wrong, and says nothing where nothing is."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quantkit.engines.rules import RULES, Facts, Module, Status, judge
from quantkit.errors import EngineError
from support.engine_cases import LAYERS, MLA, Case, both, described, modelopt, module, modules, sglang

MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = modules("layers.3.mlp.experts.0", MLP, "int4 g=32")
NVFP4_EXPERTS = modules("layers.3.mlp.experts.0", MLP, "nvfp4")
MODELOPT_EXPERTS = modules("layers.3.mlp.experts.0", MLP, "modelopt nvfp4")
SHARED = modules("layers.3.mlp.shared_experts", MLP)


def retargeted(found: Sequence[Module], *targets: str) -> dict[str, Any]:
    """The same with other targets of the first group."""
    config = copy.deepcopy(described(found))
    config["config_groups"]["group_0"]["targets"] = list(targets)
    return config


OK, WARNING, FLAG, BROKEN, NEITHER = "ok", "warning", "needs a flag", "not ok", "not applicable"
O_PROJ, DOWN = "layers.3.self_attn.o_proj", "layers.3.mlp.experts.0.down_proj"
KV_B = "layers.3.self_attn.kv_b_proj"
QKV_A = ("q_a_proj", "kv_a_proj_with_mqa")
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
FP8_LINEAR = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"targets": ["Linear"], "weights": FP8_BLOCKS}},
}
CLASS_OF_INT4 = retargeted(EXPERTS, "Linear")  # as quantkit 0.1 wrote it before FP8 blocks
MTP_INT4 = modules("layers.78.mlp.experts.0", MLP, "int4 g=32")
FULL_KV = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
PATCHES = module("vision_tower.patch_embed.proj", shape=(16, 3, 2, 2))
FUSED = replace(module(DOWN), within="layers.3.mlp.experts.down_proj")
PACKED_SHARED = modules("layers.3.mlp.shared_experts", MLP, "int4 g=32")
Q_PROJ, GQA = module("layers.0.self_attn.q_proj"), {"num_attention_heads": 24, "kv_lora_rank": None}
REGEX_ONLY = (r"re:.*mlp\.experts\..*",)
CASES = [
    Case("fused-partners", both(OK), modules("layers.0.mlp", MLP)),
    Case("fused-partners", both(OK), [module("layers.0.mlp.gate_proj", "f32"), module("layers.1.mlp.up_proj")]),
    Case("fused-partners", both(BROKEN), [module("layers.0.mlp.gate_proj", "f32"), module("layers.0.mlp.up_proj")]),
    Case("fused-partners", both(BROKEN), [*modules("layers.3.mlp.experts.1", MLP), *EXPERTS]),
    Case("plain-modules", both(OK), modules("layers.78", ("eh_proj", "enorm", "mlp.gate"))),
    Case("plain-modules", both(BROKEN), [*EXPERTS, module("layers.78.eh_proj", "int4 g=32")]),
    Case("plain-modules", both(BROKEN), [module("layers.3.mlp.gate", "fp8 128x128")]),
    Case("kv-b", sglang(OK), [module(KV_B)]),
    Case("kv-b", sglang(BROKEN), [*EXPERTS, module(KV_B, "int4 g=32")]),
    Case("kv-b", sglang(BROKEN), [*NVFP4_EXPERTS, module(KV_B, "nvfp4")]),
    Case("kv-b", sglang(BROKEN), [*MODELOPT_EXPERTS, module(KV_B, "modelopt nvfp4")], quantization=modelopt()),
    Case("kv-b", sglang(OK), [*EXPERTS, module(KV_B, "fp8 128x128")]),
    Case("kv-b", sglang(BROKEN), [*EXPERTS, module(KV_B, "fp8 128x128")], quantization=CLASS_OF_INT4),
    Case("kv-b", sglang(OK), [*EXPERTS, module(KV_B, "fp8 channel")]),
    Case("kv-b", sglang(OK), [module(KV_B, "fp8 128x128")], quantization=FP8_LINEAR),
    Case("kv-b", sglang(OK), [module(KV_B, "fp8 128x128")], quantization={"quant_method": "fp8"}),
    Case("qkv-a", sglang(OK), modules("layers.0.self_attn", QKV_A, "fp8 128x128")),
    Case("qkv-a", sglang(BROKEN), [*EXPERTS, *modules("layers.0.self_attn", QKV_A, "int4 g=32")]),
    Case("qkv-a", sglang(BROKEN), [*NVFP4_EXPERTS, *modules("layers.0.self_attn", QKV_A, "nvfp4")]),
    Case("qkv-a", sglang(OK), modules("layers.0.self_attn", QKV_A, "modelopt nvfp4"), quantization=modelopt()),
    Case("indexer", both(OK), modules("layers.0.self_attn.indexer", ("wk", "weights_proj"))),
    Case("indexer", both(OK), [module("layers.0.self_attn.indexer.wk", "fp8 128x128")]),
    Case("indexer", both(NEITHER), [*EXPERTS, module("layers.0.self_attn.indexer.wq_b", "int4 g=32")]),
    Case("indexer", both(BROKEN), [*EXPERTS, module("layers.0.self_attn.indexer.wk", "int4 g=32")]),
    Case("indexer", both(BROKEN), [*NVFP4_EXPERTS, module("layers.0.self_attn.indexer.weights_proj", "nvfp4")]),
    Case("indexer", {"vLLM": BROKEN, "SGLang": OK}, [module("layers.0.self_attn.indexer.weights_proj", "fp8 128x128")]),
    Case("indexer", {"vLLM": OK, "SGLang": BROKEN}, [module("layers.0.self_attn.indexer.wk", "fp8 64x64")]),
    Case("indexer", {"vLLM": OK, "SGLang": BROKEN}, [module("layers.0.self_attn.indexer.wk", "fp8 channel")]),
    Case("indexer", both(BROKEN), [module("layers.0.self_attn.indexer.wk", "fp8 tensor")]),
    Case("surplus-indexer", {"vLLM": OK}, [module("layers.3.self_attn.indexer.wk")]),
    Case("surplus-indexer", {"vLLM": OK}, [module("layers.6.self_attn.indexer.wk")], FULL_KV),
    Case("surplus-indexer", {"vLLM": OK}, [module("layers.78.self_attn.indexer.wk")], FULL_KV),
    Case("surplus-indexer", {"vLLM": BROKEN}, [module("layers.3.self_attn.indexer.k_norm")], FULL_KV),
    Case("surplus-indexer", {"vLLM": BROKEN}, [module("layers.1.self_attn.indexer.wk")], {"index_topk_pattern": "FSF"}),
    Case("surplus-indexer", {"vLLM": OK}, [module("layers.2.self_attn.indexer.wk")], {"index_topk_pattern": "FSF"}),
    Case("surplus-indexer", {"vLLM": NEITHER}, [module("layers.3.self_attn.o_proj")], FULL_KV),
    Case("modelopt-mtp", sglang(OK), [module("layers.78.self_attn.o_proj")], quantization=modelopt()),
    Case(
        "modelopt-mtp",
        sglang(BROKEN),
        [module("layers.78.self_attn.o_proj", "modelopt nvfp4")],
        quantization=modelopt(),
    ),
    Case("modelopt-mtp", sglang(NEITHER), MTP_INT4),
    Case("shared-globals", both(OK), NVFP4_EXPERTS, unequal={}),
    Case("shared-globals", both(NEITHER), NVFP4_EXPERTS),
    Case(
        "shared-globals", both(BROKEN), NVFP4_EXPERTS, unequal={"model.layers.3.mlp.experts.0.gate_up_proj": "1 and 2"}
    ),
    Case("merged-blocks", sglang(OK), [*EXPERTS, *modules("layers.0.mlp", MLP, "fp8 128x128")]),
    Case("merged-blocks", sglang(OK), [*NVFP4_EXPERTS, *modules("layers.0.mlp", MLP, "fp8 128x128")]),
    Case("merged-blocks", sglang(NEITHER), [*EXPERTS, module("layers.0.mlp.down_proj", "fp8 128x128")]),
    Case("merged-blocks", sglang(NEITHER), [*EXPERTS, *modules("layers.0.mlp", MLP, "fp8 channel")]),
    Case(
        "merged-blocks",
        sglang(NEITHER),
        modules("layers.0.mlp", MLP, "fp8 128x128"),
        quantization={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    Case("merged-blocks", sglang(BROKEN), modules("layers.0.mlp", MLP, "fp8 64x64"), quantization=FP8_LINEAR),
    Case("merged-blocks", sglang(BROKEN), modules("layers.0.mlp", MLP, "fp8 128x128"), quantization=CLASS_OF_INT4),
    Case(
        "merged-blocks",
        sglang(BROKEN),
        modules("layers.0.self_attn", ("q_proj", "k_proj", "v_proj"), "fp8 128x128"),
        quantization=CLASS_OF_INT4,
    ),
    Case("block-scales", both(NEITHER), [module(O_PROJ, "fp8 128x128")]),
    Case("block-scales", both(OK), [replace(module(O_PROJ, "fp8 128x128"), scales="F32")]),
    Case("block-scales", both(BROKEN), [replace(module(O_PROJ, "fp8 128x128"), scales="U8")]),
    Case("experts-apart", both(OK), [module(DOWN)]),
    Case("experts-apart", {"vLLM": BROKEN, "SGLang": OK}, [FUSED]),
    Case("experts-apart", {"vLLM": OK, "SGLang": BROKEN}, [FUSED], {"model_type": "glm4_moe"}),
    Case("experts-apart", both(BROKEN), [FUSED], {"model_type": "glm4_moe_lite"}),
    Case("experts-apart", both(BROKEN), [replace(FUSED, turned=True)]),
    Case("experts-apart", both(BROKEN), [replace(FUSED, within=f"{FUSED.within}.weight")]),
    Case("mtp-kv-scales", {"vLLM": OK}, modules("layers.78.self_attn", QKV_A)),
    Case("mtp-kv-scales", {"vLLM": NEITHER}, [module("layers.3.self_attn.k_proj", "f32", (), "k_scale")]),
    Case("mtp-kv-scales", {"vLLM": BROKEN}, [module("layers.78.self_attn.k_proj", "f32", (), "k_scale")]),
    Case(
        "mtp-kv-scales",
        {"vLLM": NEITHER},
        [module("layers.78.self_attn.k_proj", "f32", (), "k_scale")],
        {"model_type": "deepseek_v3"},
    ),
    Case(
        "mtp-kv-scales",
        {"vLLM": BROKEN},
        [module("layers.78.self_attn.k_proj", "f32", (), "k_scale")],
        {"model_type": "glm4_moe", "kv_lora_rank": None},
    ),
    Case("architectures", both(OK), [module("embed_tokens")], whole={"architectures": ["GlmMoeDsaForCausalLM"]}),
    Case("architectures", both(BROKEN), [module("embed_tokens")], whole={"architectures": None}),
    Case("architectures", both(BROKEN), [module("embed_tokens")], whole={}),
    Case("architectures", both(NEITHER), [module("embed_tokens")]),
    Case("architectures", {"vLLM": OK, "SGLang": BROKEN}, [module("embed_tokens")], {"model_type": "llama"}, whole={}),
    Case("architectures", both(NEITHER), [module("layers.78.embed_tokens")], whole={}),
    Case("vision-sizes", both(OK), [PATCHES], whole={"vision_config": {"hidden_size": 16}}),
    Case("vision-sizes", both(BROKEN), [PATCHES], whole={"vision_config": {"vt_hidden_size": 16}}),
    Case("vision-sizes", both(OK), [replace(PATCHES, shape=(1152, 3, 14, 14))], whole={"vision_config": {}}),
    Case("vision-sizes", both(NEITHER), [replace(PATCHES, name=replace(PATCHES.name, leaf="bias"))], whole={}),
    Case("shared-experts-apart", sglang(OK), SHARED, {"model_type": "glm4_moe"}),
    Case("shared-experts-apart", sglang(NEITHER), PACKED_SHARED),
    Case("shared-experts-apart", sglang(WARNING), PACKED_SHARED, {"model_type": "glm4_moe"}),
    Case("heads", both(OK), [module("layers.0.self_attn.q_b_proj")], {"num_attention_heads": 64}, ranks=8),
    Case("heads", both(BROKEN), [module("layers.0.self_attn.q_b_proj")], {"num_attention_heads": 20}, ranks=8),
    Case("heads", both(WARNING), [module("layers.0.self_attn.q_b_proj")], {"num_attention_heads": 20}),
    Case("heads", both(OK), [Q_PROJ], {**GQA, "num_key_value_heads": 2}, ranks=8),
    Case("heads", both(BROKEN), [Q_PROJ], {**GQA, "num_key_value_heads": 3}, ranks=8),
    Case("heads", both(OK), [Q_PROJ], {**GQA, "num_key_value_heads": None}, ranks=8),
    Case("heads", both(NEITHER), [module(O_PROJ)], {"num_attention_heads": 20}, ranks=8),
    Case("experts", sglang(OK), EXPERTS, {"n_routed_experts": 8}, ranks=8),
    Case("experts", sglang(BROKEN), EXPERTS, {"n_routed_experts": 4}, ranks=8),
    Case("experts", sglang(WARNING), EXPERTS, {"n_routed_experts": 4}),
    Case("experts", sglang(NEITHER), SHARED, {"n_routed_experts": 4}, ranks=8),
    Case("router-bias", both(OK), [module("layers.3.mlp.gate", "f32", leaf="e_score_correction_bias")]),
    Case("router-bias", both(WARNING), [module("layers.3.mlp.gate", "bf16", leaf="e_score_correction_bias")]),
    Case("mtp-prefix", sglang(OK), [*EXPERTS, *MTP_INT4, module("layers.78.self_attn.o_proj")]),
    Case(
        "mtp-prefix",
        sglang(BROKEN),
        [*EXPERTS, *MTP_INT4],
        quantization=described([*EXPERTS, *MTP_INT4], ignore=[r"re:.*layers\.78\..*"]),
    ),
    Case(
        "exclude-layers",
        both(OK),
        modules("layers.70.mlp", MLP, "modelopt nvfp4"),
        quantization=modelopt("model.layers.7.*"),
    ),
    Case(
        "exclude-layers",
        {"vLLM": BROKEN, "SGLang": OK},
        modules("layers.70.mlp", MLP, "modelopt nvfp4"),
        quantization=modelopt("model.layers.7"),
    ),
    Case(
        "exclude-layers",
        both(BROKEN),
        modules("layers.17.mlp", MLP, "modelopt nvfp4"),
        quantization=modelopt("model.layers.1*"),
    ),
    Case(
        "modelopt-mtp-head", {"vLLM": BROKEN}, [module("layers.78.eh_proj")], quantization=modelopt("*shared_head.head")
    ),
    Case("modelopt-mtp-head", {"vLLM": OK}, [module("layers.78.eh_proj")], quantization=modelopt("*.layers.78.head")),
    Case("modelopt-mtp-head", {"vLLM": OK}, [module("layers.78.eh_proj")], quantization=modelopt("model.layers.78*")),
    Case("modules-described", {**both(OK), "transformers": OK}, [*EXPERTS, *SHARED, module(O_PROJ, "fp8 128x128")]),
    Case(
        "modules-described",
        {**both(BROKEN), "transformers": BROKEN},
        [*EXPERTS, module(O_PROJ)],
        quantization=described(EXPERTS),
    ),
    Case(
        "modules-described",
        {**both(BROKEN), "transformers": BROKEN},
        modules("layers.3.mlp.experts.0", MLP, "int4 g=64"),
        quantization=described(EXPERTS),
    ),
    Case("modules-described", {**both(OK), "transformers": NEITHER}, MODELOPT_EXPERTS, quantization=modelopt()),
    Case("no-target", sglang(OK), [*EXPERTS, module(O_PROJ)]),
    Case("no-target", sglang(BROKEN), [*EXPERTS, module(O_PROJ)], quantization=retargeted(EXPERTS, *REGEX_ONLY)),
    Case("top-level-format", sglang(OK), EXPERTS),
    Case("top-level-format", sglang(BROKEN), EXPERTS, quantization=described(EXPERTS, format="mixed-precision")),
    Case("top-level-format", sglang(NEITHER), NVFP4_EXPERTS),
    Case("linear-target", sglang(OK), [*EXPERTS, *SHARED]),
    Case("linear-target", sglang(FLAG), [*EXPERTS, *SHARED], quantization=retargeted([*EXPERTS, *SHARED], *REGEX_ONLY)),
    Case("linear-target", sglang(NEITHER), [*EXPERTS, *SHARED], {"n_routed_experts": 384}),
    Case("shared-experts", sglang(FLAG), [*NVFP4_EXPERTS, *SHARED]),
    Case("shared-experts", sglang(OK), [*NVFP4_EXPERTS, *modules("layers.3.mlp.shared_experts", MLP, "nvfp4")]),
    Case("shared-experts", sglang(NEITHER), [*NVFP4_EXPERTS, *SHARED], {"n_routed_experts": 384}),
    Case("shared-experts", sglang(NEITHER), [*EXPERTS, *SHARED]),
    Case("shared-experts", sglang(FLAG), [*EXPERTS, *SHARED], {"model_type": "glm4_moe", "n_routed_experts": 128}),
    Case("shared-experts", sglang(OK), [*MODELOPT_EXPERTS, *SHARED], quantization=modelopt("*shared_experts*")),
    Case("shared-experts", sglang(FLAG), [*MODELOPT_EXPERTS, *SHARED], quantization=modelopt("*mlp.shared_exp*_proj")),
    Case(
        "shared-experts",
        sglang(FLAG),
        [*MODELOPT_EXPERTS, *SHARED],
        {"model_type": "glm4_moe"},
        quantization=modelopt("*shared_experts*"),
    ),
    Case(
        "experts-target", {"transformers": OK}, [*EXPERTS, *modules("layers.3.mlp.shared_experts", MLP, "fp8 128x128")]
    ),
    Case(
        "experts-target",
        {"transformers": BROKEN},
        EXPERTS,
        quantization={
            "quant_method": "compressed-tensors",
            "config_groups": {
                "a": described(EXPERTS)["config_groups"]["group_0"],
                "b": {"targets": [r"re:.*shared_experts.*"], "weights": FP8_BLOCKS},
            },
        },
    ),
    Case("modelopt-unread", {"transformers": WARNING}, MODELOPT_EXPERTS, quantization=modelopt()),
    Case("modelopt-unread", {"transformers": NEITHER}, NVFP4_EXPERTS),
    Case("fp8-merged", both(OK), modules("layers.0.self_attn", QKV_A, "fp8 128x128", (256, 512))),
    Case("fp8-merged", both(NEITHER), [module("layers.0.self_attn.kv_a_proj_with_mqa", "fp8 128x128", (576, 512))]),
    Case("fp8-merged", both(BROKEN), [module("layers.0.self_attn.q_a_proj", "fp8 128x128", (576, 512))]),
    Case("fp8-merged", both(NEITHER), [module(O_PROJ, "fp8 128x128", (576, 512))]),
    Case("int4-groups", both(OK), EXPERTS, ranks=16),
    Case("int4-groups", both(BROKEN), modules("layers.3.mlp.experts.0", MLP, "int4 g=128"), ranks=32),
    Case("int4-groups", both(OK), modules("layers.3.mlp.experts.0", MLP, "int4 g=32", (64, 2048)), ranks=64),
    Case("int4-groups", both(WARNING), [module(DOWN, "int4 g=128", (2048, 1536))]),
    Case("int4-groups", both(OK), [module(DOWN, "int4 g=128", (2048, 1536))], ranks=4),
    Case("nvfp4-groups", both(OK), NVFP4_EXPERTS, ranks=128),
    Case("nvfp4-groups", both(BROKEN), NVFP4_EXPERTS, ranks=256),
    Case("int4-tiles", sglang(NEITHER), EXPERTS, ranks=64),
    Case("int4-tiles", sglang(OK), [*EXPERTS, module(O_PROJ, "int4 g=32")], ranks=16),
    Case("int4-tiles", sglang(BROKEN), [*EXPERTS, module(O_PROJ, "int4 g=32")], ranks=32),
    Case("int4-tiles", sglang(OK), modules("layers.0.mlp", MLP[:2], "int4 g=32", (1024, 512)), ranks=32),
    Case("int4-tiles", sglang(BROKEN), modules("layers.0.mlp", MLP[:2], "int4 g=32", (1024, 512)), ranks=64),
    Case("fp8-blocks", both(OK), [module(O_PROJ, "fp8 128x128")], ranks=16),
    Case("fp8-blocks", both(BROKEN), [module(O_PROJ, "fp8 128x128")], ranks=32),
    Case("fp8-blocks", both(BROKEN), [module("layers.0.mlp.gate_proj", "fp8 128x128", (384, 2048))], ranks=2),
    Case("fp8-blocks", both(OK), [module("layers.0.mlp.gate_proj", "fp8 128x128", (384, 2048))], ranks=1),
    Case(
        "fp8-blocks",
        both(OK),
        [module("layers.0.self_attn.k_proj", "fp8 128x128", (256, 512))],
        {"num_key_value_heads": 2},
        ranks=8,
    ),
    Case("fp8-blocks", both(NEITHER), modules("layers.0.self_attn", QKV_A, "fp8 128x128"), ranks=64),
    Case("fp8-blocks", both(NEITHER), [module(O_PROJ, "fp8 channel")], ranks=64),
    Case("int4-group-size", both(OK), EXPERTS),
    Case("int4-group-size", both(WARNING), modules("layers.3.mlp.experts.0", MLP, "int4 g=16")),
    Case("int4-blackwell", sglang(OK), modules("layers.3.mlp.experts.0", MLP, "int4 g=128")),
    Case("int4-blackwell", sglang(WARNING), modules("layers.3.mlp.experts.0", MLP, "int4 g=64")),
    Case("int4-flashinfer", both(OK), EXPERTS),
    Case("int4-flashinfer", both(WARNING), modules("layers.3.mlp.experts.0", MLP, "int4 g=128")),
    Case("signed-scales", both(NEITHER), EXPERTS),
    Case("signed-scales", both(WARNING), EXPERTS, signed=True),
    Case("w4a4", both(OK), NVFP4_EXPERTS),
    Case("w4a4", both(WARNING), modules("layers.3.mlp.experts.0", MLP, "nvfp4 w4a4")),
    Case("nvfp4-experts", {"transformers": WARNING}, NVFP4_EXPERTS),
    Case("nvfp4-experts", {"transformers": NEITHER}, [module(O_PROJ, "nvfp4")]),
    Case(
        "kv-scales",
        {"vLLM": WARNING, "SGLang": FLAG},
        [*EXPERTS, module("layers.3.self_attn.k_proj", "f32", (), "k_scale")],
    ),
    Case(
        "kv-scales", both(NEITHER), [module("layers.3.self_attn.k_proj", "f32", (), "k_scale")], {"kv_lora_rank": None}
    ),
    Case("folded-kv-scales", both(OK), modules("layers.0.self_attn", QKV_A), folded=True),
    Case("folded-kv-scales", both(NEITHER), modules("layers.0.self_attn", QKV_A)),
    Case(
        "folded-kv-scales",
        both(WARNING),
        [module("layers.3.self_attn.k_proj", "f32", (), "k_scale")],
        folded=True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{number} {case.rule}" for number, case in enumerate(CASES)])
def test_a_rule_says(case: Case) -> None:
    """The rule's status for each engine; where something is wrong, the first module and the number of all are named."""
    found = case.judgements()

    assert {engine: judgement.status for engine, judgement in found.items()} == case.says
    for judgement in found.values():
        wrong = judgement.status not in (Status.OK, Status.NOT_APPLICABLE)
        assert bool(judgement.problem) == wrong
        assert (judgement.module in {entry.name.module for entry in case.modules}) == wrong
        assert (0 < judgement.modules <= len(case.modules)) == wrong


def test_every_rule_is_tried_where_it_is_broken_and_where_it_is_not() -> None:
    """The cases above have both for each rule and engine, and each rule says where it was read and what fixes it."""
    tried = {(case.rule, engine, status in (OK, NEITHER)) for case in CASES for engine, status in case.says.items()}

    assert tried == {(rule.id, engine, kept) for rule in RULES for engine in rule.sources for kept in (True, False)}
    for rule in RULES:
        assert all(".py" in source for source in rule.sources.values())
        assert rule.fix.endswith((".", ")", "]"))


def test_experts_are_counted_and_the_first_is_named() -> None:
    """1024 experts of which two have another group size are one judgement, with the first one's name."""
    names = [f"layers.3.mlp.experts.{number}.down_proj" for number in range(1024)]
    found = Case("int4-blackwell", sglang(WARNING), [module(name, "int4 g=64") for name in names]).judgements()[
        "SGLang"
    ]

    assert (found.modules, found.module) == (1024, f"model.{names[0]}")
    assert found.text.startswith(f"model.{names[0]} (and 1,023 more) has groups of 64")


def test_every_expert_is_judged_by_its_own_global_scales() -> None:
    """Experts look alike but for their scales: of eight, the two whose partners have others are named and counted."""
    names = [f"layers.3.mlp.experts.{number}.{part}" for number in range(8) for part in MLP]
    unequal = {f"model.layers.3.mlp.experts.{number}.gate_up_proj": "1 and 2" for number in (3, 5)}
    found = Case(
        "shared-globals", both(BROKEN), [module(name, "nvfp4") for name in names], unequal=unequal
    ).judgements()

    assert {judgement.status for judgement in found.values()} == {Status.BROKEN}
    assert {(judgement.modules, judgement.module) for judgement in found.values()} == {(4, f"model.{names[9]}")}


def test_the_smallest_number_of_ranks_that_fails_is_told() -> None:
    """1536 columns in groups of 128 are whole for 1, 2 and 4 ranks; 8 cut them. A given number is taken as it is."""
    wide = [module(DOWN, "int4 g=128", (2048, 1536))]
    usual = Case("int4-groups", both(WARNING), wide).judgements()["vLLM"]
    given = Case("int4-groups", both(BROKEN), wide, ranks=16).judgements()["vLLM"]

    assert (usual.status, usual.ranks) == ("warning", 8)
    assert (given.status, given.ranks) == ("not ok", 16)


def test_ranks_that_nobody_would_take_are_not_warned_of() -> None:
    """512 columns over 8 ranks leave 64 to each: too few to be worth it, unless it is asked for."""
    narrow = [module(DOWN, "int4 g=128", (2048, 512))]

    assert Case("int4-groups", both(OK), narrow).judgements()["vLLM"].status == "ok"
    assert Case("int4-groups", both(BROKEN), narrow, ranks=8).judgements()["vLLM"].status == "not ok"


@pytest.mark.parametrize(
    "groups",
    [
        None,
        {"a": {}},
        {"a": {"targets": ["Linear"], "weights": {"type": "float"}}},
        {"a": {"targets": ["re:("], "weights": {}}},
    ],
)
def test_a_malformed_config_is_an_error(groups: Any) -> None:
    """It is named as such, before any rule is asked."""
    config = {"quant_method": "compressed-tensors", "config_groups": groups}

    with pytest.raises(EngineError, match="quantization_config is malformed"):
        list(judge(Facts(tuple(EXPERTS), MLA, config, LAYERS)))

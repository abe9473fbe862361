"""Names of the tensors of published models give layer, expert, role and fused partners."""

import pytest

from quantkit.naming import Role, TensorName

# local module name -> role, and the last part of the module that engines fuse it into
ATTENTION: dict[str, tuple[str, str | None]] = {
    "input_layernorm": ("norm", None),
    "post_attention_layernorm": ("norm", None),
    "self_attn.q_a_proj": ("attention", "self_attn.fused_qkv_a_proj"),
    "self_attn.q_a_layernorm": ("norm", None),
    "self_attn.q_b_proj": ("attention", None),
    "self_attn.kv_a_proj_with_mqa": ("attention", "self_attn.fused_qkv_a_proj"),
    "self_attn.kv_a_layernorm": ("norm", None),
    "self_attn.kv_b_proj": ("kv_b", None),
    "self_attn.o_proj": ("attention", None),
    "self_attn.indexer.wq_b": ("indexer", None),
    "self_attn.indexer.wk": ("indexer", None),
    "self_attn.indexer.k_norm": ("norm", None),
    "self_attn.indexer.weights_proj": ("indexer_weights", None),
}
DENSE: dict[str, tuple[str, str | None]] = {
    **ATTENTION,
    "mlp.gate_proj": ("dense_mlp", "mlp.gate_up_proj"),
    "mlp.up_proj": ("dense_mlp", "mlp.gate_up_proj"),
    "mlp.down_proj": ("dense_mlp", None),
}
SPARSE: dict[str, tuple[str, str | None]] = {
    **ATTENTION,
    "mlp.gate": ("router", None),
    "mlp.shared_experts.gate_proj": ("shared_expert", "mlp.shared_experts.gate_up_proj"),
    "mlp.shared_experts.up_proj": ("shared_expert", "mlp.shared_experts.gate_up_proj"),
    "mlp.shared_experts.down_proj": ("shared_expert", None),
    "mlp.experts.0.gate_proj": ("routed_expert", "mlp.experts"),
    "mlp.experts.0.up_proj": ("routed_expert", "mlp.experts"),
    "mlp.experts.255.down_proj": ("routed_expert", "mlp.experts"),
}
MTP: dict[str, tuple[str, str | None]] = {
    **SPARSE,
    "enorm": ("norm", None),
    "hnorm": ("norm", None),
    "eh_proj": ("mtp_projection", None),
    "shared_head.norm": ("norm", None),
    "shared_head.head": ("lm_head", None),  # GLM-4.x and DeepSeek-V3 have their own
    "embed_tokens": ("embedding", None),
}
LAYERS = [
    (layer, local, role, fused)
    for layer, modules in ((0, DENSE), (3, SPARSE), (78, MTP))
    for local, (role, fused) in modules.items()
]


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
@pytest.mark.parametrize(("layer", "local", "role", "fused"), LAYERS)
def test_every_module_of_a_glm5_layer_is_known(
    prefix: str, layer: int, local: str, role: str, fused: str | None
) -> None:
    """A dense, a sparse and the MTP layer hold no module without role, layer and fusion, under any prefix."""
    name = TensorName.parse(f"{prefix}layers.{layer}.{local}.weight")

    assert name.role == role
    assert name.layer == layer
    assert name.fused_module == (fused and f"{prefix}layers.{layer}.{fused}")


@pytest.mark.parametrize(
    ("name", "role", "fused"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "attention", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.k_proj.bias", "attention", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.v_proj.weight", "attention", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.o_proj.weight", "attention", None),
        ("model.layers.0.self_attn.q_norm.weight", "norm", None),
        ("model.layers.0.self_attn.k_norm.weight", "norm", None),
        ("model.layers.91.mlp.experts.159.up_proj.weight", "routed_expert", "model.layers.91.mlp.experts"),
        ("model.layers.91.mlp.gate.e_score_correction_bias", "router_bias", None),
        ("model.layers.31.mlp.down_proj.weight", "dense_mlp", None),
        ("model.layers.0.self_attn.o_proj.bias", "attention", None),
        ("model.layers.0.mlp.up_proj.bias", "dense_mlp", "model.layers.0.mlp.gate_up_proj"),
    ],
)
def test_grouped_query_attention_is_known(name: str, role: str, fused: str | None) -> None:
    """GLM-4.x and Llama fuse q, k and v into qkv_proj."""
    assert TensorName.parse(name).role == role
    assert TensorName.parse(name).fused_module == fused


@pytest.mark.parametrize(
    ("name", "role", "layer", "expert"),
    [
        ("language_model.model.embed_tokens.weight", "embedding", None, None),
        ("language_model.model.norm.weight", "norm", None, None),
        ("language_model.lm_head.weight", "lm_head", None, None),
        ("language_model.model.layers.0.mlp.gate_proj.weight", "dense_mlp", 0, None),
        ("language_model.model.layers.60.self_attn.kv_b_proj.weight", "kv_b", 60, None),
        ("language_model.model.layers.1.mlp.experts.383.down_proj.weight_packed", "routed_expert", 1, 383),
        ("language_model.model.layers.1.mlp.shared_experts.up_proj.weight", "shared_expert", 1, None),
        ("language_model.model.layers.1.mlp.gate.e_score_correction_bias", "router_bias", 1, None),
        ("model.layers.5.mlp.shared_expert.up_proj.weight", "shared_expert", 5, None),
        ("model.embed_tokens.weight", "embedding", None, None),
        ("model.norm.weight", "norm", None, None),
        ("lm_head.weight", "lm_head", None, None),
    ],
)
def test_names_at_the_top_and_under_a_prefix_are_known(
    name: str, role: str, layer: int | None, expert: int | None
) -> None:
    """Kimi's prefix `language_model.` changes neither role, nor layer, nor expert."""
    parsed = TensorName.parse(name)

    assert (parsed.role, parsed.layer, parsed.expert) == (role, layer, expert)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.encoder.blocks.26.mlp.fc0.weight",
        "vision_tower.vision_model.encoder.layers.26.self_attn.q_proj.weight",
        "mm_projector.proj.0.weight",
        "mm_projector.pre_norm.weight",
        "model.visual.blocks.3.mlp.gate_proj.weight",
        "visual.merger.norm.weight",
    ],
)
def test_vision_is_apart_from_text(name: str) -> None:
    """A module of the vision tower has the role vision even where its name looks like the text model's."""
    assert TensorName.parse(name).role is Role.VISION


@pytest.mark.parametrize(
    ("local", "role"),
    [
        ("mlp.gate", "router"),
        ("mlp.gate_proj", "dense_mlp"),
        ("mlp.experts.0.gate_proj", "routed_expert"),
        ("mlp.shared_experts.gate_proj", "shared_expert"),
        ("self_attn.indexer.weights_proj", "indexer_weights"),
        ("self_attn.indexers_proj", "other"),  # GLM-5.2's config names this module, and no tensor has it
        ("mlp.gates", "other"),
        ("mlp.gate_proj_extra", "other"),
        ("mlp.experts.0.gate", "other"),
        ("mlp.experts.gate_proj", "other"),  # no one fuses experts and leaves gate and up apart
        ("mlp.experts", "other"),
        ("xmlp.gate_proj", "other"),
        ("self_attn.kv_b_proj.lora_a", "other"),
    ],
)
def test_a_router_is_not_a_gate_projection(local: str, role: str) -> None:
    """Names that hold each other are told apart, and no pattern matches a part of a module's name."""
    assert TensorName.parse(f"model.layers.4.{local}.weight").role == role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", "routed_expert"),
        ("model.layers.3.mlp.experts.down_proj", "routed_expert"),
        ("model.language_model.layers.3.mlp.experts.gate_up_proj.weight", "routed_expert"),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", "other"),
        ("model.layers.3.mlp.down_proj", "other"),  # a dense one is a module with a weight
    ],
)
def test_all_experts_in_one_tensor_are_routed_experts(name: str, role: str) -> None:
    """transformers keeps the experts of a layer in two parameters, which have the layer and no expert's number."""
    parsed = TensorName.parse(name)

    assert (parsed.role, parsed.layer, parsed.expert) == (role, 3, None)
    if role == "routed_expert":
        assert parsed.fused_module == name.partition(".experts")[0] + ".experts"


@pytest.mark.parametrize("name", ["", "weight", "foo.bar", "model.layers.x.mlp.gate_proj.weight", "layers.3", "model."])
def test_an_unknown_name_is_other(name: str) -> None:
    """Any string is a name; one that is not understood has the role other, no layer, no expert and no partners."""
    parsed = TensorName.parse(name)

    assert parsed.role is Role.OTHER
    assert parsed.layer is None
    assert parsed.expert is None
    assert str(parsed) == name


@pytest.mark.parametrize("leaf", ["weight", "weight_scale_inv", "weight_packed", "weight_scale", "weight_shape"])
def test_every_tensor_of_a_module_has_its_role(leaf: str) -> None:
    """Codes, scale and shape of a weight belong to the module of the weight."""
    name = TensorName.parse(f"model.layers.3.mlp.experts.17.gate_proj.{leaf}")

    assert (name.module, name.leaf) == ("model.layers.3.mlp.experts.17.gate_proj", leaf)
    assert (name.role, name.layer, name.expert) == (Role.ROUTED_EXPERT, 3, 17)
    assert name.sibling("weight") == "model.layers.3.mlp.experts.17.gate_proj.weight"


def test_the_routers_correction_bias_is_not_the_router() -> None:
    """`e_score_correction_bias` has a role of its own, which the router's weight does not share."""
    assert TensorName.parse("model.layers.3.mlp.gate.e_score_correction_bias").role is Role.ROUTER_BIAS
    assert TensorName.parse("model.layers.3.mlp.gate.weight").role is Role.ROUTER


def test_a_name_without_a_module_keeps_its_spelling() -> None:
    """The sibling of a tensor at the root has no leading dot."""
    assert TensorName.parse("weight").sibling("scale") == "scale"


def test_all_experts_of_a_layer_are_partners() -> None:
    """Engines hold all experts of a layer in one module, and those of two layers in two."""
    fused = {
        TensorName.parse(f"model.layers.3.mlp.experts.{expert}.{part}_proj.weight").fused_module
        for expert in (0, 1, 255)
        for part in ("gate", "up", "down")
    }

    assert fused == {"model.layers.3.mlp.experts"}
    assert TensorName.parse("model.layers.4.mlp.experts.0.up_proj.weight").fused_module not in fused


@pytest.mark.parametrize(
    ("name", "num_hidden_layers", "mtp"),
    [
        ("model.layers.78.eh_proj.weight", 78, True),
        ("model.layers.78.mlp.experts.0.gate_proj.weight", 78, True),
        ("model.layers.77.mlp.experts.0.gate_proj.weight", 78, False),
        ("model.layers.79.enorm.weight", 78, True),
        ("language_model.model.layers.61.enorm.weight", 61, True),
        ("lm_head.weight", 78, False),
        ("vision_tower.vision_model.encoder.layers.26.self_attn.q_proj.weight", 4, False),
    ],
)
def test_mtp_layers_come_after_the_main_layers(name: str, num_hidden_layers: int, mtp: bool) -> None:
    """A layer of the text model is an MTP layer from the number `num_hidden_layers` on."""
    assert TensorName.parse(name).is_mtp(num_hidden_layers) is mtp

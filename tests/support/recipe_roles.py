"""A weight of each role, and what a recipe makes of it."""

from quantkit.naming import Role, TensorName
from quantkit.recipe import Recipe, Treatment

LAST = "\n  - {roles: all, scheme: keep}"
NAMES = {
    Role.EMBEDDING: "model.embed_tokens",
    Role.LM_HEAD: "lm_head",
    Role.NORM: "model.norm",
    Role.ATTENTION: "model.layers.0.self_attn.o_proj",
    Role.KV_B: "model.layers.0.self_attn.kv_b_proj",
    Role.INDEXER: "model.layers.0.self_attn.indexer.wk",
    Role.INDEXER_WEIGHTS: "model.layers.0.self_attn.indexer.weights_proj",
    Role.ROUTER: "model.layers.1.mlp.gate",
    Role.DENSE_MLP: "model.layers.0.mlp.up_proj",
    Role.SHARED_EXPERT: "model.layers.1.mlp.shared_experts.up_proj",
    Role.ROUTED_EXPERT: "model.layers.1.mlp.experts.0.up_proj",
    Role.MTP_PROJECTION: "model.layers.2.eh_proj",
    Role.VISION: "vision_tower.encoder.blocks.0.mlp",
    Role.OTHER: "model.layers.0.something",
}


def treat(recipe: Recipe, role: Role) -> Treatment:
    """What becomes of a weight of `role` in a model of two main layers."""
    leaf = "e_score_correction_bias" if role is Role.ROUTER_BIAS else "weight"
    name = TensorName(NAMES[Role.ROUTER if role is Role.ROUTER_BIAS else role], leaf)
    assert name.role is role
    return recipe.choose(name, 2)[1]

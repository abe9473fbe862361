"""Sources of a few modules, recipes of a few rules, and what plans make of them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from quantkit.checkpoint.header import TensorSpec, lay_out
from quantkit.checkpoint.source import Source
from quantkit.conversion.plan import Plan, Step, make_plan
from quantkit.errors import PlanError
from quantkit.recipe import Recipe, parse_recipe
from support.toys import TOY

INT4, BF16_REST, BF16 = "glm-5.2-int4", "glm-5.2-int4-bf16rest", "bf16"
LAYER = "model.layers.0"
Outputs = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by the leaf of the name


def make_source(shards: Mapping[str, Iterable[TensorSpec]], **config: Any) -> Source:
    """The headers of a checkpoint with the given tensors in each shard."""
    tensors = {place.spec.name: place for shard, specs in shards.items() for place in lay_out(specs, shard)[1]}
    config = {"architectures": TOY["architectures"], "model_type": "glm_moe_dsa", "num_hidden_layers": 1, **config}
    return Source("toy", None, json.dumps(config), tensors)


def fp8(module: str, rows: int, columns: int) -> list[TensorSpec]:
    """An FP8 weight and its scale as published, blocks counted by hand for sizes up to 256."""
    grid = (2 if rows > 128 else 1, 2 if columns > 128 else 1)
    return [
        TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns)),
        TensorSpec(f"{module}.weight_scale_inv", "F32", grid),
    ]


def plain(module: str, *shape: int, dtype: str = "BF16") -> list[TensorSpec]:
    return [TensorSpec(f"{module}.weight", dtype, shape)]


def packed(module: str) -> list[TensorSpec]:
    """An INT4 weight of 128 x 128 in groups of 32."""
    return [
        TensorSpec(f"{module}.weight_packed", "I32", (128, 16)),
        TensorSpec(f"{module}.weight_scale", "BF16", (128, 4)),
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]


KV_B = [TensorSpec(f"{LAYER}.self_attn.kv_b_proj.weight", "BF16", (128, 128))]  # recipes have a rule for it


def experts(*numbers: int, parts: Sequence[str] = ("gate", "up", "down")) -> list[TensorSpec]:
    """Square FP8 experts of layer 0."""
    modules = [f"{LAYER}.mlp.experts.{number}.{part}_proj" for number in numbers for part in parts]
    return [spec for module in modules for spec in fp8(module, 128, 128)]


def custom(*rules: str) -> Recipe:
    """A recipe for any model; its last rule keeps all."""
    return parse_recipe(
        "mine", "rules:\n" + "".join(f"  - {rule}\n" for rule in (*rules, "{roles: all, scheme: keep}"))
    )


def int4(*roles: str, group_size: int = 32) -> str:
    return f"{{roles: [{', '.join(roles)}], scheme: int4, group_size: {group_size}, scale: minmax}}"


def refusal(source: Source, recipe: Recipe) -> PlanError:
    """The error with which the plan is refused."""
    with pytest.raises(PlanError) as caught:
        make_plan(source, recipe)
    return caught.value


def count_labels(steps: Iterable[Step]) -> Counter[str]:
    """How many weights come out in each format."""
    return Counter(step.label for step in steps)


def outputs_below(plan: Plan, module: str) -> Outputs:
    """Dtype and shape of every output tensor below `module`, by the rest of its name."""
    specs = (spec for step in plan.steps for spec in step.outputs if spec.name.startswith(f"{module}."))
    return {spec.name.removeprefix(f"{module}."): (spec.dtype, spec.shape) for spec in specs}

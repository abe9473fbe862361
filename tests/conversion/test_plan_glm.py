"""The plan for the published GLM-5.2: sizes worked out by hand, and no tensor lost."""

from collections import Counter
from functools import lru_cache

import pytest

from quantkit.conversion.plan import Plan, make_plan
from quantkit.publishing.preflight import LARGEST_FILE
from quantkit.recipe import load_recipe
from support.headers import published
from support.plans import BF16_REST, INT4, count_labels
from support.tiers import exhaustive


@lru_cache
def planned(recipe: str) -> Plan:
    """The plan of a recipe for GLM-5.2, which takes seconds."""
    return make_plan(published("glm-5.2"), load_recipe(recipe))


# An expert's matrix has 2048 x 6144 numbers: FP8 with 16 x 48 scales, INT4 with a BF16 scale for 32 and the shape.
EXPERTS = 76 * 256 * 3
EXPERT_FP8 = 2048 * 6144 + 16 * 48 * 4
EXPERT_INT4 = 2048 * 6144 // 2 + 2048 * (6144 // 32) * 2 + 16
KV_B = 79
KV_B_FP8 = 28672 * 512 + 224 * 4 * 4
KV_B_BF16 = 28672 * 512 * 2


def test_glm_5_2_int4_has_the_size_worked_out_by_hand() -> None:
    """435,280,968,896 bytes: the published ones, with 58,368 experts' matrices in INT4 and 79 kv_b_proj in BF16."""
    by_hand = 755_617_140_416 + EXPERTS * (EXPERT_INT4 - EXPERT_FP8) + KV_B * (KV_B_BF16 - KV_B_FP8)

    assert planned(INT4).nbytes == by_hand == 435_280_968_896
    assert planned(INT4).num_tensors == 118_629 + EXPERTS - KV_B == 176_918


@pytest.mark.exhaustive
def test_glm_5_2_with_a_bf16_rest_has_the_size_worked_out_by_hand() -> None:
    """The BF16 release's 59,585 tensors and 1,506.66 GB, with the experts' matrices in INT4."""
    by_hand = 1_506_659_919_872 - EXPERTS * (2048 * 6144 * 2 - EXPERT_INT4)

    assert planned(BF16_REST).nbytes == by_hand == 450_904_205_312
    assert planned(BF16_REST).num_tensors == 59_585 + EXPERTS * 2


RECIPES = (INT4, exhaustive(BF16_REST))


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_shard_of_glm_5_2_is_too_large_for_the_hub(recipe: str) -> None:
    """The Hub takes no file over 50 GB: a whole layer is less, even decoded to twice its bytes."""
    layers: Counter[str] = Counter()
    for tensor in planned(recipe).source.tensors.values():
        layers[tensor.shard] += tensor.spec.nbytes

    assert max(layers.values()) * 2 < LARGEST_FILE
    assert all(job.file_bytes < LARGEST_FILE for job in planned(recipe).jobs)


def test_glm_5_2s_weights_come_out_in_these_formats() -> None:
    """Of 59,044 FP8 weights the experts become INT4 and kv_b_proj BF16; 465 BF16 tensors and 76 FP32 biases stay."""
    assert count_labels(planned(INT4).steps) == {
        "int4 g=32": 58_368,
        "fp8 128x128": 59_044 - 58_368 - 79,
        "bf16": 465 + 79,
        "f32": 76,
    }


@pytest.mark.exhaustive
def test_a_bf16_rest_leaves_no_fp8() -> None:
    """Of the same weights all but the experts become BF16."""
    assert count_labels(planned(BF16_REST).steps) == {
        "int4 g=32": 58_368,
        "bf16": 465 + 59_044 - 58_368,
        "f32": 76,
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tensor_of_glm_5_2_is_lost(recipe: str) -> None:
    """Every one of the 118,629 source tensors is in exactly one step, and no two outputs have one name."""
    plan = planned(recipe)
    used = Counter(tensor.spec.name for step in plan.steps for tensor in step.weight.tensors)

    assert used.keys() == plan.source.tensors.keys()
    assert len(used) == used.total() == 118_629
    outputs = [name for job in plan.jobs for name in job.places]
    assert len(outputs) == len(set(outputs)) == plan.num_tensors


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_engine_loads_glm_5_2_and_needs_no_flag(recipe: str) -> None:
    """No rule of an engine is broken, and none has to be warned of."""
    assert planned(recipe).warnings == ()


def test_glm_5_2_has_an_output_shard_for_each_source_shard() -> None:
    """Shards keep their names and order, and each job reads its own shard alone when no scale strays."""
    plan = planned(INT4)

    assert tuple(job.shard for job in plan.jobs) == plan.source.shards
    assert all(job.reads == (job.shard,) for job in plan.jobs)

"""`quantkit recipes` lists, shows and checks recipes, and every mistake in one is named with its rule."""

import json
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from quantkit.conversion.plan import make_plan
from quantkit.conversion.recipe_check import check_recipe, list_recipes
from quantkit.conversion.recipe_report import RecipeCheck
from quantkit.errors import PlanError, RecipeError
from quantkit.families.locate import describe_model
from quantkit.recipe import load_recipe, recipe_names
from quantkit.weights.grouping import read_weights
from support.families import config_of
from support.headers import published
from support.program import Result, Runner

KEEP = "  - {roles: all, scheme: keep}\n"
INT4 = "scheme: int4, group_size: 32, scale: search"
EXPERT = 256 * 128  # numbers of a projection of an expert in the toy
EXPERT_FP8 = EXPERT + 2 * 4  # and two FP32 scales of blocks
EXPERT_NVFP4 = EXPERT // 2 + EXPERT // 16 + 4  # codes, scales, the global scale
EXPERT_INT4 = EXPERT // 2 + EXPERT // 32 * 2 + 16  # codes, BF16 scales, the shape


Writer = Callable[[str], Path]


@pytest.fixture
def recipes(quantkit: Runner) -> Runner:
    """Runs `quantkit recipes` in this process."""
    return partial(quantkit, "recipes")


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes a recipe called `mine`: the text, or rules and after them the one for all."""

    def make(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text if "rules:" in text else f"rules:\n{text}{KEEP}")
        return path

    return make


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a toy GLM-5.2 in FP8: a dense layer, seven sparse ones and the MTP layer, four experts each.

    o_proj has 96 columns.
    """
    config = config_of("glm-5.2-fp8_block")
    config |= {"num_hidden_layers": 8, "v_head_dim": 48, "indexer_types": ["full", "shared"] * 4}
    config["mlp_layer_types"] = ["dense"] + ["sparse"] * 7
    path = tmp_path_factory.mktemp("glm") / "config.json"
    path.write_text(json.dumps(config))
    return path


# --- list and show


def test_list_has_every_built_in_recipe() -> None:
    """Each with what it makes, in which format and for what, as its file says."""
    listed = {entry.name: entry for entry in list_recipes().recipes}

    assert tuple(listed) == recipe_names()
    for name, entry in listed.items():
        said = load_recipe(name).as_dict()
        schemes = {rule["scheme"] for rule in said["rules"]} & {"int4", "nvfp4"}
        assert {entry.scheme} - {None} == schemes
        assert (entry.format, list(entry.model_types)) == (said["format"], said["model_types"])
        assert entry.description == said["description"] != ""


def test_list_is_a_table_or_an_object(recipes: Runner) -> None:
    """The table shows names, schemes, formats and model types; --json is the report."""
    table, printed = recipes("list"), recipes("list", "--json")

    assert (table.exit_code, table.stderr) == (printed.exit_code, printed.stderr) == (0, "")
    for name in recipe_names():
        assert any(line.split()[:1] == [name] for line in table.stdout.splitlines())
    assert "glm4_moe, glm4_moe_lite" in table.stdout
    content = json.loads(printed.stdout)
    assert content["kind"] == "RecipeList"
    assert content["recipes"][0] == {
        "name": "bf16",
        "scheme": None,
        "format": "compressed-tensors",
        "model_types": [],
        "description": load_recipe("bf16").description,
    }


@pytest.mark.parametrize("name", recipe_names())
def test_show_prints_the_file_as_it_is(recipes: Runner, name: str) -> None:
    """Comments, order and spacing are those of the file, so that the output is a recipe to begin with."""
    text = resources.files("quantkit.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")

    assert "# " in text
    assert recipes("show", name) == Result(0, text, "")


def test_show_prints_a_file_without_adding_to_it(recipes: Runner, write: Writer) -> None:
    """A file of the user's without a line end at its end gets none."""
    path = write("rules: [{roles: all,   scheme: bf16}] # décodé")

    assert recipes("show", path) == Result(0, path.read_text(), "")


def test_show_as_json_fills_in_the_defaults(recipes: Runner, write: Writer) -> None:
    """What the recipe says, as it is understood."""
    content = json.loads(recipes("show", write("rules: [{roles: all, scheme: bf16}]"), "--json").stdout)

    assert content == {
        "schema_version": 1,
        "kind": "RecipeContent",
        "name": "mine",
        "description": "",
        "model_types": [],
        "mtp": "quantize",
        "format": "compressed-tensors",
        "engines": ["vLLM", "SGLang", "transformers"],
        "rules": [{"roles": "all", "scheme": "bf16"}],
    }


# --- check


@pytest.mark.parametrize("name", recipe_names())
def test_every_built_in_recipe_is_sound(recipes: Runner, name: str) -> None:
    """Without a model, check parses a recipe and says its rules."""
    result = recipes("check", name)

    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{name} is sound in itself" in result.stdout
    assert len(result.stdout.splitlines()) == 3 + len(load_recipe(name).rules)
    checked = check_recipe(name)
    assert (checked.model, checked.total_bytes, checked.warnings) == (None, 0, ())
    assert not any(rule.weights for rule in checked.rules)


def test_check_says_what_each_rule_does(write: Writer, glm: Path) -> None:
    """Weights, bytes before and after and layers of a rule are those worked out by hand."""
    text = """engines: [vLLM, SGLang]
rules:
  - {roles: [routed_expert], except_layers: 'first 2, last 1', scheme: nvfp4, scale: search}
  - {roles: [routed_expert], layers: 'first 2, last 1', scheme: bf16}
  - {modules: '.*layers\\.[0-3]\\..*o_proj', scheme: bf16}
  - {roles: [kv_b], scheme: bf16}
  - {roles: all, scheme: keep}
"""
    checked = check_recipe(write(text), glm)
    first, second, third, fourth, last = checked.rules

    assert (first.number, first.conditions) == (1, "roles: routed_expert; except_layers: first 2, last 1")
    assert (first.treatment, first.layers, first.mtp_layers) == ("nvfp4 search", "2-6", "8")
    assert (first.weights, first.source_bytes) == (6 * 4 * 3, 6 * 4 * 3 * EXPERT_FP8)
    assert first.nbytes == 6 * 4 * 3 * EXPERT_NVFP4
    assert [(group.mtp, group.source_format, group.format) for group in first.groups] == [
        (False, "fp8 128x128", "nvfp4"),
        (True, "fp8 128x128", "nvfp4"),
    ]
    assert (second.layers, second.mtp_layers, second.weights) == ("1, 7", "", 2 * 4 * 3)
    assert second.nbytes == 2 * 4 * 3 * EXPERT * 2
    assert (third.layers, third.mtp_layers, third.weights) == ("0-3", "", 4)
    assert (fourth.layers, fourth.mtp_layers, fourth.weights) == ("0-7", "8", 9)
    assert (last.conditions, last.treatment, last.layers, last.mtp_layers) == ("roles: all", "keep", "0-7", "8")
    assert {"embedding", "norm", "lm_head", "attention"} < {group.role for group in last.groups}
    assert last.nbytes == last.source_bytes
    assert any("transformers" in warning and "all experts" in warning for warning in checked.warnings)


def test_an_engine_that_is_not_named_only_warns(write: Writer, glm: Path) -> None:
    """What transformers could not load is refused, unless the recipe is for other engines."""
    rules = """rules:
  - {roles: [routed_expert], layers: last 2, scheme: nvfp4, scale: search}
  - {roles: [kv_b], scheme: bf16}
  - {roles: all, scheme: keep}
"""
    with pytest.raises(PlanError, match="transformers could not load this"):
        check_recipe(write(rules), glm)

    assert check_recipe(write(f"engines: [vLLM]\n{rules}"), glm).warnings
    with pytest.raises(RecipeError, match="an entry of engines is 'TRT'"):
        check_recipe(write(f"engines: [TRT]\n{rules}"), glm)


@pytest.mark.parametrize("name", ["bf16", "glm-5.2-int4", "glm-5.2-nvfp4", "glm-5.2-nvfp4-modelopt"])
def test_every_weight_is_covered_once(glm: Path, name: str) -> None:
    """The rules together cover all weights and bytes of the model, and give those of the plan."""
    source = describe_model(glm)
    checked = check_recipe(name, glm)

    assert sum(rule.weights for rule in checked.rules) == len(read_weights(source))
    assert sum(rule.source_bytes for rule in checked.rules) == checked.source_bytes == source.nbytes
    assert sum(rule.nbytes for rule in checked.rules) == checked.total_bytes
    assert checked.total_bytes == make_plan(source, load_recipe(name)).nbytes
    for rule in checked.rules:
        assert sum(group.weights for group in rule.groups) == rule.weights
        assert sum(group.nbytes for group in rule.groups) == rule.nbytes


def test_kept_mtp_layers_belong_to_the_last_rule(write: Writer, glm: Path) -> None:
    """With `mtp: keep` the rule that quantizes experts covers none of the MTP layer, whose experts the last one has."""
    rule = f"  - {{roles: [routed_expert], {INT4}}}\n  - {{roles: [kv_b], scheme: bf16}}\n"
    quantized = check_recipe(write(f"rules:\n{rule}{KEEP}"), glm)
    kept = check_recipe(write(f"mtp: keep\nrules:\n{rule}{KEEP}"), glm)

    assert (quantized.rules[0].weights, quantized.rules[0].mtp_layers) == (8 * 12, "8")
    assert quantized.rules[0].nbytes == 8 * 12 * EXPERT_INT4
    assert (kept.rules[0].weights, kept.rules[0].mtp_layers) == (7 * 12, "")
    assert kept.rules[2].weights == quantized.rules[2].weights + 12
    assert kept.total_bytes - quantized.total_bytes == 12 * (EXPERT_FP8 - EXPERT_INT4)


def test_dropped_mtp_layers_are_counted(recipes: Runner, write: Writer, glm: Path) -> None:
    """With `mtp: drop` no rule covers the MTP layer, and its bytes have a line of their own."""
    path = write(f"mtp: drop\nrules:\n{KEEP.replace('keep', 'bf16')}")
    checked = check_recipe(path, glm)
    source = describe_model(glm)
    mtp = sum(tensor.spec.nbytes for name, tensor in source.tensors.items() if ".layers.8." in name)

    assert checked.dropped_bytes == mtp > 0
    assert checked.source_bytes == source.nbytes
    assert all(rule.mtp_layers == "" for rule in checked.rules)
    table = recipes("check", path, glm).stdout
    assert ["MTP", "layers", "dropped", f"{mtp:,}", "0"] in [line.split() for line in table.splitlines()]


def test_check_prints_tables_and_warnings(recipes: Runner, glm: Path) -> None:
    """Rules and what they cover are on stdout; what engines need or do less well is talk."""
    result = recipes("check", "glm-5.2-nvfp4-modelopt", glm)

    assert result.exit_code == 0
    title, headings, first, *_, answer = result.stdout.splitlines()
    assert title.rstrip() == f"glm-5.2-nvfp4-modelopt on {glm}"
    assert answer == f"glm-5.2-nvfp4-modelopt on {glm}: no engine refuses the result"
    assert headings.split()[:4] == ["rule", "for", "gives", "layers"]
    assert first.split()[:5] == ["1", "roles:", "routed_expert", "nvfp4", "search"]
    assert f"{7 * 12 * EXPERT_NVFP4:,}" in first
    assert "routed_expert (MTP)" in result.stdout
    assert result.stderr.startswith("warning: transformers: ")


def test_check_as_json_is_the_report(recipes: Runner, glm: Path) -> None:
    """One object, which can be read back."""
    result = recipes("check", "glm-5.2-nvfp4", glm, "--json")

    assert result.exit_code == 0
    assert list(json.loads(result.stdout))[:3] == ["schema_version", "kind", "recipe"]
    assert RecipeCheck.from_json(result.stdout) == check_recipe("glm-5.2-nvfp4", glm)


def test_check_takes_a_folder(toy: Path) -> None:
    """A checkpoint that is there is judged by its own headers."""
    checked = check_recipe("glm-5.2-int4", toy)

    assert (checked.model, checked.model_type) == (str(toy), "glm_moe_dsa")
    assert checked.source_bytes == describe_model(toy).nbytes


WRONG: dict[str, tuple[str, str]] = {
    "fits nothing": (
        f"  - {{roles: [kv_b], scheme: bf16}}\n  - {{roles: [routed_expert], layers: 40-50, {INT4}}}\n",
        "recipe mine: rule 2 (roles: routed_expert; layers: 40-50) fits no weight of this model",
    ),
    "no such role": (
        f"  - {{roles: [vision], {INT4}}}\n",
        "recipe mine: rule 1 (roles: vision) fits no weight of this model",
    ),
    "twice": (
        f"  - {{roles: [routed_expert], {INT4}}}\n  - {{modules: '.*experts.*', layers: 3, scheme: bf16}}\n",
        "recipe mine: rules 1 and 2 both fit model.layers.3.mlp.experts.0.down_proj.weight",
    ),
    "the same twice": (
        "  - {roles: [kv_b], scheme: bf16}\n" + "  - {roles: [lm_head], scheme: bf16}\n" * 2,
        "recipe mine: rules 2 and 3 both fit lm_head.weight",
    ),
    "fused partners": (
        f"  - {{modules: '.*experts.*up_proj', {INT4}}}\n",
        "model.layers.1.mlp.experts.0.up_proj by rule 1 (modules: .*experts.*up_proj)",
    ),
    "an embedding": (
        f"  - {{roles: [embedding, routed_expert], {INT4}}}\n",
        "recipe mine: model.embed_tokens by rule 1 (roles: embedding, routed_expert)",
    ),
    "a vector": (
        f"  - {{roles: [kv_b], scheme: bf16}}\n  - {{roles: [norm], {INT4}}}\n",
        "; recipe mine: model.norm by rule 2 (roles: norm)",
    ),
    "all": (f"rules:\n  - {{roles: all, {INT4}}}\n", "; recipe mine: model.norm by rule 1 (roles: all)"),
    "a group size that does not divide": (
        f"  - {{roles: [kv_b], scheme: bf16}}\n  - {{modules: '.*o_proj', {INT4.replace('32', '64')}}}\n",
        "does not divide the 96 columns; recipe mine: model.layers.0.self_attn.o_proj by rule 2 (modules: .*o_proj)",
    ),
    "two group sizes": (
        f"  - {{roles: [routed_expert], {INT4}}}\n  - {{roles: [dense_mlp], {INT4.replace('32', '64')}}}\n",
        "the result would mix int4 g=32 and int4 g=64, of which engines take one",
    ),
    "two 4-bit formats": (
        f"  - {{roles: [routed_expert], {INT4}}}\n  - {{roles: [dense_mlp], scheme: nvfp4, scale: search}}\n",
        "the result would mix int4 g=32 and nvfp4 tensor_group, of which engines take one",
    ),
    "FP8 in modelopt": (
        f"format: modelopt\nrules:\n  - {{roles: [routed_expert], scheme: nvfp4, scale: search}}\n{KEEP}",
        "would stay fp8 128x128, which the format modelopt cannot hold beside NVFP4; recipe mine: model.layers.0.",
    ),
    "another model": (f"model_types: [llama]\nrules:\n{KEEP}", "the recipe mine is made for llama"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_rule(recipes: Runner, write: Writer, glm: Path, name: str) -> None:
    """Exit code 1, nothing on stdout, one sentence with recipe and rule, and a remedy."""
    text, words = WRONG[name]
    result = recipes("check", write(text), glm)

    assert (result.exit_code, result.stdout) == (1, "")
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")
    assert "<" not in error  # of an enum's repr


@pytest.fixture
def nvidia() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of nvidia/GLM-5.2-NVFP4."""
    return {
        name: (tensor.spec.dtype, tensor.spec.shape)
        for name, tensor in published("nvidia-glm-5.2-nvfp4").tensors.items()
    }


@pytest.mark.exhaustive
def test_our_modelopt_glm_5_2_is_nvidias_without_input_scales(nvidia: dict[str, Any]) -> None:
    """The same tensors, MTP layer included, but 57,600 input scales of 4 bytes, which W4A4 has."""
    plan = make_plan(published("glm-5.2"), load_recipe("glm-5.2-nvfp4-modelopt"))
    ours = {spec.name: (spec.dtype, spec.shape) for step in plan.steps for spec in step.outputs}
    more = {name: nvidia[name] for name in nvidia.keys() - ours.keys()}

    assert ours.items() <= nvidia.items()
    assert len(more) == 75 * 256 * 3 == 57_600
    assert {(name.rpartition(".")[2], *stored) for name, stored in more.items()} == {("input_scale", "F32", ())}
    assert plan.nbytes == 464_795_036_672 == 464_795_267_072 - 57_600 * 4
    assert (len(ours), len(nvidia)) == (174_785, 232_385)


def test_a_model_is_refused_by_recipes_for_others(glm: Path) -> None:
    """The hint says where to look for the right one."""
    with pytest.raises(PlanError, match=r"'glm_moe_dsa'; the recipe kimi-k2.6-nvfp4 is made for kimi_k25") as caught:
        check_recipe("kimi-k2.6-nvfp4", glm)

    assert caught.value.hint == "quantkit recipes list says which recipe is for which model types."

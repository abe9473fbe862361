"""Which recipe is meant, what options change of it, and what the manifest and the README say of it."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.choices import Dialect, Rest, ScaleMethod, Scheme
from quantkit.errors import QuantkitError, RecipeError, UsageError
from quantkit.naming import Role, TensorName
from quantkit.recipe import (
    Recipe,
    Rule,
    Treatment,
    default_recipe,
    find_alias,
    load_recipe,
    parse_recipe,
    recipe_names,
    recipe_text,
)
from support.recipe_roles import LAST, treat


def test_a_recipe_file_is_read_by_its_path(tmp_path: Path) -> None:
    """A YAML file is a recipe called by its stem."""
    path = tmp_path / "ours.yaml"
    path.write_text("description: décodé\nrules: [{roles: all, scheme: bf16}]\n", encoding="utf-8")

    assert load_recipe(path) == Recipe("ours", "décodé", (Rule(Treatment(Scheme.BF16)),))
    assert load_recipe(str(path)) == load_recipe(path)
    assert recipe_text(path) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["missing", "folder", "latin-1"])
def test_a_recipe_file_that_cannot_be_read_is_named(kind: str, tmp_path: Path) -> None:
    """A file that is not there, is no file or is not UTF-8 is a RecipeError that names it."""
    path = tmp_path / "ours.yaml"
    if kind == "folder":
        path.mkdir()
    if kind == "latin-1":
        path.write_bytes("description: décodé\nrules: [{roles: all, scheme: bf16}]\n".encode("latin-1"))

    with pytest.raises(RecipeError) as caught:
        load_recipe(path)

    assert "ours" in str(caught.value)


def test_a_recipe_that_does_not_exist_lists_those_that_do() -> None:
    """The hint for an unknown recipe names the built-in ones."""
    with pytest.raises(UsageError, match="'glm-9'") as caught:
        load_recipe("glm-9")

    assert caught.value.hint is not None
    assert "glm-5.2-int4" in caught.value.hint


@pytest.mark.parametrize("group_size", [64, 128])
def test_with_quantized_changes_only_the_int4_rules(group_size: int) -> None:
    """Another group size changes the routed experts and leaves every other role and the recipe itself alone."""
    recipe = load_recipe("glm-5.2-int4")
    changed = recipe.with_quantized(group_size=group_size)

    assert treat(changed, Role.ROUTED_EXPERT) == Treatment(Scheme.INT4, group_size, ScaleMethod.SEARCH)
    others = [role for role in Role if role is not Role.ROUTED_EXPERT]
    assert [treat(changed, role) for role in others] == [treat(recipe, role) for role in others]
    assert treat(recipe, Role.ROUTED_EXPERT).group_size == 32


@pytest.mark.parametrize(
    ("changes", "option"), [({"group_size": 64}, "--group-size"), ({"scale": ScaleMethod.MINMAX}, "--scale")]
)
def test_with_quantized_needs_a_recipe_that_quantizes(changes: dict[str, Any], option: str) -> None:
    """An INT4 option for a recipe without INT4 is a usage error that names both."""
    with pytest.raises(UsageError, match=f"{option}.*bf16"):
        load_recipe("bf16").with_quantized(**changes)


def test_with_quantized_refuses_a_group_size_that_no_kernel_takes() -> None:
    """The group sizes are the same as in a file."""
    with pytest.raises(QuantkitError, match="group_size is 16"):
        load_recipe("glm-5.2-int4").with_quantized(group_size=16)


@pytest.mark.parametrize(
    ("name", "rest", "scheme"),
    [
        ("glm-5.2-int4", Rest.BF16, "bf16"),
        ("glm-5.2-int4", Rest.FP8, "keep"),
        ("glm-5.2-int4-bf16rest", Rest.FP8, "keep"),
    ],
)
def test_with_rest_changes_only_the_last_rule(name: str, rest: Rest, scheme: str) -> None:
    """Another rest changes the roles that only the last rule covers; all others keep their treatment."""
    recipe = load_recipe(name)
    changed = recipe.with_rest(rest)

    assert treat(changed, Role.ATTENTION) == Treatment(Scheme(scheme))
    assert changed.rules[:-1] == recipe.rules[:-1]
    assert changed.rules[-1].roles is None


@pytest.mark.parametrize(
    ("model", "model_type", "int4", "nvfp4", "modelopt"),
    [
        ("glm-5.2", "glm_moe_dsa", "glm-5.2-int4", "glm-5.2-nvfp4", "glm-5.2-nvfp4-modelopt"),
        ("/models/mine", "glm_moe_dsa", "glm-5.2-int4", "glm-5.2-nvfp4", "glm-5.2-nvfp4-modelopt"),
        ("mine", "glm4_moe", "glm-4.x-int4", "glm-4.x-nvfp4", "moe-nvfp4-modelopt"),
        ("mine", "glm4_moe_lite", "glm-4.x-int4", "glm-4.x-nvfp4", "moe-nvfp4-modelopt"),
        ("mine", "deepseek_v3", "deepseek-v3-int4", "deepseek-v3-nvfp4", "moe-nvfp4-modelopt"),
        ("mine", "deepseek_v32", "deepseek-v3-int4", "deepseek-v3-nvfp4", "moe-nvfp4-modelopt"),
        ("mine", "kimi_k2", "deepseek-v3-int4", "deepseek-v3-nvfp4", "moe-nvfp4-modelopt"),
        ("kimi-k2.6", "kimi_k25", "deepseek-v3-int4", "kimi-k2.6-nvfp4", "moe-nvfp4-modelopt"),
        ("mine", "llama", "int4", "nvfp4", "nvfp4-modelopt"),
    ],
)
def test_int4_and_nvfp4_mean_the_models_recipe(
    model: str, model_type: str, int4: str, nvfp4: str, modelopt: str
) -> None:
    """`--int4`, `--nvfp4` and `--format` choose the alias's own recipe, or the one made for the model type."""
    assert default_recipe(model, model_type, Scheme.INT4).name == int4
    assert default_recipe(model, model_type, Scheme.INT4, Dialect.COMPRESSED_TENSORS).name == int4
    assert default_recipe(model, model_type, Scheme.NVFP4).name == nvfp4
    assert default_recipe(model, model_type, Scheme.NVFP4, Dialect.MODELOPT).name == modelopt


def test_no_model_type_has_int4_in_modelopts_format() -> None:
    """The error says what the format holds and which options to give instead."""
    with pytest.raises(RecipeError, match="modelopt holds NVFP4, and not INT4") as caught:
        default_recipe("glm-5.2", "glm_moe_dsa", Scheme.INT4, Dialect.MODELOPT)

    assert caught.value.hint == "Give --nvfp4 for NVFP4, or leave --format out for INT4."


def test_int4_for_an_unknown_model_type_is_refused() -> None:
    """Without a recipe for the model type the error names model and type, and says what to write."""
    with pytest.raises(RecipeError, match=r"/models/mine.*'mamba'") as caught:
        default_recipe("/models/mine", "mamba", Scheme.INT4)

    assert caught.value.hint is not None
    assert "--recipe" in caught.value.hint


def table_of_the_readme(heading: str) -> list[list[str]]:
    """The rows of the table whose first column is called `heading` in recipes/README.md, cells without backticks."""
    text = resources.files("quantkit.recipes").joinpath("README.md").read_text(encoding="utf-8")
    table = next(part for part in text.split("\n\n") if part.startswith(f"| {heading} |"))
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_the_readme_lists_exactly_the_built_in_recipes() -> None:
    """Name, options, model types and format of each stand in a table, as the files and `default_recipe` have them."""
    rows = {row[0]: row[1:] for row in table_of_the_readme("recipe")}

    assert tuple(sorted(rows)) == recipe_names()
    for name, (options, model_types, *_) in rows.items():
        recipe = load_recipe(name)
        assert model_types == (", ".join(recipe.model_types) or "any")
        modelopt = recipe.dialect is Dialect.MODELOPT
        assert ("--format modelopt" in options) == modelopt
        if options in ("--int4", "--nvfp4", "--nvfp4 --format modelopt"):
            scheme, model_type = recipe.scheme, recipe.model_types[0]
            assert scheme is not None
            assert options.startswith(f"--{scheme}")
            assert default_recipe("mine", model_type, scheme, recipe.dialect).name == name


def test_the_readme_explains_every_key() -> None:
    """The tables of keys name the keys of a recipe and of a rule, as the errors list them, and no others."""
    for what, text in (("a recipe", f"key: 1\nrules:{LAST}"), ("a rule", f"rules:\n  - {{key: 1}}{LAST}")):
        with pytest.raises(RecipeError, match="unknown key 'key'") as caught:
            parse_recipe("mine", text)
        keys = str(caught.value).partition(f"{what} has ")[2].split(", ")
        assert [row[0] for row in table_of_the_readme(f"key of {what}")] == keys


def test_the_readme_lists_the_families_that_recipes_are_made_for() -> None:
    """Every model type of a built-in recipe has its line, and every line's model type a recipe."""
    made_for = {model_type for name in recipe_names() for model_type in load_recipe(name).model_types}

    assert {row[1] for row in table_of_the_readme("family")} == made_for


def test_the_readmes_example_parses() -> None:
    """The example of a recipe is one, and treats first and last layers otherwise than the others."""
    text = resources.files("quantkit.recipes").joinpath("README.md").read_text(encoding="utf-8")
    recipe = parse_recipe("high", text.partition("```yaml\n")[2].partition("```")[0])

    names = [TensorName(f"model.layers.{layer}.mlp.experts.0.up_proj", "weight") for layer in (5, 6, 75, 76, 78)]
    schemes = [recipe.choose(name, 78)[1].scheme for name in names]
    assert schemes == [Scheme.BF16, Scheme.NVFP4, Scheme.NVFP4, Scheme.BF16, Scheme.NVFP4]


@pytest.mark.parametrize("name", recipe_names())
def test_as_dict_says_what_the_file_says(name: str) -> None:
    """The dictionary for the manifest is the YAML file's content with the name added."""
    text = resources.files("quantkit.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")

    assert json.loads(json.dumps(load_recipe(name).as_dict())) == {
        "name": name,
        "model_types": [],
        "mtp": "quantize",
        "format": "compressed-tensors",
        "engines": ["vLLM", "SGLang", "transformers"],
        **yaml.safe_load(text),
    }


def test_as_dict_holds_the_overrides() -> None:
    """What options changed is what the manifest says."""
    rules = load_recipe("glm-5.2-int4").with_quantized(group_size=128).with_rest(Rest.BF16).as_dict()["rules"]

    assert rules == [
        {"roles": ["routed_expert"], "scheme": "int4", "group_size": 128, "scale": "search"},
        {"roles": ["kv_b"], "scheme": "bf16"},
        {"roles": "all", "scheme": "bf16"},
    ]


def test_as_dict_names_roles_in_order() -> None:
    """The roles of a rule are sorted, so that a manifest does not depend on how the file or the set orders them."""
    recipe = parse_recipe("mine", "rules:\n  - {roles: [vision, norm, kv_b, embedding], scheme: bf16}" + LAST)

    assert recipe.as_dict()["rules"][0] == {"roles": ["embedding", "kv_b", "norm", "vision"], "scheme": "bf16"}


def test_the_alias_of_glm_5_2_carries_its_config() -> None:
    """The alias names the FP8 repository and holds the published config: 78 layers, 256 experts, FP8 blocks."""
    alias = find_alias("glm-5.2")

    assert alias is not None
    assert (alias.name, alias.repo) == ("glm-5.2", "zai-org/GLM-5.2-FP8")
    config = json.loads(alias.config_text)
    assert (config["model_type"], config["num_hidden_layers"], config["n_routed_experts"]) == ("glm_moe_dsa", 78, 256)
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("name", ["glm-5.9", "", "GLM-5.2", "zai-org/GLM-5.2-FP8"])
def test_another_name_is_no_alias(name: str) -> None:
    """Only the exact name is an alias."""
    assert find_alias(name) is None

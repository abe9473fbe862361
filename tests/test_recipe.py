"""Recipes choose a scheme by role, and a recipe that says something wrong is refused with the number of the rule."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.errors import QuantkitError, RecipeError, UsageError
from quantkit.naming import Role
from quantkit.recipe import (
    Recipe,
    Rest,
    Rule,
    ScaleMethod,
    Scheme,
    Treatment,
    find_alias,
    int4_recipe,
    load_recipe,
    parse_recipe,
    recipe_names,
)

LAST = "\n  - {roles: all, scheme: keep}"


def test_the_built_in_recipes_are_these() -> None:
    """The recipes that ship are listed by name, without the list of models."""
    assert recipe_names() == ("bf16", "glm-5.2-int4", "glm-5.2-int4-bf16rest", "int4")


@pytest.mark.parametrize(
    ("name", "named", "rest", "model_types"),
    [
        ("bf16", {}, "bf16", ()),
        ("glm-5.2-int4", {Role.ROUTED_EXPERT: "int4", Role.KV_B: "bf16"}, "keep", ("glm_moe_dsa",)),
        ("glm-5.2-int4-bf16rest", {Role.ROUTED_EXPERT: "int4"}, "bf16", ("glm_moe_dsa",)),
    ],
)
def test_a_built_in_recipe_treats_each_role_as_it_says(
    name: str, named: dict[Role, str], rest: str, model_types: tuple[str, ...]
) -> None:
    """Each built-in recipe parses, has a description, and gives every role its scheme; INT4 has groups of 32."""
    recipe = load_recipe(name)

    assert recipe.name == name
    assert recipe.description
    assert recipe.model_types == model_types
    assert {role: recipe.treatment(role).scheme for role in Role} == {role: named.get(role, rest) for role in Role}
    for role in (role for role, scheme in named.items() if scheme == "int4"):
        assert recipe.treatment(role) == Treatment(Scheme.INT4, 32, ScaleMethod.SEARCH)


def test_the_first_rule_that_names_a_role_decides() -> None:
    """Of two rules for a role the first counts, and a role that no rule names falls to the last."""
    text = """
rules:
  - {roles: [kv_b, norm], scheme: bf16}
  - {roles: [norm, routed_expert], scheme: int4, group_size: 64, scale: minmax}
  - {roles: all, scheme: keep}
"""
    recipe = parse_recipe("mine", text)

    assert recipe.treatment(Role.NORM) == Treatment(Scheme.BF16)
    assert recipe.treatment(Role.KV_B) == Treatment(Scheme.BF16)
    assert recipe.treatment(Role.ROUTED_EXPERT) == Treatment(Scheme.INT4, 64, ScaleMethod.MINMAX)
    assert recipe.treatment(Role.OTHER) == Treatment(Scheme.KEEP)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{roles: [routed_expert], scheme: bf16, group: 32}", "'group'"),
        ("{roles: [routed_expert], scheme: bf16, on: 1, off: 2}", "rule 2"),  # YAML reads on and off as booleans
        ("{roles: [routed_expert], scheme: bf16, on: 1, group: 2}", "rule 2"),
        ("{roles: [experts], scheme: bf16}", "'experts'"),
        ("{roles: routed_expert, scheme: bf16}", "not a valid Role"),
        ("{roles: [[routed_expert]], scheme: bf16}", "not a valid Role"),
        ("{roles: null, scheme: bf16}", "rule 2"),
        ("{roles: 7, scheme: bf16}", "rule 2"),
        ("{scheme: bf16}", "roles is missing"),
        ("{roles: [norm]}", "scheme is missing"),
        ("{roles: [norm], scheme: fp4}", "'fp4'"),
        ("{roles: [norm], scheme: [bf16]}", "not a valid Scheme"),
        ("{roles: [routed_expert], scheme: int4, scale: minmax}", "group_size is None"),
        ("{roles: [routed_expert], scheme: int4, group_size: 48, scale: minmax}", "group_size is 48"),
        ("{roles: [routed_expert], scheme: int4, group_size: 256, scale: minmax}", "32, 64, 128"),
        ("{roles: [routed_expert], scheme: int4, group_size: '32', scale: minmax}", "group_size is 32"),
        ("{roles: [routed_expert], scheme: int4, group_size: 32.0, scale: minmax}", "group_size is 32.0"),
        ("{roles: [routed_expert], scheme: int4, group_size: [32], scale: minmax}", "group_size is [32]"),
        ("{roles: [routed_expert], scheme: int4, group_size: 32}", "needs a scale: minmax"),
        ("{roles: [routed_expert], scheme: int4, group_size: 32, scale: mse}", "'mse'"),
        ("{roles: [routed_expert], scheme: keep, group_size: 32}", "belong to the scheme int4"),
        ("{roles: [routed_expert], scheme: bf16, scale: minmax}", "belong to the scheme int4"),
        ("bf16", "not a mapping"),
        ("[norm, bf16]", "not a mapping"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_number(rule: str, said: str) -> None:
    """The message names the recipe, the number of the rule and what is wrong with it, and points to the README."""
    text = f"rules:\n  - {{roles: [embedding], scheme: keep}}\n  - {rule}{LAST}"

    with pytest.raises(RecipeError) as caught:
        parse_recipe("mine", text)

    assert "recipe mine: rule 2" in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.hint is not None
    assert "README" in caught.value.hint


@pytest.mark.parametrize(
    "rules",
    [
        "  - {roles: [norm], scheme: keep}",
        "  - {roles: all, scheme: keep}\n  - {roles: [norm], scheme: bf16}",
        "  - {roles: all, scheme: bf16}\n  - {roles: all, scheme: keep}",
    ],
    ids=["none", "not last", "twice"],
)
def test_the_rule_for_all_is_the_last_and_only_the_last(rules: str) -> None:
    """A recipe that leaves roles untreated, or has rules that cannot count, is refused."""
    with pytest.raises(RecipeError, match="last rule, and only the last"):
        parse_recipe("mine", f"rules:\n{rules}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "list of rules"),
        ("[]", "list of rules"),
        ("rules: []", "list of rules"),
        ("rules: {roles: all}", "list of rules"),
        ("description: nothing", "list of rules"),
        ("a: b: c", "not valid YAML"),
        ("rules: [{roles: all, scheme: keep}]\nrule: 1", "'rule'"),
        ("rules: [{roles: all, scheme: keep}]\non: 1\nrule: 2", "unknown key"),
        ("rules: [{roles: all, scheme: keep}]\nmodel_types: 5", "model_types"),
        ("rules: [{roles: all, scheme: keep}]\nmodel_types: null", "model_types"),
        ("rules: [{roles: all, scheme: keep}]\nmodel_types: glm_moe_dsa", "model_types"),
    ],
)
def test_what_is_not_a_recipe_is_refused(text: str, said: str) -> None:
    """YAML that does not parse or has other keys or values than a recipe's is refused by the recipe's name."""
    with pytest.raises(RecipeError, match="recipe mine") as caught:
        parse_recipe("mine", text)

    assert said in str(caught.value)


def test_a_recipe_file_is_read_by_its_path(tmp_path: Path) -> None:
    """A YAML file is a recipe called by its stem."""
    path = tmp_path / "ours.yaml"
    path.write_text("description: décodé\nrules: [{roles: all, scheme: bf16}]\n", encoding="utf-8")

    assert load_recipe(path) == Recipe("ours", "décodé", (Rule(None, Treatment(Scheme.BF16)),))
    assert load_recipe(str(path)) == load_recipe(path)


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
def test_with_int4_changes_only_the_int4_rules(group_size: int) -> None:
    """Another group size changes the routed experts and leaves every other role and the recipe itself alone."""
    recipe = load_recipe("glm-5.2-int4")
    changed = recipe.with_int4(group_size=group_size)

    assert changed.treatment(Role.ROUTED_EXPERT) == Treatment(Scheme.INT4, group_size, ScaleMethod.SEARCH)
    others = [role for role in Role if role is not Role.ROUTED_EXPERT]
    assert [changed.treatment(role) for role in others] == [recipe.treatment(role) for role in others]
    assert recipe.treatment(Role.ROUTED_EXPERT).group_size == 32


@pytest.mark.parametrize(
    ("changes", "option"), [({"group_size": 64}, "--group-size"), ({"scale": ScaleMethod.MINMAX}, "--scale")]
)
def test_with_int4_needs_a_recipe_with_int4(changes: dict[str, Any], option: str) -> None:
    """An INT4 option for a recipe without INT4 is a usage error that names both."""
    with pytest.raises(UsageError, match=f"{option}.*bf16"):
        load_recipe("bf16").with_int4(**changes)


def test_with_int4_refuses_a_group_size_that_no_kernel_takes() -> None:
    """The group sizes are the same as in a file."""
    with pytest.raises(QuantkitError, match="group_size is 16"):
        load_recipe("glm-5.2-int4").with_int4(group_size=16)


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

    assert changed.treatment(Role.ATTENTION) == Treatment(Scheme(scheme))
    assert changed.rules[:-1] == recipe.rules[:-1]
    assert changed.rules[-1].roles is None


@pytest.mark.parametrize(
    ("model", "model_type"), [("glm-5.2", "glm_moe_dsa"), ("glm-5.2", "anything"), ("/models/mine", "glm_moe_dsa")]
)
def test_int4_means_the_models_recipe(model: str, model_type: str) -> None:
    """`--int4` is the alias's own recipe, or the one made for the model type."""
    assert int4_recipe(model, model_type).name == "glm-5.2-int4"


def test_int4_for_an_unknown_model_type_is_refused() -> None:
    """Without a recipe for the model type the error names model and type, and says what to write."""
    with pytest.raises(RecipeError, match=r"/models/mine.*'mamba'") as caught:
        int4_recipe("/models/mine", "mamba")

    assert caught.value.hint is not None
    assert "--recipe" in caught.value.hint


@pytest.mark.parametrize("name", ["bf16", "glm-5.2-int4", "glm-5.2-int4-bf16rest", "int4"])
def test_as_dict_says_what_the_file_says(name: str) -> None:
    """The dictionary for the manifest is the YAML file's content with the name added."""
    text = resources.files("quantkit.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")

    assert json.loads(json.dumps(load_recipe(name).as_dict())) == {
        "name": name,
        "model_types": [],
        "mtp": "quantize",
        **yaml.safe_load(text),
    }


def test_as_dict_holds_the_overrides() -> None:
    """What options changed is what the manifest says."""
    rules = load_recipe("glm-5.2-int4").with_int4(group_size=128).with_rest(Rest.BF16).as_dict()["rules"]

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

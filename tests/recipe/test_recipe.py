"""Recipes choose a scheme by role, and a recipe that says something wrong is refused with the number of the rule."""

import pytest
import yaml

from quantkit.choices import ScaleMethod, Scheme
from quantkit.errors import RecipeError
from quantkit.naming import Role, TensorName
from quantkit.recipe import Treatment, load_recipe, parse_recipe, recipe_names
from support.recipe_roles import LAST, treat

INT4 = "scheme: int4, group_size: 32, scale: search"


def test_the_built_in_recipes_are_these() -> None:
    """The recipes that ship are listed by name, without the list of models."""
    assert recipe_names() == (
        "bf16",
        "deepseek-v3-int4",
        "deepseek-v3-nvfp4",
        "glm-4.x-int4",
        "glm-4.x-nvfp4",
        "glm-5.2-int4",
        "glm-5.2-int4-bf16rest",
        "glm-5.2-nvfp4",
        "glm-5.2-nvfp4-modelopt",
        "int4",
        "kimi-k2.6-nvfp4",
        "moe-nvfp4-modelopt",
        "nvfp4",
        "nvfp4-modelopt",
    )


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
    assert {role: treat(recipe, role).scheme for role in Role} == {role: named.get(role, rest) for role in Role}
    for role in (role for role, scheme in named.items() if scheme == "int4"):
        assert treat(recipe, role) == Treatment(Scheme.INT4, 32, ScaleMethod.SEARCH)


def test_two_rules_for_one_weight_are_an_error() -> None:
    """No order decides between rules: the error names both and the weight; a weight that no rule fits is the last's."""
    text = """
rules:
  - {roles: [kv_b, norm], scheme: bf16}
  - {roles: [norm, routed_expert], scheme: int4, group_size: 64, scale: minmax}
  - {roles: all, scheme: keep}
"""
    recipe = parse_recipe("mine", text)

    assert treat(recipe, Role.KV_B) == Treatment(Scheme.BF16)
    assert treat(recipe, Role.ROUTED_EXPERT) == Treatment(Scheme.INT4, 64, ScaleMethod.MINMAX)
    assert treat(recipe, Role.OTHER) == Treatment(Scheme.KEEP)
    with pytest.raises(RecipeError, match=r"rules 1 and 2 both fit model\.norm\.weight"):
        treat(recipe, Role.NORM)


@pytest.mark.parametrize(
    ("condition", "fitting"),
    [
        ("layers: '0'", {0}),
        ("layers: '1-2, 5'", {1, 2, 5}),
        ("layers: first 2", {0, 1}),
        ("layers: last 2", {4, 5}),
        ("layers: 'first 1, last 1, 3'", {0, 3, 5}),
        ("layers: 4-9", {4, 5, 6}),  # 6 is the MTP layer, named by its number
        ("except_layers: 'first 1, last 1'", {1, 2, 3, 4, 6}),
        ("modules: '.*layers.[24].*'", {2, 4}),
        ("roles: [kv_b]", set()),
    ],
)
def test_a_rule_fits_by_layer_and_name(condition: str, fitting: set[int]) -> None:
    """Of six main layers and an MTP layer, a rule fits those that all its conditions name."""
    recipe = parse_recipe("mine", f"rules:\n  - {{{condition}, scheme: bf16}}{LAST}")
    names = [TensorName(f"model.layers.{layer}.mlp.experts.3.up_proj", "weight") for layer in range(7)]

    assert {name.layer for name in names if recipe.rules[0].fits(name, 6)} == fitting
    assert not recipe.rules[0].fits(TensorName("lm_head", "weight"), 6) or condition.startswith("except")


def test_conditions_are_and_not_or() -> None:
    """A rule by role, name and layer fits what all three fit, and is said again in the manifest."""
    rule = "{roles: [routed_expert], modules: '.*up_proj', layers: last 1, scheme: bf16}"
    recipe = parse_recipe("mine", f"rules:\n  - {rule}{LAST}")

    fits = [
        recipe.rules[0].fits(TensorName(f"model.layers.{layer}.mlp.{part}", "weight"), 2)
        for layer in (0, 1)
        for part in ("experts.0.up_proj", "experts.0.down_proj", "shared_experts.up_proj")
    ]
    assert fits == [False, False, False, True, False, False]
    assert recipe.as_dict()["rules"][0] == yaml.safe_load(rule)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{roles: [routed_expert], scheme: bf16, group: 32}", "'group'"),
        ("{roles: [routed_expert], scheme: bf16, on: 1, off: 2}", "rule 2"),  # YAML reads on and off as booleans
        ("{roles: [routed_expert], scheme: bf16, on: 1, group: 2}", "rule 2"),
        ("{roles: [routed_expert], scheme: bf16, group: 32}", "a rule has roles, modules, layers, except_layers"),
        ("{roles: [norm], except_layers: first 2, last 1, scheme: bf16}", "put values that hold one into quotes"),
        ("{roles: [experts], scheme: bf16}", "a role is 'experts'; it must be one of embedding, lm_head"),
        ("{roles: routed_expert, scheme: bf16}", "roles is 'routed_expert'; it must be all, or a list of embedding"),
        ("{roles: [[routed_expert]], scheme: bf16}", "a role is ['routed_expert']"),
        ("{roles: [], scheme: bf16}", "roles is []"),
        ("{roles: null, scheme: bf16}", "rule 2"),
        ("{roles: 7, scheme: bf16}", "rule 2"),
        ("{scheme: bf16}", "roles is missing"),
        ("{roles: [norm]}", "scheme is missing"),
        ("{roles: [norm], scheme: fp4}", "scheme is 'fp4'; it must be one of keep, bf16, fp8-to-bf16, int4, nvfp4"),
        ("{roles: [norm], scheme: [bf16]}", "scheme is ['bf16']"),
        ("{roles: [routed_expert], scheme: int4, scale: minmax}", "group_size is None"),
        ("{roles: [routed_expert], scheme: int4, group_size: 48, scale: minmax}", "group_size is 48"),
        ("{roles: [routed_expert], scheme: int4, group_size: 256, scale: minmax}", "32, 64, 128"),
        ("{roles: [routed_expert], scheme: int4, group_size: '32', scale: minmax}", "group_size is 32"),
        ("{roles: [routed_expert], scheme: int4, group_size: 32.0, scale: minmax}", "group_size is 32.0"),
        ("{roles: [routed_expert], scheme: int4, group_size: [32], scale: minmax}", "group_size is [32]"),
        ("{roles: [routed_expert], scheme: int4, group_size: 32}", "needs a scale: minmax"),
        ("{roles: [routed_expert], scheme: int4, group_size: 32, scale: mse}", "'mse'"),
        ("{roles: [routed_expert], scheme: keep, group_size: 32}", "group_size belongs to the scheme int4"),
        ("{roles: [routed_expert], scheme: bf16, scale: minmax}", "scale belongs to the schemes int4 and nvfp4"),
        ("{roles: [routed_expert], scheme: nvfp4, scale: signed}", "never negative"),
        ("{roles: [routed_expert], scheme: nvfp4}", "needs a scale"),
        ("{modules: '(', scheme: bf16}", "modules is '(', which is no regular expression: missing ), unterminated"),
        ("{modules: 5, scheme: bf16}", "modules is 5"),
        ("{layers: middle 3, scheme: bf16}", "first 3 or last 2"),
        ("{layers: [1, 2], scheme: bf16}", "first 3 or last 2"),
        ("{layers: 5-2, scheme: bf16}", "layers 5-2 are none"),
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
    "text",
    [
        f"rules:\n  - {{roles: [norm], scheme: nvfp4, scale: search, activations: nvfp4}}{LAST}",
        f"rules:\n  - {{roles: [norm], scheme: nvfp4, scale: search, input_activations: null}}{LAST}",
        f"rules:\n  - {{roles: [norm], scheme: w4a4}}{LAST}",
        f"rules:\n  - {{roles: [norm], scheme: NVFP4-W4A4, scale: search}}{LAST}",
        f"rules:\n  - {{roles: [norm], scheme: w8a8}}{LAST}",
        f"activations: nvfp4\nrules:{LAST}",
    ],
)
def test_quantized_activations_are_refused_with_the_reason(text: str) -> None:
    """However a recipe asks for W4A4 or W8A8, the message says that scales of activations need calibration data."""
    with pytest.raises(RecipeError, match=r"only weights are quantized.*W4A4.*calibrated on data"):
        parse_recipe("mine", text)


@pytest.mark.parametrize("scheme", ["fp4", "w4a16", "awq"])
def test_other_unknown_schemes_have_nothing_to_do_with_activations(scheme: str) -> None:
    """The reason is given only where it is one."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe("mine", f"rules:\n  - {{roles: [norm], scheme: {scheme}}}{LAST}")

    assert "activations" not in str(caught.value)


def test_int4_in_modelopts_format_is_refused() -> None:
    """ModelOpt's format holds NVFP4: a recipe that makes INT4 in it is refused with its rule and two ways out."""
    rules = f"rules:\n  - {{roles: [norm], scheme: bf16}}\n  - {{roles: [kv_b], {INT4}}}{LAST}"
    assert parse_recipe("mine", rules).scheme is Scheme.INT4

    with pytest.raises(RecipeError, match="recipe mine: rule 2 of mine makes INT4, and the format modelopt") as caught:
        parse_recipe("mine", f"format: modelopt\n{rules}")

    assert caught.value.hint == "Give the scheme nvfp4, or the format compressed-tensors."


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
        (
            "rules: [{roles: all, scheme: keep}]\nformat: gguf",
            "format is 'gguf'; it must be one of compressed-tensors,",
        ),
        ("rules: [{roles: all, scheme: keep}]\nmtp: yes", "mtp is True; it must be one of quantize, keep, drop"),
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

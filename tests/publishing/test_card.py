"""The model card says what was measured and carries over what the source's card says; the Hub can read its metadata."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import quantkit
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.writer import File
from quantkit.errors import SourceError
from quantkit.eval.gate.markdown import gate_table
from quantkit.eval.gate.report import AccuracyReport, Comparison, DistributionReport, PositionRange, Verdict
from quantkit.publishing.card import NO_GATE, Card, Facts, make_card, parse_card

TASK = Comparison(
    task="gsm8k",
    metric="exact_match",
    filter="flexible-extract",
    items=1319,
    baseline_correct=1266,
    candidate_correct=1261,
    lost=22,
    gained=17,
    difference=-5 / 1319,
    lower=-0.0116,
    upper=0.0040,
    p_value=0.522,
    adjusted_p_value=0.8,
    detectable_drop=0.012,
    has_power=True,
)
OTHER = replace(
    TASK,
    task="ifeval",
    metric="prompt_level_strict_acc",
    filter="",
    items=541,
    baseline_correct=480,
    candidate_correct=479,
)
POOLED = replace(TASK, task="all", metric="", filter="", items=1860)
DISTRIBUTION = DistributionReport(
    candidate="./int4",
    baseline="./bf16",
    text="/home/me/heldout.txt",
    window=256,
    scored_tokens=16320,
    scored_bytes=60000,
    baseline_bits_per_byte=1.4787,
    candidate_bits_per_byte=1.4795,
    kl_divergence=0.0049,
    top1_agreement=0.9498,
    baseline_correct=9000,
    lost=300,
    gained=280,
    flips=580 / 16320,
    positions=(PositionRange(1, 64, 1.6, 1.61, 0.006, 0.94), PositionRange(65, 255, 1.4, 1.41, 0.004, 0.95)),
)
GATE = AccuracyReport(
    candidate="/home/me/GLM-INT4",
    baseline="zai-org/GLM-5.2-FP8",
    candidate_digest="c" * 64,
    baseline_digest="b" * 64,
    suite="quick",
    rule="paired",
    max_drop=0.012,
    verdict=Verdict.PASS,
    reasons=("the lower bound -1.16 is above -1.20",),
    tasks=(TASK, OTHER),
    pooled=POOLED,
    needed_items=None,
    distribution=DISTRIBUTION,
    settings={"seed": 0, "few_shot": 5},
    seconds={"baseline": 1.5},
    warnings=("gsm8k is short",),
)
SOURCE_CARD = Card(
    {
        "license": "mit",
        "language": ["en", "zh"],
        "tags": ["fp8", "moe"],
        "pipeline_tag": "text-generation",
        "base_model": "zai-org/GLM-5.2",
        "model-index": [{"name": "GLM", "results": []}],
        "thumbnail": "x.png",
    },
    "# GLM\nThe best model.\n",
)


@pytest.fixture
def facts(toy_int4: Path) -> Facts:
    """What a card of the toy is made from."""
    manifest = Manifest.from_json((toy_int4 / "quantkit.json").read_text())
    return Facts("me/toy-int4", manifest, manifest.files, gate=GATE, source_card=SOURCE_CARD)


def metadata(card: str) -> dict[str, Any]:
    """A card's metadata, as YAML says them."""
    found = re.match(r"---\n(.*?)---\n", card, re.DOTALL)
    assert found
    return dict(yaml.safe_load(found[1]))


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows in a Markdown text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


# --- metadata


def test_metadata_of_the_source_are_carried_over(facts: Facts) -> None:
    """Licence, language, task and tags come from the source's card; its results, format tags and pictures do not."""
    found = metadata(make_card(facts))

    assert (found["license"], found["language"], found["pipeline_tag"]) == ("mit", ["en", "zh"], "text-generation")
    assert found["tags"] == ["moe", "quantkit", "compressed-tensors", "int4", "fp8"]
    assert "thumbnail" not in found
    assert [entry["name"] for entry in found["model-index"]] == ["toy-int4"]


@pytest.mark.parametrize(
    ("repo", "base_model"), [("zai-org/GLM-5.2-FP8", "zai-org/GLM-5.2-FP8"), (None, "zai-org/GLM-5.2")]
)
def test_base_model_is_what_was_quantized(facts: Facts, repo: str | None, base_model: str) -> None:
    """The base model is the source's repository; of a folder, what its card calls the base model."""
    found = metadata(make_card(replace(facts, source_repo=repo)))

    assert (found["base_model"], found["base_model_relation"]) == (base_model, "quantized")


def test_own_readme_wins_and_comes_first(facts: Facts) -> None:
    """A README.md in the folder changes and adds metadata, and its text stands before what was measured."""
    own = Card({"license": "apache-2.0", "tags": ["mine"], "thumbnail": "y.png"}, "# My model\n\nRead this.\n")
    card = make_card(replace(facts, own_card=own))

    found = metadata(card)
    assert (found["license"], found["thumbnail"], found["tags"][-1]) == ("apache-2.0", "y.png", "mine")
    assert found["language"] == ["en", "zh"]
    assert re.findall(r"^# .*", card, re.MULTILINE) == ["# My model"]
    assert card.index("Read this.") < card.index("## Sizes")


def test_gate_results_are_a_model_index(facts: Facts) -> None:
    """The Hub's own parser reads the candidate's accuracy on each task from the metadata, beside results of others."""
    other = {"task": {"type": "text-generation"}, "dataset": {"type": "a", "name": "a"}, "metrics": []}
    own = Card({"model-index": [{"name": "toy-int4", "results": [other]}]})

    data: Any = ModelCard(make_card(facts)).data
    kept = metadata(make_card(replace(facts, own_card=own)))["model-index"]

    assert [
        (entry.task_type, entry.dataset_type, entry.metric_type, entry.metric_name, entry.metric_value)
        for entry in data.eval_results
    ] == [
        ("text-generation", "gsm8k", "exact_match", "exact_match (flexible-extract)", 0.956),
        ("text-generation", "ifeval", "prompt_level_strict_acc", "prompt_level_strict_acc", 0.8854),
    ]
    assert kept[0]["results"] == [other]
    assert len(kept) == 2


def test_card_without_gate_says_so(facts: Facts) -> None:
    """Without a result of the gate the card says in a sentence that there is none, and claims no accuracy."""
    card = make_card(replace(facts, gate=None))

    assert NO_GATE in card
    assert "model-index" not in metadata(card)
    assert NO_GATE not in make_card(facts)


# --- text


def test_sizes_are_the_manifests(facts: Facts) -> None:
    """Each group of weights has a row with its formats and bytes, and the total is that of the manifest."""
    table = rows(make_card(facts))

    assert ["routed_expert", "fp8 128x128", "int4 g=32", "24", "786,624", "442,752"] in table
    assert ["routed_expert (MTP)", "fp8 128x128", "int4 g=32", "12", "393,312", "221,376"] in table
    total = f"{facts.manifest.total_bytes:,}"
    assert ["**all**", "", "", "", f"{facts.manifest.source.total_bytes:,}", total] in table


def test_errors_are_those_of_verify(facts: Facts, toy: Path, toy_int4: Path) -> None:
    """The error of each role is in the card as verify measured it, and the checks that were made."""
    result = quantkit.verify(toy_int4, against=toy)
    card = make_card(replace(facts, verification=result))

    table = rows(card)
    assert {check.name for check in result.checks} <= {row[0] for row in table}
    for error in result.errors:
        role = f"{error.role} (MTP)" if error.mtp else error.role
        assert [role, error.format, str(error.weights), f"{error.relative_rms:.4%}"] in [row[:4] for row in table]


def test_every_file_has_its_hash(facts: Facts) -> None:
    """The card lists each file with its sha256 and size."""
    table = rows(make_card(facts))

    for name, file in facts.manifest.files.items():
        assert [f"`{name}`", f"`{file.sha256}`", f"{file.nbytes:,}"] in table


def test_recipe_can_be_copied_from_the_card(facts: Facts) -> None:
    """The recipe in the card is the manifest's, as YAML."""
    found = re.search(r"```yaml\n(.*?)```", make_card(facts), re.DOTALL)

    assert found
    assert yaml.safe_load(found[1]) == json.loads(json.dumps(facts.manifest.recipe))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, ""),
        ({"revision": "g64"}, " --revision g64"),
        ({"files": {"modeling.py": File(1, "0")}}, " --trust-remote-code"),
    ],
)
def test_serving_names_the_repository(facts: Facts, change: dict[str, Any], options: str) -> None:
    """The command lines for SGLang and vLLM serve this repository at this revision, with its code if it has any."""
    card = make_card(replace(facts, **change))

    assert f"python -m sglang.launch_server --model-path me/toy-int4{options}   #" in card
    assert f"vllm serve me/toy-int4{options}   #" in card


def test_signed_scales_are_mentioned(facts: Facts) -> None:
    """A checkpoint with negative scales warns of the engine paths that do not expect them; another does not."""
    recipe = facts.manifest.recipe
    signed = recipe | {"rules": [rule | ({"scale": "signed"} if "scale" in rule else {}) for rule in recipe["rules"]]}

    assert "negative" not in make_card(facts)
    assert "negative" in make_card(replace(facts, manifest=replace(facts.manifest, recipe=signed)))


@pytest.mark.parametrize("name", ["/home/me/models/GLM-FP8", "./models/GLM-FP8/", "../GLM-FP8", "~/GLM-FP8"])
def test_paths_of_the_machine_are_not_published(facts: Facts, name: str) -> None:
    """Of a local source the card names the folder, not where it lies."""
    manifest = replace(facts.manifest, source=replace(facts.manifest.source, name=name))
    card = make_card(replace(facts, manifest=manifest))

    assert "`GLM-FP8`, converted by" in card
    assert "`GLM-INT4` against `zai-org/GLM-5.2-FP8`" in card
    assert "/home" not in card
    assert "models/" not in card


# --- the gate's table


def test_gate_table_has_all_numbers() -> None:
    """The table has n, both accuracies, the difference, its bounds and p for each task and for all items."""
    text = gate_table(GATE)

    numbers = ["1,319", "95.98", "95.60", "-0.38", "-1.16", "+0.40", "22 / 17", "0.800"]
    assert rows(text)[2] == ["gsm8k", "exact_match (flexible-extract)", *numbers]
    assert [row[0] for row in rows(text)[2:]] == ["gsm8k", "ifeval", "all"]
    assert "Verdict: **pass**" in text
    assert "1.2 points" in text
    assert GATE.reasons[0] in text
    assert "KL divergence 0.00490" in text
    assert "94.98%" in text


def test_gate_table_says_what_the_pages_held() -> None:
    """A run by quantkit's own runtime says so, with each arm's pages, and where their scales are from, not the path."""
    scales = {"kv": "fp8", "scales": "/home/me/scales.json", "scales_digest": "5ca1e"}
    text = gate_table(replace(GATE, pages={"candidate": scales, "baseline": {"kv": "bf16"}}))

    assert "candidate: kv `fp8`, scales `scales.json`, scales_digest `5ca1e`; baseline: kv `bf16`." in text
    assert "paged runtime" in text
    assert "paged runtime" not in gate_table(GATE)


def test_gate_table_of_an_invalid_run() -> None:
    """Without comparisons the verdict and its reasons remain, and no number is made up."""
    invalid = replace(GATE, verdict=Verdict.INVALID, tasks=(), pooled=None, distribution=None, reasons=("7 errors",))
    text = gate_table(invalid)

    assert rows(text) == []
    assert text.startswith("Verdict: **invalid**")
    assert "7 errors" in text


def test_gate_table_says_what_would_decide() -> None:
    """An undecided gate says how many items would decide, and one task needs no row for all tasks."""
    text = gate_table(replace(GATE, verdict=Verdict.CANNOT_DECIDE, needed_items=5000, tasks=(TASK,)))

    assert "**cannot decide**" in text
    assert "5,000 items" in text
    assert len(rows(text)) == 3


def test_cell_cannot_break_the_table() -> None:
    """A name with a bar in it stays in its cell."""
    assert "a&#124;b" in gate_table(replace(GATE, tasks=(replace(TASK, task="a|b"),)))


@pytest.mark.parametrize(
    "report",
    [
        GATE,
        replace(GATE, tasks=(), pooled=None, distribution=None, needed_items=3),
        replace(GATE, pages={"candidate": {"kv": "fp8"}}),
    ],
)
def test_gate_result_survives_its_file(report: AccuracyReport) -> None:
    """An accuracy report comes back from its JSON as it was."""
    assert AccuracyReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 1, "kind": "AccuracyReport"}', "TASKS", "MANIFEST"]
)
def test_what_is_no_gate_result_is_refused(toy_int4: Path, text: str) -> None:
    """Other text, and another report, are no accuracy report."""
    if text == "MANIFEST":
        text = (toy_int4 / "quantkit.json").read_text()
    elif text == "TASKS":
        text = json.dumps(json.loads(GATE.to_json()) | {"tasks": ["gsm8k"]})

    with pytest.raises((ValueError, KeyError, TypeError)):
        AccuracyReport.from_json(text)


# --- reading cards


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("---\nlicense: mit\n---\n# A\n", Card({"license": "mit"}, "# A\n")),
        ("---\r\nlicense: mit\r\n---\r\n# A\r\n", Card({"license": "mit"}, "# A\r\n")),
        ("---\n---\n# A\n", Card({}, "# A\n")),
        ("# A\n\n---\n\nb\n\n---\n", Card({}, "# A\n\n---\n\nb\n\n---\n")),
        ("", Card()),
    ],
)
def test_card_is_taken_apart(text: str, card: Card) -> None:
    """Metadata are what stands between two rules at the very beginning; everything else is text."""
    assert parse_card(text, "README.md") == card


@pytest.mark.parametrize("metadata", ["a: [", "- a\n- b", "only words", "a: b: c"])
def test_bad_metadata_are_refused_by_name(metadata: str) -> None:
    """Metadata that are no YAML mapping name the file, and how to fix it."""
    with pytest.raises(SourceError, match=r"x/README\.md: its metadata") as caught:
        parse_card(f"---\n{metadata}\n---\n", "x/README.md")

    assert caught.value.hint

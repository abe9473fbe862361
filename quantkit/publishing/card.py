"""The model card: README.md, made from what was measured and from nothing else. Pure functions from reports to text.

metadata   licence, language and tags of the source's card, the base model, the gate's results as `model-index`
text       source and recipe, sizes, error by role, accuracy gate, how to serve it, sha256 of every file
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.writer import File
from quantkit.errors import SourceError
from quantkit.eval.gate.markdown import gate_table, shown_name
from quantkit.eval.gate.report import AccuracyReport, Comparison
from quantkit.tables import TextTable, markdown, role_name
from quantkit.verification.report import Verification

CARD_FILE = "README.md"
NO_GATE = (
    "**No accuracy gate was passed.** This checkpoint was published without one: nothing here says how accurate it is."
)
_CARRIED = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag", "base_model")
_FORMAT_TAGS = frozenset({"fp8", "bf16", "int4", "4-bit", "8-bit", "compressed-tensors"})  # of the source's weights
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Card:
    """A model card: its metadata and its Markdown."""

    metadata: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Facts:
    """What a card is made from.

    repo         where it will be published: owner/name
    revision     the branch, if it is not the main one
    files        all files but the card, with size and sha256
    gate         None for a checkpoint that is published without an accuracy gate
    source_repo  the Hub id of what was converted; None for a folder
    source_card  the card of what was converted
    own_card     the README.md in the folder: its metadata win, and its text comes first
    """

    repo: str
    manifest: Manifest
    files: Mapping[str, File]
    revision: str | None = None
    verification: Verification | None = None
    gate: AccuracyReport | None = None
    source_repo: str | None = None
    source_card: Card = Card()
    own_card: Card = Card()


def parse_card(text: str, name: str) -> Card:
    """Take a README.md apart. Raises SourceError, naming `name`, if its metadata are no YAML mapping."""
    match = _FRONT_MATTER.match(text)
    try:
        metadata = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SourceError(
            f"{name}: its metadata are no YAML: {reason}", hint="Fix the lines between the ---."
        ) from error
    if not isinstance(metadata, dict | None):
        raise SourceError(f"{name}: its metadata are no mapping", hint="Write `key: value` lines between the ---.")
    return Card(metadata or {}, text[match.end() :] if match else text)


def make_card(facts: Facts) -> str:
    """The text of README.md."""
    metadata = yaml.safe_dump(_metadata(facts), sort_keys=False, allow_unicode=True, width=1000)
    own = facts.own_card.text.strip()
    title = "" if re.search(r"^# ", own, re.MULTILINE) else f"# {_name(facts)}"
    sections = (title, own, _source(facts), _sizes(facts.manifest), _errors(facts.verification), _gate(facts.gate))
    return f"---\n{metadata}---\n\n" + "\n\n".join(filter(None, (*sections, _serving(facts), _files(facts)))) + "\n"


# --- metadata


def _metadata(facts: Facts) -> dict[str, Any]:
    source, own = facts.source_card.metadata, facts.own_card.metadata
    metadata = {key: source[key] for key in _CARRIED if source.get(key)}
    if facts.source_repo:
        metadata["base_model"] = facts.source_repo
    if "base_model" in metadata or "base_model" in own:
        metadata["base_model_relation"] = "quantized"
    metadata |= {"pipeline_tag": metadata.get("pipeline_tag", "text-generation"), "tags": _tags(facts)}
    metadata |= {key: value for key, value in own.items() if key != "tags"}
    if facts.gate and facts.gate.tasks:
        kept = own.get("model-index", [])
        ours = {"name": _name(facts), "results": [_result(entry) for entry in facts.gate.tasks]}
        metadata["model-index"] = [*kept, ours] if isinstance(kept, list) else kept
    return metadata


def _tags(facts: Facts) -> list[str]:
    """The source's tags but for those of its format, ours, and those of the folder's README.md; none twice."""
    source, own = (_list(card.metadata.get("tags")) for card in (facts.source_card, facts.own_card))
    formats = {group.format.split()[0] for group in facts.manifest.groups} & {"int4", "fp8"}
    method = (facts.manifest.quantization_config or {}).get("quant_method")
    ours = ["quantkit", *([str(method)] if method else []), *sorted(formats, reverse=True)]
    return list(dict.fromkeys([*(tag for tag in source if tag not in _FORMAT_TAGS), *ours, *own]))


def _list(value: Any) -> list[str]:
    """Metadata allow one value where several are possible."""
    return [str(entry) for entry in (value if isinstance(value, list) else [value]) if entry is not None]


def _result(entry: Comparison) -> dict[str, Any]:
    metric = entry.metric or "accuracy"
    return {
        "task": {"type": "text-generation", "name": "Text Generation"},
        "dataset": {"type": entry.task, "name": entry.task},
        "metrics": [
            {
                "type": metric,
                "name": f"{metric} ({entry.filter})" if entry.filter else metric,
                "value": round(entry.candidate_correct / entry.items, 4),
            }
        ],
    }


# --- sections


def _source(facts: Facts) -> str:
    source, recipe = facts.manifest.source, facts.manifest.recipe
    what = (
        f"`{facts.source_repo}` at revision `{source.revision}`"
        if facts.source_repo
        else f"`{shown_name(source.name)}`"
    )
    recipe_text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=100)
    return (
        f"{what}, converted by quantkit {facts.manifest.version} with the recipe `{recipe['name']}`: "
        f"{recipe['description']}.\n\n```yaml\n{recipe_text}```"
    )


def _sizes(manifest: Manifest) -> str:
    rows = []
    for group in manifest.groups:
        numbers = (f"{number:,}" for number in (group.weights, group.source_bytes, group.nbytes))
        rows.append((role_name(group.role, group.mtp), group.source_format, group.format, *numbers))
    before, after = manifest.source.total_bytes, manifest.total_bytes
    rows.append(("**all**", "", "", "", f"{before:,}", f"{after:,}"))
    ratio = f" ({after / before:.1%})" if before else ""
    table = _table(("weights", "from:", "to:", "number", "bytes before", "bytes after"), rows)
    return f"## Sizes\n\n{_megabytes(before)} became {_megabytes(after)}{ratio}.\n\n{table}"


def _errors(verification: Verification | None) -> str:
    if verification is None:
        return ""
    passed = [(check.name, check.note) for check in verification.checks if check.problems == 0]
    checks = _table(("check", "covered:"), passed)
    text = f"## Verification\n\n`quantkit verify` found nothing wrong.\n\n{checks}"
    if not verification.errors:
        return text
    rows = [
        (
            role_name(entry.role, entry.mtp),
            entry.format,
            f"{entry.weights:,}",
            f"{entry.relative_rms:.4%}",
            "exact" if entry.sqnr_db is None else f"{entry.sqnr_db:.2f}",
            f"{entry.worst_relative_rms:.4%}",
        )
        for entry in verification.errors
    ]
    table = _table(("weights", "format:", "number", "RMS", "SQNR dB", "worst weight's RMS"), rows)
    meaning = "Error against the source: root mean square, relative to the weights'. What is not listed was copied."
    return f"{text}\n\n{meaning}\n\n{table}"


def _gate(report: AccuracyReport | None) -> str:
    if report is None:
        return f"## Accuracy\n\n{NO_GATE}"
    candidate, baseline = shown_name(report.candidate), shown_name(report.baseline)
    return f"## Accuracy\n\n`{candidate}` against `{baseline}`.\n\n{gate_table(report)}"


def _serving(facts: Facts) -> str:
    revision = f" --revision {facts.revision}" if facts.revision else ""
    code = " --trust-remote-code" if any(name.endswith(".py") for name in facts.files) else ""
    text = (
        "## Serving\n\n"
        f"```bash\npython -m sglang.launch_server --model-path {facts.repo}{revision}{code}   # several GPUs: --tp N\n"
        f"vllm serve {facts.repo}{revision}{code}   # several GPUs: --tensor-parallel-size N\n```"
    )
    if any(rule.get("scale") == "signed" for rule in facts.manifest.recipe["rules"]):
        text += (
            "\n\nSome INT4 scales are negative (`scale: signed`); a few engine paths, such as W4A8, do not expect that."
        )
    return text


def _files(facts: Facts) -> str:
    rows = [(f"`{name}`", f"`{file.sha256}`", f"{file.nbytes:,}") for name, file in sorted(facts.files.items())]
    table = _table(("file", "sha256:", "bytes"), rows)
    return f"## Files\n\n<details>\n<summary>{len(rows)} files and their sha256</summary>\n\n{table}\n\n</details>"


# --- text


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return markdown([TextTable("", headings, tuple(rows))])


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def _name(facts: Facts) -> str:
    return facts.repo.split("/")[-1]

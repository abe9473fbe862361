"""A recipe and a source's headers become a list of shard jobs with exact output sizes.

steps   what happens to one weight
checks  the engines' rules: what is refused by name, and what is warned of

Everything that can be refused is refused here, by name, before a byte is written.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantkit.checkpoint.config import MODELOPT_FILE, MTP_KEY, replace_value, splice
from quantkit.checkpoint.header import StoredTensor, lay_out
from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE, Source
from quantkit.choices import Dialect, Mtp
from quantkit.conversion.engine_check import check_engines, planned_facts
from quantkit.conversion.steps import Step, make_steps
from quantkit.errors import PlanError
from quantkit.recipe import Recipe
from quantkit.weights.encodings import PLAIN, Format
from quantkit.weights.grouping import read_weights
from quantkit.weights.quantization_config import describe, modelopt_file
from quantkit.weights.weight import KV_SCALES, Weight

__all__ = ["Plan", "ShardJob", "Step", "describe_weights", "make_plan"]


@dataclass(frozen=True)
class ShardJob:
    """One output shard: the weights whose data lie in the source shard of the same name.

    places  where each output tensor goes in the file, by name and in that order
    """

    shard: str
    steps: tuple[Step, ...]
    header: bytes
    places: Mapping[str, StoredTensor]

    @property
    def file_bytes(self) -> int:
        """The exact size of the output file."""
        return len(self.header) + sum(place.spec.nbytes for place in self.places.values())

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The source shards that the job reads: its own, and those that hold a scale of its weights."""
        return tuple(sorted({tensor.shard for step in self.steps for tensor in step.reads}))


@dataclass(frozen=True)
class Plan:
    """All that a conversion will do; nothing has been read but headers.

    warnings  what is odd in the source, and what engines need to serve the output, or serve less well
    """

    source: Source
    recipe: Recipe
    jobs: tuple[ShardJob, ...]
    quantization_config: dict[str, Any] | None
    warnings: tuple[str, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all jobs."""
        return tuple(step for job in self.jobs for step in job.steps)

    @cached_property
    def nbytes(self) -> int:
        """The size of all output tensors in bytes."""
        return sum(spec.nbytes for step in self.steps for spec in step.outputs)

    @property
    def num_tensors(self) -> int:
        """The number of output tensors."""
        return sum(len(step.outputs) for step in self.steps)

    @property
    def file_bytes(self) -> int:
        """The size of all output shards in bytes, headers included."""
        return sum(job.file_bytes for job in self.jobs)

    @property
    def config_text(self) -> str:
        """The output's config.json."""
        text = splice(self.source.config_text, self.quantization_config)
        return replace_value(text, MTP_KEY, 0) if self.recipe.mtp is Mtp.DROP else text

    @property
    def index_text(self) -> str:
        """The output's model.safetensors.index.json."""
        weight_map = {name: job.shard for job in self.jobs for name in job.places}
        return _json({"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))})

    @property
    def texts(self) -> dict[str, str]:
        """The JSON files of the output, by name."""
        texts = {INDEX_FILE: self.index_text, CONFIG_FILE: self.config_text}
        if self.quantization_config and self.recipe.dialect is Dialect.MODELOPT:
            texts[MODELOPT_FILE] = _json(modelopt_file(self.quantization_config))
        return texts


def make_plan(source: Source, recipe: Recipe) -> Plan:
    """Plan the conversion of `source` by `recipe`.

    Raises PlanError, naming the module, for a source that is already converted, a group size that does not divide a
    weight, and a result that an engine could not load.
    """
    if recipe.model_types and source.model_type not in recipe.model_types:
        raise PlanError(
            f"{source.name} has the model type {source.model_type!r}; the recipe {recipe.name} is made for "
            f"{', '.join(recipe.model_types)}",
            hint="quantkit recipes list says which recipe is for which model types.",
        )
    steps = list(make_steps(read_weights(source), recipe, source.num_hidden_layers))
    quantization_config = _quantization_config(source, recipe, steps)
    warnings = check_engines(planned_facts(source, recipe, steps, quantization_config))
    warnings = (*source.warnings, *warnings, *(() if quantization_config else _kv_warnings(steps)))
    return Plan(source, recipe, tuple(_make_jobs(steps)), quantization_config, warnings)


def _quantization_config(source: Source, recipe: Recipe, steps: Iterable[Step]) -> dict[str, Any] | None:
    """What describes the output; None where all of it is plain."""
    steps = list(steps)
    quantized = [step for step in steps if step.encoding is not PLAIN]
    if not any(step.encoding.is_main for step in steps):
        if quantized or recipe.scheme is not None:
            raise PlanError(
                f"the recipe {recipe.name} finds no weight in {source.name} to make {recipe.scheme or 'INT4'}",
                hint="quantkit inspect shows what the checkpoint holds.",
            )
        return None
    if not any(step.changes for step in steps):
        raise PlanError(
            f"{source.name} is already converted: the recipe {recipe.name} would change nothing",
            hint="Serve it as it is; for other numbers, convert the checkpoint that it was made from.",
        )
    formats = ((step.weight, step.format) for step in steps)
    return describe_weights(formats, source.num_hidden_layers, recipe.dialect)


def describe_weights(
    weights: Iterable[tuple[Weight, Format | None]], num_hidden_layers: int, dialect: Dialect
) -> dict[str, Any]:
    """The `quantization_config` of these weights in these formats: of the matrices, and of scales of a KV cache if some
    are among them. Raises PlanError for two 4-bit formats."""
    weights = list(weights)
    matrices = [(weight.name, form) for weight, form in weights if len(weight.shape) == 2]
    kv_scales = any(weight.name.leaf in KV_SCALES for weight, _ in weights)
    return describe(matrices, num_hidden_layers, dialect, kv_scales=kv_scales)


def _kv_warnings(steps: Iterable[Step]) -> Iterable[str]:
    if names := [str(step.weight.name) for step in steps if step.weight.name.leaf in KV_SCALES]:
        more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
        yield f"{names[0]}{more} stays 1.0: engines read scales of a KV cache only if a quantization_config says so"


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _make_jobs(steps: Iterable[Step]) -> Iterable[ShardJob]:
    by_shard: dict[str, list[Step]] = {}
    for step in sorted(steps, key=lambda step: step.weight.data.offset):
        by_shard.setdefault(step.weight.data.shard, []).append(step)
    for shard, group in sorted(by_shard.items()):
        header, places = lay_out((spec for step in group for spec in step.outputs), shard, in_order=True)
        yield ShardJob(shard, tuple(group), header, {place.spec.name: place for place in places})

"""A recipe and a source's headers become a list of shard jobs with exact output sizes.

Everything that can be refused is refused here, by name, before a byte is written.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantkit.checkpoint.config import MTP_KEY, dense_int4_config, int4_config, replace_value, splice
from quantkit.checkpoint.engines import ENGINES, ConfigMatcher, is_linear
from quantkit.checkpoint.header import StoredTensor, TensorSpec, lay_out
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.weights import FLOAT_DTYPES, Encoding, Weight, fp8_block_specs, int4_specs, read_weights
from quantkit.errors import PlanError
from quantkit.naming import Role, TensorName
from quantkit.recipe import Mtp, Recipe, Scheme, Treatment

_ROW_PARALLEL = ("down_proj", "o_proj")  # engines give each rank some of their columns
_TENSOR_PARALLEL = (2, 4, 8)
_SMALLEST_PART = 128  # columns that the engines' INT4 kernels need at least


@dataclass(frozen=True)
class Step:
    """One weight, what happens to it, and the tensors that come out."""

    weight: Weight
    treatment: Treatment
    outputs: tuple[TensorSpec, ...]

    @property
    def label(self) -> str:
        """The format that comes out, as reports call it."""
        if self.treatment.scheme is Scheme.INT4:
            return f"int4 g={self.treatment.group_size}"
        return self.weight.label if self.outputs[0].dtype == self.weight.data.spec.dtype else "bf16"


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
        return tuple(sorted({tensor.shard for step in self.steps for tensor in step.weight.tensors}))


@dataclass(frozen=True)
class Plan:
    """All that a conversion will do; nothing has been read but headers."""

    source: Source
    recipe: Recipe
    jobs: tuple[ShardJob, ...]
    quantization_config: dict[str, Any] | None

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

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is odd in the source, and what a usual deployment of the output could not do."""
        return (*self.source.warnings, *_tensor_parallel_warnings(self.steps))

    @property
    def config_text(self) -> str:
        """The output's config.json."""
        text = splice(self.source.config_text, self.quantization_config)
        return replace_value(text, MTP_KEY, 0) if self.recipe.mtp is Mtp.DROP else text

    @property
    def index_text(self) -> str:
        """The output's model.safetensors.index.json."""
        weight_map = {name: job.shard for job in self.jobs for name in job.places}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def make_plan(source: Source, recipe: Recipe) -> Plan:
    """Plan the conversion of `source` by `recipe`.

    Raises PlanError, naming the module, for a source that is already converted, a group size that does not divide a
    weight, fused partners with different treatments, and a result that the config could not describe to an engine.
    """
    weights = read_weights(source)
    if packed := next((weight for weight in weights if weight.encoding is Encoding.INT4), None):
        raise PlanError(
            f"{source.name} is already converted: {packed.module} is INT4", hint="Give the checkpoint as published."
        )
    if recipe.model_types and source.model_type not in recipe.model_types:
        raise PlanError(
            f"{source.name} has the model type {source.model_type!r}; the recipe {recipe.name} is made for "
            f"{', '.join(recipe.model_types)}"
        )
    steps = list(_make_steps(source, recipe, weights))
    _check_fused_partners(steps)
    quantization_config = _quantization_config(source, recipe, steps)
    if quantization_config is not None:
        check_config(steps, quantization_config, source.num_hidden_layers)
    return Plan(source, recipe, tuple(_make_jobs(steps)), quantization_config)


def check_config(steps: Iterable[Step], quantization_config: Mapping[str, Any], num_hidden_layers: int) -> None:
    """Prove, with each engine's own rules, that the config alone predicts the tensors of every module.

    One expert stands for all of its layer: they have one format, and no pattern of ours holds an expert's number.
    """
    checked = [step for step in steps if is_linear(step.weight) and not step.weight.name.expert]
    for engine in ENGINES:
        matcher = ConfigMatcher(quantization_config, engine, num_hidden_layers)
        for step in checked:
            name = step.weight.name
            actual = {TensorName.parse(spec.name).leaf for spec in step.outputs}
            if actual != (expected := matcher.leaves(name)):
                raise PlanError(
                    f"{name.module} would hold {', '.join(sorted(actual))}, but {engine.name} would look for "
                    f"{', '.join(sorted(expected))}",
                    hint="No config that is known to load describes this recipe; use a built-in one.",
                )


def _make_steps(source: Source, recipe: Recipe, weights: Iterable[Weight]) -> Iterator[Step]:
    for weight in weights:
        mtp = weight.name.is_mtp(source.num_hidden_layers)
        if not (mtp and recipe.mtp is Mtp.DROP):
            yield _make_step(weight, recipe.treatment(weight.name.role, mtp=mtp))


def _make_step(weight: Weight, treatment: Treatment) -> Step:
    name, shape = weight.name, weight.shape
    if treatment.scheme is Scheme.INT4 and name.leaf != "bias":
        return Step(weight, treatment, _int4_outputs(weight, treatment))
    if weight.encoding is Encoding.PLAIN:
        return Step(weight, treatment, (weight.data.spec,))
    if treatment.scheme is Scheme.BF16:
        return Step(weight, treatment, (TensorSpec(str(name), "BF16", shape),))
    assert weight.block is not None
    return Step(weight, treatment, fp8_block_specs(name.module, shape, weight.block, "weight_scale"))


def _int4_outputs(weight: Weight, treatment: Treatment) -> tuple[TensorSpec, ...]:
    name, group_size = weight.name, treatment.group_size
    assert group_size is not None
    if weight.encoding is Encoding.PLAIN and (weight.data.spec.dtype not in FLOAT_DTYPES or len(weight.shape) != 2):
        raise PlanError(
            f"{name} is {weight.label} {list(weight.shape)}; INT4 is made from FP8 blocks, BF16, FP16 or FP32 matrices",
            hint="Give its role another scheme in the recipe.",
        )
    if weight.shape[1] % group_size:
        raise PlanError(
            f"{name}: the group size {group_size} does not divide the {weight.shape[1]} columns",
            hint="Choose a smaller --group-size.",
        )
    return int4_specs(name.module, (weight.shape[0], weight.shape[1]), group_size)


def _check_fused_partners(steps: Iterable[Step]) -> None:
    """Engines load fused partners into one module, so they need one format."""
    first: dict[str, Step] = {}
    for step in steps:
        fused = step.weight.name.fused_module
        if fused is None or step.weight.name.leaf != "weight":
            continue
        partner = first.setdefault(fused, step)
        if partner.label != step.label:
            raise PlanError(
                f"engines fuse {partner.weight.module} ({partner.label}) and {step.weight.module} ({step.label}) "
                "into one module, which needs one format"
            )


def _tensor_parallel_warnings(steps: Iterable[Step]) -> Iterator[str]:
    """One for each projection that ranks share by columns, if a rank's part of a usual size would cut a group."""
    seen: set[tuple[str, int]] = set()
    for step in steps:
        projection = step.weight.module.rpartition(".")[2]
        if step.treatment.group_size is None or projection not in _ROW_PARALLEL or len(step.outputs) < 2:
            continue
        columns, group_size = step.weight.shape[1], step.treatment.group_size
        served = (ranks for ranks in _TENSOR_PARALLEL if columns // ranks >= _SMALLEST_PART)
        cut = next((ranks for ranks in served if columns % (ranks * group_size)), None)
        if cut and (projection, columns) not in seen:
            seen.add((projection, columns))
            yield (
                f"tensor parallelism over {cut} ranks or more would cut the groups of {group_size} in "
                f"{step.weight.module} ({columns} columns)"
            )


def _quantization_config(source: Source, recipe: Recipe, steps: Iterable[Step]) -> dict[str, Any] | None:
    group_sizes = {step.treatment.group_size for step in steps if step.treatment.group_size}
    kept = [step.weight for step in steps if len(step.outputs) == 2]
    if not group_sizes:
        if kept or any(rule.treatment.scheme is Scheme.INT4 for rule in recipe.rules):
            raise PlanError(
                f"the recipe {recipe.name} finds no weight in {source.name} to make INT4",
                hint="quantkit inspect shows what the checkpoint holds.",
            )
        return None
    if len(group_sizes) > 1:
        raise PlanError(f"the recipe {recipe.name} mixes the group sizes {sorted(group_sizes)}; engines take one")
    layers = {weight.name.layer for weight in (step.weight for step in steps) if weight.name.layer is not None}
    mtp_layers = tuple(sorted(layer for layer in layers if layer >= source.num_hidden_layers))
    kept_mtp_layers = mtp_layers if recipe.mtp is Mtp.KEEP else ()
    if not any(step.weight.name.role is Role.ROUTED_EXPERT for step in steps):
        return dense_int4_config(group_sizes.pop())
    return int4_config(group_sizes.pop(), kept[0].block if kept else None, kept_mtp_layers)


def _make_jobs(steps: Iterable[Step]) -> Iterable[ShardJob]:
    by_shard: dict[str, list[Step]] = {}
    for step in sorted(steps, key=lambda step: step.weight.data.offset):
        by_shard.setdefault(step.weight.data.shard, []).append(step)
    for shard, group in sorted(by_shard.items()):
        header, places = lay_out((spec for step in group for spec in step.outputs), shard, in_order=True)
        yield ShardJob(shard, tuple(group), header, {place.spec.name: place for place in places})

"""The manifest of a conversion: as planned, and completed when every shard is written."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from quantkit.checkpoint.manifest import Group, Manifest, made_from, read_manifest
from quantkit.checkpoint.writer import File
from quantkit.conversion.plan import Plan, Step
from quantkit.version import VERSION


def planned_manifest(plan: Plan) -> Manifest:
    """The manifest before any weight is read; scales that were folded into the source's are in the output's, too."""
    source = plan.source
    made = read_manifest(source.folder)
    return Manifest(
        version=VERSION,
        source=made_from(source, {}),
        recipe=plan.recipe.as_dict(),
        quantization_config=plan.quantization_config,
        groups=summarize(plan.steps, source.num_hidden_layers),
        num_tensors=plan.num_tensors,
        total_bytes=plan.nbytes,
        file_bytes=plan.file_bytes,
        warnings=plan.warnings,
        fold=made.fold if made else None,
    )


def completed(
    planned: Manifest,
    *,
    files: Mapping[str, File],
    source_hashes: Mapping[str, str],
    nvfp4_groups: Mapping[str, int],
    rounded_scales: Iterable[str],
) -> Manifest:
    """`planned` with what only the weights could tell: hashes, groups of NVFP4 at their limits, rounded scales."""
    rounded = tuple(sorted(rounded_scales))
    return replace(
        planned,
        source=replace(planned.source, shards_sha256=dict(sorted(source_hashes.items()))),
        files=dict(sorted(files.items())),
        warnings=(*planned.warnings, *_rounding_warnings(rounded)),
        nvfp4_groups=dict(sorted(nvfp4_groups.items())),
        rounded_scales=rounded,
    )


def _rounding_warnings(names: tuple[str, ...]) -> Iterator[str]:
    if names:
        examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        yield (
            f"{len(names):,} global scales are no powers of two, so their reciprocals are rounded to FP32 (by 2^-24 at "
            f"most) and another conversion may not bring them back: {examples}"
        )


def summarize(steps: Iterable[Step], num_hidden_layers: int) -> tuple[Group, ...]:
    """The `steps` of a plan by role, by whether they are of an MTP layer, and by format before and after."""
    groups: dict[tuple[str, bool, str, str], list[Step]] = {}
    for step in steps:
        name = step.weight.name
        key = (str(name.role), name.is_mtp(num_hidden_layers), step.weight.label, step.label)
        groups.setdefault(key, []).append(step)
    return tuple(
        Group(
            *key,
            weights=len(group),
            source_bytes=sum(step.weight.nbytes for step in group),
            nbytes=sum(spec.nbytes for step in group for spec in step.outputs),
        )
        for key, group in sorted(groups.items())
    )

"""`convert`: a checkpoint in, a quantized checkpoint out, shard by shard.

run         all shards, one after the other, with flushing and hashing beside
shards      the work on one shard: read, convert, write, piece by piece
maker       what comes out of a piece of a weight
journal     what is finished, for going on after an interruption
side_files  what else goes along: tokenizer, chat template, custom code
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.locate import describe_model, open_model
from quantkit.checkpoint.manifest import made_from, read_manifest
from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.checkpoint.weights import Encoding, read_weights
from quantkit.checkpoint.writer import WORK_FOLDER, OutputFolder, check_apart
from quantkit.conversion.journal import Journal
from quantkit.conversion.run import ShardRun
from quantkit.conversion.side_files import side_files
from quantkit.errors import OutputError, UsageError
from quantkit.naming import TensorName
from quantkit.plan import Plan, Step, make_plan
from quantkit.recipe import (
    Dialect,
    Mtp,
    Recipe,
    Rest,
    Rule,
    ScaleMethod,
    Scheme,
    Treatment,
    default_recipe,
    load_recipe,
)
from quantkit.report import File, Group, Manifest
from quantkit.version import VERSION


@dataclass(frozen=True)
class Options:
    """Which recipe is taken when none is named, and changes to it: None leaves its own value.

    group_size  of the INT4 weights: 32, 64 or 128
    scale       how the scale of a group is chosen
    rest        what the weights that the recipe's last rule covers stay or become
    mtp         what becomes of the multi-token-prediction layers
    dialect     how NVFP4 is spelled; alone, for a checkpoint that holds NVFP4, nothing else changes
    scheme      that the recipe shall have: INT4, unless NVFP4 is asked for
    """

    group_size: int | None = None
    scale: ScaleMethod | None = None
    rest: Rest | None = None
    mtp: Mtp | None = None
    dialect: Dialect | None = None
    scheme: Scheme | None = None

    def apply(self, recipe: Recipe) -> Recipe:
        """`recipe` with these changes."""
        if self.rest is not None:
            recipe = recipe.with_rest(self.rest)
        if self.mtp is not None:
            recipe = replace(recipe, mtp=self.mtp)
        if self.scale is not None:
            recipe = recipe.with_quantized(scale=self.scale)
        if self.dialect is not None:
            recipe = replace(recipe, dialect=self.dialect)
        return recipe if self.group_size is None else recipe.with_quantized(group_size=self.group_size)


def convert(
    model: str | Path,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    options: Options = Options(),
    revision: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    trust_source: bool = False,
    workers: int = 2,
    progress: Callable[[int], Callable[[int], None]] | None = None,
) -> Manifest:
    """Convert `model` (alias, folder or Hub id) into the folder `output` and return the manifest written there.

    recipe        name, YAML file or Recipe; None is the INT4 recipe for the model
    revision      of a Hub repository
    overwrite     replace an output of quantkit that is already there; it is removed only when the plan has passed
    resume        go on with an interrupted run; the result is the same as without the interruption
    trust_source  on resuming, do not hash again what the interrupted run has read
    workers       threads that read, convert and write; the output's bytes do not depend on it
    progress      is given the number of source bytes, and returns what is called with the bytes just converted

    Raises a QuantkitError before anything is written if the source, the recipe or the output folder is not usable; an
    interrupted run leaves a folder without config.json, which does not load.
    """
    if workers < 1:
        raise UsageError(f"workers is {workers}; it must be at least 1")
    chosen, path = _load(recipe), Path(output)
    check_apart(Path(model), path)
    OutputFolder.check(path, overwrite=overwrite, resume=resume)  # before anything is fetched
    source = open_model(model, revision)
    if source.folder:
        check_apart(source.folder, path)
    plan = make_plan(source, choose_recipe(source, chosen, options))
    planned, beside = _planned(plan), side_files(source)
    if resume and (finished := _finished(planned, plan, path)):
        return finished
    folder, journal = _open_output(plan, path, overwrite, resume)
    report = progress(source.nbytes) if progress else lambda done: None
    run = ShardRun(plan, folder, journal, workers, report)
    entries = (*run.finished(trust_source), *run.remaining())
    files = {entry.shard: File(entry.nbytes, entry.sha256) for entry in entries}
    files |= _add_small_files(plan, beside, folder)
    hashes = {shard: sha256 for entry in entries for shard, sha256 in entry.sources.items()}
    counts = sum((Counter(entry.counts) for entry in entries), Counter[str]())
    rounded = (name for entry in entries for name in entry.rounded)
    manifest = _completed(planned, files, hashes, counts, rounded)
    folder.seal(manifest.to_json(), plan.config_text)
    return manifest


def preview(
    model: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    options: Options = Options(),
    revision: str | None = None,
) -> Manifest:
    """What `convert` would write, from a folder's headers, or from the config of an alias or a Hub repository."""
    chosen = _load(recipe)
    source = describe_model(model, revision)
    return _planned(make_plan(source, choose_recipe(source, chosen, options)))


def choose_recipe(source: Source, recipe: Recipe | None, options: Options) -> Recipe:
    """`recipe`, or the built-in one that `options` ask for, with `options` applied."""
    if recipe is None and options.scheme is None and options.dialect is not None and _holds_nvfp4(source):
        recipe, options = _restating(source, options), replace(options, rest=None)
    if recipe is None:
        recipe = default_recipe(source.name, source.model_type, options.scheme or Scheme.INT4, options.dialect)
    return options.apply(recipe)


def _restating(source: Source, options: Options) -> Recipe:
    """All NVFP4 as it is in another format; with a BF16 rest what is FP8 is decoded, and MTP layers that are kept."""
    rules = [Rule(Treatment(Scheme.FP8_TO_BF16 if options.rest is Rest.BF16 else Scheme.KEEP))]
    layers = {TensorName.parse(name).layer for name in source.tensors}
    mtp = [str(layer) for layer in layers if layer is not None and layer >= source.num_hidden_layers]
    if options.rest is Rest.BF16 and options.mtp is Mtp.KEEP and mtp:
        rules.insert(0, Rule(Treatment(Scheme.BF16), modules=rf"(.*\.)?layers\.({'|'.join(mtp)})\..*"))
    return Recipe("restate", "another format, the same numbers", tuple(rules))


def _holds_nvfp4(source: Source) -> bool:
    return any(weight.encoding is Encoding.NVFP4 for weight in read_weights(source))


def _load(recipe: str | Path | Recipe | None) -> Recipe | None:
    return load_recipe(recipe) if isinstance(recipe, str | Path) else recipe


def _finished(planned: Manifest, plan: Plan, path: Path) -> Manifest | None:
    """The manifest in `path` if a run of this plan has ended there; OutputError if it was another one."""
    if (path / WORK_FOLDER).exists() or (found := read_manifest(path)) is None:
        return None
    expected = _completed(planned, found.files, found.source.shards_sha256, found.nvfp4_groups, found.rounded_scales)
    known = replace(found.source, config_sha256=expected.source.config_sha256)  # wherever it lies now
    if replace(expected, source=known) != found or not {job.shard for job in plan.jobs} <= found.files.keys():
        raise OutputError(f"{path} holds another conversion", hint="Choose another folder, or give --overwrite.")
    return found


def _open_output(plan: Plan, path: Path, overwrite: bool, resume: bool) -> tuple[OutputFolder, Journal]:
    """The folder to write to and its journal, reopened if there is one and it is to be gone on with."""
    if resume and (journal := Journal.reopen(path / WORK_FOLDER, plan)):
        done = sum(entry.nbytes for entry in journal.entries)
        return OutputFolder.reopen(path, plan.file_bytes - done), journal
    folder = OutputFolder.create(path, plan.file_bytes, overwrite=overwrite or resume)
    return folder, Journal.begin(folder.work, plan)


def _add_small_files(plan: Plan, beside: Mapping[str, Path], folder: OutputFolder) -> dict[str, File]:
    """All files of the output but shards and manifest; config.json, which comes last, is not written yet."""
    files = {}
    for name, side_file in beside.items():
        files[name] = folder.copy(side_file, name)
    for name, text in plan.texts.items():
        files[name] = _text_file(text)
        if name != CONFIG_FILE:
            folder.write_text(name, text)
    return files


def _text_file(text: str) -> File:
    data = text.encode()
    return File(len(data), hashlib.sha256(data).hexdigest())


def _planned(plan: Plan) -> Manifest:
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


def _completed(
    planned: Manifest,
    files: Mapping[str, File],
    source_hashes: Mapping[str, str],
    nvfp4_groups: Mapping[str, int],
    rounded_scales: Iterable[str],
) -> Manifest:
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

"""`convert`: a checkpoint in, a quantized checkpoint out, shard by shard.

run         all shards, one after the other, with flushing and hashing beside
shards      the work on one shard: read, convert, write, piece by piece
maker       what comes out of a piece of a weight
journal     what is finished, for going on after an interruption
respelling  a converted checkpoint with the config that this version writes
side_files  what else goes along: tokenizer, chat template, custom code
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.journal import CONVERT
from quantkit.checkpoint.manifest import Group, Manifest, made_from, read_manifest
from quantkit.checkpoint.output import Output
from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.checkpoint.writer import WORK_FOLDER, File, OutputFolder, check_apart, file_of
from quantkit.conversion.journal import Journal, open_with
from quantkit.conversion.plan import Plan, Step, make_plan
from quantkit.conversion.run import ShardRun
from quantkit.conversion.side_files import side_files
from quantkit.errors import OutputError, UsageError
from quantkit.families.locate import describe_model, open_model
from quantkit.naming import TensorName
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
from quantkit.version import VERSION
from quantkit.weights.weight import Encoding, read_weights


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
    warn: Callable[[str], None] = lambda what: None,
) -> Manifest:
    """Convert `model` (alias, folder or Hub id) into the folder `output` and return the manifest written there.

    recipe        name, YAML file or Recipe; None is the INT4 recipe for the model
    revision      of a Hub repository
    overwrite     replace an output of quantkit that is already there; it is removed only when the plan has passed
    resume        go on with an interrupted run, whose shards are hashed; the result is that of an uninterrupted one
    trust_source  on resuming, do not hash again what the interrupted run has read
    workers       threads that read, convert and write; the output's bytes do not depend on it
    progress      is given the number of source bytes, and returns what is called with the bytes just converted
    warn          is told of each shard of the interrupted run that is damaged and made again

    Raises a QuantkitError before anything is written if the source, the recipe or the output folder is not usable, or
    another run is writing to it; an interrupted run leaves a folder without config.json, which does not load.
    """
    if workers < 1:
        raise UsageError(f"workers is {workers}; it must be at least 1")
    chosen, target = _load(recipe), Output(Path(output), CONVERT, overwrite=overwrite, resume=resume)
    check_apart(Path(model), target.path)
    target.check()  # before anything is fetched
    with target.held():
        source = open_model(model, revision)
        if source.folder:
            check_apart(source.folder, target.path)
        plan = make_plan(source, choose_recipe(source, chosen, options))
        report = progress(source.nbytes) if progress else lambda done: None
        return _finished(plan, target) or _write(
            plan, target, trust_source=trust_source, workers=workers, progress=report, warn=warn
        )


def _write(
    plan: Plan,
    target: Output,
    *,
    trust_source: bool,
    workers: int,
    progress: Callable[[int], None],
    warn: Callable[[str], None],
) -> Manifest:
    """Convert every shard that is not finished, and seal the folder."""
    planned, beside = _planned(plan), side_files(plan.source)
    folder, journal = _open_output(plan, beside, target)
    run = ShardRun(plan, folder, journal, workers, progress, warn)
    finished = run.finished(trust_source)
    entries = (*finished, *run.remaining(finished))
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


def _finished(plan: Plan, target: Output) -> Manifest | None:
    """The manifest of a run of this plan that has ended, if it is gone on with; OutputError if it was another one."""
    if target.finished() is None or (found := read_manifest(target.path)) is None:
        return None
    planned = _planned(plan)
    expected = _completed(planned, found.files, found.source.shards_sha256, found.nvfp4_groups, found.rounded_scales)
    known = replace(found.source, config_sha256=expected.source.config_sha256)  # wherever it lies now
    if (
        replace(expected, source=known, respelled=found.respelled) != found
        or not {job.shard for job in plan.jobs} <= found.files.keys()
    ):
        raise OutputError(f"{target.path} holds another conversion", hint=target.another())
    target.check_whole(found)
    return found


def _open_output(plan: Plan, beside: Iterable[str], target: Output) -> tuple[OutputFolder, Journal]:
    """The folder to write to and its journal, reopened if there is one and it is to be gone on with."""
    opening = open_with(plan, beside)
    if target.run() and (journal := Journal.reopen(target.path / WORK_FOLDER, plan, opening)):
        done = sum(entry.nbytes for entry in journal.entries)
        return target.reopen(plan.file_bytes - done), journal
    folder = target.begin(plan.file_bytes, opening)
    return folder, Journal.begin(folder.work)


def _add_small_files(plan: Plan, beside: Mapping[str, Path], folder: OutputFolder) -> dict[str, File]:
    """All files of the output but shards and manifest; config.json, which comes last, is not written yet."""
    files = {}
    for name, side_file in beside.items():
        files[name] = folder.copy(side_file, name)
    for name, text in plan.texts.items():
        files[name] = file_of(text.encode())
        if name != CONFIG_FILE:
            folder.write_text(name, text)
    return files


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

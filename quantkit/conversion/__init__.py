"""`convert`: a checkpoint in, a quantized checkpoint out, shard by shard.

choice      which recipe
plan        a recipe and a source's headers become shard jobs with exact sizes
steps       what happens to one weight
run         all shards, one after the other, with flushing and hashing beside
shards      the work on one shard: read, convert, write, piece by piece
maker       what comes out of a piece of a weight
journal     what is finished, for going on after an interruption
respelling  a converted checkpoint with the config that this version writes
side_files  what else goes along: tokenizer, chat template, custom code
outcome     the manifest
recipe_check, recipe_report   `quantkit recipes`
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.journal import CONVERT
from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.output import Output
from quantkit.checkpoint.source import CONFIG_FILE
from quantkit.checkpoint.writer import WORK_FOLDER, File, OutputFolder, check_apart, file_of
from quantkit.conversion.choice import UNCHANGED, Options, choose_recipe, named_recipe
from quantkit.conversion.journal import Journal, open_with
from quantkit.conversion.outcome import completed, planned_manifest
from quantkit.conversion.plan import Plan, make_plan
from quantkit.conversion.run import ShardRun
from quantkit.conversion.side_files import side_files
from quantkit.errors import OutputError, UsageError
from quantkit.families.locate import describe_model, open_model
from quantkit.progress import Advance, Progress, silent
from quantkit.recipe import Recipe

__all__ = ["Options", "convert", "preview"]


def convert(
    model: str | Path,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    options: Options = UNCHANGED,
    revision: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    trust_source: bool = False,
    workers: int = 2,
    progress: Progress = silent,
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
    chosen, target = named_recipe(recipe), Output(Path(output), CONVERT, overwrite=overwrite, resume=resume)
    check_apart(Path(model), target.path)
    target.check()  # before anything is fetched
    with target.held():
        source = open_model(model, revision)
        if source.folder:
            check_apart(source.folder, target.path)
        plan = make_plan(source, choose_recipe(source, chosen, options))
        report = progress(source.nbytes)
        return _finished(plan, target) or _write(
            plan, target, trust_source=trust_source, workers=workers, progress=report, warn=warn
        )


def _write(
    plan: Plan,
    target: Output,
    *,
    trust_source: bool,
    workers: int,
    progress: Advance,
    warn: Callable[[str], None],
) -> Manifest:
    """Convert every shard that is not finished, and seal the folder."""
    planned, beside = planned_manifest(plan), side_files(plan.source)
    folder, journal = _open_output(plan, beside, target)
    run = ShardRun(plan, folder, journal, workers, progress, warn)
    finished = run.finished(trust_source)
    entries = (*finished, *run.remaining(finished))
    files = {entry.shard: File(entry.nbytes, entry.sha256) for entry in entries}
    files |= _add_small_files(plan, beside, folder)
    hashes = {shard: sha256 for entry in entries for shard, sha256 in entry.sources.items()}
    counts = sum((Counter(entry.counts) for entry in entries), Counter[str]())
    rounded = (name for entry in entries for name in entry.rounded)
    manifest = completed(planned, files=files, source_hashes=hashes, nvfp4_groups=counts, rounded_scales=rounded)
    folder.seal(manifest.to_json(), plan.config_text)
    return manifest


def preview(
    model: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    options: Options = UNCHANGED,
    revision: str | None = None,
) -> Manifest:
    """What `convert` would write, from a folder's headers, or from the config of an alias or a Hub repository."""
    chosen = named_recipe(recipe)
    source = describe_model(model, revision)
    return planned_manifest(make_plan(source, choose_recipe(source, chosen, options)))


def _finished(plan: Plan, target: Output) -> Manifest | None:
    """The manifest of a run of this plan that has ended, if it is gone on with; OutputError if it was another one."""
    if target.finished() is None or (found := read_manifest(target.path)) is None:
        return None
    planned = planned_manifest(plan)
    expected = completed(
        planned,
        files=found.files,
        source_hashes=found.source.shards_sha256,
        nvfp4_groups=found.nvfp4_groups,
        rounded_scales=found.rounded_scales,
    )
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

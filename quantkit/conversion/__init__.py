"""`convert`: a checkpoint in, a quantized checkpoint out, shard by shard.

shards      the work on one shard: read, convert, write, piece by piece
side_files  what else goes along: tokenizer, chat template, custom code
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.locate import describe_model, open_model
from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE, Source
from quantkit.checkpoint.writer import OutputFolder
from quantkit.conversion.shards import convert_shard
from quantkit.conversion.side_files import side_files
from quantkit.errors import OutputError, UsageError
from quantkit.plan import Plan, Step, make_plan
from quantkit.recipe import Recipe, Rest, ScaleMethod, int4_recipe, load_recipe
from quantkit.report import File, Group, Manifest
from quantkit.version import VERSION


@dataclass(frozen=True)
class Options:
    """Changes to a recipe: None leaves the recipe's own value.

    group_size  of the INT4 weights: 32, 64 or 128
    scale       how the scale of an INT4 group is chosen
    rest        what the weights that the recipe's last rule covers stay or become
    """

    group_size: int | None = None
    scale: ScaleMethod | None = None
    rest: Rest | None = None

    def apply(self, recipe: Recipe) -> Recipe:
        """`recipe` with these changes."""
        if self.rest is not None:
            recipe = recipe.with_rest(self.rest)
        if self.scale is not None:
            recipe = recipe.with_int4(scale=self.scale)
        return recipe if self.group_size is None else recipe.with_int4(group_size=self.group_size)


def convert(
    model: str | Path,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    options: Options = Options(),
    revision: str | None = None,
    overwrite: bool = False,
    workers: int = 2,
    progress: Callable[[int], Callable[[int], None]] | None = None,
) -> Manifest:
    """Convert `model` (alias, folder or Hub id) into the folder `output` and return the manifest written there.

    recipe     name, YAML file or Recipe; None is the INT4 recipe for the model
    revision   of a Hub repository
    overwrite  replace an output of quantkit that is already there; it is removed only when the plan has passed
    workers    threads that read, convert and write; the output's bytes do not depend on it
    progress   is given the number of source bytes, and returns what is called with the bytes just converted

    Raises a QuantkitError before anything is written if the source, the recipe or the output folder is not usable; an
    interrupted run leaves a folder without config.json, which does not load.
    """
    start = time.monotonic()
    if workers < 1:
        raise UsageError(f"workers is {workers}; it must be at least 1")
    chosen = _load(recipe)
    _check_apart(Path(model), Path(output))
    OutputFolder.check(Path(output), overwrite=overwrite)  # before anything is fetched
    source = open_model(model, revision)
    if source.folder:
        _check_apart(source.folder, Path(output))
    plan = make_plan(source, choose_recipe(source, chosen, options))
    folder = OutputFolder.create(Path(output), plan.file_bytes, overwrite=overwrite)
    files = dict(_write_shards(plan, folder, workers, progress(source.nbytes) if progress else lambda done: None))
    for name, path in side_files(source):
        files[name] = File(path.stat().st_size, folder.copy(path, name))
    for name, text in ((INDEX_FILE, plan.index_text), (CONFIG_FILE, plan.config_text)):
        files[name] = _text_file(text)
    folder.write_text(INDEX_FILE, plan.index_text)
    manifest = _manifest(plan, files, seconds=round(time.monotonic() - start, 3))
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
    return _manifest(make_plan(source, choose_recipe(source, chosen, options)), {}, None)


def choose_recipe(source: Source, recipe: Recipe | None, options: Options) -> Recipe:
    """`recipe`, or the INT4 one for `source`, with `options` applied."""
    return options.apply(recipe or int4_recipe(source.name, source.model_type))


def _load(recipe: str | Path | Recipe | None) -> Recipe | None:
    return load_recipe(recipe) if isinstance(recipe, str | Path) else recipe


def _write_shards(
    plan: Plan, folder: OutputFolder, workers: int, progress: Callable[[int], None]
) -> Iterator[tuple[str, File]]:
    """Convert all shards; each is flushed, hashed and renamed while the next is converted."""
    with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(1) as publisher:
        pending: list[tuple[str, int, Future[str]]] = []
        for job in plan.jobs:
            with folder.shard(job.shard, job.file_bytes) as output, plan.source.open_shards(job.reads) as inputs:
                convert_shard(job, inputs, output, pool, progress)
            while pending:
                yield _finished(*pending.pop())
            pending.append((job.shard, job.file_bytes, publisher.submit(folder.publish, job.shard)))
        while pending:
            yield _finished(*pending.pop())


def _finished(name: str, nbytes: int, digest: Future[str]) -> tuple[str, File]:
    return name, File(nbytes, digest.result())


def _check_apart(source: Path, output: Path) -> None:
    """The output may be neither the source, nor inside it, nor around it, by any path or link."""
    ours, theirs = output.resolve(), source.resolve()
    if source.is_dir() and (ours == theirs or ours in theirs.parents or theirs in ours.parents):
        raise OutputError(f"the output {output} and the source {source} overlap", hint="Choose another output.")


def _text_file(text: str) -> File:
    data = text.encode()
    return File(len(data), hashlib.sha256(data).hexdigest())


def _manifest(plan: Plan, files: dict[str, File], seconds: float | None) -> Manifest:
    source = plan.source
    return Manifest(
        version=VERSION,
        source={
            "name": source.name,
            "revision": source.revision,
            "model_type": source.model_type,
            "num_tensors": len(source.tensors),
            "total_bytes": source.nbytes,
            "config_sha256": _text_file(source.config_text).sha256,
        },
        recipe=plan.recipe.as_dict(),
        quantization_config=plan.quantization_config,
        groups=_groups(plan),
        num_tensors=plan.num_tensors,
        total_bytes=plan.nbytes,
        file_bytes=plan.file_bytes,
        files=dict(sorted(files.items())),
        warnings=source.warnings,
        seconds=seconds,
    )


def _groups(plan: Plan) -> tuple[Group, ...]:
    groups: dict[tuple[str, bool, str, str], list[Step]] = {}
    for step in plan.steps:
        name = step.weight.name
        key = (str(name.role), name.is_mtp(plan.source.num_hidden_layers), step.weight.label, step.label)
        groups.setdefault(key, []).append(step)
    return tuple(
        Group(
            *key,
            weights=len(steps),
            source_bytes=sum(step.weight.nbytes for step in steps),
            nbytes=sum(spec.nbytes for step in steps for spec in step.outputs),
        )
        for key, steps in sorted(groups.items())
    )

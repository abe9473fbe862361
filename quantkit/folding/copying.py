"""`-o OUT`: a copy of the checkpoint with patches, or with embedded scales. OUT loads only when all of it is there."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.checkpoint.digest import GATE_FILE, list_files
from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.checkpoint.writer import MANIFEST_FILE, WORK_FOLDER, OutputFolder, check_apart
from quantkit.errors import OutputError
from quantkit.folding.manifest import check_sources, folded_manifest
from quantkit.folding.plan import FoldPlan
from quantkit.folding.shards import Hashes, Progress, can_clone, file_size, write_shard
from quantkit.report import File, Manifest

_NOT_OF_COPIES = (CONFIG_FILE, MANIFEST_FILE, GATE_FILE)  # the gate's result is about other bytes


@dataclass(frozen=True)
class Additions:
    """What a copy holds besides patched weights.

    names      other names of the source's shards
    shards     whole files of tensors
    texts      files of text instead of the source's, config.json included
    kv_scales  the scales among the tensors
    """

    names: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, bytes] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    kv_scales: Mapping[str, float] = field(default_factory=dict)


def check_output(source: Source, output: Path, *, overwrite: bool) -> None:
    """Raise OutputError unless the copy can be put there; nothing is written."""
    assert source.folder is not None
    check_apart(source.folder, output)
    if (output / WORK_FOLDER).exists() and not overwrite:
        raise OutputError(f"{output} holds an interrupted run", hint="Start it anew with --overwrite.")
    OutputFolder.check(output, overwrite=overwrite)


def write_copy(
    plan: FoldPlan,
    made: Manifest | None,
    output: Path,
    prove: Callable[[Source], str],
    *,
    additions: Additions = Additions(),
    overwrite: bool = False,
    workers: int = 2,
    progress: Progress = lambda done: None,
) -> str:
    """Write the copy, and return what `prove` says of it before it is sealed.

    Files are cloned where the file system lets them share blocks, else copied. Raises OutputError for a folder in use
    and a full disk, SourceError for a shard that is not the one of its manifest.
    """
    source = plan.source
    assert source.folder is not None
    check_output(source, output, overwrite=overwrite)
    others = list_files(source.folder)
    cloned = can_clone(source.folder / source.shards[0], output)
    shard_bytes = 0 if cloned else sum(file_size(source.folder / shard) for shard in source.shards)
    needed = shard_bytes + sum(layer.nbytes for layer in plan.layers) + sum(map(len, additions.shards.values()))
    folder = OutputFolder.create(output, needed, overwrite=overwrite)

    def write(shard: str) -> Hashes:
        name = additions.names.get(shard, shard)
        assert source.folder is not None
        return write_shard(source.folder / shard, name, plan.patches(shard), folder, cloned, progress)

    with ThreadPoolExecutor(workers) as pool:
        hashes = dict(zip(source.shards, pool.map(write, source.shards), strict=True))
    before = {shard: found.before for shard, found in hashes.items()}
    check_sources(source, made, before)
    files = {additions.names.get(shard, shard): File(found.nbytes, found.after) for shard, found in hashes.items()}
    files |= _copy_others(others, source.shards, folder, additions)
    moved = {
        name: replace(tensor, shard=additions.names.get(tensor.shard, tensor.shard))
        for name, tensor in source.tensors.items()
    }
    proof = prove(replace(source, folder=output, tensors=moved))
    config_text = additions.texts.get(CONFIG_FILE, source.config_text)
    files[CONFIG_FILE] = _file(config_text.encode())
    manifest = folded_manifest(plan, made, before, files)
    folder.seal(_with_additions(manifest, additions, config_text).to_json(), config_text)
    return proof


def _copy_others(
    paths: Mapping[str, Path], shards: Sequence[str], folder: OutputFolder, additions: Additions
) -> dict[str, File]:
    """All files but the source's shards, the config and what is about the bytes before."""
    files = {}
    for name, path in paths.items():
        if name not in (*shards, *_NOT_OF_COPIES, *additions.texts):
            files[name] = folder.copy(path, name)
    for name, data in additions.shards.items():
        with folder.shard(name, len(data)) as shard:
            shard.append(memoryview(data))
            shard.finish()
        folder.publish(name)
        files[name] = _file(data)
    for name, text in additions.texts.items():
        if name != CONFIG_FILE:
            files[name] = File(len(text.encode()), folder.write_text(name, text))
    return files


def _with_additions(manifest: Manifest, additions: Additions, config_text: str) -> Manifest:
    if not additions.kv_scales:
        return manifest
    config = Source("", None, config_text, {})
    return replace(
        manifest,
        kv_scales=dict(additions.kv_scales),
        quantization_config=config.quantization_config or None,
        num_tensors=manifest.num_tensors + len(additions.kv_scales),
        total_bytes=manifest.total_bytes + 4 * len(additions.kv_scales),
        file_bytes=manifest.file_bytes + sum(map(len, additions.shards.values())),
    )


def _file(data: bytes) -> File:
    return File(len(data), hashlib.sha256(data).hexdigest())

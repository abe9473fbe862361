"""`-o OUT`: a copy of the checkpoint with patches, or with embedded scales. OUT loads only when all of it is there."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.checkpoint.digest import GATE_FILE, list_files
from quantkit.checkpoint.journal import FOLD, Opening
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.output import Output
from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.checkpoint.writer import MANIFEST_FILE, File, OutputFolder, file_of
from quantkit.folding.manifest import check_sources, folded_manifest
from quantkit.folding.plan import FoldPlan
from quantkit.folding.shards import Hashes, can_clone, file_size, write_shard
from quantkit.progress import Advance

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


def write_copy(
    plan: FoldPlan,
    made: Manifest | None,
    target: Output,
    prove: Callable[[Source], str],
    *,
    additions: Additions = Additions(),
    workers: int = 2,
    progress: Advance = lambda done: None,
) -> str:
    """Write the copy into the folder that `target` holds, and return what `prove` says of it before it is sealed.

    Files are cloned where the file system lets them share blocks, else copied. Raises OutputError for a full disk,
    SourceError for a shard that is not the one of its manifest.
    """
    source = plan.source
    assert source.folder is not None
    others = _others(source, additions)
    cloned = can_clone(source.folder / source.shards[0], target.path)
    shard_bytes = 0 if cloned else sum(file_size(source.folder / shard) for shard in source.shards)
    needed = shard_bytes + sum(layer.nbytes for layer in plan.layers) + sum(map(len, additions.shards.values()))
    shards = {additions.names.get(shard, shard) for shard in source.shards}
    names = {*shards, *others, *additions.shards, *additions.texts, CONFIG_FILE, MANIFEST_FILE}
    folder = target.begin(needed, Opening(FOLD, frozenset(names)))

    def write(shard: str) -> Hashes:
        name = additions.names.get(shard, shard)
        assert source.folder is not None
        return write_shard(source.folder / shard, name, plan.patches(shard), folder, cloned, progress)

    with ThreadPoolExecutor(workers) as pool:
        hashes = dict(zip(source.shards, pool.map(write, source.shards), strict=True))
    before = {shard: found.before for shard, found in hashes.items()}
    check_sources(source, made, before)
    files = {additions.names.get(shard, shard): File(found.nbytes, found.after) for shard, found in hashes.items()}
    files |= _copy_others(others, folder, additions)
    moved = {
        name: replace(tensor, shard=additions.names.get(tensor.shard, tensor.shard))
        for name, tensor in source.tensors.items()
    }
    proof = prove(replace(source, folder=target.path, tensors=moved))
    config_text = additions.texts.get(CONFIG_FILE, source.config_text)
    files[CONFIG_FILE] = file_of(config_text.encode())
    manifest = folded_manifest(plan, made, before, files)
    folder.seal(_with_additions(manifest, additions, config_text).to_json(), config_text)
    return proof


def _others(source: Source, additions: Additions) -> dict[str, Path]:
    """All files but the source's shards, the config and what is about the bytes before, or is added anew."""
    assert source.folder is not None
    left_out = (*source.shards, *_NOT_OF_COPIES, *additions.texts)
    return {name: path for name, path in list_files(source.folder).items() if name not in left_out}


def _copy_others(paths: Mapping[str, Path], folder: OutputFolder, additions: Additions) -> dict[str, File]:
    """The other files, and those that are added."""
    files = {name: folder.copy(path, name) for name, path in paths.items()}
    for name, data in additions.shards.items():
        with folder.shard(name, len(data)) as shard:
            shard.append(memoryview(data))
            shard.finish()
        folder.publish(name)
        files[name] = file_of(data)
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

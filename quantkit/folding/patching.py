"""`--patch-only DIR`: the edited tensors alone, whole, under their names, and what they are patches of."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.checkpoint.header import StoredTensor, lay_out
from quantkit.checkpoint.journal import PATCH, Opening
from quantkit.checkpoint.manifest import Fold
from quantkit.checkpoint.output import Output
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import MANIFEST_FILE, File, ShardFile
from quantkit.folding.plan import FoldPlan
from quantkit.records import Record
from quantkit.version import VERSION
from quantkit.weights.rows import Reader, byte_ranges

PATCH_FILE = "folded.safetensors"


@dataclass(frozen=True)
class Patched:
    """A tensor of the patch: the shard that holds it in the checkpoint, and its sha256 there and here."""

    shard: str
    before: str
    after: str


@dataclass(frozen=True)
class FoldPatch(Record):
    """What a patch is: `quantkit.json` in its folder.

    source  name, revision, model type and sha256 of the config of the checkpoint that it belongs to
    fold    as in the manifest of a folded checkpoint
    files   the file of tensors
    """

    version: str
    source: dict[str, Any]
    fold: Fold
    tensors: dict[str, Patched]
    files: dict[str, File] = field(default_factory=dict)


def write_patch(plan: FoldPlan, target: Output, prove: Callable[[Source], str]) -> str:
    """Write the patch into the folder that `target` holds, and return what `prove` says of the checkpoint with it.

    Raises OutputError for a full disk.
    """
    source = plan.source
    changed = {patch.tensor.spec.name: patch.tensor for edit in plan.edits for patch in edit.patches(source)}
    header, places = lay_out((tensor.spec for tensor in changed.values()), PATCH_FILE)
    size = len(header) + sum(place.spec.nbytes for place in places)
    folder = target.begin(size, Opening(PATCH, frozenset({PATCH_FILE, MANIFEST_FILE})))
    patched: dict[str, Patched] = {}
    with folder.shard(PATCH_FILE, size) as file:
        file.append(memoryview(header))
        for place in places:
            patched[place.spec.name] = _append(plan, changed[place.spec.name], file)
        made = File(size, file.finish())
    folder.publish(PATCH_FILE)
    path = str((target.path / PATCH_FILE).absolute())
    over = {place.spec.name: replace(place, shard=path) for place in places}
    proof = prove(replace(source, tensors={**source.tensors, **over}))
    folder.write_text(MANIFEST_FILE, _manifest(plan, patched, made).to_json())
    folder.tidy()
    return proof


def _append(plan: FoldPlan, tensor: StoredTensor, file: ShardFile) -> Patched:
    """Write a tensor with its patches."""
    patches = [
        patch
        for edit in plan.edits
        if tensor in edit.weight.tensors
        for patch in edit.patches(plan.source)
        if patch.tensor == tensor
    ]
    before, after = hashlib.sha256(), hashlib.sha256()
    for begin, end in byte_ranges(tensor.spec.nbytes):
        piece = Reader(plan.source).tensor_bytes(tensor, begin, end)
        before.update(piece.data)
        for patch in patches:
            first, last = max(patch.begin, begin), min(patch.begin + patch.data.nbytes, end)
            if first < last:
                piece[first - begin : last - begin] = patch.data[first - patch.begin : last - patch.begin]
        after.update(piece.data)
        file.append(piece.data)
    return Patched(tensor.shard, before.hexdigest(), after.hexdigest())


def _manifest(plan: FoldPlan, patched: dict[str, Patched], made: File) -> FoldPatch:
    source, fold = plan.source, plan.record(None)
    assert fold is not None
    config_sha256 = hashlib.sha256(source.config_text.encode()).hexdigest()
    named = {"name": source.name, "revision": source.revision, "model_type": source.model_type}
    origin = {**named, "config_sha256": config_sha256}
    return FoldPatch(VERSION, origin, fold, tensors=patched, files={PATCH_FILE: made})

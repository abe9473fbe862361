"""`fold`: scales of an FP8 KV cache put into the weights, where every engine honours them with its scale of 1.0.

plan       which weights are edited, and how
shards     shards with patches: copied or cloned, and hashed
copying    -o OUT
in_place   --in-place and --undo: the journal
patching   --patch-only DIR
embedding  --embed: scales as tensors instead
manifest   what quantkit.json says of it
proof      the same bits before and after
report     what `fold` returns

The arithmetic is in `checkpoint.powers`, and which weights take what in `models.folding`.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.checkpoint.journal import FOLD, IN_PLACE, PATCH
from quantkit.checkpoint.lock import lock
from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.occupancy import UNDO_FOLDER
from quantkit.checkpoint.output import Output
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import check_apart
from quantkit.errors import FoldError, UsageError
from quantkit.families.config import MlaConfig, ModelConfig, read_config
from quantkit.families.locate import describe_model, open_model
from quantkit.folding.copying import Additions, write_copy
from quantkit.folding.embedding import embed, embedding_warnings
from quantkit.folding.in_place import fold_in_place, recover
from quantkit.folding.in_place import undo as undo_in_place
from quantkit.folding.manifest import check_unfolded
from quantkit.folding.patching import FoldPatch, write_patch
from quantkit.folding.plan import FoldPlan, folds_of, make_plan
from quantkit.folding.proof import compare, run_sample
from quantkit.folding.report import FoldedLayer, FoldReport, Way
from quantkit.models.folding import LayerFold, fold_digest
from quantkit.naming import TensorName
from quantkit.progress import Advance, Progress, silent
from quantkit.runtime.scales import LayerScales, Numbers, read_scale_file, scales_of_layers
from quantkit.weights.weight import KV_SCALES

_NEEDS_OUTPUT = (Way.COPY, Way.PATCH, Way.EMBED)
_UNPROVED = {
    Way.DRY_RUN: "none: nothing was written",
    Way.EMBED: "none is needed: no weight is edited, and a cache that is not FP8 does not use the scales",
}


def fold(
    checkpoint: str | Path,
    scales: str | Path | Mapping[str, Numbers],
    output: str | Path | None = None,
    *,
    way: Way = Way.COPY,
    revision: str | None = None,
    overwrite: bool = False,
    workers: int = 2,
    progress: Progress = silent,
) -> FoldReport:
    """Fold `scales`, a file or what is in it, into `checkpoint` (folder, alias or Hub id), exactly or not at all.

    output    the folder of a copy or a patch
    way       a copy with edited weights or embedded scales, the folder itself, a patch, or only saying what would be
    progress  is given the number of bytes to read, and returns what is called with the bytes just read

    Raises CacheError for unsound scales, FoldError for scales that the weights cannot take exactly or have already,
    CheckFailed if anything but an FP8 cache would change, and OutputError for places that cannot be written. Then
    nothing is left that loads but what was there before.
    """
    if (output is None) == (way in _NEEDS_OUTPUT):
        raise UsageError(f"a fold by {way} {'needs a folder to write to' if output is None else 'writes to no folder'}")
    if way is Way.IN_PLACE and not Path(checkpoint).is_dir():
        raise UsageError(f"{checkpoint} is no folder; a fold in place is into one", hint="Fold into a copy: -o OUT.")
    target = _target(Path(output), way, overwrite) if output else None
    if target:
        check_apart(Path(checkpoint), target.path)
        target.check()
    with ExitStack() as stack:
        recovered = None
        if way is Way.IN_PLACE:
            stack.enter_context(lock(Path(checkpoint), IN_PLACE.name))
            recovered = recover(Path(checkpoint))
        source = describe_model(checkpoint, revision) if way is Way.DRY_RUN else open_model(checkpoint, revision)
        config = read_config(source)
        named, origin = _named(scales, source)
        by_layer = scales_of_layers(config, named, origin)
        if target and source.folder:
            check_apart(source.folder, target.path)
            stack.enter_context(target.held())
        report = silent(0) if way is Way.DRY_RUN else progress(source.nbytes)
        writing = _Writing(way, target, read_manifest(source.folder), workers, report)
        if way is Way.EMBED:
            return _embed(source, config, by_layer, writing)
        return _fold(source, config, by_layer, writing, (recovered,) if recovered else ())


def _target(output: Path, way: Way, overwrite: bool) -> Output:
    if way is Way.PATCH:
        return Output(output, PATCH, kind=FoldPatch, overwrite=overwrite)
    return Output(output, FOLD, overwrite=overwrite)


def _named(scales: str | Path | Mapping[str, Numbers], source: Source) -> tuple[dict[str, Numbers], str]:
    """The scales by their names, and what to call where they are from."""
    if isinstance(scales, Mapping):
        return dict(scales), "the scales"
    return read_scale_file(Path(scales), source), str(scales)


@dataclass(frozen=True)
class _Writing:
    """Where to and how; `made` is the manifest of the checkpoint before."""

    way: Way
    target: Output | None
    made: Manifest | None
    workers: int
    progress: Advance

    def copy(self, plan: FoldPlan, prove: Callable[[Source], str], additions: Additions | None = None) -> str:
        assert self.target is not None
        return write_copy(
            plan,
            self.made,
            self.target,
            prove,
            additions=additions or Additions(),
            workers=self.workers,
            progress=self.progress,
        )


def _fold(
    source: Source,
    config: ModelConfig,
    scales: Mapping[int, LayerScales],
    writing: _Writing,
    notes: tuple[str, ...],
) -> FoldReport:
    folds = folds_of(config, scales)
    check_unfolded(source.name, writing.made, fold_digest(folds))
    plan = make_plan(source, config, folds)
    prove = _prover(plan, writing.way)
    if writing.way is Way.COPY:
        proved = writing.copy(plan, prove)
    elif writing.way is Way.PATCH and plan.edits:
        assert writing.target is not None
        proved = write_patch(plan, writing.target, prove)
    elif writing.way is Way.IN_PLACE and plan.edits:
        at_source = partial(prove, source)
        proved = fold_in_place(plan, writing.made, at_source, workers=writing.workers, progress=writing.progress)
        notes += (f"what --undo needs is in {source.folder}/{UNDO_FOLDER}; remove it when it is not wanted",)
    else:
        proved = prove(source)
    return _report(plan, writing, proved, notes)


def undo(checkpoint: str | Path) -> FoldReport:
    """Take back the fold that was made in the folder `checkpoint`, or an interrupted one.

    Raises UsageError if there is none, and OutputError if the weights are not those that the fold wrote.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise UsageError(f"{checkpoint}: no such folder", hint="Give the folder that was folded in place.")
    note = undo_in_place(folder)
    return FoldReport(str(checkpoint), str(checkpoint), Way.UNDO, (), (), 0, 0, None, "none is needed", (note,))


def _embed(source: Source, config: ModelConfig, scales: Mapping[int, LayerScales], writing: _Writing) -> FoldReport:
    check_unfolded(source.name, writing.made, None)
    if held := [name for name in source.tensors if TensorName.parse(name).leaf in KV_SCALES]:
        hint = "Take the checkpoint without its KV scales."
        raise FoldError(f"{source.name} holds {held[0]}: its cache has scales already", hint=hint)
    plan = FoldPlan(source, config, (), ())
    additions = embed(source, config, scales)
    proved = writing.copy(plan, _prover(plan, Way.EMBED), additions)
    notes = (f"{len(additions.kv_scales)} scales as tensors, and kv_cache_scheme in the config",)
    return _report(plan, writing, proved, notes, embedding_warnings(config))


def _prover(plan: FoldPlan, way: Way) -> Callable[[Source], str]:
    """What compares a checkpoint with the plan's, which is run now."""
    if way in _UNPROVED or not plan.edits:
        unproved = _UNPROVED.get(way, "none is needed: every scale is 1, and no weight was edited")
        return lambda changed: unproved
    before = run_sample(plan, plan.source)
    return lambda changed: compare(plan, before, run_sample(plan, changed))


def _report(
    plan: FoldPlan, writing: _Writing, proof: str, notes: tuple[str, ...], warnings: tuple[str, ...] = ()
) -> FoldReport:
    source = plan.source
    mla = isinstance(plan.config.attention, MlaConfig)
    layers = tuple(
        FoldedLayer(
            entry.layer,
            entry.mtp,
            _said(entry.fold, mla),
            tuple(str(edit.weight.name).partition(".self_attn.")[2] for edit in entry.edits),
            entry.nbytes,
        )
        for entry in plan.layers
    )
    if source.folder is None and any(edit.extent.depends for edit in plan.edits):
        notes += ("codes or E4M3 scales would change too: whether they can, exactly, only the weights tell",)
    return FoldReport(
        checkpoint=source.name,
        output=str(writing.target.path) if writing.target else source.name if writing.way is Way.IN_PLACE else None,
        way=writing.way,
        layers=layers,
        left=plan.left,
        edited_bytes=sum(layer.nbytes for layer in layers),
        total_bytes=source.nbytes,
        digest=plan.digest,
        proof=proof,
        notes=notes,
        warnings=(*source.warnings, *warnings),
    )


def _said(fold: LayerFold, mla: bool) -> str:
    parts = {"latent": fold.latent, "rope": fold.rope} if mla else {"keys": (fold.key,), "values": (fold.value,)}
    return ", ".join(f"{name} {_numbers(exponents)}" for name, exponents in parts.items())


def _numbers(exponents: tuple[int, ...]) -> str:
    low, high = 2.0 ** min(exponents), 2.0 ** max(exponents)
    return f"{low:g}" if low == high else f"{low:g} to {high:g} by channel"

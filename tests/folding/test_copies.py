"""`fold` into a copy, a clone or a patch: the source's bytes but for the folded tensors, and nothing half written."""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.errors import CheckFailed, OutputError, SourceError
from quantkit.folding import copying, shards
from quantkit.folding.patching import PATCH_FILE, FoldPatch
from quantkit.folding.report import Way
from quantkit.verification import verify
from support.folds import SCALES, content, manifest, named, space
from support.runnable import Checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_copy_holds_every_file(tiny_fp8: Path, tiny_folded: Path) -> None:
    """Config, index, tokenizer and the like are the source's bytes; of shards only folded ones differ."""
    before, after = content(tiny_fp8), content(tiny_folded)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} <= {path.name for path in tiny_fp8.glob("model-*")}

    made = manifest(tiny_folded)
    assert made.files.keys() == after.keys()
    assert all(made.files[name].sha256 == sha256 for name, sha256 in after.items())
    shards_before = {path.name: before[path.name] for path in tiny_fp8.glob("model-*")}
    assert made.source.shards_sha256 == shards_before
    assert made.fold is not None
    assert made.fold.origin is not None
    assert made.fold.origin.shards_sha256 == shards_before


def test_a_cloned_copy_is_the_same(
    tiny_fp8: Path, tiny_folded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system shares blocks, shards are cloned, and only patches are written."""
    written: list[int] = []

    def clone(path: Path, target: int) -> None:
        os.write(target, path.read_bytes())

    def write_patches(file: int, patches: Any) -> None:
        written.extend(patch.data.nbytes for patch in patches)
        write(file, patches)

    write = shards.write_patches
    monkeypatch.setattr(shards, "clone", clone)
    monkeypatch.setattr(shards, "write_patches", write_patches)
    report = folding.fold(tiny_fp8, SCALES, tmp_path / "cloned")

    assert content(tmp_path / "cloned") == content(tiny_folded)
    assert sum(written) == report.edited_bytes == 2 * 280


def test_nothing_to_fold_is_a_copy(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Scales of 1 edit nothing, which is said; the cache means what it meant."""
    folder, ones = checkpoint("glm-5.2-fp8_block"), named("glm-5.2", k_scale=1.0, v_scale=1.0)
    report = folding.fold(folder, ones, tmp_path / "copy")

    assert (report.edited_bytes, report.digest) == (0, None)
    assert "every scale is 1" in report.proof
    assert all(path.read_bytes() == (tmp_path / "copy" / path.name).read_bytes() for path in folder.glob("model*"))
    assert space(tmp_path / "copy") == space(folder)


def test_no_room_is_found_before_anything_is_written(
    tiny_fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clones the disk must hold all shards."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(OutputError, match="its disk has"):
        folding.fold(tiny_fp8, SCALES, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_that_loads(tiny_fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file; the folder has no config, and --overwrite begins anew."""

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("quantkit.checkpoint.writer.ShardFile.finish", fail)
        with pytest.raises(OutputError, match="No space left") as caught:
            folding.fold(tiny_fp8, SCALES, tmp_path / "out")
    assert "Free some space" in str(caught.value.hint)
    with pytest.raises(SourceError, match=r"config.json is missing"):
        open_source(tmp_path / "out")
    with pytest.raises(OutputError, match="holds an interrupted run") as again:
        folding.fold(tiny_fp8, SCALES, tmp_path / "out")
    assert "--overwrite" in str(again.value.hint)

    folding.fold(tiny_fp8, SCALES, tmp_path / "out", overwrite=True)
    assert verify(tmp_path / "out", tiny_fp8).passed


def test_the_output_may_not_overlap(tiny_fp8: Path, tiny_folded: Path) -> None:
    """Neither the source itself nor a folder in it; another checkpoint is not written over."""
    for output in (tiny_fp8, tiny_fp8 / "out"):
        with pytest.raises(OutputError, match="overlap"):
            folding.fold(tiny_fp8, SCALES, output)
    with pytest.raises(OutputError, match="exists and is not empty"):
        folding.fold(tiny_fp8, SCALES, tiny_folded)


def test_other_bits_after_a_fold_are_found(tiny_fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof runs what was written: were one number not multiplied, the copy would not be sealed."""
    original = folding.plan.FoldPlan.patches

    def forgetful(plan: Any, shard: str) -> Any:
        return [patch for patch in original(plan, shard) if "q_b_proj" not in patch.tensor.spec.name]

    monkeypatch.setattr(folding.plan.FoldPlan, "patches", forgetful)
    with pytest.raises(CheckFailed, match=r"attention of layer 0 in torch.bfloat16: other bits after the fold"):
        folding.fold(tiny_fp8, SCALES, tmp_path / "out")

    assert not (tmp_path / "out" / "config.json").exists()


def test_copying_is_done_with_the_source_untouched(tiny_fp8: Path, tiny_folded: Path) -> None:
    """No way but --in-place writes into the checkpoint."""
    assert not list(tiny_fp8.glob(".quantkit*"))
    assert not (tiny_fp8 / "quantkit.json").exists()
    assert copying.GATE_FILE not in manifest(tiny_folded).files


def test_a_patch_holds_the_edited_tensors_alone(tiny_fp8: Path, tiny_folded: Path, tmp_path: Path) -> None:
    """Whole, under their names, with what they are a patch of; laid over the checkpoint they are the folded one."""
    report = folding.fold(tiny_fp8, SCALES, tmp_path / "patch", way=Way.PATCH)
    assert sorted(path.name for path in (tmp_path / "patch").iterdir()) == [PATCH_FILE, "quantkit.json"]
    assert "the same bits" in report.proof

    tensors = load_file(tmp_path / "patch" / PATCH_FILE)
    both = [
        {name: place for path in folder.glob("model-*") for name, place in load_file(path).items()}
        for folder in (tiny_fp8, tiny_folded)
    ]
    changed = {
        name for name in both[0] if not torch.equal(both[0][name].view(torch.uint8), both[1][name].view(torch.uint8))
    }
    assert tensors.keys() == changed
    assert all(torch.equal(tensors[name].view(torch.uint8), both[1][name].view(torch.uint8)) for name in changed)
    patch = FoldPatch.from_json((tmp_path / "patch" / "quantkit.json").read_text())
    assert patch.tensors.keys() == changed
    assert patch.fold.digest == report.digest
    for name, place in patch.tensors.items():
        assert place.shard == open_source(tiny_fp8).tensors[name].shard
        for sha256, stored in zip((place.before, place.after), both, strict=True):
            assert sha256 == hashlib.sha256(stored[name].view(torch.uint8).numpy().tobytes()).hexdigest()

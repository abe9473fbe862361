"""What a folded cache means to another one, and how `verify` holds the record of a fold against the weights."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import quantkit
from quantkit import folding
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.source import open_source
from quantkit.errors import FoldError, SourceError
from quantkit.folding.report import Way
from quantkit.models.folding import LayerFold, fold_digest
from quantkit.verification import verify
from support.folds import NOPE, PARTS, named, space
from support.runnable import Checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An FP8 checkpoint and its INT4 conversion."""
    folder = checkpoint("glm-5.2-fp8_block")
    converted = tmp_path_factory.mktemp("pair") / "int4"
    quantkit.convert(folder, converted)
    return folder, converted


def test_one_set_on_two_formats_is_one_kv_space(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same scales on FP8 and INT4 give the same id, though other weights were edited; converting a folded one, too.

    Unfolded checkpoints, and such with other scales, are of other ids. `verify` holds each against the unfolded FP8.
    """
    fp8, int4 = pair
    for name, folder, scales in (("a", fp8, PARTS), ("b", int4, PARTS), ("c", int4, {**PARTS, "rope_scale": 0.25})):
        folding.fold(folder, named("glm-5.2", **scales), tmp_path / name)
        assert verify(tmp_path / name, fp8).passed
    quantkit.convert(tmp_path / "a", tmp_path / "d")
    assert verify(tmp_path / "d", tmp_path / "a").passed
    assert verify(tmp_path / "d", fp8).passed

    edited = [Manifest.from_json((tmp_path / name / "quantkit.json").read_text()).fold for name in "ab"]
    assert edited[0]
    assert edited[1]
    assert edited[0].layers["0"]["output"] != edited[1].layers["0"]["output"]
    assert space(tmp_path / "a") == space(tmp_path / "b") == space(tmp_path / "d")
    assert space(fp8) == space(int4)
    assert len({space(folder) for folder in (fp8, tmp_path / "a", tmp_path / "c")}) == 3
    with pytest.raises(FoldError, match="these KV scales folded in already"):
        folding.fold(tmp_path / "d", named("glm-5.2", **PARTS), tmp_path / "e")


def test_plan_check_takes_equal_folds_only(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Prefill in FP8 and decode in INT4 with one set of scales pass; with an unfolded peer they do not."""
    for name, folder in zip(("fp8", "int4"), pair, strict=True):
        folding.fold(folder, named("glm-5.2", **PARTS), tmp_path / name)
    target = quantkit.Target(*[quantkit.Deployment("1xH200")] * 2)
    planned = quantkit.plan_phases(tmp_path / "fp8", tmp_path / "int4", target)
    (tmp_path / "plan.json").write_text(planned.deployment.to_json())

    assert quantkit.check_drift(tmp_path / "plan.json", [tmp_path / "fp8", tmp_path / "int4"]).passed
    drifts = quantkit.check_drift(tmp_path / "plan.json", [tmp_path / "fp8", pair[1]]).drifts
    assert {drift.pool for drift in drifts if drift.field == "kv_space_id"} == {"decode", "prefill and decode"}


def test_a_digest_is_of_what_the_cache_is_divided_by() -> None:
    """Free exponents, equal numbers given as lists and layers divided by 1 do not count; all else does."""
    fold = LayerFold((2,), (-1,))
    same = [
        {0: fold},
        {0: replace(fold, query=3, output=1)},
        {0: LayerFold((2,) * 8, (-1,) * 4)},
        {0: fold, 1: LayerFold()},
    ]
    other = [{1: fold}, {0: LayerFold((2,), (1,))}, {0: LayerFold((2, 1) * 4, (-1,))}, {0: LayerFold(key=1)}]

    assert len({fold_digest(folds) for folds in same}) == 1
    assert len({fold_digest(folds) for folds in (same[0], *other)}) == 5
    assert fold_digest({0: LayerFold()}) is None


# --- verify


@pytest.fixture
def folded(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    folding.fold(checkpoint("glm-5.2-bf16"), named("glm-5.2", **PARTS), tmp_path / "folded")
    return tmp_path / "folded"


def problems(folder: Path, against: Path) -> Iterator[str]:
    found = verify(folder, against)
    assert not found.passed
    return (f"{check.name}: {example}" for check in found.checks for example in check.examples)


def change_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "quantkit.json").read_text())
    change(content["fold"])
    (folder / "quantkit.json").write_text(json.dumps(content))


def test_verify_finds_a_weight_that_was_not_multiplied(folded: Path, checkpoint: Checkpoint) -> None:
    """One number of an edited weight as it was before is a problem, named with the tensor."""
    name = "model.layers.1.self_attn.q_b_proj.weight"
    path = folded / open_source(folded).tensors[name].shard
    tensors = load_file(path)
    tensors[name][NOPE, 0] *= 2
    save_file(tensors, path, metadata={"format": "pt"})

    assert any(name in text and text.startswith("fold:") for text in problems(folded, checkpoint("glm-5.2-bf16")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fold: fold.update(digest="0" * 64), "another digest than it says"),
        (lambda fold: fold["layers"]["0"].pop("rope"), "does not say what was folded"),
        (lambda fold: fold["layers"]["0"].update(output=1), "is not the source's times the powers of two of the fold"),
    ],
)
def test_verify_reads_the_record(
    folded: Path, checkpoint: Checkpoint, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """A record that does not fit its digest or the weights is a problem."""
    change_record(folded, change)

    assert any(words in text for text in problems(folded, checkpoint("glm-5.2-bf16")))


def test_verify_without_the_record_finds_other_weights(folded: Path, checkpoint: Checkpoint) -> None:
    """A folded checkpoint whose manifest is lost is not the source."""
    (folded / "quantkit.json").unlink()

    assert any(text.startswith("copies:") for text in problems(folded, checkpoint("glm-5.2-bf16")))


def test_a_damaged_manifest_or_shard_is_refused(folded: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A checkpoint that is not what its manifest says is not folded into."""
    quantkit.convert(checkpoint("glm-5.2-fp8_block"), tmp_path / "int4")
    shard = min((tmp_path / "int4").glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SourceError, match=f"{shard.name} has another sha256 than quantkit.json says"):
        folding.fold(tmp_path / "int4", named("glm-5.2", **PARTS), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()

    (tmp_path / "int4" / "quantkit.json").write_text("{")
    with pytest.raises(SourceError, match=r"quantkit.json: cannot be read"):
        folding.fold(tmp_path / "int4", named("glm-5.2", **PARTS), tmp_path / "other", way=Way.COPY)

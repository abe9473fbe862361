"""`convert` refuses what is damaged or in the way, and leaves nothing half-written."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.conversion import Options
from quantkit.errors import OutputError, PlanError, QuantkitError, SourceError, UsageError
from support.checkpoints import digests

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
ATTENTION = "model.layers.1.self_attn.o_proj.weight"


def _nan_in_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT].view(torch.uint8)[100, 17] = 0x7F


def _nan_in_attention(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ATTENTION].view(torch.uint8)[3, 5] = 0xFF


def _tiny_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}_scale_inv"][0, 1] = 1e-40


def _nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{ATTENTION}_scale_inv"][1, 0] = float("nan")


def _no_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERT}_scale_inv"]


def _floor_grid(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_nan_in_expert, EXPERT),
        (_nan_in_attention, ATTENTION),
        (_tiny_scale, f"{EXPERT}_scale_inv"),
        (_nan_scale, f"{ATTENTION}_scale_inv"),
        (_no_scale, EXPERT),
        (_floor_grid, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"),
    ],
)
def test_damaged_source_is_refused_by_name(
    make_toy: Callable[..., Path], tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    """A NaN, an unsound or missing scale and a grid one row short are refused, and no folder that loads is left."""
    with pytest.raises(SourceError) as caught:
        quantkit.convert(make_toy(damage), tmp_path / "out")

    assert named in str(caught.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_existing_output_is_refused(toy: Path, tmp_path: Path) -> None:
    """A folder with anything in it is left alone, even with overwrite if it is not quantkit's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("the only copy")

    for overwrite in (False, True):
        with pytest.raises(OutputError, match="out"):
            quantkit.convert(toy, tmp_path / "out", overwrite=overwrite)
    assert digests(tmp_path / "out").keys() == {"thesis.txt"}


def test_overwrite_keeps_the_old_output_until_the_plan_has_passed(toy: Path, tmp_path: Path) -> None:
    """An output of quantkit is replaced on request, but not by a run that is refused."""
    quantkit.convert(toy, tmp_path / "out", "bf16")
    before = digests(tmp_path / "out")
    with pytest.raises(QuantkitError):
        quantkit.convert(tmp_path / "missing", tmp_path / "out", overwrite=True)
    with pytest.raises(UsageError):
        quantkit.convert(toy, tmp_path / "out", "bf16", options=Options(group_size=32), overwrite=True)
    assert digests(tmp_path / "out") == before

    quantkit.convert(toy, tmp_path / "out", overwrite=True)

    assert quantkit.verify(tmp_path / "out", toy).passed


@pytest.mark.parametrize("place", [".", "inside", "..", "link"])
def test_output_that_overlaps_the_source_is_refused(make_toy: Callable[..., Path], tmp_path: Path, place: str) -> None:
    """The output may not be the source, lie inside it, hold it, or be a link to it; the source stays as it was."""
    source = make_toy(name="nest/toy")
    (source / "quantkit.json").write_text("{}")
    (tmp_path / "link").symlink_to(source)
    before = digests(source)

    with pytest.raises(OutputError):
        quantkit.convert(source, tmp_path / "link" if place == "link" else source / place, overwrite=True)

    assert digests(source) == before


def test_converted_source_is_refused(toy_int4: Path, tmp_path: Path) -> None:
    """An INT4 checkpoint is not converted again."""
    with pytest.raises(PlanError, match="already converted"):
        quantkit.convert(toy_int4, tmp_path / "out")


def test_failed_run_leaves_nothing_that_loads(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up gives an error with the file and a hint, and no partial file has a final name."""
    calls = []
    write = os.write

    def full(file: int, data: memoryview) -> int:
        calls.append(file)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("quantkit.checkpoint.writer.os.write", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        quantkit.convert(toy, tmp_path / "out", workers=1)

    assert caught.value.hint
    assert "model-0000" in str(caught.value)
    assert not (tmp_path / "out" / "config.json").exists()
    for path in (tmp_path / "out").glob("*.safetensors"):
        load_file(path)
    monkeypatch.undo()
    quantkit.convert(toy, tmp_path / "out", overwrite=True)
    assert quantkit.verify(tmp_path / "out", toy).passed


def test_full_disk(toy: Path, tmp_path: Path) -> None:
    """On a file system that is really full the run is refused or breaks off with an error, and nothing loads."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        with pytest.raises(OutputError, match="free"):
            quantkit.convert(toy, tmp_path / "out")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quantkit.checkpoint.writer._check_space", lambda *_: None)
            with pytest.raises(OutputError, match="No space left") as caught:
                quantkit.convert(toy, tmp_path / "out")
        assert caught.value.hint
        assert not (tmp_path / "out" / "config.json").exists()
        for path in (tmp_path / "out").glob("*.safetensors"):
            load_file(path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_too_small_a_disk_is_refused_at_once(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space is checked before anything is written."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)

    with pytest.raises(OutputError, match="free"):
        quantkit.convert(toy, tmp_path / "out")
    assert not (tmp_path / "out").exists()

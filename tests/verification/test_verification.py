"""`verify`: a sound conversion passes, and each kind of damage fails the check that is meant for it, by name."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import SourceError
from quantkit.verification.report import Verification

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
NORM = "model.layers.1.input_layernorm.weight"
ATTENTION = "model.layers.1.self_attn.o_proj"


@pytest.fixture
def copy(toy_int4: Path, tmp_path: Path) -> Path:
    """A conversion of the toy that may be damaged."""
    return Path(shutil.copytree(toy_int4, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], holding: str) -> None:
    """Rewrite the shard that holds the tensor `holding`, manifest kept in step, so that only values are wrong."""
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][holding]
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard, metadata={"format": "pt"})
    record(folder, shard)


def record(folder: Path, file: str) -> None:
    """Write the file's true size and sha256 into the manifest."""
    manifest = json.loads((folder / "quantkit.json").read_text())
    data = (folder / file).read_bytes()
    manifest["files"][file] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "quantkit.json").write_text(json.dumps(manifest))


def edit_json(folder: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file, manifest kept in step."""
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    record(folder, file)


def failed(result: Verification) -> dict[str, str]:
    """The checks that found something, with their examples in one string."""
    assert result.passed == (not [check for check in result.checks if check.problems])
    return {check.name: "; ".join(check.examples) for check in result.checks if check.problems}


def test_sound_conversion_passes(toy: Path, toy_int4: Path) -> None:
    """All checks are made, none finds anything, and every changed weight has an error near that of 4-bit rounding."""
    result = quantkit.verify(toy_int4, toy)

    assert failed(result) == {}
    assert [check.name for check in result.checks if check.problems is None] == []
    assert {error.role for error in result.errors} == {"kv_b", "routed_expert"}
    experts = next(error for error in result.errors if error.role == "routed_expert" and error.mtp)
    assert experts.weights == 12
    assert 0.08 < experts.relative_rms < 0.09
    assert len(result.worst) == 10
    assert result.worst[0].relative_rms == max(error.worst_relative_rms for error in result.errors)


def test_without_source_the_folder_alone_is_checked(toy_int4: Path) -> None:
    """Without --against there are no errors to report, and the other checks are made."""
    result = quantkit.verify(toy_int4)

    assert result.passed
    assert {check.name for check in result.checks} == {"manifest", "headers", "index", "config", "engines", "values"}
    assert result.errors == ()


def test_flipped_byte_fails_the_manifest(toy: Path, copy: Path) -> None:
    """A single changed byte in a shard is found by sha256, and the file named."""
    path = copy / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    assert "model-00001-of-00002.safetensors has another sha256" in failed(quantkit.verify(copy))["manifest"]


@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_missing_file_fails_the_manifest(copy: Path, file: str) -> None:
    """A file of the manifest that is gone is named."""
    (copy / file).unlink()

    assert file in failed(quantkit.verify(copy))["manifest"]


def test_truncated_shard_fails_the_headers(copy: Path) -> None:
    """A shard that is shorter than its header says is named, and verify ends with a result, not with an exception."""
    path = copy / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    assert path.name in failed(quantkit.verify(copy))["headers"]


def test_stray_shard_is_found(copy: Path) -> None:
    """Weights of an earlier run that no index names are reported: some loaders read every file."""
    save_file({NORM: torch.zeros(4)}, copy / "model-00003-of-00003.safetensors")

    problems = failed(quantkit.verify(copy))
    assert "model-00003-of-00003.safetensors" in problems["manifest"]
    assert NORM in problems["index"]


def test_wrong_total_size_is_found(copy: Path) -> None:
    """The index's total_size must be the sum of the tensors' bytes."""
    edit_json(copy, "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=1))

    assert "total_size is 1" in failed(quantkit.verify(copy))["index"]


def test_interrupted_run_is_found(copy: Path) -> None:
    """A work folder says that a conversion did not end; one with nothing but the lock of a run that has, does not."""
    (copy / ".quantkit").mkdir()
    (copy / ".quantkit" / ".lock").touch()
    assert quantkit.verify(copy).passed

    (copy / ".quantkit" / "journal.jsonl").write_text("{}\n")
    assert "interrupted" in failed(quantkit.verify(copy))["manifest"]


def _drop_ignore(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].remove(r"re:.*self_attn\.kv_b_proj$")


def _drop_fp8_group(config: dict[str, Any]) -> None:
    del config["quantization_config"]["config_groups"]["group_1"]


def _other_group_size(config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64


def _no_quantization(config: dict[str, Any]) -> None:
    del config["quantization_config"]


@pytest.mark.parametrize("change", [_drop_ignore, _drop_fp8_group, _other_group_size, _no_quantization])
def test_config_that_does_not_predict_the_tensors_is_found(
    copy: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """A config whose groups, group size or ignore list do not give the tensors on disk fails, naming a module."""
    edit_json(copy, "config.json", change)

    assert "model.layers" in failed(quantkit.verify(copy))["config"]


def _nan_in_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM][3] = float("nan")


def _infinite_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.weight_scale"][0, 0] = float("inf")


def _zero_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.weight_scale"][0, 0] = 0.0


def _negative_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.weight_scale"][0, 0] *= -1


def _fp8_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{ATTENTION}.weight"].view(torch.uint8)[0, 0] = 0x7F


def _zero_block_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{ATTENTION}.weight_scale"][0, 0] = 0.0


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.weight_shape"][0] = 127


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_nan_in_norm, NORM),
        (_infinite_scale, f"{EXPERT}.weight_scale"),
        (_zero_scale, f"{EXPERT}.weight_scale"),
        (_negative_scale, f"{EXPERT}.weight_scale"),
        (_fp8_nan, f"{ATTENTION}.weight"),
        (_zero_block_scale, f"{ATTENTION}.weight_scale"),
        (_wrong_shape, f"{EXPERT}.weight_shape"),
    ],
)
def test_unsound_values_are_found(copy: Path, change: Callable[[dict[str, torch.Tensor]], None], name: str) -> None:
    """A NaN, an infinity, an unsound scale and a wrong weight_shape fail the values, naming the tensor."""
    edit(copy, change, name)

    problems = failed(quantkit.verify(copy))
    assert problems.keys() == {"values"}
    assert name in problems["values"]


def _wrong_code(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.weight_packed"][5, 5] ^= 0x1000


def _changed_copy(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM][0] += 1


def _wrong_decoding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.kv_b_proj.weight"][0, 0] += 0.01


@pytest.mark.parametrize(
    ("change", "name", "check"),
    [
        (_wrong_code, f"{EXPERT}.weight_packed", "codes"),
        (_wrong_decoding, "model.layers.1.self_attn.kv_b_proj.weight", "codes"),
        (_changed_copy, NORM, "copies"),
    ],
)
def test_differences_from_the_source_are_found(
    toy: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], None], name: str, check: str
) -> None:
    """One code that is not nearest, one wrongly decoded number and one changed copy are found by comparing."""
    edit(copy, change, name)

    assert quantkit.verify(copy).passed
    problems = failed(quantkit.verify(copy, toy))
    assert problems.keys() == {check}
    assert name in problems[check]


def test_lost_and_added_weights_are_found(toy: Path, copy: Path) -> None:
    """A weight of the source that is not there, and one that the source does not have, are named."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.input_layernorm.weight"] = tensors.pop(NORM)

    edit(copy, rename, NORM)

    def move(index: dict[str, Any]) -> None:
        index["weight_map"]["model.layers.9.input_layernorm.weight"] = index["weight_map"].pop(NORM)

    edit_json(copy, "model.safetensors.index.json", move)

    assert NORM in failed(quantkit.verify(copy, toy))["accounted for"]
    assert "layers.9" in failed(quantkit.verify(copy, toy))["accounted for"]


def test_scale_without_weight_is_found(toy: Path, copy: Path) -> None:
    """A packed weight without its scale fails the headers, and the other checks are still made."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.weight_scale"]

    edit(copy, drop, f"{EXPERT}.weight_scale")
    edit_json(copy, "model.safetensors.index.json", lambda index: index["weight_map"].pop(f"{EXPERT}.weight_scale"))

    assert f"{EXPERT}.weight_scale" in failed(quantkit.verify(copy, toy))["headers"]


def test_checkpoint_of_another_tool_is_verified_too(toy: Path) -> None:
    """Without a manifest that check is skipped, with the reason, and the rest is made."""
    checks = {check.name: check for check in quantkit.verify(toy).checks}

    assert checks["manifest"].problems is None
    assert "quantkit.json" in checks["manifest"].note
    assert checks["values"].problems == 0


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    """There is nothing to verify in a folder that does not exist."""
    with pytest.raises(SourceError, match="no such folder"):
        quantkit.verify(tmp_path / "nothing")

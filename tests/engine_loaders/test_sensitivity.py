"""The comparison sees a single number: a checkpoint with one bit changed is held against the files without it."""

import json
import shutil
from pathlib import Path

import pytest

from engine_loaders.jobs import Job, Report
from engine_loaders.outputs import Outputs
from engine_loaders.running import LOADERS, Engines

TOY = "glm-5.2-fp8_block"
_WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}
E = "model.layers.1.mlp.experts"
FLIPS = {  # what is changed -> way, tensor, and how the engines' names of the module end
    "an INT4 code": ("int4", f"{E}.2.up_proj.weight_packed", "[2].up"),
    "an INT4 scale": ("int4", f"{E}.3.down_proj.weight_scale", "[3].down"),
    "an FP8 code": ("int4", "model.layers.0.self_attn.o_proj.weight", ".o_proj"),
    "an FP8 scale": ("int4", "model.layers.0.mlp.up_proj.weight_scale", ".gate_up_proj"),
    "a plain number": ("int4", "model.norm.weight", "model.norm"),
    "a bias of the router": ("int4", "model.layers.1.mlp.gate.e_score_correction_bias", ".e_score_correction_bias"),
    "an NVFP4 code": ("nvfp4", f"{E}.0.gate_proj.weight_packed", "[0].gate"),
    "an NVFP4 scale": ("nvfp4", f"{E}.1.gate_proj.weight_scale", "[1].gate"),
    "a code of ModelOpt's": ("modelopt", f"{E}.1.down_proj.weight", "[1].down"),
    "a scale of ModelOpt's": ("modelopt", f"{E}.1.down_proj.weight_scale", "[1].down"),
}


def flip(folder: Path, tensor: str) -> None:
    """Change the lowest bit of the highest byte of the first number of a tensor."""
    shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    content = bytearray(shard.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:begin])[tensor]
    content[begin + entry["data_offsets"][0] + _WIDTHS[entry["dtype"]] - 1] ^= 1
    shard.write_bytes(content)


@pytest.fixture(scope="module")
def flipped(
    engines: Engines, outputs: Outputs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Report]]:
    """The reports by engine and by what is changed."""
    place, jobs = tmp_path_factory.mktemp("flipped"), {}
    for number, (what, (way, tensor, _)) in enumerate(FLIPS.items()):
        original = outputs.output(TOY, way)
        assert original is not None
        flip(shutil.copytree(original, place / str(number)), tensor)
        jobs[what] = Job(str(place / str(number)), against=str(original))
    reports = engines.load(dict.fromkeys(LOADERS, jobs.values()))
    return {engine: {what: found[job] for what, job in jobs.items()} for engine, found in reports.items()}


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize("what", FLIPS)
def test_one_bit_is_seen(flipped: dict[str, dict[str, Report]], what: str, engine: str) -> None:
    """One module is wrong, the one that holds the number, and nothing else is said of the model."""
    report = flipped[engine][what]

    assert report.modules > 30
    assert not report.right
    assert len(report.wrong) == 1, report.fault
    assert report.wrong[0].partition(" (")[0].endswith(FLIPS[what][2])
    assert (report.stopped, report.unwritten, report.not_taken) == ("", [], [])

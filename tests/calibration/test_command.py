"""`quantkit calibrate`: files, tables and picture, exit codes, and options that do not go together."""

import builtins
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibration import CalibrationReport
from quantkit.calibration.run import REPORT_FILE, SCALES_FILE
from quantkit.checkpoint.source import open_source
from quantkit.families.config import read_config
from quantkit.runtime.scales import KvScaleFile, read_scale_file, scales_by_layer
from quantkit.weights.identity import identify
from support.program import Runner
from support.reference import write_numbers
from support.runnable import write_runnable

pytestmark = pytest.mark.usefixtures("one_thread")

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(quantkit: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    """Runs `quantkit calibrate` in an empty folder: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(quantkit, "calibrate")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples of tokens."""
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    tokens = torch.randint(3, 99, (2, 60), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in tokens))
    return path


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi whose first layer keeps latents of about .004 and roped keys beyond 448, and computes the same."""
    folder = tmp_path_factory.mktemp("hard")
    model = write_numbers(write_runnable(folder / "packed", "kimi-k2.5-int4"), folder / "hard")
    tensors = load_file(model / "model.safetensors")
    prefix = "language_model.model.layers.0.self_attn."
    for name, factor in (("kv_a_layernorm", 0.004), ("kv_b_proj", 1 / 0.004)):
        tensors[f"{prefix}{name}.weight"] *= factor
    tensors[f"{prefix}kv_a_proj_with_mqa.weight"][128:] *= 3000
    tensors[f"{prefix}q_b_proj.weight"].view(2, 80, -1)[:, 48:] /= 3000
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_scales_that_the_runtime_takes(run: Runner, hard: Path, data: Path, tmp_path: Path) -> None:
    """One layer gets scales for its parts, the other one nothing; the file names every layer and can be read."""
    code, out, err = run(hard, "--kv", "fp8", "--data", data, "--tokens", "120", "-o", "out", "--plot", "p.png")

    assert code == 0
    assert "nothing to do" in out
    assert "2 up to 64" not in out  # packed: one sequence
    assert "1 up to 128" in out
    assert "one scale for the whole row (k_scale) has up to" in err
    assert (tmp_path / "p.png").read_bytes()[:8] == PNG
    report = CalibrationReport.from_json((tmp_path / "out" / REPORT_FILE).read_text())
    first, second = report.layers
    assert report.losing == (first,)
    assert first.verdict.startswith("latent 1/")
    assert first.verdict in out
    assert (first.attention, second.scales) == ("language_model.model.layers.0.self_attn", {})
    scales = scales_by_layer(read_config(open_source(hard)), read_scale_file(tmp_path / "out" / SCALES_FILE), "file")
    assert (scales.layers[0].latent, scales.layers[0].rope) == (first.scales["latent"], first.scales["rope"])
    assert (scales.layers[1].key, scales.layers[1].latent) == (1.0, ())
    assert scales.layers[0].key == first.row_scale
    written = KvScaleFile.from_json((tmp_path / "out" / SCALES_FILE).read_text())
    assert written.model == identify(open_source(hard))


def test_check_writes_nothing(run: Runner, hard: Path, glm_tiny: Path, data: Path, tmp_path: Path) -> None:
    """Exit code 3 names the layer that loses at scale 1; 0 where none does."""
    code, out, err = run(hard, "--kv", "fp8", "--data", data, "--tokens", "120", "--check", "--json")
    assert code == 3
    assert json.loads(out)["kind"] == "CalibrationReport"
    assert "at scale 1 loses in 1 layers: 0 (latent" in err
    code, out, err = run(glm_tiny, "--kv", "fp8", "--tokens", "200", "--check")
    assert code == 0
    assert "not run" in out
    assert "layer 4, for multi-token prediction" in out
    assert not list(tmp_path.iterdir())


def test_folder_by_default(run: Runner, glm_tiny: Path, data: Path, tmp_path: Path) -> None:
    """Without -o the folder has the model's name; a second run does not replace it unasked."""
    arguments = (glm_tiny, "--tokens", "120", "--data", data, "--rows", "--dtype", "bfloat16", "--per-channel")
    assert run(*arguments)[0] == 0
    folder = tmp_path / "glm-tiny-fp8-kv-fp8"
    assert sorted(path.name for path in folder.iterdir()) == [REPORT_FILE, SCALES_FILE]
    report = json.loads((folder / REPORT_FILE).read_text())
    assert (report["dtype"], report["data"]["sequences"], report["held_bytes"]) == ("bfloat16", 2, 2 * 120 * 256)
    code, _, err = run(*arguments)
    assert code == 1
    assert "holds scales already" in err
    assert run(*arguments, "--overwrite")[0] == 0


def test_llama(run: Runner, llama_folder: Path, tmp_path: Path) -> None:
    """GQA: a scale for keys and one for values in each layer, and none by channel."""
    assert run(llama_folder, "--tokens", "300", "-o", "out")[0] == 0
    names = read_scale_file(tmp_path / "out" / SCALES_FILE)
    assert list(names) == [f"model.layers.{layer}.self_attn.{letter}_scale" for layer in range(2) for letter in "kv"]
    code, _, err = run(llama_folder, "--tokens", "300", "--per-channel", "--check")
    assert code == 2
    assert "MLA" in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--kv", "int8"), 2, "only fp8"),
        (("--dtype", "float16"), 2, "--dtype float16"),
        (("--check", "-o", "x"), 2, "--check writes nothing"),
        (("--resume", "--overwrite"), 2, "exclude each other"),
        (("--memory", "many"), 2, "--memory many"),
        (("--memory", "100KiB"), 2, "needs"),
        (("--device", "cuda"), 2, "torch sees no GPU"),
        (("--device", "abacus"), 2, "no device"),
        (("--length", "5000"), 2, "the model takes 2,048"),
        (("--tokens", "99999999"), 1, "tokens, and 99,999,999 are asked for"),
        (("--data", "none.txt"), 1, "none.txt"),
        (("--plot", "no/such/folder.png"), 1, "there is no folder"),
    ],
)
def test_refusals(
    run: Runner, glm_tiny: Path, tmp_path: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    """What cannot be done is said before anything is written."""
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    left, out, err = run(glm_tiny, *options)

    assert left == code
    assert message in err
    assert not out
    assert not list(tmp_path.iterdir())


def test_plot_is_optional(run: Runner, glm_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib --plot says what to install, before the model is read."""
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = run(glm_tiny, "--plot", "p.png")

    assert code == 1
    assert "quantkit[plot]" in err
    assert not list(tmp_path.iterdir())

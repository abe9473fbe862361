"""What options of `convert` change, and what workers, pieces and shards do not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import quantkit
from quantkit.choices import Mtp, Rest, ScaleMethod
from quantkit.conversion import Options
from quantkit.formats import fp8_block
from support.checkpoints import digests, load, same

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("group_size", [64, 128])
def test_group_size_option(toy: Path, tmp_path: Path, group_size: int) -> None:
    """--group-size changes the scales' number and the config, and verify agrees."""
    quantkit.convert(toy, tmp_path / "out", options=Options(group_size=group_size))

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == group_size
    assert load(tmp_path / "out")[f"{EXPERT}_scale"].shape == (128, 256 // group_size)
    assert quantkit.verify(tmp_path / "out", toy).passed


def test_scale_option_lowers_the_error(toy: Path, tmp_path: Path) -> None:
    """On Gaussian weights search has at most .87 of plain rounding's squared error and signed search at most .75; each
    passes verify, and the manifest says which it was."""
    errors = {}
    for method in ScaleMethod:
        manifest = quantkit.convert(toy, tmp_path / method, options=Options(scale=method))
        result = quantkit.verify(tmp_path / method, toy)
        assert result.passed
        assert manifest.recipe["rules"][0]["scale"] == method
        errors[method] = next(error.relative_rms**2 for error in result.errors if error.role == "routed_expert")

    assert errors[ScaleMethod.SEARCH] <= 0.87 * errors[ScaleMethod.MINMAX]
    assert errors[ScaleMethod.SIGNED] <= 0.75 * errors[ScaleMethod.MINMAX]
    scales = load(tmp_path / "signed")[f"{EXPERT}_scale"]
    assert 0.3 < (scales < 0).float().mean() < 0.7


def test_mtp_keep(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """--mtp keep leaves the MTP layer's experts as the rest is, with a config that each engine resolves to that."""
    source, default = load(toy), load(toy_int4)
    for rest in Rest:
        quantkit.convert(toy, tmp_path / rest, options=Options(mtp=Mtp.KEEP, rest=rest))
        output = load(tmp_path / rest)
        name = "model.layers.3.mlp.experts.1.up_proj.weight"
        decoded = fp8_block.dequantize(source[name], source[f"{name}_scale_inv"])
        assert same(output[name], source[name] if rest is Rest.FP8 else decoded)
        assert same(output[f"{EXPERT}_packed"], default[f"{EXPERT}_packed"])
        assert quantkit.verify(tmp_path / rest, toy).passed


def test_mtp_drop(toy: Path, tmp_path: Path) -> None:
    """--mtp drop leaves out exactly the MTP layer's tensors, sets the config's count to 0, and verify knows of it."""
    quantkit.convert(toy, tmp_path / "out", "bf16", options=Options(mtp=Mtp.DROP))

    kept = {name for name in load(toy) if not name.endswith("_scale_inv") and ".layers.3." not in name}
    assert load(tmp_path / "out").keys() == kept
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (toy, tmp_path / "out"))
    del before["quantization_config"]
    assert after == before | {"num_nextn_predict_layers": 0}
    assert quantkit.verify(tmp_path / "out", toy).passed


def test_rest_option_equals_the_recipe(toy: Path, tmp_path: Path) -> None:
    """--rest bf16 gives the tensors of the recipe with a BF16 rest."""
    quantkit.convert(toy, tmp_path / "option", options=Options(rest=Rest.BF16))
    quantkit.convert(toy, tmp_path / "recipe", "glm-5.2-int4-bf16rest")

    shards = [name for name in digests(tmp_path / "option") if name.endswith(".safetensors")]
    assert len(shards) == 2
    for name in (*shards, "config.json", "model.safetensors.index.json"):
        assert digests(tmp_path / "option")[name] == digests(tmp_path / "recipe")[name]


def test_bytes_do_not_depend_on_workers(toy: Path, toy_int4: Path, tmp_path: Path) -> None:
    """One, two and five threads write the same shards."""
    for workers in (1, 5):
        quantkit.convert(toy, tmp_path / str(workers), workers=workers)
        ours, theirs = digests(tmp_path / str(workers)), digests(toy_int4)
        assert {name: digest for name, digest in ours.items() if name != "quantkit.json"} == {
            name: digest for name, digest in theirs.items() if name != "quantkit.json"
        }


def test_pieces_do_not_change_bytes(toy: Path, toy_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cut into many pieces at block borders come out as if read whole."""
    monkeypatch.setattr("quantkit.weights.rows.PIECE_BYTES", 20_000)

    quantkit.convert(toy, tmp_path / "out")

    shards = {name: digest for name, digest in digests(toy_int4).items() if name.endswith(".safetensors")}
    assert shards.items() <= digests(tmp_path / "out").items()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_source_sharding_does_not_matter(
    make_toy: Callable[..., Path], toy_int4: Path, tmp_path: Path, num_shards: int
) -> None:
    """The same tensors come out wherever weights and scales lie."""
    quantkit.convert(make_toy(num_shards=num_shards), tmp_path / "out")

    ours, theirs = load(tmp_path / "out"), load(toy_int4)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)


@pytest.mark.exhaustive
def test_many_shards_need_few_open_files(make_toy: Callable[..., Path], toy_int4: Path, tmp_path: Path) -> None:
    """A checkpoint in 100 shards converts, and verifies, with 64 open files allowed."""
    source = make_toy(num_shards=100)
    program = (
        "import resource, sys, quantkit; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "quantkit.convert(sys.argv[1], sys.argv[2]); sys.exit(not quantkit.verify(sys.argv[2], sys.argv[1]).passed)"
    )

    subprocess.run([sys.executable, "-c", program, source, tmp_path / "out"], check=True)

    ours, theirs = load(tmp_path / "out"), load(toy_int4)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)

"""The benchmarks' own tools: the made-up checkpoint, the timers, and what the ways of choosing INT4 scales lose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit.checkpoint.source import open_source
from quantkit.choices import ScaleMethod
from quantkit.eval.bench import peers
from quantkit.eval.bench.conversion_speed import (
    drop_caches,
    make_source,
    time_conversion,
    time_process,
    time_reading_and_writing,
)
from quantkit.eval.bench.scale_error import (
    PEER_COLUMNS,
    Fp8Weight,
    gaussian_weight,
    nvfp4_errors,
    routed_experts,
    squared_errors,
    table_row,
)
from quantkit.naming import Role
from quantkit.weights.encodings import INT4
from quantkit.weights.grouping import read_weights
from support.paths import GLM_TINY

LARGEST_RATIO = {
    ScaleMethod.SEARCH: {32: 0.87, 64: 0.87, 128: 0.87},
    ScaleMethod.SIGNED: {32: 0.75, 64: 0.77, 128: 0.77},
}


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The smallest made-up checkpoint, of one layer with one routed expert, and the size that its maker reports."""
    folder = tmp_path_factory.mktemp("bench") / "source"
    return folder, make_source(folder, 1)


@pytest.mark.exhaustive
def test_made_up_size_is_exact(made_up: tuple[Path, int]) -> None:
    """The reported size is that of the tensors on the disk."""
    folder, nbytes = made_up

    assert open_source(folder).nbytes == nbytes


@pytest.mark.exhaustive
def test_made_up_experts_have_their_real_shapes(made_up: tuple[Path, int]) -> None:
    """Gate and up are 2048 x 6144, down is 6144 x 2048, as in GLM-5.2."""
    weights = read_weights(open_source(made_up[0]))

    experts = {w.module.rpartition(".")[2]: w.shape for w in weights if w.name.role is Role.ROUTED_EXPERT}
    assert experts == {"gate_proj": (2048, 6144), "up_proj": (2048, 6144), "down_proj": (6144, 2048)}


@pytest.mark.exhaustive
def test_made_up_checkpoint_converts_and_verifies(made_up: tuple[Path, int], tmp_path: Path) -> None:
    """The random numbers are a checkpoint like any other."""
    quantkit.convert(made_up[0], tmp_path / "int4")

    assert quantkit.verify(tmp_path / "int4", against=made_up[0]).passed
    assert peers.count_4bit_weights(tmp_path / "int4") == 3


@pytest.mark.exhaustive
def test_conversion_is_timed_and_cleared_away(made_up: tuple[Path, int], tmp_path: Path) -> None:
    """A timed conversion has a time and a peak memory, and leaves only its log."""
    timing = time_conversion(made_up[0], tmp_path / "output", ("--int4",))

    assert timing.seconds > 0
    assert timing.peak_bytes > 20e6
    assert [path.name for path in tmp_path.iterdir()] == ["output.log"]


def test_reading_and_writing_is_timed_and_cleared_away(made_up: tuple[Path, int], tmp_path: Path) -> None:
    """More bytes than the input has can be written; nothing stays."""
    timing = time_reading_and_writing(made_up[0], tmp_path / "copy", 2 * made_up[1])

    assert timing.seconds > 0
    assert not list(tmp_path.iterdir())


def test_peak_memory_is_the_process_own(tmp_path: Path) -> None:
    """What the benchmark itself holds does not count as the memory of what it starts."""
    (tmp_path / "source").mkdir()
    held = bytearray(os.urandom(4096)) * 50_000

    timing = time_process(tmp_path / "source", tmp_path / "output", ["this", "--help"])

    assert timing.peak_bytes < len(held) / 2


def test_failed_process_says_why(tmp_path: Path) -> None:
    """A process that fails is not a time; the end of what it said is in the error."""
    (tmp_path / "source").mkdir()

    with pytest.raises(RuntimeError, match="No module named no_such_module"):
        time_process(tmp_path / "source", tmp_path / "output", ["no_such_module"])


def test_dropping_caches_keeps_files(tmp_path: Path) -> None:
    """Files are as they were after their pages were dropped."""
    (tmp_path / "shard").write_bytes(b"abc")

    drop_caches(tmp_path)

    assert (tmp_path / "shard").read_bytes() == b"abc"


@pytest.fixture(scope="module", params=["gaussian", "fixture"])
def weights(request: pytest.FixtureRequest) -> list[Fp8Weight]:
    """Gaussian weights in FP8, and the trained fixture's routed experts."""
    return [gaussian_weight(512, 2048)] if request.param == "gaussian" else routed_experts(GLM_TINY)


@pytest.mark.parametrize("group_size", INT4.group_sizes)
def test_search_and_signed_beat_minmax(
    weights: list[Fp8Weight], group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Squared errors relative to amax / 7.5 are at most what the README promises."""
    monkeypatch.setattr(peers, "installed", lambda _: False)

    errors = squared_errors(weights, group_size)

    for method, largest in LARGEST_RATIO.items():
        assert errors[method] <= largest[group_size] * errors[ScaleMethod.MINMAX], method


@pytest.mark.skipif(not peers.installed("llm-compressor"), reason="llm-compressor is not installed")
@pytest.mark.parametrize("group_size", INT4.group_sizes)
def test_search_and_signed_beat_the_peers_search(weights: list[Fp8Weight], group_size: int) -> None:
    """Squared errors are never above those of llm-compressor's memoryless_mse on the same weights."""
    errors = squared_errors(weights, group_size)

    assert max(errors[ScaleMethod.SEARCH], errors[ScaleMethod.SIGNED]) <= errors["memoryless_mse"]


def test_searched_nvfp4_scales_lose_less(weights: list[Fp8Weight]) -> None:
    """The search for NVFP4's block scales takes a fifth and more off the squared error of plain rounding."""
    errors = nvfp4_errors(weights)

    assert errors[ScaleMethod.SEARCH] <= 0.8 * errors[ScaleMethod.MINMAX]


def test_table_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where llm-compressor is not installed the table says so."""
    monkeypatch.setattr(peers, "installed", lambda _: False)

    row = table_row("small", [gaussian_weight(128, 128)], 32)

    assert row.startswith("| small | 32 | 1.0000 | 0.")
    assert row.count("not installed") == len(PEER_COLUMNS)


@pytest.mark.exhaustive
def test_peer_that_is_not_installed_fails_by_name() -> None:
    """Loading a peer that is missing ends with the name of the module, which the benchmark gives as its reason."""
    script = "import sys; sys.modules['auto_round'] = None; sys.argv = ['peers', 'auto-round']; import runpy; "
    script += "runpy.run_module('quantkit.eval.bench.peers', run_name='__main__')"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert result.returncode
    assert "auto_round" in result.stderr.splitlines()[-1]

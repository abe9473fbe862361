"""One layer at a time gives what the whole model gives, whatever is held in memory and wherever a run was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration import DataOptions, Options, calibrate
from quantkit.calibration.budget import Budget, plan_memory
from quantkit.calibration.run import REPORT_FILE, SCALES_FILE
from quantkit.calibration.streaming import LayerStream
from quantkit.checkpoint.source import open_source
from quantkit.errors import OutputError, UsageError
from quantkit.models import PlainCache, load
from quantkit.models.loading import LayerReader, open_layers
from support.reference import reference_logits, reference_model, write_numbers
from support.runnable import Checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (40, 7, 23, 16)  # sparse attention selects 16
SMALL = Budget(chunk=16, block=32, held=30, largest_layer=0)
FAMILIES = [
    "glm-5.2-fp8_block",
    "glm-5.1-fp8_block",
    "glm-4.5-fp8_channel",
    "glm-4.7-flash-bf16",
    "deepseek-v3-fp8_block",
    "deepseek-v3.2-fp8_block",
    "kimi-k2.5-int4",
    "llama-tied-bf16",
]


def sequences() -> list[list[int]]:
    """Random tokens of the tiny families."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in LENGTHS]


def hidden(reader: LayerReader, tokens: Sequence[Sequence[int]], folder: Path, budget: Budget) -> torch.Tensor:
    """Hidden states of all tokens after the last layer."""
    folder.mkdir(exist_ok=True)
    stream = LayerStream(reader, tokens, folder, budget)
    for _ in range(reader.config.layers):
        stream.run()
        stream.keep()
        stream.advance()
    states = stream.states.read(0, sum(map(len, tokens)))
    stream.close()
    assert not list(folder.iterdir())
    return states


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_the_whole_models(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    """Through the decoder's norm they are what all layers at once give, and through its head transformers' logits.

    Sequences longer and shorter than a chunk and a selection, in groups, most rows on disk; shared selections too.
    """
    tokens, folder = sequences(), checkpoint(name)
    decoder = load(folder, torch.float32)

    streamed = decoder.norm(hidden(open_layers(open_source(folder)), tokens, tmp_path / "states", SMALL))

    whole = torch.cat([decoder.forward(torch.tensor(row), torch.arange(len(row)), PlainCache()) for row in tokens])
    assert (streamed - whole).abs().max() < 1e-5 * whole.abs().max()
    expected = reference_logits(reference_model(write_numbers(folder, tmp_path / "numbers")), torch.tensor(tokens[0]))
    logits = decoder.logits(streamed[: LENGTHS[0]])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_memory_changes_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Held in part, as a whole or not at all, hidden states are the same bit for bit."""
    reader = open_layers(open_source(checkpoint("glm-5.2-fp8_block")))

    found = [hidden(reader, sequences(), tmp_path, replace(SMALL, held=held)) for held in (0, 30, sum(LENGTHS))]

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_one_layer_is_in_memory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """When a layer is read, the one before it is gone."""
    reader = open_layers(open_source(checkpoint("kimi-k2.5-int4")))
    alive: list[weakref.ref[Any]] = []

    class Watched(LayerReader):
        def layer(self, number: int) -> Any:
            assert not [reference for reference in alive if reference() is not None]
            layer = super().layer(number)
            alive.append(weakref.ref(layer.attention))
            return layer

    watched = Watched(reader.config, reader.dtype, reader.device, reader.parts)

    hidden(watched, sequences(), tmp_path, SMALL)

    assert len(alive) == reader.config.layers


def test_memory_is_shared_out(checkpoint: Checkpoint) -> None:
    """More memory holds more rows; less makes chunks smaller; too little is an error with both sizes."""
    reader = open_layers(open_source(checkpoint("glm-5.2-fp8_block")))

    large, small = (plan_memory(reader, [2000] * 10, memory) for memory in (1 << 30, 20 << 20))
    assert large.held == 20_000
    assert 0 < small.held < 20_000
    assert small.chunk < large.chunk
    assert small.block < large.block
    with pytest.raises(UsageError, match=r"2,000 tokens .* needs [\d,]+ bytes .*--memory is 1,000") as error:
        plan_memory(reader, [2000, 2000], 1000)
    assert error.value.hint
    needed = int(error.value.hint.split()[2].removesuffix("MiB"))
    assert plan_memory(reader, [2000, 2000], needed << 20)


# --- resuming

OPTIONS = Options(DataOptions(tokens=300, length=200))
KILLED = """
import os, signal, sys
from pathlib import Path
from quantkit.calibration import DataOptions, Options, calibrate

def start(total):
    done = []
    def advance(count):
        done.append(count)
        if len(done) == 4:  # what was done before, then three layers
            os.kill(os.getpid(), signal.SIGKILL)
    return advance

options = Options(DataOptions(tokens=300, length=200))
calibrate(sys.argv[1], Path(sys.argv[2]), options, resume=True, progress=start)
"""


def report_of(folder: Path) -> dict[str, Any]:
    """The report in a folder, without how long it took."""
    report: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text())
    del report["seconds"]
    return report


@pytest.fixture(scope="module")
def killed(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that was killed after the third of four layers, which shares the second one's selection."""
    folder = tmp_path_factory.mktemp("killed") / "out"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, glm_tiny, folder], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    return folder


@pytest.mark.exhaustive
def test_a_killed_run_goes_on(killed: Path, glm_tiny: Path, tmp_path: Path) -> None:
    """kill -9 loses the layer that runs and no other; the end is the same; another run in its place is refused."""
    whole = tmp_path / "whole"
    calibrate(glm_tiny, whole, OPTIONS)
    with pytest.raises(OutputError, match="interrupted"):
        calibrate(glm_tiny, killed, OPTIONS)
    with pytest.raises(OutputError, match="differs in data"):
        calibrate(glm_tiny, killed, Options(DataOptions(tokens=299)), resume=True)
    lines = (killed / ".quantkit" / "calibration.jsonl").read_text().splitlines()
    assert [json.loads(line)["layer"] for line in lines[1:]] == [0, 1, 2]
    with (killed / ".quantkit" / "calibration.jsonl").open("a") as journal:
        journal.write('{"layer": 3, "torn')

    counts: list[int] = []
    calibrate(glm_tiny, killed, OPTIONS, resume=True, progress=lambda total: counts.append)

    assert len(counts) == 2  # what was done before, and the fourth layer
    assert report_of(killed) == report_of(whole)
    assert (killed / SCALES_FILE).read_bytes() == (whole / SCALES_FILE).read_bytes()
    assert sorted(path.name for path in killed.iterdir()) == [REPORT_FILE, SCALES_FILE]


def test_a_changed_checkpoint_is_refused(glm_tiny: Path, tmp_path: Path) -> None:
    """A run does not go on with other weights; scales that are there are replaced only when asked."""
    folder, output = shutil.copytree(glm_tiny, tmp_path / "model"), tmp_path / "out"

    def stop(total: int) -> Callable[[int], None]:
        def advance(done: int) -> None:
            raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        calibrate(folder, output, OPTIONS, progress=stop)
    os.utime(folder / "model-00001-of-00003.safetensors", ns=(0, 0))
    with pytest.raises(OutputError, match="source files"):
        calibrate(folder, output, OPTIONS, resume=True)
    report = calibrate(folder, output, OPTIONS, overwrite=True)
    assert len(report.layers) == 4
    with pytest.raises(OutputError, match="holds scales already"):
        calibrate(folder, output, OPTIONS)


def test_bfloat16(glm_tiny: Path) -> None:
    """The fast way sees the same ranges within the rounding of BF16, and chooses the same."""
    exact = calibrate(glm_tiny, None, OPTIONS)
    fast = calibrate(glm_tiny, None, replace(OPTIONS, dtype=torch.bfloat16))

    for one, other in zip(exact.layers, fast.layers, strict=True):
        assert other.range("rope").amax == pytest.approx(one.range("rope").amax, rel=0.1)
        assert other.scales == one.scales == {}

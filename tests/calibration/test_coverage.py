"""Faults of calibration as users of other tools reported them: scales frozen on the first tokens, experts that no token
reaches, hooks that see nothing, sums in too few bits, data that were not asked for."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibration import CalibrationReport, DataOptions, Options, calibrate, streaming
from quantkit.calibration.run import SCALES_FILE, scale_file
from quantkit.calibration.statistics import Spread
from quantkit.errors import CheckFailed, SourceError
from quantkit.models.moe import Moe, Router
from quantkit.runtime.scales import read_scale_file
from support.reference import write_numbers
from support.runnable import write_runnable

pytestmark = pytest.mark.usefixtures("one_thread")

PREFIX = "model.layers.0.self_attn."
LOUD = 99


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a checkpoint that `write_numbers` wrote."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(model: Path, tmp_path: Path, samples: Sequence[Sequence[int]], output: Path | None = None) -> CalibrationReport:
    """Calibrate on samples of tokens, a row for each."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"tokens": list(sample)}) + "\n" for sample in samples))
    options = DataOptions(data, tokens=sum(map(len, samples)), packed=False)
    return calibrate(model, output, Options(options))


def random_samples(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Samples without the loud token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, LOUD, (count, length), generator=generator).tolist()


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A tiny Kimi K2 Thinking in float32."""
    return write_numbers(write_runnable(tmp_path / "packed", "kimi-k2-thinking-int4"), tmp_path / "kimi")


def test_scales_are_of_all_tokens(kimi: Path, tmp_path: Path) -> None:
    """B04: the last of eight samples is eight times louder; the scale knows it, and tokens seen are those asked for."""
    samples = random_samples(8, 24)
    samples[-1][5] = LOUD

    def loud(tensors: dict[str, torch.Tensor]) -> None:  # a channel of its own for one token, in the first layer
        embedding, rows = tensors["model.embed_tokens.weight"], tensors[f"{PREFIX}kv_a_proj_with_mqa.weight"]
        embedding[:, 7] = 0
        embedding[LOUD] = 0
        embedding[LOUD, 7] = 1
        rows[128:] *= 20
        rows[128:, 7] = 100

    edit(kimi, loud)
    first = run(kimi, tmp_path, samples[:7]).layers[0]
    row = run(kimi, tmp_path, samples).layers[0].range("rope").amax
    assert row > 8 * first.range("rope").amax
    edit(kimi, lambda tensors: tensors[f"{PREFIX}kv_a_proj_with_mqa.weight"][128:].mul_(1200 / row))

    report = run(kimi, tmp_path, samples, tmp_path / "out")

    layer = report.layers[0]
    assert layer.tokens == report.data.tokens == 8 * 24
    assert layer.absmax_scales["row"] == pytest.approx(1200 / 448, rel=1e-4)
    assert layer.absmax_scales["row"] == pytest.approx(2.68, abs=0.01)
    assert 0 < layer.range("rope").clipped <= 32 / layer.range("rope").values
    assert 1200 / 112 <= layer.scales["rope"][0] <= 4 * 1200 / 112
    written = read_scale_file(tmp_path / "out" / SCALES_FILE)
    assert written == scale_file(report).scales
    assert written[f"{PREFIX}rope_scale"] == layer.scales["rope"][0]
    assert written[f"{PREFIX}k_scale"] == written[f"{PREFIX}v_scale"] == layer.row_scale
    with pytest.raises(SourceError, match="192 tokens, and 193 are asked for"):
        calibrate(kimi, None, Options(DataOptions(tmp_path / "data.jsonl", tokens=193, packed=False)))


def test_experts_that_no_token_reaches(kimi: Path, tmp_path: Path) -> None:
    """C01: they are counted and named, every scale is finite and positive, and two data sets scale the same modules."""

    def never(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.gate.e_score_correction_bias"][2] = -1000.0

    edit(kimi, never)
    reports = [run(kimi, tmp_path, random_samples(4, 24, seed)) for seed in range(2)]

    for report in reports:
        layer = report.layers[1]
        assert layer.unseen_experts == (2,)
        assert sum(layer.experts) == 2 * 4 * 24
        assert report.layers[0].experts == ()
        assert "routed experts that got no token, by layer: 1: 2" in report.warnings
        assert all(0 < scale < float("inf") for scale in scale_file(report).scales.values() if type(scale) is float)
    assert scale_file(reports[0]).scales.keys() == scale_file(reports[1]).scales.keys()


def test_observers_that_see_nothing(kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C02: experts, or attention, that go round what counts them fail the run instead of reporting zeros."""
    samples = random_samples(2, 24)
    with monkeypatch.context() as patch:

        def fused(moe: Moe, x: torch.Tensor) -> torch.Tensor:
            plain = Router(moe.router.config, moe.router.weight, moe.router.bias)
            return called(replace(moe, router=plain), x)

        called = Moe.__call__
        patch.setattr(Moe, "__call__", fused)
        with pytest.raises(CheckFailed, match="layer 1: experts were given 0 tokens of 96"):
            run(kimi, tmp_path, samples)
    with monkeypatch.context() as patch:
        patch.setattr(streaming.RecordingCache, "_note", lambda *args, **parts: None)
        patch.setattr(streaming.RecordingCache, "sample", lambda cache: None)
        with pytest.raises(SourceError, match=r"layer 0: calibration saw no values \(latent\)"):
            run(kimi, tmp_path, samples)


def test_sums_are_wide() -> None:
    """C03: 2,000 batches of 1.0 have the root mean square 1, in BF16 too; a channel of zeros is no trouble."""
    spread = Spread("latent")
    batch = torch.ones(1, 4, dtype=torch.bfloat16)
    batch[0, 3] = 0
    for _ in range(2_000):
        spread.add(batch)
    figures = spread.range()

    assert figures.values == 8_000
    assert figures.rms == pytest.approx(0.75**0.5, abs=1e-5)
    assert (figures.amax, figures.p50, figures.clipped, figures.subnormal) == (1.0, 1.0, 0.0, 0.0)
    assert spread.channels is not None
    assert spread.channels.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_few_tokens_and_dead_channels(kimi: Path, tmp_path: Path) -> None:
    """C03: three tokens and a latent channel that is always zero give finite scales, by channel too."""

    def dead(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PREFIX}kv_a_layernorm.weight"][7] = 0

    edit(kimi, dead)
    run(kimi, tmp_path, [[5, 6, 7]])
    options = Options(DataOptions(tmp_path / "data.jsonl", tokens=3), per_channel=True)

    report = calibrate(kimi, None, options)

    assert report.layers[0].range("latent").values == 3 * 128
    for layer in report.layers:
        assert all(0 < scale < float("inf") for numbers in layer.scales.values() for scale in numbers)
        assert all(loss.total < float("inf") for loss in layer.losses.values())


def test_only_real_tokens_count(kimi: Path, tmp_path: Path) -> None:
    """C04: sequences of 3, 40 and 1,000 tokens together have the statistics of their own tokens, and of no padding."""
    lengths = (3, 40, 1000)
    samples = [sample[:length] for sample, length in zip(random_samples(3, 1000), lengths, strict=True)]

    together = run(kimi, tmp_path, samples)
    apart = [run(kimi, tmp_path, [sample]) for sample in samples]

    assert together.data.lengths == {"4": 1, "64": 1, "1024": 1}
    for number, layer in enumerate(together.layers):
        for part in ("latent", "rope", "q_latent", "q_rope"):
            alone: list[Any] = [report.layers[number].range(part) for report in apart]
            assert layer.range(part).values == sum(one.values for one in alone)
            assert layer.range(part).amax == pytest.approx(max(one.amax for one in alone), rel=1e-5)
            squares = sum(one.values * one.rms**2 for one in alone)
            assert layer.range(part).rms ** 2 * layer.range(part).values == pytest.approx(squares, rel=1e-4)


def test_long_positions_are_seen(kimi: Path, tmp_path: Path) -> None:
    """C04: a sample is not cut short unless asked to be, so that what comes late counts."""
    long = random_samples(1, 1500)[0]
    report = run(kimi, tmp_path, [long])

    assert report.data.longest == 1500
    assert report.layers[0].tokens == 1500

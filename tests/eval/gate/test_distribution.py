"""Next-token distributions of two models on a text: each figure equals one that is computed token by token."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.errors import SourceError, UsageError
from quantkit.eval.gate.distribution import compare_distributions, compare_loaded
from quantkit.eval.gate.loading import Loaded, load
from quantkit.eval.gate.report import DistributionReport

NAMES = ("candidate", "baseline", "text")
WINDOW, WINDOWS = 25, 12

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text(glm_tiny: Path) -> str:
    """Some prose."""
    return (glm_tiny / "heldout.txt").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def sound(glm_tiny_converted: dict[str, Path]) -> Loaded:
    """The trained model; not to be changed."""
    return load(glm_tiny_converted["bf16"])


@pytest.fixture(scope="module")
def noisy(glm_tiny_converted: dict[str, Path]) -> Loaded:
    """The same with noise on its weights, so that it is right and wrong about other tokens."""
    made = load(glm_tiny_converted["bf16"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.model.parameters():
            weight += 0.2 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return made


@pytest.fixture(scope="module")
def report(sound: Loaded, noisy: Loaded, text: str) -> DistributionReport:
    """The noisy model as the candidate, the sound one as the baseline."""
    return compare_loaded(noisy, sound, text, names=NAMES, window=WINDOW, max_tokens=WINDOW * WINDOWS)


@pytest.fixture(scope="module")
def tokens(sound: Loaded, noisy: Loaded, text: str) -> list[dict[str, Any]]:
    """What the report has to say of each scored token, found one token at a time."""
    encoded = sound.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    found = []
    for begin in range(0, WINDOW * WINDOWS, WINDOW):
        window = encoded["input_ids"][begin : begin + WINDOW]
        with torch.inference_mode():
            both = [loaded.model(torch.tensor([window])).logits[0].double() for loaded in (sound, noisy)]
        for position in range(1, WINDOW):
            p, q = (logits[position - 1].softmax(-1).tolist() for logits in both)
            target = window[position]
            first_p, first_q = p.index(max(p)), q.index(max(q))
            (_, start), (_, end) = encoded["offset_mapping"][begin + position - 1 : begin + position + 1]
            found.append(
                {
                    "position": position,
                    "nbytes": len(text[start:end].encode()),
                    "bits": (-math.log2(p[target]), -math.log2(q[target])),
                    "kl": sum(one * math.log(one / another) for one, another in zip(p, q, strict=True)),
                    "same": first_p == first_q,
                    "right": (first_p == target, first_q == target),
                }
            )
    return found


def test_figures_equal_those_of_single_tokens(report: DistributionReport, tokens: list[dict[str, Any]]) -> None:
    """Bits per byte, KL divergence, agreement, lost and gained tokens and flips are what their definitions say."""
    nbytes = sum(token["nbytes"] for token in tokens)
    lost = sum(token["right"] == (True, False) for token in tokens)
    gained = sum(token["right"] == (False, True) for token in tokens)

    assert (report.candidate, report.baseline, report.text) == NAMES
    assert report.window == WINDOW
    assert report.scored_tokens == len(tokens) == (WINDOW - 1) * WINDOWS
    assert report.scored_bytes == nbytes
    assert report.baseline_bits_per_byte == pytest.approx(sum(token["bits"][0] for token in tokens) / nbytes)
    assert report.candidate_bits_per_byte == pytest.approx(sum(token["bits"][1] for token in tokens) / nbytes)
    assert report.kl_divergence == pytest.approx(sum(token["kl"] for token in tokens) / len(tokens), rel=1e-5)
    assert report.top1_agreement == pytest.approx(sum(token["same"] for token in tokens) / len(tokens))
    assert report.baseline_correct == sum(token["right"][0] for token in tokens)
    assert (report.lost, report.gained) == (lost, gained)
    assert report.flips == pytest.approx((lost + gained) / len(tokens))
    assert min(lost, gained, report.scored_tokens - lost - gained) > 0  # so that the figures tell something


def test_figures_by_position(report: DistributionReport, tokens: list[dict[str, Any]]) -> None:
    """Eight ranges of the position in a window have the same figures, each over its own tokens."""
    assert len(report.positions) == 8
    for part in report.positions:
        inside = [token for token in tokens if part.first <= token["position"] <= part.last]
        nbytes = sum(token["nbytes"] for token in inside)
        assert part.baseline_bits_per_byte == pytest.approx(sum(token["bits"][0] for token in inside) / nbytes)
        assert part.candidate_bits_per_byte == pytest.approx(sum(token["bits"][1] for token in inside) / nbytes)
        assert part.kl_divergence == pytest.approx(sum(token["kl"] for token in inside) / len(inside), rel=1e-5)
        assert part.top1_agreement == pytest.approx(sum(token["same"] for token in inside) / len(inside))


@pytest.mark.parametrize("window", [2, 3, 8, 9, 10, 33])
def test_positions_cover_the_window(llama: Loaded, text: str, window: int) -> None:
    """The ranges are as many as there are scored positions, up to eight, about equally long, without gap or overlap."""
    report = compare_loaded(llama, llama, text, names=NAMES, window=window, max_tokens=2 * window)

    covered = [place for part in report.positions for place in range(part.first, part.last + 1)]
    lengths = {part.last - part.first + 1 for part in report.positions}
    assert covered == list(range(1, window))
    assert len(report.positions) == min(8, window - 1)
    assert max(lengths) - min(lengths) <= 1


def test_lost_and_gained_change_places(sound: Loaded, noisy: Loaded, text: str, report: DistributionReport) -> None:
    """With candidate and baseline exchanged, what was lost is gained; flips and agreement stay."""
    turned = compare_loaded(sound, noisy, text, names=NAMES, window=WINDOW, max_tokens=WINDOW * WINDOWS)

    assert (turned.lost, turned.gained) == (report.gained, report.lost)
    assert turned.baseline_correct == report.baseline_correct - report.lost + report.gained
    assert (turned.flips, turned.top1_agreement) == (report.flips, report.top1_agreement)


def test_report_comes_back_from_json(report: DistributionReport) -> None:
    """A report that is read from its JSON is the same one, position ranges included."""
    assert DistributionReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("broken", ["candidate", "baseline"])
def test_logits_that_are_no_numbers_are_refused(llama: Loaded, llama_folder: Path, text: str, broken: str) -> None:
    """A model with a NaN in its weights has no distributions to compare; the error names it."""
    nan = load(llama_folder)
    with torch.no_grad():
        nan.model.model.norm.weight[0] = float("nan")
    candidate, baseline = (nan, llama) if broken == "candidate" else (llama, nan)

    with pytest.raises(SourceError, match=f"{broken}: its logits are not all numbers"):
        compare_loaded(candidate, baseline, text, names=NAMES, window=WINDOW, max_tokens=100)


@pytest.mark.exhaustive
def test_int4_is_close_to_its_source(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """On held-out text the default conversion costs little, but measurably: KL and bits per byte see it."""
    report = compare_distributions(
        glm_tiny_converted["glm-5.2-int4"], glm_tiny_converted["bf16"], glm_tiny / "heldout.txt", max_tokens=4096
    )

    assert 0.0005 < report.kl_divergence < 0.03
    assert 0.85 < report.top1_agreement < 1
    assert abs(report.candidate_bits_per_byte - report.baseline_bits_per_byte) < 0.02
    assert report.scored_tokens == 16 * 255


@pytest.mark.exhaustive
def test_a_model_is_itself(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """A checkpoint against itself has no divergence and full agreement."""
    folder = glm_tiny_converted["bf16"]

    report = compare_distributions(folder, folder, glm_tiny / "heldout.txt", window=64, max_tokens=512)

    assert (report.kl_divergence, report.top1_agreement) == (0, 1)
    assert report.candidate_bits_per_byte == report.baseline_bits_per_byte


def test_bits_per_byte_counts_the_scored_bytes(
    glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path
) -> None:
    """The bytes are those of the text that the scored tokens stand for, so that they add up to the text's."""
    text = (glm_tiny / "heldout.txt").read_text(encoding="utf-8")[:3000]
    (tmp_path / "text").write_text(text, encoding="utf-8")
    folder = glm_tiny_converted["bf16"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]

    report = compare_distributions(folder, folder, tmp_path / "text", window=len(tokens))

    first = tokenizer.decode(tokens[:1])
    assert report.scored_bytes == len(text.encode()) - len(first.encode())


def test_too_short_a_text_is_refused(glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """A text that does not fill a window gives no figure."""
    (tmp_path / "text").write_text("short")

    with pytest.raises(UsageError, match="fewer than 256 tokens"):
        compare_distributions(glm_tiny_converted["bf16"], glm_tiny_converted["bf16"], tmp_path / "text")

"""How far a converted model's next-token distributions are from its baseline's, on any text.

Both run in float32 on the same windows of the text, as a backend loads them.

    bits per byte   of the text, by each model: lower is better
    KL divergence   mean over the scored tokens of KL(baseline || candidate), in nats: 0 for the same distributions
    top-1           share of the scored tokens for which both models rank the same token first
    flips           share of the scored tokens that one model ranks first and the other does not
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import SourceError, UsageError
from quantkit.eval.gate.loading import Loaded, check_measurable, load
from quantkit.eval.gate.report import DistributionReport, PositionRange

_BATCH = 8  # windows in one forward pass
_POSITION_RANGES = 8


def compare_distributions(
    candidate: str | Path, baseline: str | Path, text: str | Path, *, window: int = 256, max_tokens: int = 16384
) -> DistributionReport:
    """Compare the checkpoints in the folders `candidate` and `baseline` on the text file `text`, in transformers.

    window      tokens in one forward pass; windows do not overlap, and the first token of each is not scored
    max_tokens  at most so many tokens from the start of the text are used
    """
    content = read_text(Path(text))
    for folder in (baseline, candidate):
        check_measurable(Path(folder))
    return compare_loaded(
        load(Path(candidate)),
        load(Path(baseline)),
        content,
        names=(str(candidate), str(baseline), str(text)),
        window=window,
        max_tokens=max_tokens,
    )


def compare_loaded(
    candidate: Loaded, baseline: Loaded, text: str, *, names: tuple[str, str, str], window: int, max_tokens: int
) -> DistributionReport:
    """The same for models in memory; `names` are those of candidate, baseline and text. The tokenizer is baseline's.

    Raises SourceError if a model's logits are no numbers.
    """
    windows = _windows(baseline.tokenizer, text, window, max_tokens)
    totals = torch.zeros(window - 1, len(_COLUMNS), dtype=torch.float64)
    with torch.inference_mode():
        for tokens in windows.tokens.split(_BATCH):
            both = baseline.model(tokens).logits, candidate.model(tokens).logits
            for window_logits in zip(*both, tokens, strict=True):
                totals += _score(*window_logits)  # one by one: float64 over a large vocabulary is large
    count = len(windows.tokens)
    whole = _Sums(totals.sum(dim=0), int(windows.scored_bytes.sum()), count * (window - 1))
    for name, loss in (names[1], "baseline_loss"), (names[0], "candidate_loss"):
        if not math.isfinite(whole.mean(loss)):
            raise SourceError(f"{name}: its logits are not all numbers", hint="`quantkit verify` finds the weights.")
    return DistributionReport(
        candidate=names[0],
        baseline=names[1],
        text=names[2],
        window=window,
        scored_tokens=whole.tokens,
        scored_bytes=whole.nbytes,
        baseline_bits_per_byte=whole.bits_per_byte("baseline_loss"),
        candidate_bits_per_byte=whole.bits_per_byte("candidate_loss"),
        kl_divergence=whole.mean("divergence"),
        top1_agreement=whole.mean("agreement"),
        baseline_correct=whole.count("baseline_correct"),
        lost=whole.count("lost"),
        gained=whole.count("gained"),
        flips=whole.mean("lost") + whole.mean("gained"),
        positions=_by_position(totals, windows.scored_bytes, count),
    )


_COLUMNS = ("baseline_loss", "candidate_loss", "divergence", "agreement", "baseline_correct", "lost", "gained")


@dataclass(frozen=True)
class _Sums:
    """Sums of the `_COLUMNS` over tokens that stand for `nbytes` of text; losses and divergence in nats."""

    values: torch.Tensor
    nbytes: int
    tokens: int

    def mean(self, column: str) -> float:
        return self.values[_COLUMNS.index(column)].item() / self.tokens

    def count(self, column: str) -> int:
        return round(self.values[_COLUMNS.index(column)].item())

    def bits_per_byte(self, column: str) -> float:
        return self.values[_COLUMNS.index(column)].item() / math.log(2) / max(self.nbytes, 1)


def _by_position(totals: torch.Tensor, scored_bytes: torch.Tensor, count: int) -> tuple[PositionRange, ...]:
    """The same in ranges of about equal length of the position in the window."""
    length = len(totals)
    ranges = min(_POSITION_RANGES, length)
    borders = [length * number // ranges for number in range(ranges + 1)]
    found = []
    for begin, end in pairwise(borders):
        sums = _Sums(totals[begin:end].sum(dim=0), int(scored_bytes[begin:end].sum()), count * (end - begin))
        bits = sums.bits_per_byte("baseline_loss"), sums.bits_per_byte("candidate_loss")
        found.append(PositionRange(begin + 1, end, *bits, sums.mean("divergence"), sums.mean("agreement")))
    return tuple(found)


def read_text(text: Path) -> str:
    """The content of a UTF-8 file; UsageError if it cannot be read as that."""
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: cannot be read as UTF-8 text: {error}") from error


@dataclass(frozen=True)
class _Windows:
    """tokens [number, window] int64; scored_bytes [window - 1] int64: of UTF-8 text, summed over windows, that the
    tokens at each position but the first stand for."""

    tokens: torch.Tensor
    scored_bytes: torch.Tensor


def _windows(tokenizer: Any, text: str, window: int, max_tokens: int) -> _Windows:
    if window < 2:
        raise UsageError(f"window is {window}; it must be at least 2")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    count = min(len(encoded["input_ids"]), max_tokens) // window
    if count == 0:
        raise UsageError(f"the text has fewer than {window} tokens", hint="Give a longer text or a smaller --window.")
    tokens = torch.tensor(encoded["input_ids"][: count * window]).reshape(count, window)
    ends = [end for _, end in encoded["offset_mapping"][: count * window]]
    nbytes = [len(text[begin:end].encode()) for begin, end in pairwise([0, *ends])]
    return _Windows(tokens, torch.tensor(nbytes).reshape(count, window)[:, 1:].sum(dim=0))


def _score(baseline: torch.Tensor, candidate: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The `_COLUMNS` of each token of a window but the first, float64 [window - 1, columns].

    baseline, candidate  logits [window, vocabulary]
    tokens               [window]
    """
    log_p, log_q = (logits[:-1].double().log_softmax(dim=-1) for logits in (baseline, candidate))
    targets = tokens[1:]
    losses = [-log.gather(-1, targets.unsqueeze(-1)).squeeze(-1) for log in (log_p, log_q)]
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    first_p, first_q = log_p.argmax(dim=-1), log_q.argmax(dim=-1)
    right_p, right_q = first_p == targets, first_q == targets
    flags = first_p == first_q, right_p, right_p & ~right_q, right_q & ~right_p
    return torch.stack([*losses, divergence, *(flag.double() for flag in flags)], dim=-1)

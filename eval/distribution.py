"""How far a converted model's next-token distributions are from its baseline's, on any text.

Both run in transformers in float32 on the same windows of the text. The weights are what is measured: where a format
makes transformers quantize activations as well, that is switched off, and experts that it keeps in BF16 are widened.

    bits per byte   of the text, by each model: lower is better
    KL divergence   mean over the scored tokens of KL(baseline || candidate), in nats: 0 for the same distributions
    top-1           share of the scored tokens for which both models rank the same token first
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.config import KEY
from quantkit.checkpoint.source import Source, open_source
from quantkit.checkpoint.weights import Encoding, read_weights
from quantkit.errors import DependencyError, SourceError, UsageError
from quantkit.report import DistributionReport

_BATCH = 8  # windows in one forward pass


def compare_distributions(
    candidate: str | Path, baseline: str | Path, text: str | Path, *, window: int = 256, max_tokens: int = 16384
) -> DistributionReport:
    """Compare the checkpoints in the folders `candidate` and `baseline` on the text file `text`.

    window      tokens in one forward pass; windows do not overlap, and the first token of each is not scored
    max_tokens  at most so many tokens from the start of the text are used
    """
    if window < 2:
        raise UsageError(f"window is {window}; it must be at least 2")
    content = _read(Path(text))
    folders = Path(baseline), Path(candidate)
    sources = [_measurable(folder) for folder in folders]
    windows = _windows(Path(baseline), content, window, max_tokens)
    reference, converted = (
        _load_float32(folder, source.config.get(KEY)) for folder, source in zip(folders, sources, strict=True)
    )
    totals = torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        for tokens in windows.tokens.split(_BATCH):
            for window_logits in zip(reference(tokens).logits, converted(tokens).logits, tokens, strict=True):
                totals += _score(*window_logits)  # one by one: float64 over a large vocabulary is large
    scored = windows.tokens[:, 1:].numel()
    to_bits_per_byte = 1 / math.log(2) / windows.scored_bytes
    return DistributionReport(
        candidate=str(candidate),
        baseline=str(baseline),
        text=str(text),
        window=window,
        scored_tokens=scored,
        scored_bytes=windows.scored_bytes,
        baseline_bits_per_byte=totals[0].item() * to_bits_per_byte,
        candidate_bits_per_byte=totals[1].item() * to_bits_per_byte,
        kl_divergence=totals[2].item() / scored,
        top1_agreement=totals[3].item() / scored,
    )


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: cannot be read as UTF-8 text: {error}") from error


def _measurable(folder: Path) -> Source:
    """The checkpoint in `folder`, refused if transformers would misread it: 5.17 takes the block's rows for a part of
    the weight's when these are not a multiple."""
    source = open_source(folder)
    if (source.config.get(KEY) or {}).get("quant_method") != "compressed-tensors" and any(
        weight.encoding is not Encoding.PLAIN for weight in read_weights(source)
    ):
        raise SourceError(
            f"{folder} holds FP8 blocks, which transformers misreads when rows are not a multiple of the block",
            hint=f"Decode it first: quantkit convert {folder} --bf16 -o FOLDER.",
        )
    return source


def _load_float32(folder: Path, quantization: dict[str, Any] | None) -> Any:
    """The causal language model, loaded by transformers and widened to float32, activations unquantized."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if quantization:
        for group in quantization["config_groups"].values():
            group["input_activations"] = None
        config.quantization_config = quantization
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            model(torch.zeros(1, 2, dtype=torch.int64))  # compressed weights are decoded in the first forward pass
    return torch.nn.Module.float(model).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and remarks of the loaders; what they raise comes through."""
    from loguru import logger
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logger.disable("compressed_tensors")
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
        logger.enable("compressed_tensors")


@dataclass(frozen=True)
class _Windows:
    """tokens [number, window] int64; scored_bytes of UTF-8 text that all but each window's first token stand for."""

    tokens: torch.Tensor
    scored_bytes: int


def _windows(folder: Path, text: str, window: int, max_tokens: int) -> _Windows:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise DependencyError(
            "transformers is not installed", hint="Install what evaluation needs: pip install 'quantkit[eval]'."
        ) from error

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    count = min(len(encoded["input_ids"]), max_tokens) // window
    if count == 0:
        raise UsageError(f"the text has fewer than {window} tokens", hint="Give a longer text or a smaller --window.")
    tokens = torch.tensor(encoded["input_ids"][: count * window]).reshape(count, window)
    return _Windows(tokens, sum(_scored_bytes(text, encoded["offset_mapping"], window, count)))


def _scored_bytes(text: str, offsets: list[tuple[int, int]], window: int, count: int) -> Iterator[int]:
    for number in range(count):
        begin, end = offsets[number * window + 1][0], offsets[(number + 1) * window - 1][1]
        yield len(text[begin:end].encode())


def _score(baseline: torch.Tensor, candidate: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of a window, float64 [4]: baseline's and candidate's loss in nats, KL, equal first ranks.

    baseline, candidate  logits [window, vocabulary]
    tokens               [window]; all but the first are scored
    """
    log_p, log_q = (logits[:-1].double().log_softmax(dim=-1) for logits in (baseline, candidate))
    losses = [-log.gather(-1, tokens[1:].unsqueeze(-1)).sum() for log in (log_p, log_q)]
    divergence = (log_p.exp() * (log_p - log_q)).sum()
    agreement = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum().double()
    return torch.stack([*losses, divergence, agreement])

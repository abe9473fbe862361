"""Loading checkpoints into transformers as the gate measures them: weights as stored, in float32, activations as well.

Where a format makes transformers quantize activations as well (FP8 modules of a mixed checkpoint), that is switched
off, and experts that it keeps in BF16 are widened: what is measured is the weights.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.config import KEY
from quantkit.checkpoint.source import Source, open_source
from quantkit.checkpoint.weights import Encoding, read_weights
from quantkit.errors import DependencyError, SourceError


@dataclass(frozen=True)
class Loaded:
    """A causal language model in float32, and its tokenizer."""

    model: Any
    tokenizer: Any


def quantizes_activations(source: Source) -> bool:
    """Whether a checkpoint's format makes transformers quantize activations, which `load` switches off."""
    groups = (source.config.get(KEY) or {}).get("config_groups", {})
    return any(group.get("input_activations") is not None for group in groups.values())


def check_measurable(folder: Path) -> Source:
    """The checkpoint in `folder`; SourceError if transformers would misread it.

    Version 5.17 takes the rows of an FP8 block for a part of the weight's, and these are not always a multiple.
    """
    source = open_source(folder)
    if (source.config.get(KEY) or {}).get("quant_method") != "compressed-tensors" and any(
        weight.encoding is not Encoding.PLAIN for weight in read_weights(source)
    ):
        raise SourceError(
            f"{folder} holds FP8 blocks, which transformers misreads when rows are not a multiple of the block",
            hint=f"Decode it first: quantkit convert {folder} --bf16 -o FOLDER.",
        )
    return source


def check_memory(sources: Sequence[Source]) -> None:
    """SourceError if this machine's memory cannot hold the checkpoints side by side in float32."""
    needed = sum(4 * math.prod(weight.shape) for source in sources for weight in read_weights(source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        names = " and ".join(source.name for source in sources)
        raise SourceError(
            f"{names} need {needed / 1e9:,.1f} GB of memory in float32, and this machine has {memory / 1e9:,.1f} GB",
            hint="Evaluate on a machine with more memory.",
        )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of the checkpoint in `folder`; SourceError if it has none, DependencyError without transformers."""
    transformers = _transformers()
    with _readable(folder):
        return transformers.AutoTokenizer.from_pretrained(folder)


def load(folder: Path) -> Loaded:
    """Load the checkpoint in `folder`; SourceError if transformers would misread it, or cannot load it."""
    transformers = _transformers()
    quantization = check_measurable(folder).config.get(KEY)
    with _quiet(), _readable(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        if quantization:
            for group in quantization["config_groups"].values():
                group["input_activations"] = None
            config.quantization_config = quantization
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):  # transformers makes them up
            raise SourceError(f"{folder}: {len(missing):,} weights are missing, {missing[0]} among them")
        with torch.inference_mode():
            model(torch.zeros(1, 2, dtype=torch.int64))  # compressed weights are decoded in the first forward pass
    return Loaded(torch.nn.Module.float(model).eval(), load_tokenizer(folder))


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise DependencyError(
            "transformers is not installed", hint="Install what evaluation needs: pip install 'quantkit[eval]'."
        ) from error
    return transformers


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """What transformers raises for a checkpoint that it does not understand, as SourceError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SourceError(f"{folder}: transformers cannot load it: {type(error).__name__}: {reason}") from error


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

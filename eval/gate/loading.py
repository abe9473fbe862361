"""Loading checkpoints into transformers, the gate's backend `hf`: weights decoded, everything computed in float32.

transformers and compressed-tensors decode, not quantkit, so that quantkit's reading is not what judges its writing.
What is measured is the weights:

    activations  are not quantized, whatever the format asks for (FP8 modules of a mixed checkpoint do)
    experts      are decoded to BF16 before they are widened: INT4 and FP8 ones are rounded to it, as in the decoding
                 that they are compared with; NVFP4's numbers have 6 bits, which BF16 holds
    NVFP4        decodes to BF16 everywhere, exactly if the global scale is a power of two, as quantkit's are. Those of
                 experts are left out by transformers 5.17 (huggingface/transformers issue 48371): they are applied here
    other        INT4 and FP8 decode to float32

What version 5.17 cannot read, or would misread without a word, is refused: `check_measurable`.
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
from quantkit.choices import Dialect
from quantkit.errors import DependencyError, SourceError
from quantkit.naming import Role, TensorName
from quantkit.weights.encodings import FP8
from quantkit.weights.grouping import read_weights
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Strategy, Weight


@dataclass(frozen=True)
class Loaded:
    """A causal language model in float32, of transformers or a `PagedModel`, and its tokenizer."""

    model: Any
    tokenizer: Any


def quantizes_activations(source: Source) -> bool:
    """Whether a checkpoint's format asks for quantized activations, which neither `load` nor the runtime gives it."""
    config = source.config.get(KEY) or {}
    groups = config.get("config_groups") or {}
    return "activation_scheme" in config or any(group.get("input_activations") for group in groups.values())


def check_measurable(folder: Path) -> Source:
    """The checkpoint in `folder`; SourceError, with the conversion that helps, if transformers would misread it."""
    source = open_source(folder)
    compressed = (source.config.get(KEY) or {}).get("quant_method") == "compressed-tensors"
    experts: dict[str, Weight] = {}
    for weight in read_weights(source):
        if weight.name.is_mtp(source.num_hidden_layers):
            continue
        if weight.dialect is Dialect.MODELOPT:
            what = f"NVFP4 in ModelOpt's spelling, which transformers does not read: {weight.name}"
            raise _not_measurable(folder, what, "--format compressed-tensors")
        if weight.encoding is FP8 and (trouble := _trouble_with_fp8(weight, compressed)):
            raise _not_measurable(folder, f"{trouble}: {weight.name}", "--bf16")
        if weight.name.role is Role.ROUTED_EXPERT:
            experts.setdefault(weight.encoding.name, weight)
    if len(experts) > 1:
        names = " and ".join(f"{weight.name} ({encoding})" for encoding, weight in sorted(experts.items()))
        raise _not_measurable(folder, f"experts of different formats, which transformers leaves out: {names}", "--bf16")
    return source


def _not_measurable(folder: Path, what: str, options: str) -> SourceError:
    return SourceError(
        f"{folder} holds {what}", hint=f"Convert it first: quantkit convert {folder} {options} -o FOLDER."
    )


def _trouble_with_fp8(weight: Weight, compressed: bool) -> str | None:
    """What transformers makes of an FP8 weight, if that is wrong; `compressed`: in a compressed-tensors checkpoint."""
    blocks = weight.strategy is Strategy.BLOCK
    if not compressed:
        if blocks:
            return "FP8 blocks, which transformers misreads when rows are not a multiple of the block"
        return f"FP8 with a scale for each {weight.strategy}, which transformers reads without the scale"
    return (
        "experts in FP8 blocks, which transformers cannot decode" if blocks and weight.name.expert is not None else None
    )


def check_memory(sources: Sequence[Source]) -> None:
    """SourceError if this machine's memory cannot hold the checkpoints side by side in float32."""
    needed = [sum(4 * math.prod(weight.shape) for weight in read_weights(source)) for source in sources]
    check_room(list(zip((source.name for source in sources), needed, strict=True)), "in float32")


def check_room(needed: Sequence[tuple[str, int]], how: str) -> None:
    """SourceError if this machine's memory cannot hold checkpoints of these names and bytes side by side."""
    total = sum(nbytes for _, nbytes in needed)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > memory:
        names = " and ".join(name for name, _ in needed)
        raise SourceError(
            f"{names} need {total / 1e9:,.1f} GB of memory {how}, and this machine has {memory / 1e9:,.1f} GB",
            hint="Evaluate on a machine with more memory.",
        )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of the checkpoint in `folder`; SourceError if it has none, DependencyError without transformers."""
    transformers = _transformers()
    with _readable(f"{folder}, its tokenizer", "Copy the tokenizer's files from the source into it."):
        return transformers.AutoTokenizer.from_pretrained(folder)


def load(folder: Path) -> Loaded:
    """Load the checkpoint in `folder`; SourceError if transformers would misread it, or cannot load it."""
    transformers = _transformers()
    source = check_measurable(folder)
    with _quiet(), _readable(str(folder)):
        config = transformers.AutoConfig.from_pretrained(folder)
        if quantization := source.config.get(KEY):
            for group in quantization["config_groups"].values():
                group["input_activations"] = None
            config.quantization_config = quantization | {"dequantize": True}
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):  # transformers makes them up
        raise SourceError(f"{folder}: {len(missing):,} weights are missing, {missing[0]} among them")
    model = torch.nn.Module.float(model).eval()
    left = found["unexpected_keys"] - _apply_global_scales(model, source, found["unexpected_keys"])
    if ignored := sorted(name for name in left if _matters(name, source)):
        raise SourceError(f"{folder}: transformers does not use {len(ignored):,} weights, {ignored[0]} among them")
    return Loaded(model, load_tokenizer(folder))


@torch.inference_mode()
def _apply_global_scales(model: Any, source: Source, unused: set[str]) -> set[str]:
    """Divide decoded experts by those NVFP4 global scales that are in `unused`; the names of these."""
    reader, applied = Reader(source), set()
    for weight in read_weights(source):
        name, divisor = weight.name, weight.global_scale
        if divisor is None or divisor.spec.name not in unused or name.is_mtp(source.num_hidden_layers):
            continue
        assert name.fused_module is not None
        experts, projection = model.get_submodule(name.fused_module), name.module.rpartition(".")[2]
        if projection == "down_proj":
            decoded = experts.down_proj[name.expert]
        else:
            decoded = experts.gate_up_proj[name.expert].chunk(2)[projection == "up_proj"]
        decoded /= reader.scalar(divisor)
        applied.add(divisor.spec.name)
    return applied


def _matters(unused: str, source: Source) -> bool:
    """Whether a tensor that transformers did not use belongs to a weight of the model; the MTP layers are left out."""
    name = TensorName.parse(unused)
    return name.leaf.startswith("weight") and not name.is_mtp(source.num_hidden_layers)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise DependencyError(
            "transformers is not installed", hint="Install what evaluation needs: pip install 'quantkit[eval]'."
        ) from error
    return transformers


@contextmanager
def _readable(what: str, hint: str | None = None) -> Iterator[None]:
    """What transformers raises for a checkpoint that it does not understand, as SourceError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"{what}: transformers cannot load it: {type(error).__name__}: {reason}"
        raise SourceError(message, hint=hint) from error


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

"""How a run shares out its memory: what one layer's pass needs beside the weights, and hidden states with the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from quantkit.calibration.recording import QUERIES, ROWS, SEQUENCES
from quantkit.errors import UsageError
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.models.loading import LayerReader

_WIDE = 4  # bytes of a float32, which scores, sums and samples are
_CANDIDATES = 48  # of both parts together, about
_CHUNKS, _BLOCKS = (1024, 512, 256, 128, 64, 32, 16), (65536, 32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 64, 16)


@dataclass(frozen=True)
class Budget:
    """Sizes for a run.

    chunk          tokens of a sequence that attend together
    block          tokens that go through an MLP together
    held           rows of hidden states that stay in memory
    largest_layer  bytes of its weights as stored, which come on top
    """

    chunk: int
    block: int
    held: int
    largest_layer: int


def plan_memory(reader: LayerReader, lengths: Sequence[int], memory: int) -> Budget:
    """The budget for sequences of these lengths in `memory` bytes beside the weights of one layer.

    Raises UsageError, with the sizes, if one pass does not fit.
    """
    config, tokens, longest = reader.config, sum(lengths), max(lengths)
    row = config.hidden * reader.dtype.itemsize
    layers = [reader.parts[number].nbytes for number in range(config.layers)]
    fixed = _decoded(reader) + _samples(config, longest) + longest * _kept(config) + 3 * longest * row
    attending, routed = _chunk_row(config, longest), _block_row(config, row)
    left = memory - fixed
    chunk = _largest(_CHUNKS, attending, (left - _BLOCKS[-1] * routed) // 3)
    left -= min(chunk, longest) * attending
    block = _largest(_BLOCKS, routed, left - min(tokens * row, left // 2))
    needed = memory - left + min(block, tokens) * routed
    if needed > memory:
        raise UsageError(
            f"a pass of {longest:,} tokens through a layer needs {needed:,} bytes beside its weights "
            f"({max(layers):,} bytes in the largest layer), and --memory is {memory:,}",
            hint=f"Give --memory {-(-needed // (1 << 20))}MiB or more, or shorter sequences with --length.",
        )
    return Budget(chunk, block, min(tokens, (memory - needed) // row), max(layers))


def _largest(sizes: Sequence[int], row: int, nbytes: int) -> int:
    """The largest size whose rows fit, or the smallest of all."""
    return next((size for size in sizes if size * row <= nbytes), sizes[-1])


def _decoded(reader: LayerReader) -> int:
    """The largest matrix of a layer as numbers, which exists while it is multiplied with."""
    shapes = (tensor.spec for number in range(reader.config.layers) for tensor in reader.parts[number].tensors.values())
    largest = max(prod(spec.shape[-2:]) * (8 if spec.dtype == "I32" else 1) for spec in shapes)
    return 2 * largest * _WIDE


def _kept(config: ModelConfig) -> int:
    """Bytes that a token of the sequence takes in its cache, which grows by doubling and is read as float32."""
    attention = config.attention
    if isinstance(attention, MlaConfig):
        numbers = attention.kv_rank + attention.rope + (config.dsa.head_dim if config.dsa else 0)
        return 4 * numbers * _WIDE + (4 * config.dsa.top_k if config.dsa else 0)
    return 8 * attention.kv_heads * attention.head_dim * _WIDE


def _chunk_row(config: ModelConfig, longest: int) -> int:
    """Bytes for each token that attends: scores against the sequence, and queries."""
    attention = config.attention
    scores = 4 * attention.heads * longest * _WIDE
    if isinstance(attention, MlaConfig):
        queries = attention.heads * (attention.nope + attention.value + 5 * (attention.kv_rank + attention.rope))
        if config.dsa:
            scores += longest * (2 * config.dsa.heads * _WIDE + 24)
    else:
        queries = 4 * attention.heads * attention.head_dim
    return scores + queries * _WIDE


def _block_row(config: ModelConfig, row: int) -> int:
    """Bytes for each token in an MLP."""
    inner = 3 * config.intermediate
    if config.moe:
        inner = max(inner, config.moe.top_k * (3 * config.moe.intermediate + 3 * config.hidden))
    return inner * _WIDE + 6 * row


def _samples(config: ModelConfig, longest: int) -> int:
    """What is kept to judge candidates by, and what judging one sequence's takes."""
    attention, rows = config.attention, min(ROWS, longest)
    queries = QUERIES * attention.heads
    width = attention.kv_rank + attention.rope if isinstance(attention, MlaConfig) else 2 * attention.head_dim
    pairs = queries * rows * (_CANDIDATES * (_WIDE + torch.float64.itemsize) + 8)
    return SEQUENCES * (queries + rows) * width * _WIDE + pairs

"""The proof that a fold changes nothing where the cache is not FP8: the same bits before and after, in both dtypes.

Each folded layer's attention is run alone on random hidden states, which works for a checkpoint of any size. Of a small
one all layers are run besides, on random tokens, up to the last hidden states: what makes logits of them is not edited.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from quantkit.checkpoint.source import Source
from quantkit.errors import CheckFailed
from quantkit.families.config import ModelConfig
from quantkit.folding.plan import FoldPlan
from quantkit.models.cache import PlainCache, Step
from quantkit.models.folding import attention_prefix
from quantkit.models.gqa import take_gqa
from quantkit.models.loading import LayerReader, open_layers
from quantkit.models.mla import take_mla
from quantkit.models.rope import make_rotation
from quantkit.models.weight_loader import WeightLoader

_DTYPES = (torch.bfloat16, torch.float32)
_TOKENS = 8
_WHOLE_BYTES = 2 << 30  # of a checkpoint whose layers are all run
Sample = dict[str, torch.Tensor]


def run_sample(plan: FoldPlan, source: Source) -> Sample:
    """What comes out of `source`, the plan's own or one with the same tensors, by what was run."""
    return {what: out for dtype in _DTYPES for what, out in _run(plan, open_layers(source, dtype))}


def compare(plan: FoldPlan, before: Sample, after: Sample) -> str:
    """What was compared, in words. Raises CheckFailed, naming what differs."""
    for what, out in before.items():
        if not out.isfinite().all():
            raise CheckFailed(f"{what}: not finite before the fold, so nothing is proved by it")
        if not torch.equal(out, after[what]):
            raise CheckFailed(f"{what}: other bits after the fold", hint="This is a fault of quantkit; report it.")
    count = sum(bool(layer.edits) for layer in plan.layers)
    proved = f"the same bits in BF16 and float32: attention of {count} folded layers on {_TOKENS} random hidden states"
    if _is_whole(plan):
        return f"{proved}; hidden states after all layers, of which logits are made, on {_TOKENS} random tokens"
    return f"{proved}; the whole model was not run, since it has more than {_WHOLE_BYTES >> 30} GiB"


def _is_whole(plan: FoldPlan) -> bool:
    return plan.source.nbytes <= _WHOLE_BYTES


def _run(plan: FoldPlan, reader: LayerReader) -> Iterator[tuple[str, torch.Tensor]]:
    config = reader.config
    for layer in plan.layers:
        if layer.edits:
            yield f"attention of layer {layer.layer} in {reader.dtype}", _attend(config, reader, layer.layer)
    if _is_whole(plan):
        yield f"the last hidden states in {reader.dtype}", _forward(config, reader)


@torch.inference_mode()
def _attend(config: ModelConfig, reader: LayerReader, layer: int) -> torch.Tensor:
    """One layer's attention to all tokens: an indexer, which is not edited, is left out."""
    alone = replace(config, dsa=None)
    loader = WeightLoader(reader.parts[layer], reader.dtype, reader.device)
    take = take_mla if hasattr(config.attention, "kv_rank") else take_gqa
    attention = take(loader, attention_prefix(config, layer), layer, alone)
    hidden = torch.randn(_TOKENS, config.hidden, generator=torch.Generator().manual_seed(layer)).to(reader.dtype)
    return attention.attend(hidden, _step(config), None).output


@torch.inference_mode()
def _forward(config: ModelConfig, reader: LayerReader) -> torch.Tensor:
    tokens = torch.randint(config.vocab, (_TOKENS,), generator=torch.Generator().manual_seed(0))
    x, step, selected = reader.embed(tokens), _step(config), None
    for number in range(config.layers):
        layer = reader.layer(number)
        attended, selected = layer.attention.attend(layer.attention_norm(x), step, selected)
        x = x + attended
        x = x + layer.mlp(layer.mlp_norm(x))
    return x


def _step(config: ModelConfig) -> Step:
    positions = torch.arange(_TOKENS)
    return Step(positions, make_rotation(config.rope, positions), PlainCache())

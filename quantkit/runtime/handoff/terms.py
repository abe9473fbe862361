"""What two workers must agree on before one takes the other's pages, and what may differ.

must be equal     the model, the `kv_space_id` (what a cached number means), the layout of a row
may differ        weight formats, page sizes
dtype of pages    equal, or BF16 converted to FP8; FP8 to FP8 only with equal scales
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit.errors import HandoffError
from quantkit.runtime.page_set import layout_of
from quantkit.runtime.pages import FP8, CacheSpec


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is.

    model        stands for its config without what a conversion changes in it
    kv_space_id  stands for what a number in its cache means
    """

    model: str
    kv_space_id: str


@dataclass(frozen=True)
class Terms:
    """What the pages of a worker hold; `scales` is the digest of their KV scales."""

    model: str
    kv_space_id: str
    layout: str
    dtype: str
    page_size: int
    scales: str


def terms_of(model: str, spec: CacheSpec) -> Terms:
    """The terms of a worker that runs `model` with pages of `spec`, whose own `model` is the kv_space_id."""
    return Terms(model, spec.model, layout_of(spec), str(spec.dtype), spec.page_size, spec.scales.digest)


def check_identity(prefill: Identity, decode: Identity) -> None:
    """Raise HandoffError, with both sides' values, unless two checkpoints are of one model with one kind of cache."""
    _compare(asdict(prefill), asdict(decode), ("prefill checkpoint", "decode checkpoint"))


def check_peers(prefill: Terms, decode: Terms, names: tuple[str, str] = ("prefill worker", "decode worker")) -> None:
    """Raise HandoffError, with both sides' values, unless pages of `prefill` can become pages of `decode`."""
    ours, theirs = asdict(prefill), asdict(decode)
    free = ["page_size"]
    if (prefill.dtype, decode.dtype) == (str(torch.bfloat16), str(FP8)):
        free += ["dtype", "scales"]
    for name in free:
        ours[name] = theirs[name]
    _compare(ours, theirs, names)


def _compare(ours: dict[str, Any], theirs: dict[str, Any], names: tuple[str, str]) -> None:
    for name, value in ours.items():
        if value != theirs[name]:
            what = {"scales": "digest of KV scales"}.get(name, name)
            raise HandoffError(
                f"the {names[0]}'s {what} is {value}, and the {names[1]}'s {theirs[name]}",
                hint="Weight formats and page sizes may differ; a cache changes only from BF16 to FP8.",
            )

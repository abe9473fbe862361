"""Reading weights into tensors as they are stored: bytes go from the file to their place, then to the device."""

from collections.abc import Sequence

import torch

from quantkit.checkpoint.source import Source
from quantkit.weights.packed import DTYPES, Packed, as_bytes
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Weight


def read_stack(source: Source, weights: Sequence[Weight], device: torch.device) -> Packed:
    """Matrices of one shape and encoding as a stack [E, ...]."""
    encoding = weights[0].encoding
    packed = encoding.empty(weights[0], len(weights))
    for number, weight in enumerate(weights):
        encoding.fill(packed.expert(number), weight, Reader(source))
    return packed.to(device)


def read_plain(source: Source, weight: Weight, device: torch.device) -> torch.Tensor:
    """A plain tensor of any shape in its stored dtype."""
    tensor = torch.empty(weight.shape, dtype=DTYPES[weight.data.spec.dtype])
    source.read_into(weight.data, 0, as_bytes(tensor))
    return tensor.to(device)

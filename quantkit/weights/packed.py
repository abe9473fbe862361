"""A weight as the checkpoint stores it, in tensors, and as numbers.

    plain   codes [N, K] BF16, F16 or F32
    fp8     codes [N, K] float8_e4m3fn      scale float32 [ceil(N/rows), ceil(K/columns)] of `block`
    int4    codes [N, K/8] int32            scale bfloat16 [N, K/g]
    nvfp4   codes [N, K/2] uint8            scale float8_e4m3fn [N, K/16]      multiplier float32 []

A channel's scale is that of the block (1, K), a tensor's that of (N, K). The experts of a layer are stacked: all
tensors have one axis more, E, in front. Bit layouts: `quantkit.formats`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from quantkit.weights.encodings.encoding import Encoding
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Weight

if TYPE_CHECKING:
    from quantkit.kernels.cpu.linear import Weights


DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Packed:
    """A weight of `shape` [N, K], or of E experts of that shape each."""

    encoding: Encoding
    shape: tuple[int, int]
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in (self.codes, self.scale, self.multiplier) if part is not None)

    @cached_property
    def compiled(self) -> "Weights | None":
        """The weight made ready for the CPU's loops, if they take it."""
        return self.encoding.ready(self)

    def expert(self, number: int) -> "Packed":
        """One expert's weight, sharing the memory."""
        return self._map(lambda part: part[number])

    def to(self, device: torch.device) -> "Packed":
        """The same on another device."""
        return self._map(lambda part: part.to(device))

    def read_codes(self, weight: Weight, reader: Reader) -> None:
        """Read the codes of a weight as they are stored."""
        reader.source.read_into(weight.data, 0, as_bytes(self.codes))

    def read_scale(self, weight: Weight, reader: Reader) -> None:
        """Read its scales as they are stored."""
        assert self.scale is not None
        assert weight.scale is not None
        reader.source.read_into(weight.scale, 0, as_bytes(self.scale))

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of a weight that is not stacked: [N, K] in `dtype`, code x scale rounded once to it."""
        return self.encoding.decode(self, dtype)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Packed":
        return replace(
            self,
            codes=change(self.codes),
            scale=None if self.scale is None else change(self.scale),
            multiplier=None if self.multiplier is None else change(self.multiplier),
        )


def empty(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor [count, *shape] that is not filled."""
    return torch.empty(count, *shape, dtype=dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

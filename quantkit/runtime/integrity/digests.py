"""Digests of whole pages, all layers and parts, over `quantkit.ops.pages.digest`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from quantkit.kernels.reference.page_digest import Binding, Spans, bind
from quantkit.ops import pages as ops

_WORD_SIZES = (8, 4, 2, 1)
Place = tuple[int, str]  # layer and part


@dataclass(frozen=True)
class Bound:
    """Pages and what their digests are bound to, a number of each for N pages.

    rows    that are filled
    prefix  a hash of the tokens up to the last of them
    """

    rows: Sequence[int]
    prefix: Sequence[int]
    position: Sequence[int]
    generation: Sequence[int]

    @classmethod
    def join(cls, parts: Sequence["Bound"]) -> "Bound":
        """All pages of `parts`, in order."""
        return cls(*([one for part in parts for one in getattr(part, field.name)] for field in fields(cls)))

    def binding(self, device: torch.device) -> Binding:
        """As tensors."""
        return Binding(*(_numbers(one, device) for one in (self.prefix, self.position, self.generation)))

    def digest(self, total: torch.Tensor) -> torch.Tensor:
        """The digests, int64 [N], of pages with the sums `total`."""
        return bind(total, _numbers(self.rows, total.device), self.binding(total.device))


def digest_pages(
    tensors: Mapping[Place, torch.Tensor],
    pages: torch.Tensor,
    bound: Bound,
    start: Sequence[int] | None = None,
    carry: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and the digests, int64 [N] each, of `pages` int32 [N] of a pool's `tensors`, each [num_pages, page_size,
    ...]: of all filled rows, or of those from `start` on, added to the sums so far, `carry` int64 [N].
    """
    total = torch.zeros(len(pages), dtype=torch.int64, device=pages.device) if carry is None else carry
    begin = _numbers(start or [0] * len(pages), pages.device).int()
    spans = Spans(pages, begin, _numbers(bound.rows, pages.device).int(), total)
    binding, digest, first_word = bound.binding(pages.device), total, 0
    for tensor in tensors.values():
        total, digest = ops.digest(tensor, replace(spans, carry=total), binding, first_word)
        first_word += _words(tensor)
    return total, digest


def _words(pages: torch.Tensor) -> int:
    """Words of a page of one part."""
    row = pages[0, 0].numel() * pages.itemsize
    return int(pages.shape[1]) * row // next(size for size in _WORD_SIZES if row % size == 0)


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)

"""Content: do pages hold the bytes that were written to them, for the tokens and at the place where they are read?

Beside the pool lie, for each page, the sum of its filled rows and a digest that binds it to the hash of all tokens up
to its last row, to its position and its generation; never to its owner, so requests that share a prefix share pages.
The digest of a page that is appended to grows with it. Before a step all pages that it will read are digested anew and
compared. The hashes begin with the digest of what pages mean, KV scales included.
"""

from collections.abc import Sequence

import torch

from quantkit.runtime.integrity.digests import Bound, digest_pages
from quantkit.runtime.pages import PagePool


class PageContents:
    """What `pool`'s pages ought to hold: int64 [num_pages] of each.

    sums       of the bytes of the filled rows
    digests    that bind a sum to rows, prefix, position and the page's generation
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.sums, self.digests, self._rows, self._prefixes, self._positions = torch.zeros(
            5, pool.num_pages, dtype=torch.int64, device=pool.device
        )
        pool.allocator.carried, pool.copied = self._carry, self._copy

    def check(self, pages: torch.Tensor, bound: Bound) -> torch.Tensor:
        """Whether the bytes of `pages` int32 [N] are those that were written for what is `bound`: bool [N]."""
        _, digest = digest_pages(self._pool.tensors, pages, bound)
        return digest.eq(self.digests[pages])

    def write(self, pages: Sequence[int], bound: Bound, start: Sequence[int]) -> None:
        """Rows from `start` on were written to `pages`."""
        index = torch.tensor(pages, dtype=torch.int32, device=self._pool.device)
        fresh = torch.tensor([begin == 0 for begin in start], device=self._pool.device)
        carry = self.sums[index].masked_fill(fresh, 0)
        self.sums[index], self.digests[index] = digest_pages(self._pool.tensors, index, bound, start, carry)
        for kept, values in (
            (self._rows, bound.rows),
            (self._prefixes, bound.prefix),
            (self._positions, bound.position),
        ):
            kept[index] = torch.tensor(values, dtype=torch.int64, device=self._pool.device)

    def _carry(self, page: int, old: int, new: int) -> None:
        self._bind_again(page, old, page, new)

    def _copy(self, source: int, target: int) -> None:
        generations = self._pool.allocator.generations
        for kept in (self.sums, self._rows, self._prefixes, self._positions):
            kept[target] = kept[source]
        self._bind_again(source, generations[source], target, generations[target])

    def _bind_again(self, source: int, old: int, target: int, new: int) -> None:
        """The digest of `source` in its generation as that of `target` in another: sound only if it was."""
        kept = [int(one[source]) for one in (self._rows, self._prefixes, self._positions)]
        rows, prefix, position = ([number] for number in kept)
        total = self.sums[source : source + 1]
        before, after = (Bound(rows, prefix, position, [one]).digest(total) for one in (old, new))
        sound = self.digests[source] == before
        self.digests[target] = torch.where(sound, after, ~after)[0]

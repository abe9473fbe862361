"""What the digests of a request's pages are bound to: the tokens before and in each page, in one number."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.runtime.integrity.digests import Bound
from quantkit.runtime.tables import next_hash


@dataclass
class _Chain:
    """The hashes of a request's full pages, and the same as numbers."""

    hashes: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class Prefixes:
    """Hashes of requests' tokens, page by page, from `root` on: what the pages mean."""

    def __init__(self, root: bytes, page_size: int) -> None:
        self.root, self._size = root, page_size
        self._chains: dict[int, _Chain] = {}

    def bound(
        self, request: int, tokens: Sequence[int], stop: int, generations: Sequence[int], first: int = 0
    ) -> Bound:
        """What a request's pages, from number `first` on, are bound to when its first `stop` tokens are in them."""
        numbers = self._numbers(request, tokens, stop)
        positions = range(first, len(numbers))
        rows = [min(self._size, stop - position * self._size) for position in positions]
        return Bound(rows, numbers[first:], positions, generations[first : len(numbers)])

    def forget(self, request: int) -> None:
        """A request ended."""
        self._chains.pop(request, None)

    def _numbers(self, request: int, tokens: Sequence[int], stop: int) -> list[int]:
        size, chain = self._size, self._chains.setdefault(request, _Chain())
        for begin in range(len(chain.hashes) * size, stop - size + 1, size):
            chain.hashes.append(next_hash(self._before(chain, begin // size), tokens[begin : begin + size]))
            chain.numbers.append(_number(chain.hashes[-1]))
        full, rest = divmod(stop, size)
        if not rest:
            return chain.numbers[:full]
        return [*chain.numbers[:full], _number(next_hash(self._before(chain, full), tokens[full * size : stop]))]

    def _before(self, chain: _Chain, page: int) -> bytes:
        return chain.hashes[page - 1] if page else self.root


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)

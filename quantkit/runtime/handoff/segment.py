"""One hand-off in shared memory: what the prefill worker writes, and what the decode worker checks before it believes.

    0        header   magic, complete, request, nonce, sha256 of the tokens, their number, the number of terms' bytes
    72       terms    JSON of the writer's `Terms`
    then     tokens   int32 [tokens]: the prompt, written by the coordinator
    then     digests  int64 [pages]: of each page, bound to the terms, the tokens up to its end, its place and the nonce
    then     pages    each part of the writer's spec in order, [pages, page_size, ...]

All but the header begin at a multiple of 64. Pages hold all tokens but the last one, which the decode worker computes.
`complete` is 0 until everything else is written, then the nonce. A nonce is drawn for each attempt at each request, so
what another request or an earlier attempt left is never taken for this one's, equal tokens or not.

A hand-off is refused because of its `truncated` bytes; `incomplete`; a damaged `header`; another `request`; an earlier
attempt, `replayed`; other `tokens`; `terms` that do not fit; or a page that is not that of its `digest`.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from quantkit.errors import HandoffError
from quantkit.runtime.handoff.terms import Terms, check_peers
from quantkit.runtime.integrity.digests import digest_pages
from quantkit.runtime.integrity.prefixes import Prefixes
from quantkit.runtime.page_set import PageSet
from quantkit.runtime.pages import DTYPES, FP8, CacheSpec
from quantkit.runtime.scales import unscaled

_HEADER = struct.Struct("<8sQQQ32sII")
_MAGIC = b"QKPAGES1"
_COMPLETE = 8  # where the word is
_UNIT = 64

Hook = Callable[[str], None]


@dataclass(frozen=True)
class Ticket:
    """Which hand-off it is: a number of its own for each attempt (`nonce`, 63 bits, not 0) at a request's prompt."""

    request: int
    nonce: int
    num_tokens: int
    tokens_sha256: bytes


@dataclass(frozen=True)
class _Places:
    tokens: int
    digests: int
    pages: int
    end: int


def tokens_sha256(tokens: Sequence[int]) -> bytes:
    """The sha256 of a prompt."""
    return hashlib.sha256(_packed(tokens)).digest()


def size_of(terms: Terms, spec: CacheSpec, num_tokens: int) -> int:
    """The bytes of the hand-off of a prompt by a worker with these terms and pages."""
    return _places(len(_encoded(terms)), num_tokens, spec).end


def write_tokens(buffer: memoryview, terms: Terms, spec: CacheSpec, tokens: Sequence[int]) -> None:
    """Put a prompt into a new segment, as the coordinator does."""
    begin = _places(len(_encoded(terms)), len(tokens), spec).tokens
    buffer[begin : begin + 4 * len(tokens)] = _packed(tokens)


def read_tokens(buffer: memoryview, terms: Terms, spec: CacheSpec, ticket: Ticket) -> tuple[int, ...]:
    """The prompt in a segment. Raises HandoffError if it is not the one of the ticket."""
    begin = _places(len(_encoded(terms)), ticket.num_tokens, spec).tokens
    return _tokens_at(buffer, begin, ticket)


def write_pages(
    buffer: memoryview, terms: Terms, ticket: Ticket, pages: PageSet, hook: Hook = lambda point: None
) -> None:
    """Write all but the tokens, `complete` last; `hook` is told how far it is."""
    encoded, spec = _encoded(terms), pages.spec
    places = _places(len(encoded), ticket.num_tokens, spec)
    digests = digests_of(pages, hashlib.sha256(encoded).digest(), ticket.nonce)
    header = 0, ticket.request, ticket.nonce, ticket.tokens_sha256, ticket.num_tokens, len(encoded)
    buffer[: _HEADER.size] = _HEADER.pack(_MAGIC, *header)
    buffer[_HEADER.size : _HEADER.size + len(encoded)] = encoded
    buffer[places.digests : places.digests + 8 * len(digests)] = digests.numpy().tobytes()
    begin = places.pages
    for number, part in enumerate(spec.parts):
        content = _bytes_of(pages.tensors[part.layer, part.name])
        buffer[begin : begin + len(content)] = content
        begin += len(content)
        if number == len(spec.parts) // 2:
            hook("half written")
    hook("written")
    struct.pack_into("<Q", buffer, _COMPLETE, ticket.nonce)


def read_pages(buffer: memoryview, ticket: Ticket, ours: Terms, spec: CacheSpec) -> tuple[PageSet, tuple[int, ...]]:
    """The pages as the prefill worker had them, and the prompt, for a decode worker with the terms `ours` and `spec`.

    Everything is copied out before it is checked, so what was checked is what is used. Raises HandoffError, with its
    cause, for a segment that is cut, not complete, of another request or attempt, of pages that cannot become ours, or
    in which any byte that is used has changed.
    """
    encoded = _read_header(buffer, ticket)
    theirs = _parse_terms(encoded)
    check_peers(theirs, ours)
    source = _source_spec(theirs, spec)
    places = _places(len(encoded), ticket.num_tokens, source)
    if len(buffer) < places.end:
        raise HandoffError(f"the hand-off has {len(buffer):,} bytes of {places.end:,}", cause="truncated")
    tokens = _tokens_at(buffer, places.tokens, ticket)
    pages, begin = PageSet(source, tokens[:-1]), places.pages
    for part in source.parts:
        target = _bytes_of(pages.tensors[part.layer, part.name])
        target[:] = buffer[begin : begin + len(target)]
        begin += len(target)
    found = digests_of(pages, hashlib.sha256(encoded).digest(), ticket.nonce)
    written = np.frombuffer(bytes(buffer[places.digests : places.digests + 8 * len(found)]), np.int64)
    if wrong := np.flatnonzero(found.numpy() != written).tolist():
        raise HandoffError(
            f"request {ticket.request}: the bytes of page {wrong[0]} of {len(found)} are not those of its digest",
            cause="digest",
        )
    pages.complete = True
    return pages, tokens


def _read_header(buffer: memoryview, ticket: Ticket) -> bytes:
    """The bytes of the terms in a segment that is complete and the ticket's."""
    if len(buffer) < _HEADER.size:
        raise HandoffError(f"the hand-off has {len(buffer):,} bytes, less than its header", cause="truncated")
    magic, complete, request, nonce, sha256, num_tokens, terms_bytes = _HEADER.unpack_from(buffer)
    if not complete:
        raise HandoffError(f"request {ticket.request}: the hand-off is not complete", cause="incomplete")
    if magic != _MAGIC or complete != nonce:
        raise HandoffError(f"request {ticket.request}: the header is damaged", cause="header")
    if request != ticket.request:
        raise HandoffError(f"the hand-off is request {request}'s, and not {ticket.request}'s", cause="request")
    if nonce != ticket.nonce:
        raise HandoffError(f"request {request}: the hand-off is one of an earlier attempt", cause="replayed")
    if sha256 != ticket.tokens_sha256:
        raise HandoffError(f"request {request}: the hand-off is of other tokens", cause="tokens")
    if num_tokens != ticket.num_tokens or terms_bytes > len(buffer) - _HEADER.size:
        raise HandoffError(f"request {request}: the header is damaged", cause="header")
    return bytes(buffer[_HEADER.size : _HEADER.size + terms_bytes])


def _parse_terms(encoded: bytes) -> Terms:
    try:
        terms = Terms(**json.loads(encoded))
        if terms.page_size < 1:
            raise ValueError(f"pages of {terms.page_size} tokens")
    except (ValueError, TypeError) as error:
        raise HandoffError(f"the hand-off's terms are damaged: {error}", cause="header") from error
    return terms


def _source_spec(theirs: Terms, spec: CacheSpec) -> CacheSpec:
    """The spec of the other side's pages, which have the same layout as ours."""
    dtype = {str(known): known for known in DTYPES}[theirs.dtype]
    scales = spec.scales if dtype is FP8 else unscaled(len(spec.scales.layers))
    return replace(spec, dtype=dtype, page_size=theirs.page_size, scales=scales)


def _tokens_at(buffer: memoryview, begin: int, ticket: Ticket) -> tuple[int, ...]:
    content = bytes(buffer[begin : begin + 4 * ticket.num_tokens])
    if hashlib.sha256(content).digest() != ticket.tokens_sha256:
        raise HandoffError(f"request {ticket.request}: the tokens have changed", cause="tokens")
    return tuple(np.frombuffer(content, np.int32).tolist())


def digests_of(pages: PageSet, root: bytes, generation: int) -> torch.Tensor:
    """A digest of each page, int64 [pages], bound to `root`, all tokens up to its end, its place and `generation`."""
    count = pages.spec.pages_for(len(pages.tokens))
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    prefixes = Prefixes(root, pages.spec.page_size)
    bound = prefixes.bound(0, pages.tokens, len(pages.tokens), [generation] * count)
    return digest_pages(pages.tensors, torch.arange(count, dtype=torch.int32), bound)[1]


def _places(terms_bytes: int, num_tokens: int, spec: CacheSpec) -> _Places:
    count = spec.pages_for(num_tokens - 1)
    sizes = (_HEADER.size + terms_bytes, 4 * num_tokens, 8 * count)
    begins = accumulate(-(-size // _UNIT) * _UNIT for size in sizes)
    tokens, digests, pages = begins
    return _Places(tokens, digests, pages, pages + count * spec.page_bytes)


def _encoded(terms: Terms) -> bytes:
    return json.dumps(asdict(terms)).encode()


def _packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy().reshape(-1)
    return flat.data

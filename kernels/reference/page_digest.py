"""A 64-bit digest of a page's bytes, in torch: the truth for `kernels/gpu/page_digest.py`, and what a CPU uses.

    word[i]   the page's bytes as little-endian words, numbered from `first_word`, filled up to 64 bits with zeros; a
              word has 8 bytes, or as many (4, 2, 1) as divide a row
    sum       mix(word[i] + (i + 1) * GOLDEN) added over the rows that are filled
    digest    h = sum; for x in (rows filled, prefix, position, generation): h = mix(h ^ x) + GOLDEN

All modulo 2^64; mix is the finalizer of splitmix64, a bijection. A sum is exact in any order, and grows with the page:
the sum of more rows is the sum so far (`carry`) and that of the new ones, so appending reads only the rows appended.

What it detects: a change within one word, or of one of the four numbers that are bound, always; any other fault (words
swapped, a page replayed, bits flipped in several words) unless two sums of 64 bits agree by chance, 1 in 2^64. It has
no key, so someone who chooses bytes can make two pages agree: it finds faults, not attackers.
"""

from dataclasses import dataclass

import torch

from quantkit.kernels.checks import check_tensor, require

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Spans:
    """Rows `start` to `stop` (not included) of `page`, each int32 [N], to be added to the sums `carry` int64 [N]."""

    page: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    carry: torch.Tensor


@dataclass(frozen=True)
class Binding:
    """What a digest is bound to, each int64 [N]: a hash of the tokens up to the page's end, the page's logical position
    and its generation. Never the owner: requests that share a prefix share its pages."""

    prefix: torch.Tensor
    position: torch.Tensor
    generation: torch.Tensor


def page_digest(
    pages: torch.Tensor, spans: Spans, binding: Binding, first_word: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and the digests, int64 [N] each, of `spans` in `pages` [num_pages, page_size, ...] of any dtype.

    Where a page has several parts (layers, keys and values), the sum of one is the carry of the next and `first_word`
    the number of words before it.
    """
    words = check(pages, spans, binding)
    num_pages, page_size = pages.shape[:2]
    sound = (spans.page >= 0) & (spans.page < num_pages) & (spans.start >= 0) & (spans.stop <= page_size)
    require(bool(sound.all()), f"a span is not within {num_pages} pages of {page_size} rows")
    taken = words[spans.page].to(torch.int64) & _mask(words.element_size())  # [N, page_size, words of a row]
    number = torch.arange(first_word + 1, first_word + 1 + taken[0:1].numel(), device=pages.device)
    terms = _mix(taken + (number * _signed(GOLDEN)).view(taken.shape[1:])).sum(2)
    row = torch.arange(page_size, device=pages.device)
    within = (row >= spans.start[:, None]) & (row < spans.stop[:, None])
    total = spans.carry + torch.where(within, terms, 0).sum(1)
    return total, bind(total, spans.stop, binding)


def bind(total: torch.Tensor, rows: torch.Tensor, binding: Binding) -> torch.Tensor:
    """The digests, int64 [N], of pages whose first `rows` have the sums `total`."""
    digest = total
    for bound in (rows.long(), binding.prefix, binding.position, binding.generation):
        digest = _mix(digest ^ bound) + _signed(GOLDEN)
    return digest


def check(pages: torch.Tensor, spans: Spans, binding: Binding) -> torch.Tensor:
    """Refuse tensors that do not fit together; returns `pages` as words, [num_pages, page_size, words of a row]."""
    require(
        pages.dim() >= 3 and pages.is_contiguous() and pages.numel() > 0,
        f"pages {list(pages.shape)} with strides {pages.stride()} are not a contiguous [num_pages, page_size, ...]",
        "pass the whole pool of one layer",
    )
    size = spans.page.shape
    for name, tensor in (("page", spans.page), ("start", spans.start), ("stop", spans.stop)):
        check_tensor(name, tensor, tuple(size), torch.int32)
    bound = ("prefix", binding.prefix), ("position", binding.position), ("generation", binding.generation)
    for name, tensor in (("carry", spans.carry), *bound):
        check_tensor(name, tensor, tuple(size), torch.int64)
    rows = pages.flatten(2).view(torch.uint8)
    return rows.view(next(dtype for width, dtype in _WORDS.items() if rows.shape[2] % width == 0))


def _signed(number: int) -> int:
    """The same 64 bits as a signed number, which is what torch computes with."""
    return number - (1 << 64) if number >> 63 else number


def _mask(itemsize: int) -> int:
    return _signed((1 << 8 * itemsize) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier)
    return x

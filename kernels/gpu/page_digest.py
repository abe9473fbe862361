"""A 64-bit digest of pages' bytes, bound to prefix, position and generation; it grows with a page that is appended to.

    sum[n]    = carry[n] + sum over the words i of rows start[n]..stop[n] of mix(word[i] + (i + 1) * GOLDEN)
    digest[n] = bind(sum[n], stop[n], prefix[n], position[n], generation[n])

Exact in any order. Definitions, and what the digest detects: `quantkit.kernels.reference.page_digest`.
"""

import torch
import triton
import triton.language as tl

from quantkit.kernels.checks import check_tensor
from quantkit.kernels.gpu.launching import run
from quantkit.kernels.reference.page_digest import GOLDEN, MULTIPLIERS, SHIFTS, Binding, Spans, check

_BLOCK = 1024
_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_SHIFT1, _SHIFT2, _SHIFT3 = (tl.constexpr(shift) for shift in SHIFTS)


def page_digest(
    pages: torch.Tensor,
    spans: Spans,
    binding: Binding,
    first_word: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and the digests, int64 [N] each or in `out`, of `spans` in `pages` [num_pages, page_size, ...].

    A span outside the pool is not read: its digest is that of no rows, which does not match.
    """
    words = check(pages, spans, binding)
    out = out or (torch.empty_like(spans.carry), torch.empty_like(spans.carry))
    for name, tensor in zip(("sums", "digests"), out, strict=True):
        check_tensor(name, tensor, tuple(spans.carry.shape), torch.int64)
    if spans.page.numel():
        run(
            _digest,
            (spans.page.numel(),),
            words,
            spans.page,
            spans.start,
            spans.stop,
            spans.carry,
            binding.prefix,
            binding.position,
            binding.generation,
            *out,
            words.shape[0],
            first_word,
            PAGE_SIZE=words.shape[1],
            ROW=words.shape[2],
            BLOCK=min(_BLOCK, triton.next_power_of_2(words.shape[1] * words.shape[2])),
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["first_word"])
def _digest(  # type: ignore[no-untyped-def]
    words,  # [num_pages, PAGE_SIZE, ROW] whole numbers
    pages,  # [N] int32, as the next two
    starts,
    stops,
    carries,  # [N] int64, as all that follow
    prefixes,
    positions,
    generations,
    sums,
    digests,
    num_pages,
    first_word,
    PAGE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each span."""
    span = tl.program_id(0)
    page = tl.load(pages + span).to(tl.int64)
    start = tl.load(starts + span)
    stop = tl.load(stops + span)
    sound = (page >= 0) & (page < num_pages) & (start >= 0) & (stop <= PAGE_SIZE)
    end = tl.where(sound, stop, start) * ROW
    total = tl.zeros([BLOCK], tl.uint64)
    for begin in range(start * ROW, end, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        value = tl.load(words + page * (PAGE_SIZE * ROW) + word, mask=word < end, other=0)
        number = (word + 1).to(tl.uint64) + first_word
        total += tl.where(word < end, _mix(_unsigned(value) + number * _GOLDEN), 0)
    result = tl.sum(total, axis=0) + tl.load(carries + span).to(tl.uint64, bitcast=True)
    tl.store(sums + span, result.to(tl.int64, bitcast=True))
    digest = _bind(result, stop.to(tl.int64))
    digest = _bind(digest, tl.load(prefixes + span))
    digest = _bind(digest, tl.load(positions + span))
    digest = _bind(digest, tl.load(generations + span))
    tl.store(digests + span, digest.to(tl.int64, bitcast=True))


@triton.jit
def _unsigned(word):  # type: ignore[no-untyped-def]
    """A whole number of any size as uint64, filled up with zeros."""
    if word.dtype == tl.int64:
        word = word.to(tl.uint64, bitcast=True)
    elif word.dtype == tl.int32:
        word = word.to(tl.uint32, bitcast=True)
    elif word.dtype == tl.int16:
        word = word.to(tl.uint16, bitcast=True)
    return word.to(tl.uint64)


@triton.jit
def _bind(digest, number):  # type: ignore[no-untyped-def]
    return _mix(digest ^ number.to(tl.uint64, bitcast=True)) + _GOLDEN


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """The finalizer of splitmix64."""
    x = (x ^ (x >> _SHIFT1)) * _FIRST
    x = (x ^ (x >> _SHIFT2)) * _SECOND
    return x ^ (x >> _SHIFT3)

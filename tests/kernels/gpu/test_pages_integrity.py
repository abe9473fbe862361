"""Checking pages and digesting them: the torch references equal the definitions, the Triton kernels the references."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import UsageError
from quantkit.kernels.gpu import page_check as check_kernels
from quantkit.kernels.gpu import page_digest as digest_kernels
from quantkit.kernels.reference import page_check as check_reference
from quantkit.kernels.reference import page_digest as digest_reference
from quantkit.kernels.reference.page_digest import Binding, Spans
from support.guards import guards

BOTH_CHECKS = pytest.mark.parametrize(
    "check", [check_kernels.page_check, check_reference.page_check], ids=["kernel", "reference"]
)
BOTH_DIGESTS = pytest.mark.parametrize(
    "digest", [digest_kernels.page_digest, digest_reference.page_digest], ids=["kernel", "reference"]
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@dataclasses.dataclass
class Expectations:
    """A pool's generations and what three requests expect of it."""

    table: torch.Tensor
    expected: torch.Tensor
    counts: torch.Tensor
    generations: torch.Tensor

    def check(self, check: Callable[..., torch.Tensor]) -> list[int]:
        """The verdicts, computed between guard areas."""
        with guards() as guarded:
            placed = [guarded(getattr(self, field.name)) for field in dataclasses.fields(self)]
            if check is check_kernels.page_check:
                result = check(*placed, out=guarded.empty(self.counts.shape, torch.int32))
            else:
                result = check(*placed)
        assert result.dtype == torch.int32
        return list(result.tolist())


def expectations(counts: tuple[int, ...], max_pages: int, num_pages: int = 60) -> Expectations:
    """All good; beyond a request's count the table and the expectations are garbage."""
    table = torch.randint(-(2**31), 2**31, (len(counts), max_pages)).int()
    expected = torch.randint(-(2**62), 2**62, (len(counts), max_pages))
    generations = torch.randperm(num_pages * 9)[:num_pages] * 2**33 + 1  # distinct, and no 32 bits tell them apart
    for request, count in enumerate(counts):
        table[request, :count] = torch.randperm(num_pages)[:count].int()
        expected[request, :count] = generations[table[request, :count].long()]
    return Expectations(table, expected, torch.tensor(counts, dtype=torch.int32), generations)


@BOTH_CHECKS
def test_clean_pages_are_good(check: Any) -> None:
    """No false alarm: requests without pages, with one, with all that the table has room for; shared pages."""
    case = expectations((0, 1, 17, 40), 40)
    case.table[1, 0], case.expected[1, 0] = case.table[2, 5], case.expected[2, 5]

    assert case.check(check) == [-1, -1, -1, -1]


@BOTH_CHECKS
def test_every_single_wrong_generation_is_found(check: Any) -> None:
    """A page that is given away since, at any position of any request, is that request's verdict and no other's."""
    case = expectations((5, 1, 7), 7, num_pages=13)
    for request, count in enumerate((5, 1, 7)):
        for position in range(count):
            for change in (1, -1, 1 << 40):
                case.expected[request, position] += change
                verdict = [-1, -1, -1]
                verdict[request] = position
                assert case.check(check) == verdict
                case.expected[request, position] -= change


@BOTH_CHECKS
def test_swapped_pages_are_found(check: Any) -> None:
    """Two pages of a request in each other's place, and a page of another request."""
    case = expectations((6, 6), 6, num_pages=12)
    case.table[0, [2, 4]] = case.table[0, [4, 2]]
    foreign = next(page for page in range(12) if page not in case.table[1].tolist())
    case.table[1, 3] = foreign

    assert case.check(check) == [2, 3]


@BOTH_CHECKS
def test_a_page_that_comes_back_is_found(check: Any) -> None:
    """ABA: freed and allocated again for the same request, a page has the same id and another generation."""
    case = expectations((4,), 4)
    freed = int(case.table[0, 1])
    case.generations[freed] = int(case.generations.max()) + 1
    case.generations[freed] = int(case.generations.max()) + 1

    assert case.check(check) == [1]


@BOTH_CHECKS
def test_ids_and_counts_outside_are_bad(check: Any) -> None:
    """A page id outside the pool is bad where it stands, a count above the table at its end; neither is read."""
    case = expectations((3, 3, 3, 3), 3)
    case.table[0, 2], case.table[1, 1], case.counts[2], case.counts[3] = 60, -1, 4, 2**31 - 1
    case.expected[0, 2], case.expected[1, 1] = case.generations[0], 0  # what a careless look-up would find

    assert case.check(check) == [2, 1, 3, 3]


@BOTH_CHECKS
def test_long_requests(check: Any) -> None:
    """The first of several faults counts, beyond the tile of one step too."""
    case = expectations((2500, 2500, 2500), 2500, num_pages=3000)
    case.expected[0, 2499] += 1
    case.expected[1, [1023, 1024, 2048]] += 1

    assert case.check(check) == [2499, 1023, -1]


@BOTH_CHECKS
def test_check_of_nothing(check: Any) -> None:
    """No requests give no verdicts; requests without a table are good; in a pool without pages every page is bad."""
    assert expectations((), 4).check(check) == []
    assert expectations((0, 0), 0).check(check) == [-1, -1]
    empty = expectations((2,), 2)
    empty.generations = torch.zeros(0, dtype=torch.int64)
    assert empty.check(check) == [0]


@BOTH_CHECKS
def test_check_refuses_other_types(check: Any) -> None:
    """Tensors of another type or shape are named."""
    case = expectations((2,), 2)
    with pytest.raises(UsageError, match=r"generations is torch\.int32"):
        check(case.table, case.expected, case.counts, case.generations.int())
    with pytest.raises(UsageError, match="expected has shape"):
        check(case.table, case.expected[:, :1], case.counts, case.generations)


MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finalizer of splitmix64 in Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def defined(
    rows: torch.Tensor, start: int, stop: int, carry: int, bound: list[int], first_word: int
) -> tuple[int, int]:
    """Sum and digest as the reference's docstring defines them; `rows` are a page's bytes [page_size, row]."""
    width = next(size for size in (8, 4, 2, 1) if rows.shape[1] % size == 0)
    words = rows.numpy().reshape(-1).view(f"<u{width}").reshape(len(rows), -1)
    total = carry & MASK
    for row in range(start, stop):
        for column, word in enumerate(words[row].tolist()):
            number = first_word + row * words.shape[1] + column + 1
            total = (total + mixed(word + number * 0x9E3779B97F4A7C15 & MASK)) & MASK
    digest = total
    for value in (stop, *bound):
        digest = mixed(digest ^ (value & MASK)) + 0x9E3779B97F4A7C15 & MASK
    return total, digest


def random_longs(count: int) -> torch.Tensor:
    """64-bit numbers of either sign."""
    return torch.randint(-(2**63), 2**63 - 1, (count,))


def spans(page: list[int], start: list[int], stop: list[int], carry: torch.Tensor | None = None) -> Spans:
    """Spans from lists."""
    numbers = [torch.tensor(values, dtype=torch.int32) for values in (page, start, stop)]
    return Spans(*numbers, torch.zeros(len(page), dtype=torch.int64) if carry is None else carry)


def binding(count: int) -> Binding:
    """Something to be bound to."""
    return Binding(random_longs(count), torch.arange(count), random_longs(count))


@BOTH_DIGESTS
@pytest.mark.parametrize("row", [576, 656, 20, 6, 13])
def test_digest_is_as_defined(digest: Any, row: int) -> None:
    """Words of 8, 4, 2 and 1 bytes, empty spans, parts of pages: equal to the definition in whole numbers."""
    pages = torch.randint(0, 256, (5, 4, row), dtype=torch.uint8)
    pages[1] = 0
    pages[2] = 255
    parts = spans([0, 1, 2, 3, 4, 0], [0, 0, 0, 1, 4, 3], [4, 4, 4, 3, 4, 4], random_longs(6))
    bound = binding(6)
    with guards() as guarded:
        placed = [
            type(group)(**{field.name: guarded(getattr(group, field.name)) for field in dataclasses.fields(group)})
            for group in (parts, bound)
        ]
        sums, digests = digest(guarded(pages), *placed, 7)

    for index in range(6):
        page, start, stop = (int(values[index]) for values in (parts.page, parts.start, parts.stop))
        facts = [int(values[index]) for values in (bound.prefix, bound.position, bound.generation)]
        total, final = defined(pages[page], start, stop, int(parts.carry[index]), facts, 7)
        assert (int(sums[index]) & MASK, int(digests[index]) & MASK) == (total, final)


@BOTH_DIGESTS
def test_a_growing_page_has_the_digest_of_the_whole(digest: Any) -> None:
    """Row after row from the sum so far gives the same sums and digests as all rows at once."""
    pages = torch.randint(0, 256, (3, 16, 72), dtype=torch.uint8)
    bound = binding(1)
    carry = torch.zeros(1, dtype=torch.int64)
    for row in range(16):
        grown = digest(pages, spans([1], [row], [row + 1], carry), bound)
        whole = digest(pages, spans([1], [0], [row + 1]), bound)
        assert torch.equal(grown[0], whole[0])
        assert torch.equal(grown[1], whole[1])
        carry = grown[0]


def test_every_flipped_bit_changes_the_digest() -> None:
    """Each single bit of a page, one at a time; a bit in a row that is not filled yet does not."""
    page = torch.randint(0, 256, (4, 24), dtype=torch.uint8)
    flipped = page.expand(768, 4, 24).clone()
    bits = torch.arange(768)
    flipped.view(768, 96)[bits, bits // 8] ^= (1 << (bits % 8)).to(torch.uint8)
    pages = torch.cat([page[None], flipped])
    count = len(pages)
    same = Binding(*(torch.full((count,), value) for value in (123, 4, 56)))
    _, whole = digest_reference.page_digest(pages, spans(list(range(count)), [0] * count, [4] * count), same)
    _, three = digest_reference.page_digest(pages, spans(list(range(count)), [0] * count, [3] * count), same)

    assert len(set(whole.tolist())) == count
    assert len(set(three.tolist())) == 1 + 3 * 24 * 8


def test_swapped_and_replayed_pages_change_the_digest() -> None:
    """Words, rows and pages in another place; other prefix, position, generation or number of rows; but not the id."""
    pages = torch.randint(0, 256, (6, 4, 24), dtype=torch.uint8)
    pages[1] = pages[0]
    pages[2] = pages[0][[1, 0, 2, 3]]
    pages[3] = pages[0].view(4, 3, 8)[:, [2, 1, 0]].reshape(4, 24)
    plain = {"prefix": [99] * 9, "position": [3] * 9, "generation": [8] * 9}
    plain["prefix"][4], plain["position"][5], plain["generation"][6] = 98, 4, 9
    which = [0, 1, 2, 3, 0, 0, 0, 0, 5]
    stops = [4, 4, 4, 4, 4, 4, 4, 3, 4]
    bound = Binding(*(torch.tensor(values) for values in plain.values()))
    _, digests = digest_reference.page_digest(pages, spans(which, [0] * 9, stops), bound)
    first, same, *others = digests.tolist()

    assert first == same
    assert len({first, *others}) == 8


@BOTH_DIGESTS
def test_layers_are_one_page(digest: Any) -> None:
    """The sum of one layer carried into the next is the sum of both side by side, and tells the layers apart."""
    layers = torch.randint(0, 256, (2, 3, 4, 16), dtype=torch.uint8)
    bound = binding(1)
    words = 4 * 16 // 8

    def both(order: list[int]) -> int:
        sums, _ = digest(layers[order[0]], spans([2], [0], [4]), bound)
        return int(digest(layers[order[1]], spans([2], [0], [4], sums), bound, words)[1])

    side_by_side = layers[:, 2:3].transpose(0, 1).reshape(1, 8, 16).contiguous()
    sums, _ = digest(side_by_side, spans([0], [0], [8]), bound)
    separate, _ = digest(layers[0], spans([2], [0], [4]), bound)
    joined, _ = digest(layers[1], spans([2], [0], [4], separate), bound, words)
    assert torch.equal(sums, joined)
    assert both([0, 1]) != both([1, 0])


def test_digests_of_many_pages_differ() -> None:
    """A hundred thousand pages that differ in two numbers out of a small set have as many digests."""
    pages = torch.zeros(100_489, 1, 16, dtype=torch.uint8)
    words = pages.view(torch.int64).view(-1, 2)
    words[:, 0], words[:, 1] = torch.arange(100_489) // 317, torch.arange(100_489) % 317
    count = len(pages)
    same = Binding(*(torch.zeros(count, dtype=torch.int64) for _ in range(3)))
    _, digests = digest_reference.page_digest(pages, spans(list(range(count)), [0] * count, [1] * count), same)

    assert len(np.unique(digests.numpy())) == count


def test_digest_of_nothing_and_of_what_is_not_there() -> None:
    """No spans give no digests; a span outside the pool is an error on the host, and no rows in the kernel."""
    pages = torch.randint(0, 256, (2, 4, 16), dtype=torch.uint8)
    assert digest_kernels.page_digest(pages, spans([], [], []), binding(0))[1].shape == (0,)
    for page, start, stop in ((2, 0, 4), (-1, 0, 4), (0, 0, 5), (0, -1, 4)):
        case, bound = spans([page], [start], [stop]), binding(1)
        with pytest.raises(UsageError, match="not within 2 pages of 4 rows"):
            digest_reference.page_digest(pages, case, bound)
        sums, digests = digest_kernels.page_digest(pages, case, bound)
        assert sums.tolist() == [0]
        assert digests.tolist() != digest_reference.page_digest(pages, spans([0], [0], [4]), bound)[1].tolist()


@BOTH_DIGESTS
def test_digest_refuses_other_types(digest: Any) -> None:
    """Tensors of another type or shape are named."""
    pages = torch.zeros(2, 4, 16, dtype=torch.uint8)
    case, bound = spans([0], [0], [4]), binding(1)
    with pytest.raises(UsageError, match=r"prefix is torch\.int32"):
        digest(pages, case, dataclasses.replace(bound, prefix=bound.prefix.int()))
    with pytest.raises(UsageError, match="carry has shape"):
        digest(pages, dataclasses.replace(case, carry=random_longs(2)), bound)
    with pytest.raises(UsageError, match="not a contiguous"):
        digest(pages[:, :, ::2], case, bound)

"""Paged decode attention: the torch reference equals a plain loop, and the Triton kernels equal the reference."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quantkit.errors import UsageError
from quantkit.kernels import pages as layouts
from quantkit.kernels.gpu import paged_decode as kernels
from quantkit.kernels.gpu.paged_decode import Launch, Tile
from quantkit.kernels.reference import kv_write
from quantkit.kernels.reference import paged_decode as reference
from support.guards import Guards, guards
from support.tiers import exhaustive, quick_if

LATENT, ROPE, HEAD = 48, 16, 24
SMALL = Launch(tile=Tile(16, 16, 4, 1))
BOUND = {"e4m3": 5e-4, "ds": 2e-6, "bf16": 2e-6, "float32": 2e-6}  # relative; of E4M3, weights are rounded to float16
DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "float32": torch.float32}
NUM_PAGES = 30
GARBAGE = (-1, -(2**31), NUM_PAGES, 2**31 - 1)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # NaN and infinity in the interpreter
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests over a pool of MLA pages."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    softmax_scale: float = 0.2
    scale: float = 1.0
    indices: torch.Tensor | None = None

    def arguments(self) -> list[Any]:
        """The fields in the order of `decode_mla`."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def tables(lengths: Sequence[int], page_size: int) -> torch.Tensor:
    """Distinct pages for what a length needs, and ids outside the pool beyond it."""
    needed = [-(-length // page_size) for length in lengths]
    shape = len(needed), max(needed, default=0) + 1
    table = torch.tensor(GARBAGE, dtype=torch.int32)[torch.randint(len(GARBAGE), shape)]
    for request, count in enumerate(needed):
        table[request, :count] = torch.randperm(NUM_PAGES)[:count].int()
    return table


def poison_rest(pages: torch.Tensor, table: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """`pages` with NaN in every row that belongs to no token of these requests."""
    rows = pages.view(torch.uint8).flatten(0, 1).clone()
    page_size = pages.shape[1]
    used = torch.zeros(len(rows), dtype=torch.bool)
    for request, length in enumerate(lengths):
        token = torch.arange(length)
        used[table[request, token // page_size].long() * page_size + token % page_size] = True
    rows[~used] = torch.full((1,), 0xFF, dtype=torch.uint8)
    return rows.view(pages.dtype).view(pages.shape)


def make(
    kind: str, lengths: Sequence[int], heads: int = 5, page_size: int = 16, latent: int = LATENT, rope: int = ROPE
) -> Batch:
    """A batch of `kind` with random rows, NaN wherever nothing is to be read, and a table of garbage beyond lengths."""
    values = torch.randn(NUM_PAGES * page_size, latent + rope) * 3
    if kind == "ds":
        pages = torch.zeros(NUM_PAGES, page_size, layouts.DS_ROW, dtype=torch.uint8)
        slots, counts = torch.arange(len(values)), torch.zeros(3, dtype=torch.int64)
        kv_write.write_mla(values[:, :latent], values[:, latent:], pages, slots, 1.0, counts)
    else:
        pages = values.view(NUM_PAGES, page_size, -1).to(DTYPES[kind])
    table = tables(lengths, page_size)
    query = torch.randn(len(lengths), heads, latent + rope).bfloat16()
    return Batch(
        query[..., :latent].contiguous(),
        query[..., latent:].contiguous(),
        poison_rest(pages, table, lengths),
        table,
        torch.tensor(lengths, dtype=torch.int32),
        scale=0.25 if kind == "e4m3" else 1.0,
    )


def exact(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64."""
    doubles = dataclasses.replace(batch, q_latent=batch.q_latent.double(), q_rope=batch.q_rope.double())
    return reference.decode_mla(*doubles.arguments())


def run(batch: Batch, launch: Launch = SMALL) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels between guard areas, with float32 results."""
    with guards() as guarded:
        out = guarded.empty(batch.q_latent.shape, torch.float32), guarded.empty(batch.q_latent.shape[:2], torch.float32)
        arguments = [guarded(value) if isinstance(value, torch.Tensor) else value for value in batch.arguments()]
        kernels.decode_mla(*arguments, launch, out)
    return out


def assert_near(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], bound: float
) -> None:
    """Each request's result within `bound` (relative Frobenius error), its log-sum-exp too; NaN where NaN is due."""
    for out, want in zip(actual[0], expected[0], strict=True):
        assert torch.equal(out.isnan(), want.isnan())
        difference = (out.double() - want.double()).nan_to_num().norm()
        assert difference <= bound * want.double().nan_to_num().norm()
    torch.testing.assert_close(actual[1].double(), expected[1].double(), rtol=bound, atol=bound, equal_nan=True)


def decoded(pages: torch.Tensor, latent: int, rope: int) -> torch.Tensor:
    """The numbers of MLA pages, float64 [num_slots, latent + rope]."""
    rows = pages.flatten(0, 1)
    if rows.shape[1] != layouts.DS_ROW:
        return rows.double()
    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    return torch.cat([(codes * scales[:, :, None]).flatten(1), rows[:, 528:].contiguous().view(torch.bfloat16)], dim=1)


def plain(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as its definition says it, one head and one token at a time, in float64."""
    latent, rope = batch.q_latent.shape[2], batch.q_rope.shape[2]
    values = decoded(batch.pages, latent, rope) * batch.scale
    page_size = batch.pages.shape[1]
    out = torch.zeros(batch.q_latent.shape, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    for request, length in enumerate(batch.lengths.tolist()):
        positions = list(range(length)) if batch.indices is None else batch.indices[request].tolist()
        slots = [
            int(batch.block_table[request, position // page_size]) * page_size + position % page_size
            for position in positions
            if 0 <= position < length
        ]
        for head in range(out.shape[1] if slots else 0):
            query = torch.cat([batch.q_latent[request, head], batch.q_rope[request, head]]).double()
            scores = [float(query @ values[slot]) * batch.softmax_scale for slot in slots]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            lse[request, head] = top + math.log(sum(weights))
            for weight, slot in zip(weights, slots, strict=True):
                out[request, head] += weight / sum(weights) * values[slot, :latent]
    return out, lse


AWKWARD = {1: (0, 1, 2, 17, 29), 16: (0, 1, 15, 16, 17, 33), 64: (0, 1, 63, 64, 65, 130)}


KINDS = ("e4m3", "bf16", "float32")


@pytest.mark.parametrize(
    ("kind", "page_size"),
    quick_if(lambda *case: case in (("e4m3", 16), ("bf16", 1)), itertools.product(KINDS, AWKWARD)),
)
def test_mla_at_page_borders(kind: str, page_size: int) -> None:
    """Empty and one-token requests, lengths at a page's border and beside it; nothing beyond a length is read."""
    batch = make(kind, AWKWARD[page_size], page_size=page_size)
    expected = plain(batch)

    assert_near(exact(batch), expected, 1e-13)
    assert_near(reference.decode_mla(*batch.arguments()), expected, 2.0**-8)
    assert_near(run(batch), expected, BOUND[kind])
    assert torch.equal(expected[1][0], torch.full((5,), -math.inf, dtype=torch.float64))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["e4m3", "bf16", "ds"])
def test_mla_of_real_width(kind: str) -> None:
    """Rows of 512 + 64 with the tile that is chosen for them."""
    batch = make(kind, (0, 1, 70), heads=16, page_size=64, latent=512, rope=64)
    expected = plain(batch)

    assert_near(exact(batch), expected, 1e-13)
    assert_near(run(batch, Launch(splits=2)), expected, BOUND[kind])


@pytest.mark.parametrize("heads", [1, 17, exhaustive(16), exhaustive(40)])
def test_heads_that_fill_no_tile(heads: int) -> None:
    """The heads of a tile that does not exist are neither read nor written."""
    batch = make("bf16", (7, 33), heads=heads)

    assert_near(run(batch), exact(batch), BOUND["bf16"])


@pytest.mark.parametrize(
    ("kind", "splits"),
    quick_if(
        lambda *case: case in (("e4m3", 3), ("float32", 9)), itertools.product(("e4m3", "float32"), (1, 2, 3, 9, 19))
    ),
)
def test_splits_do_not_matter(kind: str, splits: int) -> None:
    """Any number of splits, more than there are tiles included, is as near to the exact result."""
    batch = make(kind, (0, 1, 31, 100, 220), heads=2)

    assert_near(run(batch, dataclasses.replace(SMALL, splits=splits)), exact(batch), BOUND[kind])


@pytest.mark.exhaustive
def test_a_request_does_not_depend_on_its_batch() -> None:
    """With equal splits a request has the same bits alone and among others, in the kernels and in the reference."""
    batch = make("e4m3", (40, 3, 77))
    launch = dataclasses.replace(SMALL, splits=3)
    together, truth = run(batch, launch), reference.decode_mla(*batch.arguments())
    for request in range(3):
        part = slice(request, request + 1)
        fields = ("q_latent", "q_rope", "block_table", "lengths")
        alone = dataclasses.replace(batch, **{name: getattr(batch, name)[part].contiguous() for name in fields})
        assert torch.equal(run(alone, launch)[0][0], together[0][request])
        assert torch.equal(reference.decode_mla(*alone.arguments())[0][0], truth[0][request])


@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_token_lists(kind: str) -> None:
    """-1 anywhere, positions beyond the length, positions listed twice (which count twice), and a list of nothing."""
    batch = make(kind, (0, 1, 60, 60, 60))
    listed = torch.randint(-1, 70, (5, 21), dtype=torch.int32)
    listed[3] = -1
    listed[4, :3] = torch.tensor([59, 59, 0])
    listed[4, 3:] = -1
    batch = dataclasses.replace(batch, indices=listed)
    expected = plain(batch)

    assert_near(exact(batch), expected, 1e-13)
    assert_near(run(batch, dataclasses.replace(SMALL, splits=2)), expected, BOUND[kind])
    assert expected[1][3].isinf().all()


def test_a_list_of_all_tokens_is_no_list() -> None:
    """Every position once, in any order, is attention over the whole request."""
    batch = make("float32", (37, 37))
    listed = torch.stack([torch.randperm(37), torch.randperm(37)]).int()

    assert_near(run(dataclasses.replace(batch, indices=listed)), exact(batch), BOUND["float32"])


def test_ds_rows_under_a_token_list() -> None:
    """Rows with their own scales, as a DSA model reads them."""
    batch = make("ds", (5, 90), heads=8, page_size=64, latent=512, rope=64)
    batch = dataclasses.replace(batch, indices=torch.randint(-1, 90, (2, 40), dtype=torch.int32))

    assert_near(run(batch, Launch()), plain(batch), BOUND["ds"])


def test_every_e4m3_code_in_pages() -> None:
    """All codes that are numbers, -0 included, give what the table of E4M3 says; a NaN makes its request NaN."""
    batch = make("e4m3", (16, 16, 16))
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].repeat(9)[: 32 * 64].view(2, 16, 64)
    pages = batch.pages.clone()
    pages[batch.block_table[:2, 0].long()] = finite.view(torch.float8_e4m3fn)
    pages[batch.block_table[2, 0].long(), 3, 1] = torch.tensor(0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    batch = dataclasses.replace(batch, pages=pages, scale=1.0, softmax_scale=1e-3)
    result = run(batch)

    assert_near((result[0][:2], result[1][:2]), tuple(part[:2] for part in exact(batch)), BOUND["e4m3"])
    assert result[0][2, :, 1].isnan().all()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_of_any_size(size: float) -> None:
    """Float16 products over E4M3 rows neither overflow nor vanish: a head's query is brought into range."""
    batch = make("e4m3", (33,))
    query = (batch.q_latent.float() * size).bfloat16(), (batch.q_rope.float() * size).bfloat16()
    batch = dataclasses.replace(batch, q_latent=query[0], q_rope=query[1], softmax_scale=0.1 / size)

    assert_near(run(batch), exact(batch), BOUND["e4m3"])


def test_a_query_of_zeros_averages() -> None:
    """Scores of 0 weigh all tokens alike."""
    batch = make("e4m3", (33,))
    zero = dataclasses.replace(batch, q_latent=batch.q_latent * 0, q_rope=batch.q_rope * 0)

    assert_near(run(zero), exact(zero), BOUND["e4m3"])
    assert run(zero)[1] == pytest.approx(torch.full((1, 5), math.log(33)))


def test_results_have_the_type_of_the_query() -> None:
    """Without `out`, BF16 queries give BF16 results, half a step from the exact ones, and a float32 log-sum-exp."""
    batch = make("bf16", (33,))
    out, lse = kernels.decode_mla(*batch.arguments(), SMALL)

    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert_near((out, lse), exact(batch), 2.0**-8)


def test_no_requests() -> None:
    """A batch of nothing gives nothing."""
    batch = make("bf16", ())

    assert kernels.decode_mla(*batch.arguments())[0].shape == (0, 5, LATENT)
    assert reference.decode_mla(*batch.arguments())[1].shape == (0, 5)


def test_what_the_host_cannot_see_gives_nan() -> None:
    """A length beyond the block table, a negative one, and a page outside the pool give NaN to that request alone."""
    batch = make("e4m3", (20, 20, 20, 20))
    batch.lengths[1] = batch.block_table.shape[1] * 16 + 1
    batch.lengths[2] = -3
    batch.block_table[3, 1] = NUM_PAGES
    pool = torch.ones(NUM_PAGES + 1, *batch.pages.shape[1:]).to(torch.float8_e4m3fn)  # numbers behind it, too
    pool[:NUM_PAGES] = batch.pages
    out, lse = kernels.decode_mla(*dataclasses.replace(batch, pages=pool[:NUM_PAGES]).arguments(), SMALL)

    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert out[1:].isnan().all()
    assert lse[1:].isnan().all()


def test_what_the_host_can_see_is_refused() -> None:
    """E04: as many tokens as the block table has room for work; one more is refused, with the sizes."""
    batch = make("bf16", (48,))
    batch = dataclasses.replace(batch, block_table=batch.block_table[:, :3].contiguous())
    assert_near(run(batch, dataclasses.replace(SMALL, max_length=48)), exact(batch), BOUND["bf16"])
    with pytest.raises(UsageError, match=r"49 tokens.* 3 pages of 16"):
        kernels.decode_mla(*batch.arguments(), Launch(max_length=49))
    batch.lengths[0] = 49
    with pytest.raises(UsageError, match="request 0 has 49 tokens"):
        reference.decode_mla(*batch.arguments())
    batch.lengths[0] = 48
    batch.block_table[0, 2] = NUM_PAGES
    with pytest.raises(UsageError, match=f"page .{NUM_PAGES}. is not in a pool"):
        reference.decode_mla(*batch.arguments())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, "block_table is torch.int64"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths has shape"),
        ({"q_rope": torch.zeros(1, 4, ROPE, dtype=torch.bfloat16)}, "q_rope has shape"),
        ({"pages": torch.zeros(2, 16, 63, dtype=torch.uint8)}, "MLA pages have shape"),
        ({"pages": torch.zeros(2, 16, LATENT + ROPE, dtype=torch.float16)}, "are torch.float16"),
        ({"pages": torch.zeros(2, 16, LATENT + ROPE), "scale": 0.5}, "are not scaled"),
        ({"indices": torch.zeros(2, 8, dtype=torch.int32)}, "indices has shape"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    """Shapes, types and scales that contradict each other name the tensor."""
    batch = dataclasses.replace(make("e4m3", (5,)), **change)
    for decode in (kernels.decode_mla, reference.decode_mla):
        with pytest.raises(UsageError, match=message):
            decode(*batch.arguments())


def plain_gqa(arguments: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """GQA as MLA attention of one key head after another: keys without a rope part, then values by the same weights."""
    query, keys, values, table, lengths, softmax_scale, key_scale, value_scale = arguments
    out, lse = torch.zeros(query.shape, dtype=torch.float64), torch.zeros(query.shape[:2], dtype=torch.float64)
    shared = query.shape[1] // keys.shape[2]
    for head in range(query.shape[1]):
        both = torch.cat([values[:, :, head // shared], keys[:, :, head // shared]], dim=-1)
        one = query[:, head : head + 1]
        batch = Batch(one * 0, one, both, table, lengths, softmax_scale * key_scale)
        attended, lse[:, head : head + 1] = plain(batch)
        out[:, head] = attended[:, 0] * value_scale
    return out, lse


HEADS = {"e4m3": (6, 2), "bf16": (4, 4), "float32": (3, 1)}  # of queries, of keys


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads"),
    quick_if(
        lambda kind, *heads: HEADS[kind] == heads,
        ((kind, *heads) for kind in KINDS for heads in (*HEADS.values(), (40, 2))),
    ),
)
def test_gqa(kind: str, heads: int, kv_heads: int) -> None:
    """Groups of heads over two pools with a scale each, NaN beyond lengths."""
    lengths = (0, 1, 16, 35)
    table = tables(lengths, 16)
    pools = [poison_rest(torch.randn(NUM_PAGES, 16, kv_heads * HEAD).to(DTYPES[kind]), table, lengths) for _ in "kv"]
    keys, values = (pool.view(NUM_PAGES, 16, kv_heads, HEAD) for pool in pools)
    query = torch.randn(4, heads, HEAD).bfloat16()
    scales = (0.5, 2.0) if kind == "e4m3" else (1.0, 1.0)
    arguments = (query, keys, values, table, torch.tensor(lengths, dtype=torch.int32), 0.3, *scales)
    expected = plain_gqa(arguments)
    with guards() as guarded:
        out = guarded.empty(query.shape, torch.float32), guarded.empty(query.shape[:2], torch.float32)
        placed = [guarded(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        kernels.decode_gqa(*placed, dataclasses.replace(SMALL, splits=2), out)

    assert_near(reference.decode_gqa(query.double(), *arguments[1:]), expected, 1e-13)
    assert_near(out, expected, BOUND[kind])


def test_gqa_that_does_not_fit_is_refused() -> None:
    """Heads that do not divide, pools that differ, and bad scales."""
    pages = torch.zeros(4, 16, 2, HEAD, dtype=torch.bfloat16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.zeros(1, 3, HEAD, dtype=torch.bfloat16)
    for decode in (kernels.decode_gqa, reference.decode_gqa):
        with pytest.raises(UsageError, match="3 query heads are not a multiple of 2"):
            decode(query, pages, pages, table, lengths, 1.0)
        with pytest.raises(UsageError, match=r"value pages torch\.float32"):
            decode(query[:, :2], pages, pages.float(), table, lengths, 1.0)
        with pytest.raises(UsageError, match="value_scale is -1"):
            decode(query[:, :2], pages, pages, table, lengths, 1.0, 1.0, -1.0)


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
def test_one_scale_for_the_whole_row(rope: bool) -> None:
    """B02: rows written with scale 0.5 and read with it are the float attention within the error of FP8."""
    batch = make("e4m3", (50,))
    floats = torch.randn(NUM_PAGES * 16, LATENT + ROPE) * 20
    pages = torch.zeros_like(batch.pages)
    slots, counts = torch.arange(len(floats)), torch.zeros(3, dtype=torch.int64)
    kv_write.write_mla(floats[:, :LATENT], floats[:, LATENT:], pages, slots, 0.5, counts)
    query = (batch.q_latent * 0.1, batch.q_rope * (0.1 if rope else 0.0))
    stored = dataclasses.replace(batch, q_latent=query[0], q_rope=query[1], pages=pages, scale=0.5, softmax_scale=0.02)
    truth = dataclasses.replace(stored, pages=floats.view(NUM_PAGES, 16, -1), scale=1.0)

    assert counts.tolist() == [0, 0, 0]
    assert_near(run(stored), exact(truth), 0.04)


def test_pools_beyond_two_billion_numbers() -> None:
    """G03: rows behind 2^31 elements are written and read where they belong (memory is only taken where it is used)."""
    pages = torch.empty(58_300, 64, 576, dtype=torch.uint8)
    assert pages.numel() > 2**31
    rows = torch.randn(3, 576).bfloat16()
    slots, counts = torch.tensor([0, 58_299 * 64, 58_300 * 64 - 1]), torch.zeros(3, dtype=torch.int64)
    from quantkit.kernels.gpu.kv_write import write_mla

    write_mla(rows[:, :512], rows[:, 512:], pages, slots, 0.1, counts)
    query = torch.randn(2, 2, 576).bfloat16()
    parts = query[..., :512].contiguous(), query[..., 512:].contiguous()
    table, lengths = torch.tensor([[0], [58_299]], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    out, _ = kernels.decode_mla(*parts, pages, table, lengths, 0.1, 0.1, None, SMALL)
    expected = (rows[:2, None, :512].float() / 0.1).to(torch.float8_e4m3fn).float() * 0.1

    torch.testing.assert_close(out.float(), expected.expand(2, 2, 512), rtol=2.0**-8, atol=0)


def test_guard_areas_are_seen() -> None:
    """A write beside a buffer fails the check that the tests above rest on."""
    guarded = Guards()
    result = guarded.empty((4,), torch.float32)
    torch.as_strided(result, (5,), (1,), result.storage_offset())[4] = 0.0
    with pytest.raises(AssertionError, match="above 4"):
        guarded.check()

"""Writing pages: the torch reference and the Triton kernel equal the definition; and all kernels for pages (those of
attention and integrity, too) compile for sm_90 and sm_100.

To remake the table of registers, shared memory and stack:

    python -m support.compiling table pages > fixtures/gpu_pages.md

in tests/.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from quantkit.errors import UsageError
from quantkit.kernels import pages as layouts
from quantkit.kernels.gpu import compiled
from quantkit.kernels.gpu import kv_write as write_kernels
from quantkit.kernels.reference import kv_write as write_reference
from support.compiling import compiled_launches
from support.guards import guards
from support.paths import FIXTURES
from support.tiers import exhaustive, quick_if

TABLE = FIXTURES / "gpu_pages.md"
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(BF16)
BOTH_WRITERS = pytest.mark.parametrize("writer", [write_kernels, write_reference], ids=["kernel", "reference"])

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # NaN and infinity in the interpreter
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def no_counts() -> torch.Tensor:
    """Fresh counts."""
    return torch.zeros(3, dtype=torch.int64)


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The E4M3 bytes of float32 `values` by looking at all 127 magnitudes; ties go to the even byte."""
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    distance = (values.abs().double().clamp(max=448)[:, None] - numbers).abs()
    best = distance.argmin(1)
    tied = (best + 1).clamp(max=126)
    is_tie = distance.gather(1, tied[:, None])[:, 0] == distance.gather(1, best[:, None])[:, 0]
    best = torch.where(is_tie & (best % 2 == 1), tied, best)
    best = torch.where(values.isnan(), 0x7F, best)
    return (best | torch.where(values.signbit(), 0x80, 0)).to(torch.uint8)


@pytest.mark.parametrize(
    ("writer", "scale"),
    quick_if(
        lambda writer, scale: writer is write_reference and scale == 0.37,
        itertools.product((write_kernels, write_reference), (0.37, 1.0, 2.0**-5)),
    ),
)
def test_every_bf16_number_is_written(writer: Any, scale: float) -> None:
    """All 65,536 BF16 values become the E4M3 number nearest to value / scale; clamped and NaN ones are counted."""
    latent, rope = ALL_BF16.view(128, 512), ALL_BF16[: 128 * 64].view(128, 64)
    slots, counts = torch.randperm(160)[:128], no_counts()
    with guards() as guarded:
        pages = guarded.empty((10, 16, 576), torch.uint8)
        pages.fill_(0x55)
        writer.write_mla(guarded(latent), guarded(rope), pages, guarded(slots), scale, counts)

    quotient = torch.cat([latent, rope], 1).float() / torch.tensor(scale)
    rows = pages.view(160, 576)
    assert torch.equal(rows[slots].flatten(), nearest_e4m3(quotient.flatten()))
    assert counts.tolist() == [int((quotient.abs() > 448).sum()), int(quotient.isnan().sum()), 0]
    untouched = torch.ones(160, dtype=torch.bool)
    untouched[slots] = False
    assert (rows[untouched] == 0x55).all()


@BOTH_WRITERS
def test_too_large_a_value_is_the_largest_number(writer: Any) -> None:
    """B08: 1000 at scale 1 is stored as 448 and counted once, never as 0x7F; so are an infinity and -1000."""
    pages, counts = torch.zeros(1, 4, 4, dtype=torch.uint8), no_counts()
    latent = torch.tensor([[1000.0, 448.0], [-math.inf, math.nan]])
    writer.write_mla(latent, torch.tensor([[464.0, 1.0], [-1000.0, -0.0]]), pages, torch.tensor([0, 1]), 1.0, counts)

    assert pages[0, :2].tolist() == [[0x7E, 0x7E, 0x7E, 0x38], [0xFE, 0x7F, 0xFE, 0x80]]
    assert counts.tolist() == [4, 1, 0]


@BOTH_WRITERS
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_scale_is_refused(writer: Any, scale: float) -> None:
    """B08: zero, negative, NaN and infinite scales are errors that name the scale."""
    row, pages = torch.zeros(1, 1, 8), torch.zeros(1, 4, 1, 8, dtype=torch.uint8)
    with pytest.raises(UsageError, match=f"scale is {scale}"):
        writer.write_mla(row[0], row[0], pages.view(1, 2, 16), torch.tensor([0]), scale, no_counts())
    with pytest.raises(UsageError, match=f"value_scale is {scale}"):
        writer.write_gqa(row, row, pages, pages.clone(), torch.tensor([0]), 1.0, scale, no_counts())


@BOTH_WRITERS
def test_slots_that_are_not_written(writer: Any) -> None:
    """Negative slots are padding; slots beyond the pool are refused and counted; the others are written."""
    slots = torch.tensor([-1, 7, 8, -(2**40), 2**40, 0])
    rows, counts = torch.randn(6, 12), no_counts()
    with guards() as guarded:
        pages = guarded.empty((2, 4, 12), torch.float32)
        pages.zero_()
        writer.write_mla(guarded(rows[:, :8]), guarded(rows[:, 8:]), pages, guarded(slots), 1.0, counts)

    expected = torch.zeros(8, 12)
    expected[7], expected[0] = rows[1], rows[5]
    assert torch.equal(pages.view(8, 12), expected)
    assert counts.tolist() == [0, 0, 2]


@BOTH_WRITERS
def test_no_tokens(writer: Any) -> None:
    """Nothing to write writes nothing."""
    pages, counts = torch.ones(1, 4, 12, dtype=torch.uint8), no_counts()
    writer.write_mla(torch.zeros(0, 8), torch.zeros(0, 4), pages, torch.zeros(0, dtype=torch.int64), 1.0, counts)

    assert pages.sum() == 48
    assert counts.tolist() == [0, 0, 0]


@BOTH_WRITERS
@pytest.mark.parametrize("pages_dtype", [E4M3, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_keys_and_values(writer: Any, dtype: torch.dtype, pages_dtype: torch.dtype) -> None:
    """Parts of one fused projection (tokens apart, as a model leaves them) go to two pools, each by its own scale."""
    fused = (torch.randn(9, 4, 40) * 30).to(dtype)
    key, value = fused[:, :2], fused[:, 2:]
    slots, counts = torch.randperm(32)[:9], no_counts()
    scales = (0.5, 0.05) if pages_dtype == E4M3 else (1.0, 1.0)
    with guards() as guarded:
        pools = [guarded.empty((4, 8, 2, 40), pages_dtype) for _ in "kv"]
        writer.write_gqa(key, value, *pools, guarded(slots), *scales, counts)

    for pool, source, scale in zip(pools, (key, value), scales, strict=True):
        scaled = source.float() / torch.tensor(scale)
        expected = scaled.clamp(-448, 448) if pages_dtype == E4M3 else scaled
        assert torch.equal(pool.view(32, 2, 40)[slots].float(), expected.to(pages_dtype).float())
    clipped = int((value.float() / torch.tensor(scales[1])).abs().gt(448).sum()) if pages_dtype == E4M3 else 0
    assert counts.tolist() == [clipped, 0, 0]


@pytest.mark.exhaustive
@BOTH_WRITERS
def test_nan_in_plain_pages_is_counted(writer: Any) -> None:
    """BF16 pages keep infinities and NaN; NaN is counted, nothing saturates."""
    rows = ALL_BF16.view(128, 512)
    pages, counts = torch.zeros(8, 16, 512, dtype=BF16), no_counts()
    writer.write_mla(rows[:, :448], rows[:, 448:], pages, torch.arange(128), 1.0, counts)

    written = pages.view(128, 512)
    assert torch.equal(written.isnan(), rows.isnan())
    assert torch.equal(written.nan_to_num(7.0).view(torch.int16), rows.nan_to_num(7.0).view(torch.int16))
    assert counts.tolist() == [0, 254, 0]


@BOTH_WRITERS
@pytest.mark.parametrize("source", ["random", exhaustive("all"), exhaustive("spread")])
def test_ds_mla_rows(writer: Any, source: str) -> None:
    """656 bytes: the latent under the smallest power of two that holds each 128, the rope part as it is in BF16."""
    latent = {
        "random": torch.randn(128, 512).bfloat16(),
        "all": ALL_BF16.view(128, 512),
        "spread": (torch.randn(128, 512) * torch.exp2(torch.randint(-40, 40, (128, 4)).repeat_interleave(128, 1))),
    }[source]
    rope, slots, counts = ALL_BF16[: 128 * 64].view(128, 64), torch.randperm(160)[:128], no_counts()
    with guards() as guarded:
        pages = guarded.empty((10, 16, layouts.DS_ROW), torch.uint8)
        writer.write_mla(guarded(latent), guarded(rope), pages, guarded(slots), 1.0, counts)

    rows = pages.view(160, layouts.DS_ROW)[slots]
    groups = latent.float().view(128, 4, 128)
    amax = groups.abs().double().where(groups.isfinite(), 0).amax(2)
    amax = amax.where(~groups.isinf().any(2), torch.finfo(torch.float32).max).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448))).float()
    assert torch.equal(rows[:, 512:528].contiguous().view(torch.float32), scale)
    assert torch.equal(rows[:, :512].flatten(), nearest_e4m3((groups / scale[:, :, None]).flatten()))
    tail = rows[:, 528:].contiguous().view(BF16)
    assert torch.equal(tail.nan_to_num(7.0).view(torch.int16), rope.nan_to_num(7.0).view(torch.int16))
    nans = int(latent.isnan().sum() + rope.isnan().sum())
    assert counts.tolist() == [int(latent.isinf().sum()), nans, 0]


@BOTH_WRITERS
def test_ds_rows_take_no_scale(writer: Any) -> None:
    """Rows with their own scales refuse another one."""
    pages = torch.zeros(1, 4, layouts.DS_ROW, dtype=torch.uint8)
    with pytest.raises(UsageError, match="ds_mla rows have their own"):
        writer.write_mla(torch.zeros(1, 512), torch.zeros(1, 64), pages, torch.tensor([0]), 0.5, no_counts())


@BOTH_WRITERS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([0], dtype=torch.int32)}, "slots is torch.int32"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, "counts has shape"),
        ({"latent": torch.zeros(1, 8, dtype=torch.int64)}, "latent is torch.int64"),
        ({"rope": torch.zeros(2, 4)}, "rope has 2 tokens, slots 1"),
        ({"latent": torch.zeros(8, 1).t()[:, ::2]}, "a token of latent is not contiguous"),
        ({"pages": torch.zeros(1, 4, 13)}, "not .num_pages, page_size, 12."),
        ({"pages": torch.zeros(2, 4, 24)[:, :, :12]}, "are not contiguous"),
        ({"scale": 2.0}, "are not scaled"),
    ],
)
def test_what_cannot_be_written_is_refused(writer: Any, change: dict[str, Any], message: str) -> None:
    """Errors name the tensor, before anything is written."""
    arguments = {
        "latent": torch.zeros(1, 8),
        "rope": torch.zeros(1, 4),
        "pages": torch.zeros(1, 4, 12),
        "slots": torch.tensor([0]),
        "scale": 1.0,
        "counts": no_counts(),
    }
    with pytest.raises(UsageError, match=message):
        writer.write_mla(**arguments | change)


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """Every kernel compiles for sm_90 and sm_100; what it takes is in the kept table."""
    assert compiled.as_table(compiled_launches("pages")) == TABLE.read_text()

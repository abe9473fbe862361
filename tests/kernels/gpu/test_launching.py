"""How kernels are launched: on their tensors' GPU, without waiting for it, and never with what they would misread."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from quantkit.errors import UsageError
from quantkit.eval.gpu.build import all_launches
from quantkit.kernels.gpu import launching, w4a16_matmul
from quantkit.kernels.gpu.kv_write import write_mla
from quantkit.kernels.gpu.page_check import page_check
from quantkit.kernels.gpu.page_digest import page_digest
from quantkit.kernels.gpu.paged_decode import Launch, decode_gqa
from quantkit.kernels.reference.page_digest import Binding, Spans

META = torch.device("meta")  # of tensors that have no memory: who looks into one fails
ALL = {name: launch for name, launch in all_launches(False).items() if "Config(" not in name and "Tile(" not in name}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device | None]]:
    """The names of the kernels that are launched and the GPU that is current then; none of them runs."""
    seen: list[tuple[str, torch.device | None]] = []
    current: list[torch.device | None] = [None]

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current[0] = tensor.device
        yield
        current[0] = None

    def select(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: seen.append((kernel.__name__, current[0]))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", select)
    return seen


@pytest.mark.parametrize("name", ALL)
def test_every_launch_is_on_the_gpu_of_its_tensors(name: str, launched: list[tuple[str, torch.device | None]]) -> None:
    """Kernels start while their tensors' device is the current one; no launcher looks into a tensor."""
    ALL[name]()

    assert launched
    assert {device for _, device in launched} == {META}


def test_tensors_on_two_devices_are_refused() -> None:
    """A pool on one device and slots on another name both."""
    rows, slots = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    pages = torch.zeros(1, 4, 16, device="meta")
    with pytest.raises(UsageError, match="tensors on cpu and meta"):
        write_mla(rows, rows, pages, slots, 1.0, torch.zeros(3, dtype=torch.int64))


class Spy:
    """A kernel that keeps its grids and options."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.options: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *_, **options: self.options.update(options)


def test_a_grid_that_a_gpu_cannot_count_is_refused() -> None:
    """65,535 programs along the second axis are the most; the first may have any number."""
    spy = Spy()
    launching.run(spy, (10**6, 65535), torch.zeros(1))
    with pytest.raises(UsageError, match="1 x 65536 programs"):
        launching.run(spy, (1, 65536), torch.zeros(1))

    assert spy.grids == [(10**6, 65535)]


def test_products_and_sums_are_fused() -> None:
    """a * b + c is one instruction, whatever Triton's default is or becomes."""
    spy = Spy()
    launching.run(spy, (1,), torch.zeros(1))

    assert spy.options == {"enable_fp_fusion": True}


LONGS, NUMBERS = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
TABLE = NUMBERS.view(2, 1)
PAGES = torch.zeros(2, 4, 1, 16)
QUERY = torch.zeros(2, 1, 16)
PACKED, SCALE = torch.zeros(3, 8, 2, dtype=torch.int32), torch.zeros(3, 8, 2).bfloat16()
ROUTING = w4a16_matmul.route(torch.zeros(2, 1, dtype=torch.int64), 3)


def decode(out: tuple[torch.Tensor, torch.Tensor] | None = None, launch: Launch = Launch()) -> None:  # noqa: B008
    """Attention of nothing in particular."""
    decode_gqa(QUERY, PAGES, PAGES, TABLE, NUMBERS, 1.0, launch=launch, out=out)


def digest(*out: torch.Tensor) -> None:
    """The digests of nothing in particular."""
    page_digest(PAGES, Spans(NUMBERS, NUMBERS, NUMBERS, LONGS), Binding(LONGS, LONGS, LONGS), out=out)  # type: ignore


def product(routing: w4a16_matmul.Routing) -> None:
    """A product with experts."""
    w4a16_matmul.w4a16_matmul(torch.zeros(2, 16).bfloat16(), PACKED, SCALE, routing=routing)


MISREAD: dict[str, tuple[Callable[[], object], str]] = {
    "verdicts of 64 bits": (lambda: page_check(TABLE, LONGS.view(2, 1), NUMBERS, LONGS, LONGS), "out is torch.int64"),
    "too few digests": (lambda: digest(LONGS, LONGS[:1]), r"digests has shape \[1\]"),
    "sums apart": (lambda: digest(LONGS.repeat(2)[::2], LONGS), "sums is not contiguous"),
    "results apart": (
        lambda: decode((torch.zeros(2, 1, 32)[..., ::2], torch.zeros(2, 1))),
        "attended is not contiguous",
    ),
    "log-sum-exp in BF16": (lambda: decode((QUERY, torch.zeros(2, 1).bfloat16())), "log-sum-exp is torch.bfloat16"),
    "no splits": (lambda: decode(launch=Launch(splits=0)), "splits is 0"),
    "an order of 32 bits": (lambda: product(ROUTING._replace(order=ROUTING.order.int())), "order is torch.int32"),
    "ends of other experts": (lambda: product(ROUTING._replace(ends=ROUTING.ends[:-1])), r"ends has shape \[3\]"),
    "ends apart": (lambda: product(ROUTING._replace(ends=ROUTING.ends.repeat(2)[::2])), "ends is not contiguous"),
}


@pytest.mark.parametrize(("call", "message"), MISREAD.values(), ids=MISREAD.keys())
def test_what_a_kernel_would_misread_is_refused(call: Callable[[], object], message: str) -> None:
    """Results and routings of another type, shape or stride are named before a launch."""
    with pytest.raises(UsageError, match=message):
        call()

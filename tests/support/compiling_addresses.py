"""Can an address that a Triton kernel computes overflow? Intervals over its TTIR, with the arguments of real launches.

A number that left the range of its type, and whatever is computed from it, must not be added to a pointer. Numbers that
are loaded are taken to be 0 or more, those of 64 bits (slots, experts) below 2^32: kernels compare them with what there
is and mask the rest, which the tests of the kernels show. Rows `start` and `stop` of a digest lie in their page.
To be run in a process where Triton compiles.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quantkit.eval.gpu.build import META, case_launches
from quantkit.eval.gpu.cases import FAR
from quantkit.eval.gpu.page_launches import page_branches, page_launches
from quantkit.eval.gpu.weight_launches import weight_branches, weight_launches
from quantkit.kernels.gpu.compiled import AbsentGpu
from quantkit.kernels.gpu.launching import run

_NAME = re.compile(r"%[\w-]+(?:#\d+)?")
_LOOP = re.compile(r"scf\.for (%\w+) = (%[\w-]+) to (%[\w-]+)")


class Interval(NamedTuple):
    """Whole numbers from `low` to `high`; `lost` once one of them did not fit into its type."""

    low: int
    high: int
    lost: bool = False


class _Seen(Exception):
    """The TTIR of a kernel."""


def overflows(ttir: str, values: dict[str, Any], grid: tuple[int, ...]) -> Iterator[str]:
    """The lines of `ttir` where a number that may have overflowed is added to a pointer."""
    known: dict[str, Interval] = {}
    for line in re.sub(r" ?loc\([^)\n]*\)+", "", ttir).splitlines():
        if "tt.func" in line:
            given = ((name, values.get(name)) for name in re.findall(r"%(\w+): i\d+", line))
            known |= {f"%{name}": Interval(value, value) for name, value in given if isinstance(value, int)}
        loop = _LOOP.search(line)
        if loop:
            known[loop[1]] = Interval(known[loop[2]].low, max(known[loop[2]].low, known[loop[3]].high - 1))
            known[loop[1]] = known[loop[1]]._replace(lost=known[loop[2]].lost or known[loop[3]].lost)
            continue
        result, _, rest = line.strip().partition(" = ")
        if not rest:
            continue
        operation, _, rest = rest.partition(" ")
        names, _, types = rest.rpartition(" : ")
        width = int((re.findall(r"(?:xi|<i|\bi)(\d+)", types) or ["64"])[-1])  # of the result, which comes last
        operands = [known.get(name, Interval(-(2**31), 2**31 - 1)) for name in _NAME.findall(names)]
        if operation == "tt.addptr" and operands[1].lost:
            yield line.strip()
        value = _value(operation, operands, rest, width, result, values, grid)
        fits = -(2 ** (width - 1)) <= value.low and value.high < 2 ** (width - 1)
        known[result.partition(":")[0]] = value if fits else Interval(-(2 ** (width - 1)), 2 ** (width - 1) - 1, True)


def _value(
    operation: str,
    operands: list[Interval],
    text: str,
    width: int,
    result: str,
    values: dict[str, Any],
    grid: tuple[int, ...],
) -> Interval:
    """What `operation` gives; whatever is not known may be anything."""
    lost = any(operand.lost for operand in operands)
    anything = Interval(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    if operation in _ARITHMETIC and len(operands) == 2:
        left, right = operands
        ends = [_ARITHMETIC[operation](a, b) for a in left[:2] for b in right[:2]]
        return Interval(min(ends), max(ends), lost)
    match operation:
        case "arith.constant":
            found = re.search(r"(?:dense<)?(-?\d+)>? :", text)
            return Interval(int(found[1]), int(found[1])) if found else anything
        case "tt.make_range":
            return Interval(0, int(re.findall(r"end = (\d+)", text)[0]) - 1)
        case "tt.get_program_id":
            return Interval(0, (*grid, 1, 1)["xyz".index(text[0])] - 1)
        case "tt.load":
            if re.fullmatch(r"%(start|stop)(_\d+)?", result):
                return Interval(0, values["PAGE_SIZE"])
            return Interval(0, 2**32 if width == 64 else 2 ** (width - 1) - 1)
        case "arith.extsi" | "tt.splat" | "tt.expand_dims" | "tt.broadcast" | "tt.reshape" | "tt.trans" | "tt.split":
            return operands[0]
        case "arith.select" | "tt.join":
            left, right = operands[-2:]
            return Interval(min(left.low, right.low), max(left.high, right.high), left.lost or right.lost)
        case "arith.divsi" | "arith.remsi" if operands[1].low > 0:
            return _divided(operation, *operands)
    return anything._replace(lost=lost and operation.startswith("arith."))


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.minsi": min,
    "arith.maxsi": max,
}


def _divided(operation: str, left: Interval, right: Interval) -> Interval:
    lost = left.lost or right.lost
    if operation == "arith.divsi":
        ends = [abs(a) // b * (1 if a >= 0 else -1) for a in left[:2] for b in right[:2]]
        return Interval(min(ends), max(ends), lost)
    most = min(right.high - 1, max(abs(left.low), abs(left.high)))
    return Interval(0 if left.low >= 0 else -most, most, lost)


def found_in(launches: dict[str, Callable[[], object]]) -> list[str]:
    """Each address that may overflow in what `launches` launch: launch, kernel, line."""
    found: list[str] = []
    original = JITFunction.run

    def inspect(*stages: Any) -> tuple[str, str] | None:
        if not stages:
            return "addresses", "addresses"
        first = stages[1]["ttir"]

        def stop(module: Any, metadata: Any) -> None:
            raise _Seen(str(first(module, metadata)))

        stages[1]["ttir"] = stop
        return None

    driver.set_active(AbsentGpu(90))
    knobs.runtime.add_stages_inspection_hook = inspect
    for name, launch in launches.items():

        def look(self: Any, *args: Any, name: str = name, grid: tuple[int, ...], **options: Any) -> None:
            try:
                original(self, *args, grid=grid, **options | {"warmup": True})
            except _Seen as seen:
                values = dict(zip(self.arg_names, args, strict=False)) | options
                found.extend(f"{name}, {self.__name__}: {line}" for line in overflows(str(seen), values, grid))

        JITFunction.run = look
        launch()
    JITFunction.run = original
    return found


@triton.jit
def narrow(x, stride):  # type: ignore[no-untyped-def]
    """An address in 32 bits."""
    tl.store(x + tl.program_id(0) * stride, 0.0)


@triton.jit
def wide(x, stride):  # type: ignore[no-untyped-def]
    """The same address in 64 bits."""
    tl.store(x + tl.program_id(0).to(tl.int64) * stride, 0.0)


def planted() -> dict[str, Callable[[], object]]:
    """What has to be found: the first of these, and only with so many rows."""
    x = torch.empty(8, device=META)
    return {
        f"{kernel.__name__} {rows}": lambda kernel=kernel, rows=rows: run(kernel, (rows,), x, 70_000)
        for kernel in (narrow, wide)
        for rows in (30_000, 40_000)
    }


def find_overflows() -> tuple[list[str], list[str]]:
    """What is found among the `planted`, and in everything that is launched, with sizes beyond 2^31."""
    launches = (
        page_launches(META) | page_branches(META) | weight_launches(META) | weight_branches(META) | case_launches(FAR)
    )
    plain = {name: launch for name, launch in launches.items() if "Config(" not in name and "Tile(" not in name}
    return found_in(planted()), found_in(plain)

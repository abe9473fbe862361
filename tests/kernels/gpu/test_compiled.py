"""What ahead-of-time compilation shows of the Triton kernels: every branch can be launched, no address overflows."""

from types import SimpleNamespace

import pytest

from quantkit.kernels.gpu.compiled import fault_of
from support.compiling import compile_elsewhere, compiled_launches

MOST = {"shared": 232_448, "tmem_size": 512, "num_warps": 8, "global_scratch_size": 0, "registers": 255, "stack": 1024}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["page branches", "weight branches"])
def test_every_branch_can_be_launched(kind: str) -> None:
    """Other types, groups, head sizes and pages, and one of everything, compile for sm_90, fit, and spill little."""
    rows = compiled_launches(kind)

    assert len(rows) > 15
    assert [row for row in rows if row.fault] == []


@pytest.mark.parametrize(
    ("taken", "fault"),
    [
        ({}, ""),
        ({"shared": 232_449}, "232449 bytes of shared memory, not 232448"),
        ({"tmem_size": 513}, "513 columns of tensor memory, not 512"),
        ({"num_warps": 64, "registers": 32}, "2048 threads, not 1024"),
        ({"num_warps": 16}, "131072 registers of all threads, not 65536"),
        ({"global_scratch_size": 8}, "8 bytes of scratch memory, which nobody allocates, not 0"),
        ({"stack": 1025}, "1025 bytes of stack, not 1024"),
    ],
)
def test_what_cannot_be_launched_is_told(taken: dict[str, int], fault: str) -> None:
    """What a GPU or Triton's launcher refuses, and heavy spilling, is a fault; the limits themselves are not."""
    got = MOST | taken
    said = fault_of(SimpleNamespace(**got), got["registers"], got["stack"])

    assert said.startswith(fault)
    assert bool(said) == bool(fault)


@pytest.mark.exhaustive
def test_no_address_overflows() -> None:
    """With sizes beyond 2^31, of everything that is launched, no number that left its 32 or 64 bits is an address; one
    that is planted is found."""
    planted, found = compile_elsewhere("overflows")

    assert len(planted) == 1
    assert planted[0].startswith("narrow 40000, narrow: ")
    assert found == []

"""What quantkit makes is what is written down; a change that is meant is written down anew by `make record`."""

import difflib

import pytest

from record.cases import NAMED, record
from record.files import CONFIGS, OUTPUTS, digests, path_of, read, read_configs, read_lines, told

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("name", NAMED)
def test_outputs_are_those_recorded(name: str) -> None:
    """Files, reports and refusals of a source, line by line; configurations in full."""
    recorded = path_of(name).relative_to(OUTPUTS.parents[2])
    difference = difflib.unified_diff(told(read(name)), told(record(name)), str(recorded), "made now", lineterm="", n=1)

    assert not (lines := list(difference)), "\n".join([*lines, "If that is meant: make record"])


def test_nothing_else_is_recorded() -> None:
    """No file outlives its source, and no configuration the lines that name it."""
    assert set(OUTPUTS.iterdir()) == {CONFIGS, *(path_of(name) for name in NAMED)}
    assert read_configs().keys() == {digest for name in NAMED for digest in digests(read_lines(name))}

"""What quantkit makes is what is written down; a change that is meant is written down anew by `make record`."""

import difflib

import pytest

from record.cases import NAMED, record
from record.files import OUTPUTS, path_of, read

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("name", NAMED)
def test_outputs_are_those_recorded(name: str) -> None:
    """Files, reports and refusals of a source, line by line."""
    difference = difflib.unified_diff(read(name), record(name), "recorded", "now", lineterm="", n=1)

    assert not (lines := list(difference)), "\n".join([*lines[:60], "If that is meant: make record"])


def test_nothing_else_is_recorded() -> None:
    """No file outlives its source."""
    assert set(OUTPUTS.iterdir()) == {path_of(name) for name in NAMED}

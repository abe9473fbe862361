"""Which cases `make test` leaves out: of a product it runs a diagonal, the others are exhaustive."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """The values of one case, left out by `make test`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def quick_if(is_quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """The same cases, of which those that are not quick are exhaustive; a tuple is given to `is_quick` in parts."""

    def tier(*values: Any) -> Any:
        return pytest.param(*values) if is_quick(*values) else exhaustive(*values)

    return [tier(*case) if isinstance(case, tuple) else tier(case) for case in cases]

"""Manners of the client that fetching and sending share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """Without the client's progress bars where stderr is no terminal."""
    from huggingface_hub import utils

    switch = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if switch:
        utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if switch:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, or the error's name."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""How long work tells what is done: it is given a `Progress`, tells it the total, and gets what takes the steps."""

from collections.abc import Callable

Advance = Callable[[int], None]  # bytes, or items, that were just done
Progress = Callable[[int], Advance]  # of a total


def silent(total: int) -> Advance:
    """A progress that nobody looks at."""
    return lambda done: None

"""How often a request that was hit by a fault may be computed again: a fault must not become a storm of retries."""

from quantkit.errors import UsageError


class RetryBudget:
    """A request is retried at most `each` times; the pool as a whole at most `burst` times at once, and one time more
    every `steps` steps.
    """

    def __init__(self, each: int = 1, burst: int = 4, steps: int = 256) -> None:
        if min(each, burst) < 0 or steps < 1:
            raise UsageError(
                f"{each} retries of a request, {burst} of all and one more every {steps} steps: not a rate"
            )
        self._each, self._burst, self._steps = each, burst, steps
        self._left, self._refilled = burst, 0

    def allows(self, retried: int, step: int) -> bool:
        """Whether a request that was retried `retried` times is retried in `step`; then it counts as retried."""
        due = (step - self._refilled) // self._steps
        self._left, self._refilled = min(self._burst, self._left + due), self._refilled + due * self._steps
        allowed = retried < self._each and self._left > 0
        self._left -= allowed
        return allowed

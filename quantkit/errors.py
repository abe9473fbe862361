"""Every error that a user can cause, each with the exit code of the command line and, where there is one, the remedy.

    QuantkitError             1
    ├── UsageError            2   options that do not go together, or a name that means nothing
    ├── SourceError           1   the checkpoint to read is damaged, incomplete or not understood
    ├── RecipeError           1   the recipe does not parse or does not fit the model
    ├── PlanError             1   the conversion would give something that an engine cannot load
    ├── EngineError           1   an engine would refuse the checkpoint's config
    ├── OutputError           1   the place to write to is not usable
    ├── RemoteError           1   the Hub did not give what was asked for
    ├── DependencyError       1   an optional package is not installed
    ├── NotComparable         1   two evaluations differ in more than the weights, or one of them is not sound
    ├── FoldError             1   scales of a KV cache cannot be put into the weights exactly, or were put there already
    ├── CacheError            1   pages of a KV cache, or their scales, are not what they must be
    ├── RequestError          1   a request that the runtime cannot serve
    ├── HandoffError          1   pages that one worker hands to another are not what they must be
    ├── WorkerError           1   a worker process did not start, died, or hung
    ├── IntegrityError        3   a request's pages are not its own, or not what was written to them
    ├── CheckFailed           3   a check ran and found something wrong
    └── Undecided             4   a check ran and its evidence does not suffice

Anything else that escapes is a bug of ours.
"""

from typing import Any


class QuantkitError(Exception):
    """A fault that the user can fix; `hint` says how, in one sentence."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is sent to another process, whatever the constructor of its class asks for."""
        return _arrive, (type(self), self.args), self.__dict__


class UsageError(QuantkitError):
    """The command or call contradicts itself or names something that does not exist."""

    exit_code = 2


class SourceError(QuantkitError):
    """The checkpoint to read is damaged, incomplete or of a kind that is not understood."""


class RecipeError(QuantkitError):
    """The recipe does not parse, or it does not fit the model."""


class PlanError(QuantkitError):
    """The conversion was refused before it began: no engine could load its result."""


class EngineError(QuantkitError):
    """An engine would refuse the checkpoint's config."""


class OutputError(QuantkitError):
    """The output folder cannot be used, or the disk is full."""


class RemoteError(QuantkitError):
    """The Hub did not deliver the repository or the file."""


class DependencyError(QuantkitError):
    """An optional package is not installed."""


class CheckFailed(QuantkitError):
    """A check ran to its end and found something wrong."""

    exit_code = 3


class NotComparable(QuantkitError):
    """Two evaluations differ in more than the weights, or one of them is not sound."""


class FoldError(QuantkitError):
    """Scales of a KV cache cannot be folded into the weights exactly, or not into these."""


class CacheError(QuantkitError):
    """Pages of a KV cache are not of the kind that was asked for, or their scales are missing or unsound."""


class RequestError(QuantkitError):
    """A request can never be served, or what it was given turned out to be unsound."""


class HandoffError(QuantkitError):
    """Pages that one worker hands to another are of another kind, or not those of the request; `cause` in a word."""

    def __init__(self, message: str, *, cause: str = "terms", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class WorkerError(QuantkitError):
    """A worker process did not start, died, or hung, and what it did could not be done again by another."""


class IntegrityError(QuantkitError):
    """Pages of a KV cache are not the request's any more, or do not hold what was written to them.

    cause     in a word, as the counters have it
    request   its number in the engine
    page      that its block table names
    position  of the page among the request's pages
    """

    exit_code = 3

    def __init__(
        self, message: str, *, cause: str, request: int, page: int, position: int, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.cause, self.request, self.page, self.position = cause, request, page, position


class Undecided(QuantkitError):
    """A check ran to its end and its evidence does not suffice for either answer."""

    exit_code = 4


def _arrive(kind: type[QuantkitError], args: tuple[Any, ...]) -> QuantkitError:
    return kind.__new__(kind, *args)

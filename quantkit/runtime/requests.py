"""What is asked of the engine, how far it is, and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from quantkit.errors import QuantkitError, RequestError
from quantkit.families.config import ModelConfig
from quantkit.runtime.pages import CacheSpec
from quantkit.runtime.sampling import Sampling
from quantkit.runtime.tables import BlockTable


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Request:
    """A request in the engine.

    tokens    of the prompt, then those that were generated
    computed  how many of them are in its pages
    reached   how many of them ever were
    prefixes  the hash of each page of the prompt that may be shared
    retried   how often it was computed again because a page was not sound
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    table: BlockTable
    prefixes: tuple[bytes, ...] = ()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    reached: int = 0
    retried: int = 0
    finish: Finish | None = None
    error: QuantkitError | None = None

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return tuple(self.tokens[len(self.prompt) :])


@dataclass(frozen=True)
class Event:
    """What a step did for a request: a token, its end, or both."""

    request: int
    token: int | None = None
    finish: Finish | None = None
    error: QuantkitError | None = None


@dataclass(frozen=True)
class Completion:
    """What came of a request: the tokens generated, a stop token included."""

    tokens: tuple[int, ...]
    finish: Finish
    error: QuantkitError | None = None


@dataclass
class Counters:
    """What an engine did.

    prefill_tokens    rows that were computed in chunks
    decode_tokens     rows that were computed alone of their request, for its next token
    repeated_tokens   of both, those that had been computed before a preemption
    shared_tokens     of prompts, found in pages of other requests instead of computed
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preempted: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    shared_tokens: int = 0
    repeated_tokens: int = 0


def most_tokens(prompt: Sequence[int], max_new_tokens: int) -> int:
    """The most tokens that a request's pages will hold; the last one generated is never computed."""
    return len(prompt) + max_new_tokens - 1


def check_request(
    prompt: Sequence[int], max_new_tokens: int, config: ModelConfig, spec: CacheSpec, num_pages: int
) -> None:
    """Raise RequestError for what a model and a pool of `num_pages` pages could never serve."""
    if not prompt or max_new_tokens < 1:
        raise RequestError("a request needs a prompt of one token or more, and one new token or more")
    if bad := [token for token in prompt if not 0 <= token < config.vocab]:
        raise RequestError(f"token {bad[0]} is not one of the model's {config.vocab:,}")
    sizes = f"{len(prompt):,} tokens of prompt and {max_new_tokens:,} new ones"
    most = most_tokens(prompt, max_new_tokens)
    if config.max_length is not None and most + 1 > config.max_length:
        raise RequestError(f"{sizes} are more than the model's {config.max_length:,}", hint="Ask for fewer tokens.")
    needed = spec.pages_for(most)
    if needed > num_pages:
        raise RequestError(
            f"{sizes} need {needed:,} pages of {spec.page_size} tokens, and the pool has {num_pages:,}",
            hint="Ask for fewer tokens, or give the pool more memory.",
        )

"""What the coordinator and its workers say to each other. All of it is small: prompts and pages lie in shared memory.

    coordinator -> prefill   Compute                 answered by Exported or Refused
    coordinator -> decode    Open                    answered by Opened or Refused; Opened is followed by Produced
    coordinator -> worker    Drop                    may cross the answer
    worker -> coordinator    Ready or Failed once; Alive while a prompt is computed

A nonce says which attempt at which request is meant.
"""

from dataclasses import dataclass, field

from quantkit.errors import QuantkitError
from quantkit.families.config import ModelConfig
from quantkit.runtime.handoff.segment import Ticket
from quantkit.runtime.handoff.terms import Terms
from quantkit.runtime.integrity.counters import IntegrityReport
from quantkit.runtime.pages import CacheSpec
from quantkit.runtime.requests import Event
from quantkit.runtime.sampling import Sampling


@dataclass(frozen=True)
class Compute:
    """Compute the prompt in the segment with this name, and put its pages there."""

    ticket: Ticket
    segment: str


@dataclass(frozen=True)
class Open:
    """Take the pages out of a segment, and go on from them."""

    ticket: Ticket
    segment: str
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]


@dataclass(frozen=True)
class Drop:
    """Forget an attempt; one that is computed or opened is answered as ever."""

    nonce: int


@dataclass(frozen=True)
class Ready:
    """A worker has loaded its checkpoint; `has_scales`: which has KV scales of its own."""

    terms: Terms
    config: ModelConfig
    spec: CacheSpec
    num_pages: int
    has_scales: bool


@dataclass(frozen=True)
class Failed:
    """A worker cannot go on."""

    error: QuantkitError


@dataclass(frozen=True)
class Said:
    """What a worker says at work, and what its engine did since it last said something.

    checked         of its pages; None if nothing is
    saturated, nan  values that were clamped when FP8 pages were written, and that are no numbers
    """

    checked: IntegrityReport | None = field(default=None, kw_only=True)
    saturated: int = field(default=0, kw_only=True)
    nan: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Alive(Said):
    """A worker got on with its work."""


@dataclass(frozen=True)
class Exported(Said):
    """The segment is complete."""

    nonce: int


@dataclass(frozen=True)
class Opened(Said):
    """The segment is not needed any more: `nbytes` in `source_pages` became `pages`."""

    nonce: int
    source_pages: int
    pages: int
    nbytes: int


@dataclass(frozen=True)
class Refused(Said):
    """An attempt has failed."""

    nonce: int
    error: QuantkitError


@dataclass(frozen=True)
class Produced(Said):
    """What a step did, the nonces in the place of requests."""

    events: tuple[Event, ...]

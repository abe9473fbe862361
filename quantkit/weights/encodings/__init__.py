"""Every way in which a weight's numbers are stored, one object each: `encoding` says what such an object knows."""

from collections.abc import Mapping
from typing import Any

from quantkit.weights.encodings.encoding import Encoding as Encoding
from quantkit.weights.encodings.encoding import Format as Format
from quantkit.weights.encodings.encoding import Target as Target
from quantkit.weights.encodings.fp8 import FP8 as FP8
from quantkit.weights.encodings.int4 import INT4 as INT4
from quantkit.weights.encodings.nvfp4 import NVFP4 as NVFP4
from quantkit.weights.encodings.plain import PLAIN as PLAIN

TARGETS: tuple[Target, ...] = (INT4, NVFP4)
ENCODINGS: tuple[Encoding, ...] = (PLAIN, FP8, *TARGETS)
_BY_NAME = {each.name: each for each in ENCODINGS}
_TARGETS = {each.name: each for each in TARGETS}
PARTS = frozenset(leaf for each in ENCODINGS for leaf in each.parts)  # tensors that mean nothing without a weight


def encoding(name: str) -> Encoding:
    """The encoding of this name."""
    return _BY_NAME[name]


def target(name: str) -> Target | None:
    """The encoding of this name that conversions make, or None."""
    return _TARGETS.get(name)


def encoding_of(group: Mapping[str, Any]) -> Encoding:
    """The encoding of a config group. Raises ValueError for one that is not known, KeyError for one without a type."""
    weights = group["weights"]
    if found := next((each for each in ENCODINGS if each.is_described(weights)), None):
        return found
    raise ValueError(f"{weights['type']} of {weights['num_bits']} bits are not understood")


def is_main(label: str) -> bool:
    """Whether a format, as reports call it, is of an encoding that conversions make."""
    return target(label.split()[0]) is not None

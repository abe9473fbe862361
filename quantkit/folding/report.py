"""What `fold` reports, and its table; apart, so that the command line can show errors without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from quantkit.records import Report
from quantkit.tables import Line, TextTable, role_name


class Way(StrEnum):
    """Where a fold goes."""

    COPY = "copy"
    IN_PLACE = "in place"
    PATCH = "patch"
    EMBED = "embed"  # no fold: scales as tensors of a copy
    DRY_RUN = "dry run"
    UNDO = "undo"


@dataclass(frozen=True)
class FoldedLayer:
    """What was done to a layer.

    scales   that its cache is divided by, in words
    weights  that were multiplied, by their names below the attention
    nbytes   that changed
    """

    layer: int
    mtp: bool
    scales: str
    weights: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class FoldReport(Report):
    """What `fold` did, or would do.

    output        where to; None for a dry run
    edited_bytes  of `total_bytes` in all tensors; of a dry run without weights the most that may change
    left          layers for multi-token prediction without scales, whose caches stay as they are
    digest        of what the caches are divided by, which `kv_space_id` is made with; None if by nothing
    proof         what was compared before and after, or why nothing was
    notes         what else was done, or found
    """

    checkpoint: str
    output: str | None
    way: str
    layers: tuple[FoldedLayer, ...]
    left: tuple[int, ...]
    edited_bytes: int
    total_bytes: int
    digest: str | None
    proof: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def tables(self) -> Iterator[TextTable]:
        """The layers that have scales, and all in all."""
        if self.layers:
            rows = tuple(
                (
                    role_name(str(entry.layer), entry.mtp),
                    f"{entry.nbytes:,}",
                    entry.scales,
                    ", ".join(_short(name) for name in entry.weights) or "nothing",
                )
                for entry in self.layers
            )
            yield TextTable(f"{self.checkpoint}: {self.way}", ("layer", "bytes", "divided by:", "edited:"), rows)
        facts = [("proof", self.proof)]
        if self.total_bytes:
            share = self.edited_bytes / self.total_bytes
            facts.insert(0, ("bytes", f"{self.edited_bytes:,} of {self.total_bytes:,} ({share:.3%})"))
        facts += [("fold", self.digest)] if self.digest else []
        facts += [("left alone", f"MTP layer {layer}, which has no scales") for layer in self.left]
        facts += [("to", self.output)] if self.output else []
        facts += [("note", note) for note in self.notes]
        yield TextTable("", ("", ":"), tuple(facts))

    def answer(self) -> Line:
        """How many layers were folded, and where the result is."""
        if not self.edited_bytes:
            return Line(f"{self.checkpoint}: nothing to change")
        where = f", in {self.output}" if self.output else ""
        return Line(f"{self.checkpoint}, {self.way}: {self.edited_bytes:,} bytes of {len(self.layers)} layers{where}")


def _short(name: str) -> str:
    """A weight by its module, a bias by its whole name."""
    module, _, leaf = name.rpartition(".")
    return name if leaf == "bias" else module

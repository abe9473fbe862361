"""What `generate` returns."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.records import Report
from quantkit.runtime.handoff.counters import HandoffReport
from quantkit.runtime.integrity.counters import IntegrityReport
from quantkit.runtime.scales import LayerScales
from quantkit.tables import Line


@dataclass(frozen=True)
class Prompt:
    """A text, or tokens where there is none."""

    text: str | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generated:
    """What came of a prompt.

    text    None where the prompt was given as tokens
    finish  stop, length, failed, or refused: it could never fit
    """

    prompt: Prompt
    prompt_tokens: int
    text: str | None
    tokens: tuple[int, ...]
    finish: str
    error: str | None


@dataclass(frozen=True)
class GenerationReport(Report):
    """What a checkpoint said, and how its cache was kept.

    pool_tokens       that fit into the pages
    kv_scale_source   where the scales of an FP8 cache are from
    kv_scales         the scales used, one entry for each layer of an FP8 cache
    saturated, nan    values written to the cache that were beyond E4M3's range, and that were no numbers
    counters          what the engine did; empty where workers have engines of their own
    integrity         what was checked before pages were read, and found; None if nothing was, or by workers
    handoff           what prefill and decode workers did together; None without them
    """

    checkpoint: str
    kv: str
    page_size: int
    pages: int
    pool_tokens: int
    kv_scale_source: str
    kv_scales: tuple[LayerScales, ...]
    saturated: int
    nan: int
    completions: tuple[Generated, ...]
    counters: dict[str, int]
    warnings: tuple[str, ...]
    integrity: IntegrityReport | None = None
    handoff: HandoffReport | None = None

    @property
    def num_faults(self) -> int:
        """Faults in pages and hand-offs, those that were fixed included."""
        found = self.handoff or self.integrity
        return found.num_faults if found else 0

    def verbatim(self) -> str:
        """The texts, each below its number if there are several."""
        texts = [" ".join(map(str, one.tokens)) if one.text is None else one.text for one in self.completions]
        if len(texts) == 1:
            return texts[0]
        parts = zip(self.completions, texts, strict=True)
        return "\n".join(f"--- {number}: {one.finish}\n{text}" for number, (one, text) in enumerate(parts, start=1))

    def answer(self) -> None:
        """The text is the answer."""

    def remarks(self) -> Iterator[Line]:
        """How the cache was kept, and what workers did."""
        yield Line(f"cache: {self.kv}, {self.pages:,} pages of {self.page_size} tokens")
        if self.handoff:
            yield Line(str(self.handoff))
        if self.kv_scales:
            yield Line(f"KV scales from {self.kv_scale_source}:")
        for layer, scales in enumerate(self.kv_scales):
            yield Line(f"  layer {layer}: k {scales.key:g}, v {scales.value:g}")

"""How fast a step can be at best: the larger of the time to read its bytes and the time to compute its FLOPs.

    experts touched   E (1 - (1 - k/E)^n) of E experts by n tokens that choose k each, evenly and independently
    bytes of a step   resident weights but embedding, vision and MTP, routed experts by the share touched, and KV read
    FLOPs of a step   2 for each active parameter and token, in the units of the weight's format; attention in BF16

It leaves out communication, kernel launches, activations and uneven routing: no engine reaches it. The model is that of
Williams, Waterman and Patterson, "Roofline" (CACM 52/4, 2009). One token misses an expert with probability 1 - k/E.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.choices import KvLayout
from quantkit.families.attention import Attention
from quantkit.naming import Role
from quantkit.planning.gpus import Gpu
from quantkit.planning.resident import Parallelism, Part, is_whole, rank_bytes

_NOT_READ = (Role.EMBEDDING, Role.VISION)  # a look-up; and nothing for text


@dataclass(frozen=True)
class Model:
    """What the roofline needs of a model; parts hold its main layers."""

    parts: tuple[Part, ...]
    attention: Attention
    experts: int
    experts_per_token: int

    def experts_touched(self, tokens: float) -> float:
        """The expected number of a layer's routed experts that `tokens` tokens use."""
        return self.experts * (1 - float((1 - self.experts_per_token / self.experts) ** tokens))

    def read_share(self, part: Part, tokens: float) -> float:
        """The share of the bytes of `part` that a step over `tokens` tokens reads."""
        if part.role in _NOT_READ or part.mtp:
            return 0.0
        return self.experts_touched(tokens) / self.experts if part.role is Role.ROUTED_EXPERT else 1.0

    def active_share(self, part: Part) -> float:
        """The share of the parameters of `part` that one token multiplies with."""
        if part.role in _NOT_READ or part.mtp:
            return 0.0
        return self.experts_per_token / self.experts if part.role is Role.ROUTED_EXPERT else 1.0

    def weight_bytes(self, tokens: float) -> float:
        """Weight bytes that a step over `tokens` tokens reads, counted once for all ranks."""
        return sum(part.nbytes * self.read_share(part, tokens) for part in self.parts)


@dataclass(frozen=True)
class StepTime:
    """The seconds that a step needs at least to read its bytes, and to compute its FLOPs."""

    reading: float
    computing: float

    @property
    def seconds(self) -> float:
        """The larger of both."""
        return max(self.reading, self.computing)

    @property
    def bound(self) -> str:
        """What the step waits for: `bytes` or `FLOPs`."""
        return "bytes" if self.reading >= self.computing else "FLOPs"


@dataclass(frozen=True)
class Serving:
    """A model on GPUs."""

    model: Model
    parallelism: Parallelism
    gpu: Gpu
    layout: KvLayout

    def rank_weight_bytes(self, tokens: float) -> float:
        """Weight bytes that one rank reads in a step over `tokens` tokens of its replica."""
        model = self.model
        return sum(
            rank_bytes(part, self.parallelism, model.experts) * model.read_share(part, tokens) for part in model.parts
        )

    def rank_kv_bytes(self, batch: int, context: int) -> float:
        """Bytes of KV and index cache that the fullest rank reads to decode one token of each of `batch` requests."""
        tp, dp_attention = self.parallelism.tp, self.parallelism.dp_attention
        own = -(-batch // tp) if dp_attention else batch
        return own * self.model.attention.read_bytes(self.layout, context, ranks=1 if dp_attention else tp)

    def decode_step(self, batch: int, context: int) -> StepTime:
        """A step that adds one token to each of `batch` requests of `context` tokens in one replica."""
        attended = self.model.attention.attended(context)
        compute = self._weight_seconds(batch, self.model.parts)
        compute += self._attention_seconds(batch, context, attended, absorbed=True)
        nbytes = self.rank_weight_bytes(batch) + self.rank_kv_bytes(batch, context)
        return self._step(nbytes, compute)

    def prefill_step(self, tokens: int) -> StepTime:
        """A step over a whole prompt of `tokens` tokens in one replica; only its last needs the head."""
        body = [part for part in self.model.parts if part.role is not Role.LM_HEAD]
        attention = self.model.attention
        compute = self._weight_seconds(tokens, body)
        attended = attention.mean_attended(tokens)
        compute += self._attention_seconds(tokens, tokens / 2, attended, absorbed=attention.topk is not None)
        return self._step(self.rank_weight_bytes(tokens), compute)

    def _step(self, nbytes: float, computing: float) -> StepTime:
        return StepTime(nbytes / (self.gpu.bandwidth_gb_s * 1e9), computing)

    def _weight_seconds(self, tokens: float, parts: Iterable[Part]) -> float:
        """What every rank holds is computed by every rank for all tokens, except under DP attention."""
        seconds = 0.0
        for part in parts:
            whole = is_whole(part, self.parallelism) and not self.parallelism.dp_attention
            ranks = 1 if whole else self.parallelism.tp
            flops = 2.0 * part.parameters * self.model.active_share(part) * tokens / ranks
            seconds += flops / self.gpu.flops(part.format)
        return seconds

    def _attention_seconds(self, tokens: float, context: float, attended: float, *, absorbed: bool) -> float:
        attention, tp = self.model.attention, self.parallelism.tp
        shared = attention.flops(attended, absorbed=absorbed) / tp / self.gpu.flops("bf16")
        ranks = tp if self.parallelism.dp_attention else 1  # the indexer is on every rank
        return tokens * (shared + attention.index_flops(context) / ranks / self.gpu.flops("fp8"))


def price_per_million(dollars_per_gpu_hour: float, gpus: int, tokens_per_second: float) -> float:
    """Dollars for a million tokens at `tokens_per_second` of `gpus` GPUs."""
    return dollars_per_gpu_hour * gpus / 3600 / tokens_per_second * 1e6

"""The sizes that others have published of GLM-5.2 and Kimi K2.6, each beside our own, with the layout that explains it.

Sources: the index of zai-org/GLM-5.2-FP8 (`total_size`); vLLM's and SGLang's logs of KV cache sizes; a vendor's report
on INT4 serving of GLM-5.2 and FP8 KV for Kimi K2.6 ("705 to 421 GB", "88 to 52 per GPU", "1.18 M tokens", "686 k to
1.37 M tokens", "32 to 64 requests"); the Hub's size of moonshotai/Kimi-K2.6.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import IndexCache, KvLayout
from quantkit.conversion import Options
from quantkit.conversion.choice import choose_recipe
from quantkit.conversion.plan import make_plan
from quantkit.families.attention import Attention
from quantkit.families.locate import describe_model
from quantkit.naming import TensorName
from quantkit.planning.fit import GIB, Deployment, describe, report
from quantkit.planning.report import PublishedFigure, PublishedFigures
from quantkit.planning.roofline import Model
from quantkit.weights.encodings import int4

_GLM, _KIMI = "glm-5.2", "kimi-k2.6"
_RANKS = 8
_KIMI_RESERVE, _KIMI_CONTEXT = 9.64, 21_400  # GiB; 686 k tokens / 32 requests
_GAINED_TOKENS, _FREED = (
    1_180_000,
    36,
)  # what the vendor says that INT4 weights gain: tokens, and GB or GiB for each GPU


@dataclass(frozen=True)
class _Published:
    """A figure as it was published, in `unit` with so many `digits` behind the point; our own in bytes or tokens.

    It comes out if our own, rounded or cut to these digits, is the same.
    """

    model: str
    what: str
    value: float
    digits: int
    unit: str
    own: float
    layout: str

    def figure(self) -> PublishedFigure:
        scale = {"GB": 1e9, "GiB": GIB, "M tokens": 1e6}.get(self.unit, 1)
        own, step = self.own / scale, 10**self.digits
        comes_out = round(self.value * step) in (round(own * step), int(own * step))
        published, ours = f"{self.value:,.{self.digits}f}", f"{own:,.{self.digits if scale == 1 else 3}f}"
        return PublishedFigure(self.model, self.what, published, ours, self.unit, self.layout, comes_out)


def published_figures() -> PublishedFigures:
    """Every published figure beside our own; some seconds, since all tensors of both models are counted."""
    return PublishedFigures(tuple(entry.figure() for entry in (*_glm(), *_kimi())))


def _glm() -> Iterator[_Published]:
    source = describe_model(_GLM)
    released = describe(source)
    size = sum(part.nbytes for part in released.parts)
    yield _Published(_GLM, "checkpoint", 755_617_140_416, 0, "bytes", size, "FP8 release, total_size of its index")
    yield _Published(_GLM, "the same", 755.62, 2, "GB", size, "decimal: 10^9 bytes")
    yield _Published(_GLM, "the same", 703.72, 2, "GiB", size, "binary: 2^30 bytes")
    rank = _rank_bytes(source, released, mtp=False)
    layout = "FP8 release, TP8, MTP layer not loaded; q_a, kv_a, indexer, router and norms on every rank"
    yield _Published(_GLM, "88 on one GPU of eight", 88.18, 2, "GiB", rank, layout)
    yield _Published(_GLM, "705 on eight GPUs", 705, 0, "GiB", _RANKS * rank, "8 x the rank above; it is not GB")
    yield _Published(
        _GLM, "one GPU with MTP", 89.50, 2, "GiB", _rank_bytes(source, released, mtp=True), "the same, MTP loaded"
    )
    rank = _rank_bytes(source, describe(source, int4_experts_only(source, 32)), mtp=True)
    layout = "INT4 g=32 experts of the main layers, all else FP8, MTP loaded, TP8"
    yield _Published(_GLM, "52 on one GPU, INT4", 52, 0, "GiB", rank, layout)
    yield _Published(
        _GLM,
        "421 on eight GPUs, INT4",
        421,
        0,
        "GiB",
        _RANKS * rank,
        f"8 x the rank above is {_RANKS * rank / GIB:.2f}; other layouts come as near, so which one is not known",
    )
    int4 = make_plan(source, choose_recipe(source, None, Options()))
    yield _Published(
        _GLM, "convert --int4", 435_280_968_896, 0, "bytes", int4.nbytes, "INT4 g=32 experts, MTP's too; kv_b_proj BF16"
    )
    yield from _glm_kv(Attention.of(source))


def _glm_kv(attention: Attention) -> Iterator[_Published]:
    bf16 = attention.bytes_per_token(KvLayout.BF16)
    mla = attention.bytes_per_token(KvLayout.FP8_DS_MLA)
    widest = attention.bytes_per_token(KvLayout.FP8_DS_MLA, IndexCache.ALL)
    yield _Published(_GLM, "KV of a token", 92_628, 0, "bytes", bf16, "BF16, index cache on 21 layers")
    yield _Published(_GLM, "KV of a token", 53_940, 0, "bytes", mla, "fp8_ds_mla, index cache on 21 layers: vLLM")
    yield _Published(_GLM, "KV of a token", 61_464, 0, "bytes", widest, "fp8_ds_mla, index cache on all 78: SGLang")
    smallest = attention.layers * attention.layer_bytes(KvLayout.FP8)
    least, most = _FREED * 1e9 / widest, _FREED * GIB / smallest
    layout = (
        f"no FP8 layout gives it under TP8: {_FREED} GB / {widest:,} B = {least / 1e6:.2f} M to {_FREED} GiB / "
        f"{smallest:,} B = {most / 1e6:.2f} M; it takes {_FREED * 1e9 / _GAINED_TOKENS / 1e3:.1f} to "
        f"{_FREED * GIB / _GAINED_TOKENS / 1e3:.1f} kB a token: KV over two ranks, 4-bit KV, or a total, not a gain"
    )
    yield _Published(_GLM, "tokens gained by INT4", _GAINED_TOKENS / 1e6, 2, "M tokens", most, layout)


def _kimi() -> Iterator[_Published]:
    source = describe_model(_KIMI)
    released = describe(source)
    size = sum(part.nbytes for part in released.parts)
    attention = Attention.of(source)
    bf16, fp8 = attention.bytes_per_token(KvLayout.BF16), attention.bytes_per_token(KvLayout.FP8)
    yield _Published(_KIMI, "checkpoint", 595_148_192_736, 0, "bytes", size, "native INT4 g=32 experts, vision tower")
    yield _Published(_KIMI, "the same", 595, 0, "GB", size, "decimal: 10^9 bytes")
    yield _Published(_KIMI, "the same, 555 GB", 554.27, 2, "GiB", size, "binary: 2^30 bytes, rounded up")
    rank = _rank_bytes(source, released, mtp=False)
    yield _Published(_KIMI, "one GPU of eight", 71.83, 2, "GiB", rank, "TP8, the vision tower on every rank")
    yield _Published(_KIMI, "KV of a token", 70_272, 0, "bytes", bf16, "BF16: 61 layers of 1152 bytes")
    yield _Published(_KIMI, "KV of a token", 35_136, 0, "bytes", fp8, "plain FP8: 61 layers of 576 bytes")
    pool = report(source, released, Deployment(f"{_RANKS}xH200", reserve_gib=_KIMI_RESERVE, context=_KIMI_CONTEXT))
    in_bf16, in_fp8 = (next(kv for kv in pool.kv if kv.layout == layout) for layout in (KvLayout.BF16, KvLayout.FP8))
    layout = (
        f"8 x H200, TP8, 0.9 of the memory, {_KIMI_RESERVE} GiB in reserve (fitted to this figure): a pool of "
        f"{pool.pool_bytes / 1e9:.2f} GB = {pool.pool_bytes / GIB:.2f} GiB, BF16"
    )
    yield _Published(_KIMI, "686 k tokens", 0.686, 3, "M tokens", in_bf16.tokens, layout)
    yield _Published(_KIMI, "1.37 M tokens", 1.372, 3, "M tokens", in_fp8.tokens, "the same pool, plain FP8")
    layout = f"requests of {_KIMI_CONTEXT:,} tokens, BF16"
    yield _Published(_KIMI, "32 requests", 32, 0, "requests", in_bf16.requests, layout)
    yield _Published(_KIMI, "64 requests", 64, 0, "requests", in_fp8.requests, "the same, plain FP8")


def _rank_bytes(source: Source, model: Model, *, mtp: bool) -> int:
    return report(source, model, Deployment(f"{_RANKS}xH200", mtp=mtp)).rank_bytes


def int4_experts_only(source: Source, group_size: int) -> list[TensorSpec]:
    """The tensors if only the main layers' routed experts became INT4; no engine loads it, for its FP8 kv_b_proj."""
    specs: list[TensorSpec] = []
    for tensor in source.tensors.values():
        name = TensorName.parse(tensor.spec.name)
        if name.expert is None or name.is_mtp(source.num_hidden_layers):
            specs.append(tensor.spec)
        elif name.leaf == "weight":
            rows, columns = tensor.spec.shape
            specs.extend(int4.specs(name.module, (rows, columns), group_size))
    return specs

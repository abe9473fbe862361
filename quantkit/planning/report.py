"""What `plan` returns. All sizes are bytes; *_rank_* and "per rank" mean the fullest of the tensor-parallel ranks."""

from dataclasses import dataclass

from quantkit.records import Report


@dataclass(frozen=True)
class RoleSize:
    """The weights of one role that are stored and placed alike: bytes in the checkpoint and on one rank.

    loaded  whether an engine loads them: MTP layers only for speculative decoding
    whole   whether every rank holds all of them
    """

    role: str
    mtp: bool
    format: str
    checkpoint_bytes: int
    rank_bytes: int
    loaded: bool
    whole: bool


@dataclass(frozen=True)
class KvSize:
    """The KV cache in one layout.

    index_cache      which layers keep an index cache: `indexers` (vLLM), `all` (SGLang); empty for none
    bytes_per_token  of one rank
    tokens           that fit on all GPUs together
    requests         of `context` tokens each that fit on all GPUs together
    chosen           the one that the other figures are for
    """

    layout: str
    index_cache: str
    bytes_per_token: int
    tokens: int
    requests: int
    chosen: bool


@dataclass(frozen=True)
class DecodeRate:
    """The roofline of decoding.

    requests             at the same time in one replica
    experts_touched      expected number of routed experts of a layer that a step uses
    weight_bytes         that a step reads in one replica, each counted once
    rank_weight_bytes    that a step reads on one rank
    rank_kv_bytes        the same of KV and index cache
    milliseconds         of a step, at best
    bound                what the step waits for: `bytes` or `FLOPs`
    tokens_per_second    of all GPUs together, at best
    dollars_per_million  tokens, at best; None without a price
    """

    requests: int
    experts_touched: float
    weight_bytes: int
    rank_weight_bytes: int
    rank_kv_bytes: int
    milliseconds: float
    bound: str
    tokens_per_second: float
    dollars_per_million: float | None


@dataclass(frozen=True)
class PrefillRate:
    """The roofline of reading a prompt of `tokens` tokens in one replica; the rate is that of all GPUs together."""

    tokens: int
    milliseconds: float
    bound: str
    tokens_per_second: float
    dollars_per_million: float | None


@dataclass(frozen=True)
class CapacityReport(Report):
    """What a model needs on GPUs.

    recipe              that the sizes are for; None is the checkpoint as published
    parameters          in the main layers, and those of them that a token uses
    gpus, gpu           how many of which; tp ranks share one copy, so there are gpus / tp replicas
    mtp                 whether the MTP layers are loaded
    memory_bytes        of one GPU
    utilization         the share of it that the engine takes
    reserve_bytes       of that share for activations, graphs and the engine itself
    pool_bytes          what is left of it for the KV cache, on one rank; negative if the weights do not fit
    context             tokens of each request
    """

    model: str
    model_type: str
    recipe: str | None
    parameters: int
    active_parameters: int
    gpus: int
    gpu: str
    tp: int
    ep: bool
    dp_attention: bool
    mtp: bool
    roles: tuple[RoleSize, ...]
    checkpoint_bytes: int
    num_tensors: int
    rank_bytes: int
    rank_whole_bytes: int
    memory_bytes: int
    utilization: float
    reserve_bytes: int
    pool_bytes: int
    context: int
    kv: tuple[KvSize, ...]
    decode: tuple[DecodeRate, ...]
    prefill: PrefillRate
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure beside our own.

    published, own  in `unit`
    layout          what our own is: the layout, unit or sum that explains the published one
    comes_out       whether both are equal to the digits that were published
    """

    model: str
    what: str
    published: str
    own: str
    unit: str
    layout: str
    comes_out: bool


@dataclass(frozen=True)
class PublishedFigures(Report):
    """All published figures, and those that do not come out are said to be so."""

    figures: tuple[PublishedFigure, ...]

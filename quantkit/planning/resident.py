"""Which bytes of a checkpoint lie on each rank: what tensor and expert parallelism share out.

    shared out        q_b, kv_b, q, k, v, o (by heads); all MLPs; embedding and head (by vocabulary)
    on every rank     q_a and kv_a, norms, indexer, router, the MTP layer's eh_proj; the vision tower
    expert parallel   whole experts instead of parts of all: the same bytes where the ranks divide the experts
    DP attention      each rank has all of attention; with expert parallelism also all shared experts

Sources: vLLM 0.33 and SGLang 0.5.23, `models/deepseek_v2.py` (ReplicatedLinear, ColumnParallelLinear,
RowParallelLinear, VocabParallelEmbedding); the vision tower is replicated in their data-parallel mode.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from quantkit.checkpoint.header import TensorSpec
from quantkit.errors import UsageError
from quantkit.naming import Role, TensorName

_REPLICATED_MODULES = ("q_a_proj", "kv_a_proj_with_mqa")
_SHARED_OUT = frozenset(
    {
        Role.ATTENTION,
        Role.KV_B,
        Role.DENSE_MLP,
        Role.SHARED_EXPERT,
        Role.ROUTED_EXPERT,
        Role.EMBEDDING,
        Role.LM_HEAD,
    }
)
_VALUES = {"I32": 8, "U8": 2}  # 4-bit codes in an item


@dataclass(frozen=True)
class Parallelism:
    """How a model lies on GPUs.

    gpus          in all; gpus / tp replicas serve side by side
    tp            ranks that share one copy of the model
    ep            whole experts on each rank
    dp_attention  every rank has all of attention and requests of its own
    """

    gpus: int
    tp: int
    ep: bool = False
    dp_attention: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or self.gpus % self.tp:
            raise UsageError(f"--tp {self.tp} does not divide the {self.gpus} GPUs")

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.gpus // self.tp


@dataclass(frozen=True)
class Part:
    """All weights of a model that are stored, placed and used alike.

    format      fp8, int4, nvfp4, bf16 or f32
    parameters  numbers of the weights; scales and biases are none
    nbytes      in the checkpoint, scales and all
    tensors     stored tensors that hold them
    replicated  on every tensor-parallel rank
    """

    role: Role
    mtp: bool
    format: str
    replicated: bool
    parameters: int
    nbytes: int
    tensors: int


def parts(specs: Iterable[TensorSpec], num_hidden_layers: int) -> tuple[Part, ...]:
    """The tensors of a checkpoint grouped into parts."""
    modules: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        modules.setdefault(spec.name.rpartition(".")[0], []).append(spec)
    sums: dict[tuple[Role, bool, str, bool], list[int]] = {}
    for module, tensors in modules.items():
        name = TensorName(module, "weight")
        weight = next((tensor for tensor in tensors if tensor.name.endswith((".weight", ".weight_packed"))), tensors[0])
        key = (name.role, name.is_mtp(num_hidden_layers), _format(weight), _is_replicated(name))
        total = sums.setdefault(key, [0, 0, 0])
        total[0] += prod(weight.shape) * _VALUES.get(weight.dtype, 1)
        total[1] += sum(tensor.nbytes for tensor in tensors)
        total[2] += len(tensors)
    return tuple(Part(*key, *total) for key, total in sorted(sums.items()))


def rank_bytes(part: Part, parallelism: Parallelism, experts: int) -> int:
    """Bytes of `part` that the fullest rank holds; `experts` is the number of routed experts in a layer."""
    tp = parallelism.tp
    if part.role is Role.ROUTED_EXPERT:
        share = -(-experts // tp) if parallelism.ep else 0
        return -(-part.nbytes * share // experts) if share else -(-part.nbytes // tp)
    return part.nbytes if is_whole(part, parallelism) else -(-part.nbytes // tp)


def is_whole(part: Part, parallelism: Parallelism) -> bool:
    """Whether every rank holds all of `part`."""
    if parallelism.dp_attention and part.role in (Role.ATTENTION, Role.KV_B):
        return True
    return part.replicated or (parallelism.dp_attention and parallelism.ep and part.role is Role.SHARED_EXPERT)


def loaded(all_parts: Iterable[Part], *, mtp: bool) -> Iterator[Part]:
    """The parts that an engine loads: the MTP layers only for speculative decoding."""
    return (part for part in all_parts if mtp or not part.mtp)


def _format(weight: TensorSpec) -> str:
    return {"F8_E4M3": "fp8", "I32": "int4", "U8": "nvfp4"}.get(weight.dtype, weight.dtype.lower())


def _is_replicated(name: TensorName) -> bool:
    return name.role not in _SHARED_OUT or name.module.rpartition(".")[2] in _REPLICATED_MODULES

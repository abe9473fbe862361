"""Fused experts taken apart: transformers keeps all experts of a layer in two tensors, which some checkpoints store.

    mlp.experts.gate_up_proj [E, 2I, H]    for each expert the I rows of gate_proj, then the I rows of up_proj
    mlp.experts.down_proj    [E, H, I]
    transposed               [E, H, 2I] and [E, I, H]: columns instead of rows

H is the config's hidden_size and I its moe_intermediate_size. Source: `GlmMoeDsaNaiveMoe` of transformers 5.17.
"""

from dataclasses import dataclass

from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor, TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.naming import TensorName

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class FusedColumns:
    """An expert's matrix [rows, columns] in a transposed tensor: the columns `begin` to `begin` + rows of a part that
    has `columns` rows of `width` numbers."""

    begin: int
    width: int


def split_experts(tensor: StoredTensor, source: Source) -> tuple[tuple[StoredTensor, FusedColumns | None], ...]:
    """The weights of each expert in a fused tensor, named as if they had been stored alone; nothing for other tensors.

    Raises SourceError, naming the tensor, for a shape that the config does not explain or explains in two ways.
    """
    name = TensorName.parse(tensor.spec.name)
    if name.leaf == "weight":
        name = TensorName.parse(name.module)
    projections = _PROJECTIONS.get(name.leaf, ())
    if not projections or not name.module.endswith(".experts") or len(tensor.spec.shape) != 3:
        return ()
    experts, first, second = tensor.spec.shape
    rows, columns, transposed = _orientation(tensor, source, len(projections))
    itemsize = DTYPE_BYTES[tensor.spec.dtype]
    found: list[tuple[StoredTensor, FusedColumns | None]] = []
    for expert in range(experts):
        for number, projection in enumerate(projections):
            begin = expert * first * second + (0 if transposed else number * rows * columns)
            spec = TensorSpec(f"{name.module}.{expert}.{projection}.weight", tensor.spec.dtype, (rows, columns))
            data = StoredTensor(spec, tensor.shard, tensor.offset + begin * itemsize)
            found.append((data, FusedColumns(number * rows, second) if transposed else None))
    return tuple(found)


def _orientation(tensor: StoredTensor, source: Source, parts: int) -> tuple[int, int, bool]:
    """Rows and columns of each of the `parts` projections in a fused tensor, and whether they are transposed."""
    config, spec = source.text_config, tensor.spec
    try:
        hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    except KeyError as error:
        raise SourceError(f"{spec.name} holds fused experts, and the config has no {error.args[0]}") from None
    rows, columns = (intermediate, hidden) if parts == 2 else (hidden, intermediate)
    if spec.dtype not in ("BF16", "F16", "F32"):
        raise SourceError(f"{spec.name} holds fused experts in {spec.dtype}; BF16, F16 and F32 are understood")
    straight, transposed = (parts * rows, columns), (columns, parts * rows)
    if straight == transposed:
        raise SourceError(
            f"{spec.name} {list(spec.shape)}: the config does not tell rows from columns of these fused experts",
            hint="Split them into one tensor for each expert and projection.",
        )
    if spec.shape[1:] not in (straight, transposed):
        raise SourceError(
            f"{spec.name} is {list(spec.shape)}; by the config fused experts are [E, {straight[0]}, {straight[1]}]"
        )
    return rows, columns, spec.shape[1:] == transposed

"""Stored tensors grouped into weights: what a tensor is, is decided by its dtype and its siblings, never by the config.

(GLM-5.2's `modules_to_not_convert` names a module that does not exist.)
"""

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.encodings import ENCODINGS, PARTS, PLAIN
from quantkit.weights.encodings.encoding import StoredFacts
from quantkit.weights.experts import FusedColumns, split_experts
from quantkit.weights.rows import scalar_tensor
from quantkit.weights.weight import KV_SCALES, Weight

_NOT_UNDERSTOOD = ("weight_zero_point", "weight_g_idx", "qweight", "qzeros")


def read_weights(source: Source) -> tuple[Weight, ...]:
    """Group all tensors of `source` into weights, each tensor in exactly one; fused experts are taken apart.

    Raises SourceError, naming the tensor, for an FP8 or packed weight without its scale, a scale without its weight,
    a scale whose shape does not cover the weight, packed codes that the config says have another width than 4 bits, and
    fused experts whose orientation cannot be told.
    """
    facts = _facts(source)
    weights: list[Weight] = []
    used: set[str] = set()
    for tensor in source.tensors.values():
        name = TensorName.parse(tensor.spec.name)
        encoding = next((each for each in ENCODINGS if each.claims(name, tensor.spec.dtype)), None)
        if encoding is not None:
            weights.append(encoding.read(name, tensor, source.tensors, facts))
            used.update(stored.spec.name for stored in weights[-1].tensors)
    left = [tensor for tensor in source.tensors.values() if tensor.spec.name not in used]
    for tensor in left:
        if parts := split_experts(tensor, source):
            weights.extend(_expert_weight(tensor, data, fused_columns) for data, fused_columns in parts)
        else:
            weights.append(_plain_weight(tensor))
    return tuple(weights)


def _facts(source: Source) -> StoredFacts:
    """What the config says."""
    quantization = source.quantization_config
    try:
        groups = [group["weights"] or {} for group in (quantization.get("config_groups") or {}).values()]
        blocks = [quantization.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
        bits = {group.get("num_bits") for group in groups if group.get("type") == "int"} - {4, None}
    except (AttributeError, KeyError, TypeError) as error:
        raise SourceError(f"{source.name}: quantization_config in config.json is malformed: {error!r}") from error
    match block := next(filter(None, blocks), [128, 128]):
        case [rows, columns] if type(rows) is type(columns) is int and rows > 0 and columns > 0:
            return StoredFacts((rows, columns), next(iter(bits), None))
    raise SourceError(f"{source.name}: the FP8 block size in config.json is {block}, not two positive numbers")


def _expert_weight(tensor: StoredTensor, data: StoredTensor, fused_columns: FusedColumns | None) -> Weight:
    """The expert that has the part `data` of the fused `tensor`."""
    name = TensorName.parse(data.spec.name)
    return Weight(name, PLAIN, data.spec.shape, data, within=tensor.spec.name, fused_columns=fused_columns)


def _plain_weight(tensor: StoredTensor) -> Weight:
    name = TensorName.parse(tensor.spec.name)
    if name.leaf in _NOT_UNDERSTOOD:
        raise SourceError(f"{name}: quantized weights with {name.leaf} are not understood; they would come out wrong")
    if name.leaf in PARTS:
        raise SourceError(
            f"{name} is the scale or shape of a weight that is not there",
            hint="A shard or an index entry is missing; download the checkpoint again.",
        )
    if tensor.spec.dtype.startswith("F8"):
        raise SourceError(f"{name} is {tensor.spec.dtype}, which is understood only as a module's `weight`")
    if tensor.spec.dtype in ("U8", "I8") and len(tensor.spec.shape) > 1:
        raise SourceError(
            f"{name} is {tensor.spec.dtype} {list(tensor.spec.shape)}: a quantization that is not understood"
        )
    if name.leaf in KV_SCALES:
        scalar_tensor(tensor)
    return Weight(name, PLAIN, tensor.spec.shape, tensor)

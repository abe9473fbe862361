"""Which model a checkpoint holds, whatever its form: by weights that conversions and folds leave as they are.

These are the main layers' norms before attention and MLP, the last norm, and the first rows of the embedding: a few
megabytes of hundreds of gigabytes. FP8, INT4, NVFP4 and BF16 forms of a model share them, with KV scales folded in or
not, with MTP layers or without. Another model of the same shape has others; one with adapters merged into its
projections alone has the same.
"""

import hashlib

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.manifest import ModelIdentity
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.naming import Role, TensorName
from quantkit.weights.rows import Reader
from quantkit.weights.weight import FLOAT_DTYPES

_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
_ROWS = 16  # of the embedding


def identify(source: Source) -> ModelIdentity:
    """The identity of the model in `source`: by numbers, so that BF16 and float32 copies are the same.

    Raises SourceError for a config without weights, and for weights that cannot be read.
    """
    if source.folder is None:
        raise SourceError(f"{source.name}: a config has no weights to tell its model by", hint="Give a folder.")
    found, reader = hashlib.sha256(), Reader(source)
    for name, tensor in sorted(_sampled(source).items()):
        rows = tensor.spec.shape[0]
        nbytes = tensor.spec.nbytes // rows * (min(rows, _ROWS) if len(tensor.spec.shape) > 1 else rows)
        numbers = ops.to_float32(reader.tensor_bytes(tensor, 0, nbytes), tensor.spec.dtype)
        found.update(f"{name}\n".encode() + numbers.tobytes())
    return ModelIdentity(source.name, source.model_type, found.hexdigest())


def find_other_model(known: ModelIdentity, source: Source) -> str | None:
    """What tells the model in `source` from the known one, in words, with both sides' values; None for the same.

    A config alone tells no more than the model type. Raises SourceError for weights that cannot be read.
    """
    if source.folder is None:
        if known.model_type == source.model_type:
            return None
        return f"{known.name} has the model type {known.model_type}, and {source.name} {source.model_type}"
    found = identify(source)
    if found.weights_sha256 == known.weights_sha256:
        return None
    ours, theirs = (f"{each.name} ({each.model_type}, weights {each.weights_sha256})" for each in (known, found))
    return f"{ours} is not {theirs}"


def _sampled(source: Source) -> dict[str, StoredTensor]:
    """The tensors to read, by their names without the prefix that models with vision have."""
    sampled = {}
    for stored, tensor in source.tensors.items():
        name = TensorName.parse(stored)
        last = name.module.rpartition(".")[2]
        if name.leaf != "weight" or name.is_mtp(source.num_hidden_layers) or tensor.spec.dtype not in FLOAT_DTYPES:
            continue
        if name.role is Role.EMBEDDING or (name.role is Role.NORM and last in _NORMS):
            sampled[last if name.layer is None else f"{name.layer}.{last}"] = tensor
    return {name: tensor for name, tensor in sampled.items() if tensor.spec.nbytes}

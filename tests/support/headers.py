"""What headers are made of: dtypes, published configs, and a source's tensors by the parts of their names."""

from functools import lru_cache

import torch

from quantkit.checkpoint.header import StoredTensor, parse_header, parse_length
from quantkit.checkpoint.source import Source
from quantkit.families.inventory import inventory
from quantkit.naming import TensorName
from quantkit.recipe import find_alias
from support.paths import CONFIGS

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


def config_of(model: str) -> str:
    """The published config of a model: an alias, or a file of the fixtures."""
    alias = find_alias(model)
    return alias.config_text if alias else (CONFIGS / f"{model}.json").read_text()


@lru_cache(maxsize=4)
def published(model: str) -> Source:
    """The headers of the published model; half a million objects at most, so only a few are kept."""
    return inventory(model, config_of(model))


def read_header(file: bytes, name: str = "model-7.safetensors") -> tuple[StoredTensor, ...]:
    """Read a file's header as a checkpoint is opened: first its length, then the JSON."""
    length = parse_length(file[:8], len(file), name)
    return parse_header(file[8 : 8 + length], len(file), name)


def layers_with(source: Source, part: str) -> list[int]:
    """The layers that hold a tensor with `part` in its name."""
    names = [TensorName.parse(name) for name in source.tensors if part in name]
    return sorted({name.layer for name in names if name.layer is not None})


def specs_below(source: Source, module: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor below `module`, by the rest of its name."""
    return {
        name.removeprefix(f"{module}."): (tensor.spec.dtype, tensor.spec.shape)
        for name, tensor in source.tensors.items()
        if name.startswith(f"{module}.")
    }

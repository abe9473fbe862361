"""Reading weights into tensors as they are stored: bytes go from the file to their place, then to the device."""

from collections.abc import Sequence

import torch

from quantkit.checkpoint.source import Source
from quantkit.models.packed import Packed
from quantkit.weights.layout import CODES_PER_WORD, NVFP4_GROUP
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Encoding, Weight

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_stack(source: Source, weights: Sequence[Weight], device: torch.device) -> Packed:
    """Matrices of one shape and encoding as a stack [E, ...]."""
    packed = _empty(weights[0], len(weights))
    for number, weight in enumerate(weights):
        _fill(packed.expert(number), weight, Reader(source))
    return packed.to(device)


def read_plain(source: Source, weight: Weight, device: torch.device) -> torch.Tensor:
    """A plain tensor of any shape in its stored dtype."""
    tensor = torch.empty(weight.shape, dtype=DTYPES[weight.data.spec.dtype])
    source.read_into(weight.data, 0, _bytes(tensor))
    return tensor.to(device)


def _empty(weight: Weight, count: int) -> Packed:
    rows, columns = weight.shape

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(count, *shape, dtype=dtype)

    shape, block = (rows, columns), weight.block
    match weight.encoding:
        case Encoding.PLAIN:
            return Packed(weight.encoding, shape, new(DTYPES[weight.data.spec.dtype], rows, columns))
        case Encoding.FP8:
            codes, scale = new(torch.float8_e4m3fn, rows, columns), new(torch.float32, *weight.grid)
            return Packed(weight.encoding, shape, codes, scale, block=block)
        case Encoding.INT4:
            codes, scale = new(torch.int32, rows, columns // CODES_PER_WORD), new(torch.bfloat16, *weight.grid)
            return Packed(weight.encoding, shape, codes, scale, block=block)
    codes, scale = new(torch.uint8, rows, columns // 2), new(torch.float8_e4m3fn, rows, columns // NVFP4_GROUP)
    return Packed(weight.encoding, shape, codes, scale, new(torch.float32), block)


def _fill(packed: Packed, weight: Weight, reader: Reader) -> None:
    """Read one matrix into the tensors of `packed`."""
    if weight.slab:
        items = reader.slab_rows(weight, 0, weight.shape[0])
        packed.codes.view(torch.uint8).copy_(torch.from_numpy(items.view("u1")))
    else:
        reader.source.read_into(weight.data, 0, _bytes(packed.codes))
    if packed.scale is not None and weight.scale is not None:
        if weight.encoding is Encoding.FP8:
            packed.scale.copy_(torch.from_numpy(reader.fp8_scales(weight, 0, weight.grid[0])))
        else:
            reader.source.read_into(weight.scale, 0, _bytes(packed.scale))
    if packed.multiplier is not None:
        packed.multiplier.fill_(reader.multiplier(weight))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data

"""Parameters are filled with a mark before loading, so that what no loader writes is seen.

Runs in the engines' interpreter.
"""

import re

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARKS = {1: 0xA5, 2: 0x7FC5, 4: 0x7FC5A5A5, 8: 0x7FF8A5A5A5A5A5A5}  # NaN in BF16, FP16, FP32 and FP64
_NAN_OF_E4M3 = 0x7F
_DEFAULT = re.compile(r"\.(k|v|q|prob)_(scale|zero_point)$|_g_idx(_sort_indices)?$|_blockscale_swizzled$")


def has_default(name: str) -> bool:
    """Whether the engine itself gives the parameter called `name` its value, where no tensor is stored for it.

    These are scales of caches, which are 1.0; orders of columns, which are emptied where the config names none; and
    scales in the order of a kernel, which are made of those that are loaded.
    """
    return _DEFAULT.search(name) is not None


def fill(model: torch.nn.Module) -> None:
    """Fill every parameter that has no default with its mark."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not has_default(name):
            bits = torch.full((parameter.numel(),), _mark(parameter), dtype=_BITS[parameter.element_size()])
            parameter.data.copy_(bits.view(parameter.dtype).view(parameter.shape))


def count_unwritten(parameter: torch.Tensor) -> int:
    """How many numbers still are the mark; of codes, in which it occurs by chance, those of whole rows."""
    if not parameter.numel():
        return 0
    bits = parameter.data.contiguous().reshape(-1).view(_BITS[parameter.element_size()])
    marked = bits == _mark(parameter)
    if not parameter.is_floating_point() and parameter.dim():
        return int(marked.view(-1, parameter.shape[-1]).all(-1).sum()) * parameter.shape[-1]
    return int(marked.sum())


def _mark(parameter: torch.Tensor) -> int:
    return _NAN_OF_E4M3 if parameter.dtype == torch.float8_e4m3fn else _MARKS[parameter.element_size()]

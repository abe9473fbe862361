"""How the dialects spell a weight of N rows and K columns in stored tensors; the one place that knows.

    FP8         weight F8_E4M3 [N, K], a scale F32 for each block [ceil(N/rows), ceil(K/columns)], row [N, 1] or tensor
                [1]; DeepSeek and GLM call a block's `weight_scale_inv`, all others `weight_scale`. Static activation
                scale: input_scale F32 [1]
    INT4        weight_packed I32 [N, K/8], weight_scale BF16 [N, K/g], weight_shape I64 [2]
    NVFP4       compressed-tensors: weight_packed U8 [N, K/2], weight_scale F8_E4M3 [N, K/16],
                weight_global_scale F32 [1], a divisor; static activation scale: input_global_scale F32 [1], a divisor
    NVFP4       ModelOpt: weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32 [], a multiplier;
                static activation scale: input_scale F32 [], a multiplier

Sources: vLLM 0.33, `fp8_utils.py`, `compressed_tensors_wNa16.py`, `compressed_tensors_w4a4_nvfp4.py` and `modelopt.py`,
and the files of these names in SGLang 0.5.23.
"""

from dataclasses import dataclass

from quantkit.checkpoint.header import TensorSpec
from quantkit.choices import Dialect
from quantkit.naming import TensorName

CODES_PER_WORD = 8  # 4-bit codes in an int32
NVFP4_GROUP = 16  # weights that share an E4M3 scale
FP8_SCALES = ("weight_scale_inv", "weight_scale")
INT4_SCALE, INT4_SHAPE = "weight_scale", "weight_shape"
KV_SCALES = ("k_scale", "v_scale", "kv_scale")  # of an FP8 KV cache, of the attention or of k_proj and v_proj


@dataclass(frozen=True)
class Nvfp4Spelling:
    """The leaves of an NVFP4 weight in one dialect.

    divisor  whether the global scales are divisors: value = code * scale / global; else they are multipliers
    shape    of a global scale
    """

    codes: str
    scale: str
    global_scale: str
    input_scale: str
    divisor: bool
    shape: tuple[int, ...]


NVFP4 = {
    Dialect.COMPRESSED_TENSORS: Nvfp4Spelling(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", divisor=True, shape=(1,)
    ),
    Dialect.MODELOPT: Nvfp4Spelling("weight", "weight_scale", "weight_scale_2", "input_scale", divisor=False, shape=()),
}


def fp8_block_specs(module: str, shape: tuple[int, ...], block: tuple[int, int], scale: str) -> tuple[TensorSpec, ...]:
    """The tensors of an FP8 block weight of `shape` [N, K]; `scale` is `weight_scale_inv` or `weight_scale`."""
    name = TensorName(module, "weight")
    (rows, columns), (block_rows, block_columns) = shape, block
    grid = (-(-rows // block_rows), -(-columns // block_columns))
    return TensorSpec(str(name), "F8_E4M3", shape), TensorSpec(name.sibling(scale), "F32", grid)


def int4_specs(module: str, shape: tuple[int, ...], group_size: int) -> tuple[TensorSpec, ...]:
    """The tensors of an INT4 weight of `shape` [N, K]: packed codes, scale, shape."""
    rows, columns = shape
    name = TensorName(module, "weight_packed")
    return (
        TensorSpec(str(name), "I32", (rows, columns // CODES_PER_WORD)),
        TensorSpec(name.sibling(INT4_SCALE), "BF16", (rows, columns // group_size)),
        TensorSpec(name.sibling(INT4_SHAPE), "I64", (2,)),
    )


def nvfp4_specs(
    module: str, shape: tuple[int, ...], dialect: Dialect, *, activations: bool = False
) -> tuple[TensorSpec, ...]:
    """The tensors of an NVFP4 weight of `shape` [N, K]: packed codes, scales, global scale, and the activations'."""
    rows, columns = shape
    spelling = NVFP4[dialect]
    name = TensorName(module, spelling.codes)
    specs: tuple[TensorSpec, ...] = (
        TensorSpec(str(name), "U8", (rows, columns // 2)),
        TensorSpec(name.sibling(spelling.scale), "F8_E4M3", (rows, columns // NVFP4_GROUP)),
        TensorSpec(name.sibling(spelling.global_scale), "F32", spelling.shape),
    )
    if activations:
        specs += (TensorSpec(name.sibling(spelling.input_scale), "F32", spelling.shape),)
    return specs

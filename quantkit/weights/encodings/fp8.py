"""FP8: E4M3 codes with a scale for each block, row or tensor.

    weight F8_E4M3 [N, K], and a scale for each block [ceil(N/rows), ceil(K/columns)], row [N, 1] or tensor [1]:
    DeepSeek and GLM call a block's `weight_scale_inv`, all others `weight_scale`; FP32, BF16, FP16 or E8M0
    input_scale [1], where activations have a static scale

Sources: `fp8_utils.py` of vLLM 0.33 and SGLang 0.5.23; `quantization/lifecycle/initialize.py` of compressed-tensors
0.19.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor, TensorSpec
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.encodings.encoding import Encoding, Format, Rows, Storage, StoredFacts
from quantkit.weights.rescale import (
    Extent,
    Patch,
    Powers,
    cannot_hold,
    inputs_divided,
    inputs_extent,
    scales_multiplied,
    shifted_e4m3,
)
from quantkit.weights.rows import Reader, check_block_scales, scalar_tensor
from quantkit.weights.weight import FLOAT_DTYPES, Strategy, Weight

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.cpu.linear import Weights
    from quantkit.weights.packed import Packed

Bytes = npt.NDArray[np.uint8]
SCALES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = frozenset({*FLOAT_DTYPES, "F8_E8M0", "U8"})  # U8: the bytes of E8M0
INPUT_SCALE = "input_scale"
_SOUND = (2.0**-126, 2.0**119)  # scales that engines and `ops.bad_scale` take


class Fp8(Encoding):
    """See above."""

    name = "fp8"
    parts = SCALES

    def claims(self, name: TensorName, dtype: str) -> bool:
        """E4M3 as a module's weight."""
        return dtype == "F8_E4M3" and name.leaf == "weight"

    def read(
        self, name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], facts: StoredFacts
    ) -> Weight:
        """With its scale, whose shape tells what shares one."""
        scale = next((tensors[sibling] for leaf in SCALES if (sibling := name.sibling(leaf)) in tensors), None)
        if scale is None:
            raise SourceError(
                f"{name} is FP8 and has no scale: {' or '.join(name.sibling(leaf) for leaf in SCALES)} is missing",
                hint="Without its scale the weight would be wrong by a factor of hundreds; "
                "download the checkpoint again.",
            )
        if len(data.spec.shape) != 2:
            raise SourceError(f"{name} is FP8 with the shape {list(data.spec.shape)}; only matrices are understood")
        block, strategy = _sharing(name, data.spec.shape, scale.spec, facts.block)
        if scale.spec.dtype not in SCALE_DTYPES:
            raise SourceError(
                f"{scale.spec.name} is {scale.spec.dtype}; FP8 scales are {', '.join(sorted(SCALE_DTYPES))}"
            )
        inputs = scalar_tensor(tensors.get(name.sibling(INPUT_SCALE)))
        return Weight(name, self, data.spec.shape, data, scale, block, strategy, input_scale=inputs)

    def label(self, weight: Weight) -> str:
        """`fp8 128x128`, `fp8 channel` or `fp8 tensor`."""
        assert weight.block is not None
        blocks = weight.strategy is Strategy.BLOCK
        return f"fp8 {weight.block[0]}x{weight.block[1]}" if blocks else f"fp8 {weight.strategy}"

    def copied(self, weight: Weight) -> tuple[TensorSpec, ...]:
        """Under the name `weight_scale`; E8M0 as FP32, as engines would take its bytes for numbers."""
        assert weight.scale is not None
        kept = weight.scale.spec.dtype if weight.scale.spec.dtype in FLOAT_DTYPES else "F32"
        shape = (1,) if weight.strategy is Strategy.TENSOR else weight.grid
        outputs = (weight.data.spec, TensorSpec(weight.name.sibling("weight_scale"), kept, shape))
        if weight.input_scale is None:
            return outputs
        return (*outputs, TensorSpec(weight.input_scale.spec.name, "F32", (1,)))

    def copy(
        self, reader: Reader, weight: Weight, tensor: StoredTensor, target: TensorSpec, begin: int, end: int
    ) -> Rows:
        """Scales are checked, and E8M0 becomes FP32."""
        if tensor is not weight.scale:
            return super().copy(reader, weight, tensor, target, begin, end)
        data: Bytes = np.empty(end - begin, np.uint8)
        reader.source.read_into(tensor, begin, data.data)
        scales = ops.to_float32(data, tensor.spec.dtype)
        check_block_scales(tensor, scales.reshape(1, -1), begin)
        return Rows({target.name: data if target.dtype == tensor.spec.dtype else scales})

    def format(self, weight: Weight) -> Format:
        """By what shares a scale."""
        block = weight.block if weight.strategy is Strategy.BLOCK else None
        return Format(self, str(weight.strategy), block, weight.input_scale is not None)

    def kind(self, form: Format) -> str:
        return form.strategy

    def described(self, form: Format) -> dict[str, Any]:
        """Activations are quantized, too: for each block of a token, each token, or by a static scale."""
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        block = {"block_structure": list(form.block)} if form.block else {}
        if form.block:
            inputs = {**common, "strategy": "group", "group_size": form.block[1], "dynamic": True}
        else:
            strategy = "tensor" if form.activations else "token"
            inputs = {**common, "strategy": strategy, "dynamic": not form.activations}
        return {
            "format": "float-quantized",
            "weights": {**common, "strategy": form.strategy, "dynamic": False, **block},
            "input_activations": inputs,
        }

    def is_described(self, weights: Mapping[str, Any]) -> bool:
        """Floats of 8 bits."""
        return bool(weights["type"] == "float" and weights["num_bits"] == 8)

    def leaves(self, static: bool) -> frozenset[str]:
        """With compressed-tensors' name of the scale."""
        return frozenset({"weight", "weight_scale", *((INPUT_SCALE,) if static else ())})

    def storage(self, key: str, weights: Mapping[str, Any], static: bool, shape_dtype: str) -> Storage | None:
        """Scales of blocks are FP32, as quantkit writes them; others are of the weight's own dtype, BF16."""
        match weights:
            case {"block_structure": [rows, columns]}:
                return blocks((rows, columns), "weight_scale")
            case {"strategy": "channel"}:
                return without_blocks(lambda rows: (rows, 1), "BF16", (1,) if static else None)
            case {"strategy": "tensor"}:
                return without_blocks(lambda rows: (1,), "BF16", (1,) if static else None)
        return None

    def coded_rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> tuple[Bytes, npt.NDArray[np.float32]]:
        """The rows `begin` to `end`, a piece of `row_ranges`: bytes [rows, K], and their scales.

        Raises SourceError, naming tensor and block, for a scale that is not sound.
        """
        assert weight.block is not None
        columns = weight.shape[1]
        data = reader.tensor_bytes(weight.data, begin * columns, end * columns)
        first, last = begin // weight.block[0], -(-end // weight.block[0])
        return data.reshape(end - begin, columns), self.scales(reader, weight, first, last)

    def scales(self, reader: Reader, weight: Weight, first: int, last: int) -> npt.NDArray[np.float32]:
        """The rows `first` to `last` of the scales [rows, columns] of its grid, whatever their dtype."""
        assert weight.scale is not None
        dtype, columns = weight.scale.spec.dtype, weight.grid[1]
        width = columns * DTYPE_BYTES[dtype]
        data = reader.tensor_bytes(weight.scale, first * width, last * width, "scale")
        scales = ops.to_float32(data, dtype).reshape(last - first, columns)
        check_block_scales(weight.scale, scales, first)
        return scales

    def rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> npt.NDArray[np.float64]:
        """Code times scale, exactly."""
        assert weight.block is not None
        return ops.fp8_block_to_float(*self.coded_rows(reader, weight, begin, end), weight.block)

    def bf16_rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> tuple[ops.Bf16Bits, int | None]:
        """Without a detour by float64."""
        assert weight.block is not None
        data, scale = self.coded_rows(reader, weight, begin, end)
        decoded = np.empty(data.shape, np.uint16)
        return decoded, ops.fp8_block_to_bf16(data, scale, weight.block, decoded)

    def largest(self, reader: Reader, weight: Weight) -> float:
        """448 times the largest scale."""
        return 448.0 * float(self.scales(reader, weight, 0, weight.grid[0]).max(initial=0))

    def extent(self, weight: Weight, powers: Powers, fused: bool) -> Extent:
        """The scales of blocks that change, and the codes of those whose numbers do not change alike."""
        assert weight.scale is not None
        assert weight.block is not None
        low, high = powers.cells(weight.matrix, weight.block)
        mixed, codes = low != high, 0
        if mixed.any():
            heights = np.minimum(weight.block[0], weight.shape[0] - np.arange(len(low)) * weight.block[0])
            codes = int(heights[mixed.any(axis=1)].sum()) * weight.shape[1]
        scales = int((mixed | (low != 0)).sum()) * DTYPE_BYTES[weight.scale.spec.dtype]
        return Extent(scales + codes + inputs_extent(weight, powers), bool(mixed.any()))

    def multiplied(self, reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
        """The scale of a block whose numbers all change alike; else its codes, too, if E4M3 holds them."""
        assert weight.scale is not None
        assert weight.block is not None
        (rows, columns), (height, width) = weight.matrix, weight.block
        base, high = powers.cells(weight.matrix, weight.block)
        mixed = base != high
        for row in np.flatnonzero(mixed.any(axis=1)):
            begin, end = int(row) * height, min((int(row) + 1) * height, rows)
            codes = reader.tensor_bytes(weight.data, begin * columns, end * columns).reshape(end - begin, -1).copy()
            exponents = powers.full(begin, end, columns)
            for column in np.flatnonzero(mixed[row]):
                place = slice(int(column) * width, (int(column) + 1) * width)
                found = shifted_e4m3(codes[:, place], exponents[:, place])
                if found is None:
                    raise cannot_hold(weight, weight.data, begin)
                base[row, column], codes[:, place] = found
            yield Patch(weight.data, begin * columns, codes.reshape(-1))
        yield from scales_multiplied(reader, weight.scale, base, _SOUND)
        yield from inputs_divided(reader, weight, powers)

    def empty(self, weight: Weight, count: int) -> "Packed":
        """codes [N, K] float8_e4m3fn, scale float32 [ceil(N/rows), ceil(K/columns)]."""
        import torch

        from quantkit.weights.packed import Packed, empty

        codes = empty(count, weight.matrix, torch.float8_e4m3fn)
        return Packed(self, weight.matrix, codes, empty(count, weight.grid, torch.float32), block=weight.block)

    def fill(self, packed: "Packed", weight: Weight, reader: Reader) -> None:
        """Scales of any dtype become float32."""
        import torch

        assert packed.scale is not None
        packed.read_codes(weight, reader)
        packed.scale.copy_(torch.from_numpy(self.scales(reader, weight, 0, weight.grid[0])))

    def decode(self, packed: "Packed", dtype: "torch.dtype") -> "torch.Tensor":
        """The product made in float32, as the engines do, and rounded to `dtype`."""
        from quantkit.ops import linear

        return linear.decode_fp8_block(*_parts(packed), dtype)

    def ready(self, packed: "Packed") -> "Weights | None":
        from quantkit.ops import linear

        return linear.ready_fp8_block(*_parts(packed))

    def product(self, x: "torch.Tensor", packed: "Packed", ids: "torch.Tensor | None") -> "torch.Tensor":
        from quantkit.ops import linear

        return linear.fp8_block(x, *_parts(packed), ids)


FP8 = Fp8()


def _parts(packed: "Packed") -> "tuple[torch.Tensor, torch.Tensor, tuple[int, int]]":
    """What `ops.linear` takes of a weight."""
    assert packed.scale is not None
    assert packed.block is not None
    return packed.codes, packed.scale, packed.block


def has_groups(weight: Weight, group_size: int) -> bool:
    """Whether it is FP8 and each group of a row has one scale, so that it is quantized without being decoded."""
    return weight.encoding is FP8 and weight.block is not None and weight.block[1] % group_size == 0


def blocks(block: tuple[int, int], scale: str) -> Storage:
    """FP8 with a scale F32 for each `block` of rows and columns; `scale` is its leaf."""

    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns))
        yield TensorSpec(f"{module}.{scale}", "F32", (-(-rows // block[0]), -(-columns // block[1])))

    return specs


def without_blocks(
    scale_shape: Callable[[int], tuple[int, ...]], dtype: str, input_shape: tuple[int, ...] | None
) -> Storage:
    """FP8 without blocks.

    scale_shape  from the weight's rows to its scale's shape
    dtype        of the scales
    input_shape  of the static scale of the activations, or None where there is none
    """

    def specs(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns))
        yield TensorSpec(f"{module}.weight_scale", dtype, scale_shape(rows))
        if input_shape is not None:
            yield TensorSpec(f"{module}.{INPUT_SCALE}", dtype, input_shape)

    return specs


def _sharing(
    name: TensorName, shape: tuple[int, ...], scale: TensorSpec, block: tuple[int, int]
) -> tuple[tuple[int, int], Strategy]:
    """The rows and columns that share a scale, by the scale's shape; a block's are the config's."""
    rows, columns = shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape == grid:
        return block, Strategy.BLOCK
    if scale.shape in ((), (1,), (1, 1)):
        return (rows, columns), Strategy.TENSOR
    if scale.shape in ((rows,), (rows, 1)):
        return (1, columns), Strategy.CHANNEL
    raise SourceError(
        f"{scale.name} is {scale.dtype} {list(scale.shape)}, but {name} {list(shape)} in blocks of "
        f"{block[0]}x{block[1]} needs {list(grid)}, one for each row [{rows}, 1], or one in all [1]",
        hint="Check weight_block_size in config.json.",
    )

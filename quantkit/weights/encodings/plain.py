"""Weights that are not quantized, and every other tensor: BF16, FP16 or FP32 numbers; integers as they are."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import DTYPE_BYTES, StoredTensor, TensorSpec
from quantkit.choices import Dialect
from quantkit.naming import TensorName
from quantkit.weights.encodings.encoding import Encoding, Format, Storage, StoredFacts
from quantkit.weights.rescale import Extent, Patch, Powers, floats_multiplied, runs
from quantkit.weights.rows import PIECE_BYTES, Reader
from quantkit.weights.weight import Weight

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.cpu.linear import Weights
    from quantkit.weights.packed import Packed


class Plain(Encoding):
    """weight [N, K] or of any other shape; an expert's may lie within a tensor of all experts of its layer."""

    name = "plain"
    dialects = frozenset(Dialect)

    def claims(self, name: TensorName, dtype: str) -> bool:
        """Only what no other encoding claims, which `grouping` finds out."""
        return False

    def read(
        self, name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], facts: StoredFacts
    ) -> Weight:
        return Weight(name, self, data.spec.shape, data)

    def label(self, weight: Weight) -> str:
        return weight.data.spec.dtype.lower()

    def format(self, weight: Weight) -> Format | None:
        """A config is silent about it."""
        return None

    def kind(self, form: Format) -> str:
        raise AssertionError(form)

    def described(self, form: Format) -> dict[str, Any]:
        raise AssertionError(form)

    def is_described(self, weights: Mapping[str, Any]) -> bool:
        return False

    def leaves(self, static: bool) -> frozenset[str]:
        return frozenset({"weight"})

    def storage(self, key: str, weights: Mapping[str, Any], static: bool, shape_dtype: str) -> Storage | None:
        """No config group stands for it."""
        return None

    def specs(self, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """BF16 [N, K]: the tensors of a module that no config group is for."""
        yield TensorSpec(f"{module}.weight", "BF16", (rows, columns))

    def rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> npt.NDArray[np.float32]:
        """As float32 [rows, K]."""
        dtype = weight.data.spec.dtype
        if weight.fused_columns:
            items = reader.fused_rows(weight, begin, end)
            return ops.to_float32(items.reshape(-1).view(np.uint8), dtype).reshape(items.shape)
        width = weight.shape[1] * DTYPE_BYTES[dtype]
        data = reader.tensor_bytes(weight.data, begin * width, end * width)
        return ops.to_float32(data, dtype).reshape(end - begin, -1)

    def extent(self, weight: Weight, powers: Powers, fused: bool) -> Extent:
        """The rows that change."""
        rows, row_bytes = _rows(weight)
        return Extent(int(_changed_rows(powers, rows).sum()) * row_bytes, False)

    def multiplied(self, reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
        """The numbers themselves, of rows that change."""
        rows, row_bytes = _rows(weight)
        height, width = max(PIECE_BYTES // row_bytes, 1), row_bytes // DTYPE_BYTES[weight.data.spec.dtype]
        for begin, end in runs(_changed_rows(powers, rows)):
            for first in range(begin, end, height):
                last = min(first + height, end)
                data = reader.tensor_bytes(weight.data, first * row_bytes, last * row_bytes)
                exponents = powers.full(first, last, width).reshape(-1)
                numbers = floats_multiplied(weight.data, data, exponents, first * width)
                yield Patch(weight.data, first * row_bytes, numbers)

    def empty(self, weight: Weight, count: int) -> "Packed":
        """codes [N, K] in the stored dtype."""
        from quantkit.weights.packed import DTYPES, Packed, empty

        shape = weight.matrix
        return Packed(self, shape, empty(count, shape, DTYPES[weight.data.spec.dtype]))

    def fill(self, packed: "Packed", weight: Weight, reader: Reader) -> None:
        """An expert may lie in columns of a fused tensor."""
        if not weight.fused_columns:
            return packed.read_codes(weight, reader)
        import torch

        items = reader.fused_rows(weight, 0, weight.shape[0])
        packed.codes.view(torch.uint8).copy_(torch.from_numpy(items.view("u1")))
        return None

    def decode(self, packed: "Packed", dtype: "torch.dtype") -> "torch.Tensor":
        return packed.codes.to(dtype)

    def ready(self, packed: "Packed") -> "Weights | None":
        from quantkit.ops import linear

        return linear.ready_plain(packed.codes)

    def product(self, x: "torch.Tensor", packed: "Packed", ids: "torch.Tensor | None") -> "torch.Tensor":
        from quantkit.ops import linear

        return linear.plain(x, packed.codes, ids)


PLAIN = Plain()


def _rows(weight: Weight) -> tuple[int, int]:
    """The number of rows, and the bytes of one."""
    return weight.shape[0], weight.data.spec.nbytes // max(weight.shape[0], 1)


def _changed_rows(powers: Powers, rows: int) -> npt.NDArray[np.bool_]:
    low, high = powers.columns.min(), powers.columns.max()
    if low != high:
        return np.ones(rows, bool)
    return np.broadcast_to(powers.rows + low != 0, rows)

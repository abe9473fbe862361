"""NVFP4: E2M1 codes, an E4M3 scale for each 16 columns, and a global scale for the tensor, in two dialects.

    compressed-tensors  weight_packed U8 [N, K/2], weight_scale F8_E4M3 [N, K/16],
                        weight_global_scale F32 [1], a divisor;
                        static activation scale: input_global_scale F32 [1], a divisor
    ModelOpt            weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32 [], a multiplier;
                        static activation scale: input_scale F32 [], a multiplier

Sources: `compressed_tensors_w4a4_nvfp4.py` and `modelopt.py` of vLLM 0.33 and SGLang 0.5.23.
"""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.choices import Dialect, ScaleMethod
from quantkit.errors import SourceError
from quantkit.naming import TensorName
from quantkit.weights.encodings.encoding import (
    Format,
    Making,
    Origin,
    Outputs,
    Quantizer,
    Rows,
    Storage,
    StoredFacts,
    Target,
)
from quantkit.weights.encodings.fp8 import FP8, has_groups
from quantkit.weights.encodings.groups import check_divides, matrix
from quantkit.weights.encodings.int4 import INT4
from quantkit.weights.encodings.plain import PLAIN
from quantkit.weights.rescale import (
    NORMAL,
    Extent,
    Patch,
    Powers,
    cannot_hold,
    inputs_divided,
    inputs_extent,
    one_each,
    runs,
    scales_multiplied,
    shifted_e4m3,
)
from quantkit.weights.rows import Reader, row_ranges, scalar_tensor
from quantkit.weights.weight import Weight

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.convert.weight_error import WeightError
    from quantkit.kernels.cpu.linear import Weights
    from quantkit.weights.packed import Packed

GROUP = 16  # columns that share an E4M3 scale


@dataclass(frozen=True)
class Spelling:
    """The leaves of a weight in one dialect.

    divisor  whether the global scales are divisors: value = code * scale / global; else they are multipliers
    shape    of a global scale
    """

    codes: str
    scale: str
    global_scale: str
    input_scale: str
    divisor: bool
    shape: tuple[int, ...]

    @property
    def sign(self) -> int:
        """Of the exponent of a global scale that multiplies."""
        return -1 if self.divisor else 1


SPELLINGS = {
    Dialect.COMPRESSED_TENSORS: Spelling(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", divisor=True, shape=(1,)
    ),
    Dialect.MODELOPT: Spelling("weight", "weight_scale", "weight_scale_2", "input_scale", divisor=False, shape=()),
}


class Nvfp4(Target):
    """See above."""

    name = "nvfp4"
    parts = tuple(spelling.global_scale for spelling in SPELLINGS.values())
    origins = frozenset({PLAIN.name, FP8.name, INT4.name})
    dialects = frozenset(Dialect)
    restated = True
    shares_scales = True

    # --- stored

    def claims(self, name: TensorName, dtype: str) -> bool:
        """Bytes under the name that one of the dialects has for codes."""
        return dtype == "U8" and name.leaf in {spelling.codes for spelling in SPELLINGS.values()}

    def read(
        self, name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], facts: StoredFacts
    ) -> Weight:
        """The name of the codes tells the dialect."""
        dialect = next(dialect for dialect, spelling in SPELLINGS.items() if spelling.codes == name.leaf)
        spelling = SPELLINGS[dialect]
        scale, global_scale = (tensors.get(name.sibling(leaf)) for leaf in (spelling.scale, spelling.global_scale))
        if scale is None or global_scale is None:
            missing = spelling.scale if scale is None else spelling.global_scale
            raise SourceError(f"{name} is U8, as packed NVFP4 is, and {name.sibling(missing)} is missing")
        match data.spec.shape, scale.spec:
            case (rows, nbytes), TensorSpec(dtype="F8_E4M3", shape=(scale_rows, groups)):
                if rows == scale_rows and nbytes * 2 == groups * GROUP:
                    return Weight(
                        name=name,
                        encoding=self,
                        shape=(rows, nbytes * 2),
                        data=data,
                        scale=scale,
                        block=(1, GROUP),
                        global_scale=scalar_tensor(global_scale),
                        input_scale=scalar_tensor(tensors.get(name.sibling(spelling.input_scale))),
                        dialect=dialect,
                    )
        raise SourceError(
            f"{name} is U8 {list(data.spec.shape)} and its scale {scale.spec.dtype} {list(scale.spec.shape)}; NVFP4 "
            "needs U8 [N, K/2] and F8_E4M3 [N, K/16]"
        )

    def label(self, weight: Weight) -> str:
        return self.name

    def copy(
        self, reader: Reader, weight: Weight, tensor: StoredTensor, target: TensorSpec, begin: int, end: int
    ) -> Rows:
        """Scales of the whole tensor in the target's dialect; only a power of two has an exact reciprocal."""
        if tensor not in (weight.global_scale, weight.input_scale):
            return super().copy(reader, weight, tensor, target, begin, end)
        value = reader.scalar(tensor)
        stored = np.array([value], np.float32)
        if target.name == tensor.spec.name:
            return Rows({target.name: stored})
        exact = np.frexp(value)[0] == 0.5
        return Rows({target.name: np.float32(1) / stored}, rounded=() if exact else (target.name,))

    # --- described

    def format(self, weight: Weight) -> Format:
        """With the scale of activations, or without one."""
        return Format(self, "tensor_group", (1, GROUP), weight.input_scale is not None)

    def kind(self, form: Format) -> str:
        return form.strategy

    def described(self, form: Format) -> dict[str, Any]:
        """Activations are quantized like the weights where a scale for them is stored, and else not at all."""
        weights = {
            **{"num_bits": 4, "type": "float", "symmetric": True, "strategy": form.strategy, "dynamic": False},
            **{"group_size": GROUP, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None},
        }
        inputs = {**weights, "dynamic": "local"} if form.activations else None
        return {"format": "nvfp4-pack-quantized", "weights": weights, "input_activations": inputs}

    def is_described(self, weights: Mapping[str, Any]) -> bool:
        """Floats of 4 bits."""
        return bool(weights["type"] == "float" and weights["num_bits"] == 4)

    def leaves(self, static: bool) -> frozenset[str]:
        spelling = SPELLINGS[Dialect.COMPRESSED_TENSORS]
        leaves = {spelling.codes, spelling.scale, spelling.global_scale}
        return frozenset(leaves | ({spelling.input_scale} if static else set()))

    def storage(self, key: str, weights: Mapping[str, Any], static: bool, shape_dtype: str) -> Storage | None:
        match weights:
            case {"strategy": "tensor_group", "group_size": 16}:
                return stored(Dialect.COMPRESSED_TENSORS, activations=static)
        return None

    # --- made

    def made_label(self, group_size: int | None) -> str:
        return self.name

    def made_format(self, group_size: int | None) -> Format:
        """Without a scale of activations, which would have to be calibrated."""
        return Format(self, "tensor_group", (1, GROUP))

    def outputs(self, weight: Weight, group_size: int | None, dialect: Dialect) -> tuple[TensorSpec, ...]:
        """Packed codes, scales, global scale, and the activations' scale if it is restated."""
        rows, columns = matrix(weight, "NVFP4", GROUP, "Give its role another scheme in the recipe.")
        activations = weight.encoding is self and weight.input_scale is not None
        return specs(weight.module, (rows, columns), dialect, activations=activations)

    def quantizer(self, reader: Reader) -> Quantizer:
        """In the byte domain where groups lie in FP8 blocks, else from numbers; partners get one global scale."""
        return partial(_quantize, reader, _Exponents(reader))

    # --- read

    def coded_rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> tuple[ops.Bytes, ops.Bytes]:
        """The rows `begin` to `end`: bytes of two codes [rows, K/2] and E4M3 scales [rows, K/16]."""
        assert weight.scale is not None
        nbytes, groups = weight.shape[1] // 2, weight.shape[1] // GROUP
        packed = reader.tensor_bytes(weight.data, begin * nbytes, end * nbytes, "nvfp4")
        scale = reader.tensor_bytes(weight.scale, begin * groups, end * groups, "nvfp4_scale")
        return packed.reshape(-1, nbytes), scale.reshape(-1, groups)

    def multiplier(self, reader: Reader, weight: Weight) -> float:
        """What the scales are multiplied with, from the global scale in either dialect."""
        assert weight.global_scale is not None
        return multiplier_of(reader, weight, weight.global_scale)

    def rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> ops.Floats:
        """Code times scale times multiplier, in float64."""
        return ops.nvfp4_to_float(*self.coded_rows(reader, weight, begin, end), self.multiplier(reader, weight))

    def check_rows(self, reader: Reader, weight: Weight) -> str | None:
        """Groups that their codes say are not zero and their scales say are."""
        lost = 0
        for begin, end in row_ranges(weight):
            packed, scale = self.coded_rows(reader, weight, begin, end)
            codes = (packed & 0x77).reshape(*scale.shape, -1)
            lost += int((codes.any(axis=2) & (scale & 0x7F == 0)).sum())
        return f"has {lost:,} groups with a scale of zero and codes that are not" if lost else None

    def error(
        self, reader: Reader, weight: Weight, origin: Origin, begin: int, end: int, slack: float
    ) -> "WeightError":
        """Against FP8 in the byte domain, else against numbers."""
        packed, scale = self.coded_rows(reader, weight, begin, end)
        multiplier = self.multiplier(reader, weight)
        if origin.numbers is None and has_groups(origin.weight, GROUP):
            assert origin.weight.block is not None
            fp8, scales = FP8.coded_rows(origin.reader, origin.weight, begin, end)
            return ops.nvfp4_error(fp8, scales, origin.weight.block, packed, scale, multiplier)
        return ops.float_nvfp4_error(origin.rows(begin, end), packed, scale, multiplier, slack)

    # --- rescaled

    def extent(self, weight: Weight, powers: Powers, fused: bool) -> Extent:
        """The global scale if all numbers change alike; else the scales of groups, too, of a fused weight alone."""
        assert weight.block is not None
        assert weight.global_scale is not None
        low, high = powers.cells(weight.matrix, weight.block)
        inputs, nbytes = inputs_extent(weight, powers), weight.global_scale.spec.nbytes
        if low.min() == high.max() and not (fused and low.any()):
            return Extent((nbytes if low.any() else 0) + inputs, False)
        return Extent(low.size + inputs + (0 if fused else nbytes), True)

    def multiplied(self, reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
        """The same; E4M3 must hold the new scales."""
        assert weight.scale is not None
        assert weight.global_scale is not None
        assert weight.dialect is not None
        exponents = one_each(weight, powers)
        if fused or exponents.min() != exponents.max():
            scales = reader.tensor_bytes(weight.scale, 0, weight.scale.spec.nbytes).reshape(exponents.shape)
            found = shifted_e4m3(scales, exponents, bases=(0,) if fused else None)
            if found is None:
                raise cannot_hold(weight, weight.scale, 0)
            common, shifted = found
            for begin, end in runs((shifted != scales).any(axis=1)):
                yield Patch(weight.scale, begin * exponents.shape[1], shifted[begin:end].reshape(-1).copy())
        else:
            common = int(exponents.min())
        sign = SPELLINGS[weight.dialect].sign
        yield from scales_multiplied(reader, weight.global_scale, np.array([[sign * common]]), NORMAL["F32"])
        yield from inputs_divided(reader, weight, powers, -sign)

    # --- computed

    def empty(self, weight: Weight, count: int) -> "Packed":
        """codes uint8 [N, K/2], scale float8_e4m3fn [N, K/16], multiplier float32 []."""
        import torch

        from quantkit.weights.packed import Packed, empty

        rows, columns = weight.matrix
        codes = empty(count, (rows, columns // 2), torch.uint8)
        scale = empty(count, (rows, columns // GROUP), torch.float8_e4m3fn)
        return Packed(self, weight.matrix, codes, scale, empty(count, (), torch.float32), weight.block)

    def fill(self, packed: "Packed", weight: Weight, reader: Reader) -> None:
        """The global scale of either dialect as a multiplier."""
        assert packed.multiplier is not None
        packed.read_codes(weight, reader)
        packed.read_scale(weight, reader)
        packed.multiplier.fill_(self.multiplier(reader, weight))

    def decode(self, packed: "Packed", dtype: "torch.dtype") -> "torch.Tensor":
        """The exact product, rounded to float32."""
        from quantkit.ops import linear

        return linear.decode_nvfp4(*_parts(packed), dtype)

    def ready(self, packed: "Packed") -> "Weights | None":
        from quantkit.ops import linear

        return linear.ready_nvfp4(*_parts(packed))

    def product(self, x: "torch.Tensor", packed: "Packed", ids: "torch.Tensor | None") -> "torch.Tensor":
        from quantkit.ops import linear

        return linear.nvfp4(x, *_parts(packed), ids)


NVFP4 = Nvfp4()


def _parts(packed: "Packed") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """What `ops.linear` takes of a weight."""
    assert packed.scale is not None
    assert packed.multiplier is not None
    return packed.codes, packed.scale, packed.multiplier


def specs(
    module: str, shape: tuple[int, int], dialect: Dialect, *, activations: bool = False
) -> tuple[TensorSpec, ...]:
    """The tensors of an NVFP4 weight of `shape` [N, K]: packed codes, scales, global scale, and the activations'."""
    rows, columns = shape
    spelling = SPELLINGS[dialect]
    inputs = (TensorSpec(f"{module}.{spelling.input_scale}", "F32", spelling.shape),) if activations else ()
    return (
        TensorSpec(f"{module}.{spelling.codes}", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.{spelling.scale}", "F8_E4M3", (rows, columns // GROUP)),
        TensorSpec(f"{module}.{spelling.global_scale}", "F32", spelling.shape),
        *inputs,
    )


def stored(dialect: Dialect, *, activations: bool) -> Storage:
    """What a config that says NVFP4 stands for."""

    def tensors(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        check_divides(module, columns, GROUP)
        return iter(specs(module, (rows, columns), dialect, activations=activations))

    return tensors


def multiplier_of(reader: Reader, weight: Weight, scale: StoredTensor) -> float:
    """A scale of a whole tensor of `weight` as a multiplier."""
    value = reader.scalar(scale)
    return 1 / value if weight.dialect and SPELLINGS[weight.dialect].divisor else value


def _quantize(reader: Reader, exponents: "_Exponents", making: Making, begin: int, end: int) -> Rows:
    weight, exponent = making.weight, exponents(making)
    rows, columns = end - begin, weight.shape[1]
    packed: ops.Bytes = np.empty((rows, columns // 2), np.uint8)
    scale: ops.Bytes = np.empty((rows, columns // GROUP), np.uint8)
    settings = exponent, making.scale is ScaleMethod.SEARCH, packed, scale
    if has_groups(weight, GROUP):
        assert weight.block is not None
        fp8, scales = FP8.coded_rows(reader, weight, begin, end)
        counts = ops.fp8_block_to_nvfp4(fp8, scales, weight.block, *settings)
    else:
        counts = ops.float_to_nvfp4(reader.rows(weight, begin, end), *settings)
    outputs: Outputs = {making.outputs[0].name: packed, making.outputs[1].name: scale}
    if begin == 0:
        sign = SPELLINGS[making.dialect].sign
        outputs[making.outputs[2].name] = np.array([2.0 ** (sign * exponent)], np.float32)
    return Rows(outputs, counts.bad, {key: value for key, value in counts._asdict().items() if key != "bad"})


class _Exponents:
    """The global scales 2^exponent: one for all partners, whichever thread or shard asks first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._found: dict[str, Future[int]] = {}

    def __call__(self, making: Making) -> int:
        owner = making.partners[0].module
        with self._lock:
            first = owner not in self._found
            found = self._found.setdefault(owner, Future())
        if first:
            try:
                largest = max(self._reader.largest(partner) for partner in making.partners)
                names = " and ".join(weight.module for weight in making.partners)
                found.set_result(ops.nvfp4_exponent(largest, names))
            except BaseException as error:
                found.set_exception(error)
        return found.result()

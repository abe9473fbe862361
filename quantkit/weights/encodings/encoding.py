"""What quantkit knows of one way in which a weight's numbers are stored: everybody else asks such an object.

    stored     which tensors of a checkpoint are such a weight, and what reports call it
    described  its words in a `quantization_config`, and the tensors that these words stand for
    made       which tensors a conversion writes, and how their bytes are made
    read       its numbers, row by row
    compared   what it lost, and which stored values are not sound
    rescaled   how it is multiplied with powers of two
    computed   its tensors in the runtime, and its product

Nothing heavy is imported before it is used: torch and the kernels come with the method that needs them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.choices import Dialect, ScaleMethod
from quantkit.naming import TensorName
from quantkit.weights.rescale import Extent, Patch, Powers
from quantkit.weights.rows import Reader, nan_error, row_ranges
from quantkit.weights.weight import KV_SCALES, Weight

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.convert.weight_error import WeightError
    from quantkit.kernels.cpu.linear import Weights
    from quantkit.weights.packed import Packed

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Outputs = dict[str, npt.NDArray[Any]]
Storage = Callable[[str, int, int], Iterator[TensorSpec]]  # from a module, rows and columns to its tensors


@dataclass(frozen=True)
class Format:
    """The format of weights, as a config describes it: one group holds those of one format.

    strategy     what shares a scale, in the words of compressed-tensors
    block        rows and columns that share a scale; None for channels and tensors
    activations  whether a static scale of the activations is stored beside it
    """

    encoding: "Encoding"
    strategy: str
    block: tuple[int, int] | None = None
    activations: bool = False

    def __str__(self) -> str:
        kind = self.encoding.kind(self)
        return f"{self.encoding} {kind}{' with static activation scales' if self.activations else ''}"


@dataclass(frozen=True)
class StoredFacts:
    """What a config says of stored weights and no tensor tells.

    block  rows and columns of an FP8 block, in either dialect; 128 x 128 unless it says so
    bits   of packed integers, where they are not 4
    """

    block: tuple[int, int]
    bits: int | None


@dataclass
class Rows:
    """What comes out of rows of a weight.

    outputs  by the name of the tensor
    bad      the position of a number in the rows that cannot be converted, or None
    counts   of groups that a report mentions, by what they are
    rounded  the outputs that are not exact
    """

    outputs: Outputs
    bad: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()


class Making(Protocol):
    """A weight that is quantized."""

    @property
    def weight(self) -> Weight:
        """What is stored."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that come out."""

    @property
    def dialect(self) -> Dialect:
        """How they are spelled."""

    @property
    def partners(self) -> tuple[Weight, ...]:
        """The weights that share a global scale with this one, itself among them."""

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale, where the recipe says."""

    @property
    def scale(self) -> ScaleMethod | None:
        """How scales are chosen."""


Quantizer = Callable[[Making, int, int], Rows]  # of the rows from one number to another


class Encoding(ABC):
    """One way in which a weight's numbers are stored; there is one object of each.

    name             as recipes and reports call it
    is_main          whether conversions make it and a config is about it: engines take one such format of a checkpoint,
                     beside FP8 and plain weights
    parts            leaves of the tensors that lie beside its codes, and mean nothing without them
    origins          the encodings that it is made from
    dialects         that have words for it
    restated         whether they spell it differently, so that a copy is written anew
    negative_scales  whether a recipe may ask for them
    """

    name: ClassVar[str]
    is_main: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ()
    origins: ClassVar[frozenset[str]] = frozenset()
    dialects: ClassVar[frozenset[Dialect]] = frozenset({Dialect.COMPRESSED_TENSORS})
    restated: ClassVar[bool] = False
    negative_scales: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __reduce__(self) -> Any:
        from quantkit.weights.encodings import encoding  # pickled by name, as there is one object of each

        return encoding, (self.name,)

    # --- stored

    @abstractmethod
    def claims(self, name: TensorName, dtype: str) -> bool:
        """Whether a tensor holds the codes of such a weight."""

    @abstractmethod
    def read(
        self, name: TensorName, data: StoredTensor, tensors: Mapping[str, StoredTensor], facts: StoredFacts
    ) -> Weight:
        """The weight whose codes are `data`. Raises SourceError, naming the tensor, for one that is not whole."""

    @abstractmethod
    def label(self, weight: Weight) -> str:
        """What a report calls the format of a weight."""

    def copied(self, weight: Weight) -> tuple[TensorSpec, ...]:
        """The tensors of a copy, as compressed-tensors spells them."""
        return tuple(tensor.spec for tensor in weight.tensors)

    def copy(
        self, reader: Reader, weight: Weight, tensor: StoredTensor, target: TensorSpec, begin: int, end: int
    ) -> Rows:
        """The bytes `begin` to `end` of one of its tensors as `target` holds them.

        Raises SourceError, naming the tensor, for a NaN and for a scale that is not sound.
        """
        if tensor is weight.input_scale:
            return Rows({target.name: np.array([reader.scalar(tensor)], np.float32)})
        if weight.name.leaf in KV_SCALES:
            reader.scalar(tensor)  # refuses what is not positive
        data: npt.NDArray[np.uint8] = np.empty(end - begin, np.uint8)
        reader.source.read_into(tensor, begin, data.data)
        if tensor.spec.dtype == "F8_E4M3" and (nan := ops.first_nan(data)) is not None:
            raise nan_error(tensor, begin + nan)
        return Rows({target.name: data})

    # --- described

    @abstractmethod
    def format(self, weight: Weight) -> Format | None:
        """The format of a stored weight, as a config describes it; None for a plain one."""

    @abstractmethod
    def kind(self, form: Format) -> str:
        """A format of this encoding in a word or two."""

    @abstractmethod
    def described(self, form: Format) -> dict[str, Any]:
        """The keys of a config group: `format`, `weights` and `input_activations`."""

    def class_format(self, blocks: Format) -> Format:
        """The format that a config gives the class `Linear` where other modules have FP8 `blocks`."""
        return blocks

    @abstractmethod
    def is_described(self, weights: Mapping[str, Any]) -> bool:
        """Whether the `weights` of a config group are of this encoding."""

    @abstractmethod
    def leaves(self, static: bool) -> frozenset[str]:
        """The leaves of a weight in compressed-tensors; `static`: with a scale of the activations."""

    @abstractmethod
    def storage(self, key: str, weights: Mapping[str, Any], static: bool, shape_dtype: str) -> Storage | None:
        """The tensors that a config group stands for; None for a kind that is not understood.

        key          of the group, for errors
        static       with a scale of the activations
        shape_dtype  of a `weight_shape`, which no config tells
        """

    # --- read

    @abstractmethod
    def rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> Floats:
        """The numbers of the rows `begin` to `end`, exactly: [rows, K]."""

    def bf16_rows(self, reader: Reader, weight: Weight, begin: int, end: int) -> tuple[ops.Bf16Bits, int | None]:
        """The same rounded to BF16, as bits; and the position of a NaN, or None."""
        return ops.to_bf16(self.rows(reader, weight, begin, end)), None

    def largest(self, reader: Reader, weight: Weight) -> float:
        """A bound of the magnitude of its numbers; the largest itself, unless scales tell a bound sooner."""
        pieces = (self.rows(reader, weight, begin, end) for begin, end in row_ranges(weight))
        return max((float(np.abs(piece).max(initial=0)) for piece in pieces), default=0.0)

    def check_rows(self, reader: Reader, weight: Weight) -> str | None:
        """What is wrong with codes and scales that are each sound, or None."""
        return None

    # --- rescaled

    @abstractmethod
    def extent(self, weight: Weight, powers: Powers, fused: bool) -> Extent:
        """How much of a weight changes; see `rescale.extent`."""

    @abstractmethod
    def multiplied(self, reader: Reader, weight: Weight, powers: Powers, fused: bool) -> Iterator[Patch]:
        """The bytes that change; see `rescale.multiplied`."""

    # --- computed

    @abstractmethod
    def empty(self, weight: Weight, count: int) -> "Packed":
        """Tensors for `count` weights like this one, stacked, not filled."""

    @abstractmethod
    def fill(self, packed: "Packed", weight: Weight, reader: Reader) -> None:
        """Read a weight into its place in a stack."""

    @abstractmethod
    def decode(self, packed: "Packed", dtype: "torch.dtype") -> "torch.Tensor":
        """The numbers of a weight that is not stacked: [N, K] in `dtype`."""

    def ready(self, packed: "Packed") -> "Weights | None":
        """The weight made ready for the CPU's loops; None where there are none for it."""
        return None

    @abstractmethod
    def product(self, x: "torch.Tensor", packed: "Packed", ids: "torch.Tensor | None") -> "torch.Tensor":
        """x times the weight, or those of the experts `ids`: see `ops.linear`."""


class Target(Encoding):
    """An encoding that conversions make.

    group_sizes    that a recipe chooses from; empty where the encoding has one
    shares_scales  whether fused weights get one global scale
    """

    is_main = True
    group_sizes: ClassVar[tuple[int, ...]] = ()
    shares_scales: ClassVar[bool] = False

    @abstractmethod
    def made_label(self, group_size: int | None) -> str:
        """What reports call the format that a recipe makes."""

    @abstractmethod
    def made_format(self, group_size: int | None) -> Format:
        """The same as a config describes it."""

    @abstractmethod
    def outputs(self, weight: Weight, group_size: int | None, dialect: Dialect) -> tuple[TensorSpec, ...]:
        """The tensors that are made of `weight`. Raises PlanError, naming it, for what they cannot be made of."""

    @abstractmethod
    def quantizer(self, reader: Reader) -> Quantizer:
        """What makes the bytes; one for a whole run."""

    @abstractmethod
    def error(
        self, reader: Reader, weight: Weight, origin: "Origin", begin: int, end: int, slack: float
    ) -> "WeightError":
        """What the rows lost against those of `origin`.

        slack  how far `origin` may be, relatively, from the numbers that the codes were made from
        """


@dataclass(frozen=True)
class Origin:
    """What a weight was made from: a stored weight, or numbers [rows, K]."""

    reader: Reader
    weight: Weight
    numbers: Floats | None = None

    def rows(self, begin: int, end: int) -> Floats:
        """The numbers of the rows `begin` to `end`."""
        return self.reader.rows(self.weight, begin, end) if self.numbers is None else self.numbers

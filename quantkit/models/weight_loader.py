"""The weights of a checkpoint, taken by name until none is left, so that nothing is missing, misshapen or unused.

A model is built twice: first from a loader of the device `meta`, which gives empty tensors and notes what is wrong,
then from one that reads. So a checkpoint that does not fit is refused before its bytes are read, with all that is
wrong.
"""

from dataclasses import dataclass, field

import torch

from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError
from quantkit.models.linear import Linear
from quantkit.models.reading import read_plain, read_stack
from quantkit.weights.encodings import PLAIN
from quantkit.weights.grouping import read_weights
from quantkit.weights.packed import DTYPES, Packed
from quantkit.weights.rows import Reader
from quantkit.weights.weight import Weight

_SHOWN = 8


@dataclass
class WeightLoader:
    """Gives the weights of a checkpoint, each once, by the name that it has where nothing is quantized.

    dtype     of the computation: of norms and biases
    device    `meta`: nothing is read
    left      what has not been asked for yet
    problems  what was asked for and is missing or of another kind
    static    the scales of activations that lie beside weights
    """

    source: Source
    dtype: torch.dtype
    device: torch.device
    left: dict[str, Weight] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    static: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for weight in read_weights(self.source):
            name = weight.name.sibling("weight") if weight.name.leaf == "weight_packed" else str(weight.name)
            if name in self.left:
                raise SourceError(f"{self.source.name}: {name} is stored twice, packed and as it is")
            self.left[name] = weight
            if weight.input_scale:
                self.static.append(weight.input_scale.spec.name)

    def linear(self, module: str, rows: int, columns: int, bias: bool = False) -> Linear:
        """A projection with its bias, if it must have one."""
        weight = self.matrix(f"{module}.weight", (rows, columns))
        return Linear(weight, self.vector(f"{module}.bias", rows) if bias else None)

    def matrix(self, name: str, shape: tuple[int, int]) -> Packed:
        """A matrix of `shape` as it is stored."""
        return self._stack([name], shape).expert(0)

    def embedding(self, name: str, shape: tuple[int, int]) -> Packed:
        """A matrix whose rows are looked up, and which may not be quantized."""
        if name in self.left and self.left[name].encoding is not PLAIN:
            self.problems.append(f"{name} is {self.left[name].label}, and embeddings must be plain")
        return self.matrix(name, shape)

    def experts(self, prefix: str, projection: str, count: int, shape: tuple[int, int]) -> Packed:
        """One projection of all experts of a layer, stacked [E, ...]."""
        return self._stack([f"{prefix}.{expert}.{projection}.weight" for expert in range(count)], shape)

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor [size] in `dtype`, by default the computation's."""
        weight = self._take(name, (size,))
        if weight is None or self.device.type == "meta":
            return torch.empty(size, dtype=dtype or self.dtype, device="meta")
        return read_plain(self.source, weight, self.device).to(dtype or self.dtype)

    def whole(self, name: str) -> Packed | torch.Tensor:
        """A weight that is there, whatever its shape: packed if it is a matrix."""
        shape = self.left[name].shape
        if len(shape) == 2:
            return self.matrix(name, (shape[0], shape[1]))
        weight = self._take(name, shape)
        if weight is None or self.device.type == "meta":
            return torch.empty(shape, device="meta")
        return read_plain(self.source, weight, self.device)

    def number(self, name: str) -> float:
        """The one number of a tensor that is there. Raises SourceError unless it is positive and normal."""
        return Reader(self.source).scalar(self.left.pop(name).data)

    def check(self) -> None:
        """Raise SourceError for all that is wrong, and for what is left."""
        unused = (f"{name} has no place in the model" for name in sorted(self.left))
        if found := [*self.problems, *unused]:
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise SourceError(
                f"{self.source.name}: the tensors are not those of its config: {'; '.join(found[:_SHOWN])}{more}",
                hint="Download or convert the checkpoint again, or check its config.json.",
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        weight = self.left.pop(name, None)
        if weight is None:
            self.problems.append(f"{name} is missing")
        elif weight.shape != shape:
            self.problems.append(f"{name} is {list(weight.shape)}, not {list(shape)}")
        elif weight.encoding is PLAIN and weight.data.spec.dtype not in DTYPES:
            self.problems.append(f"{name} is {weight.data.spec.dtype}, which is no weight's dtype")
        return weight

    def _stack(self, names: list[str], shape: tuple[int, int]) -> Packed:
        weights = [weight for name in names if (weight := self._take(name, shape))]
        kinds: dict[object, Weight] = {}
        for weight in weights:
            kinds.setdefault((weight.label, weight.block), weight)
        if len(kinds) > 1:
            different = " and ".join(f"{weight.name} ({weight.label})" for weight in list(kinds.values())[:2])
            self.problems.append(f"{different} are stored unlike, and experts of a layer are stacked")
        if self.device.type == "meta":
            return Packed(PLAIN, shape, torch.empty(len(names), *shape, dtype=self.dtype, device="meta"))
        return read_stack(self.source, weights, self.device)

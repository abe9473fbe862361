"""`inspect`: what a checkpoint holds, by role, layer and format; from headers alone, or from the config of an alias."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quantkit.families.locate import describe_model
from quantkit.records import Report
from quantkit.tables import Line, TextTable, role_name, size
from quantkit.weights.grouping import read_weights
from quantkit.weights.weight import Weight


@dataclass(frozen=True)
class Holding:
    """The weights of one role that are stored alike: how many, their numbers and their bytes, scales included."""

    role: str
    mtp: bool
    format: str
    weights: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class LayerGroup:
    """Layers that hold the same: `layers` as `0-2, 6`, then what each of them holds.

    weights  their number in one layer, by `role: format`
    nbytes   of one layer
    """

    layers: str
    mtp: bool
    num_layers: int
    weights: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class Inspection(Report):
    """What a checkpoint holds."""

    checkpoint: str
    model_type: str
    num_shards: int
    num_tensors: int
    parameters: int
    total_bytes: int
    quantization: str | None
    holdings: tuple[Holding, ...]
    layers: tuple[LayerGroup, ...]
    warnings: tuple[str, ...]

    def tables(self) -> Iterator[TextTable]:
        """What is held by role, and by layer."""
        title = f"{self.checkpoint}: {self.model_type}, quantization {self.quantization or 'none'}"
        rows = (
            (
                role_name(holding.role, holding.mtp),
                holding.format,
                f"{holding.weights:,}",
                f"{holding.parameters:,}",
                size(holding.nbytes),
            )
            for holding in self.holdings
        )
        yield TextTable(title, ("role", "format:", "weights", "parameters", "bytes"), tuple(rows))
        layers = (
            (
                role_name(group.layers, group.mtp),
                size(group.nbytes),
                "; ".join(f"{count} {kind}" for kind, count in group.weights.items()),
            )
            for group in self.layers
        )
        yield TextTable("layers that hold the same", ("layers", "bytes each", "weights of each:"), tuple(layers))

    def answer(self) -> Line:
        """How much it is in all."""
        return Line(
            f"{self.parameters:,} parameters, {self.total_bytes:,} bytes in {self.num_tensors:,} tensors and "
            f"{self.num_shards} shards"
        )


def inspect(model: str | Path, *, revision: str | None = None) -> Inspection:
    """Describe the checkpoint `model`: a folder, an alias or a Hub repository id (from its config alone)."""
    source = describe_model(model, revision)
    weights = read_weights(source)
    return Inspection(
        checkpoint=source.name,
        model_type=source.model_type,
        num_shards=len(source.shards),
        num_tensors=len(source.tensors),
        parameters=_parameters(weights),
        total_bytes=source.nbytes,
        quantization=source.quantization_config.get("quant_method"),
        holdings=tuple(_holdings(weights, source.num_hidden_layers)),
        layers=tuple(_layer_groups(weights, source.num_hidden_layers)),
        warnings=source.warnings,
    )


def _parameters(weights: Iterable[Weight]) -> int:
    return sum(prod(weight.shape) for weight in weights)


def _holdings(weights: Iterable[Weight], num_hidden_layers: int) -> Iterator[Holding]:
    groups: dict[tuple[str, bool, str], list[Weight]] = {}
    for weight in weights:
        key = (str(weight.name.role), weight.name.is_mtp(num_hidden_layers), weight.label)
        groups.setdefault(key, []).append(weight)
    for key, group in sorted(groups.items()):
        yield Holding(*key, len(group), _parameters(group), sum(weight.nbytes for weight in group))


def _layer_groups(weights: Iterable[Weight], num_hidden_layers: int) -> Iterator[LayerGroup]:
    layers: dict[int, list[Weight]] = {}
    for weight in weights:
        if weight.name.layer is not None:
            layers.setdefault(weight.name.layer, []).append(weight)
    alike: dict[tuple[bool, int, tuple[tuple[str, int], ...]], list[int]] = {}
    for layer, group in sorted(layers.items()):
        counts = Counter(f"{weight.name.role}: {weight.label}" for weight in group)
        nbytes = sum(weight.nbytes for weight in group)
        alike.setdefault((layer >= num_hidden_layers, nbytes, tuple(sorted(counts.items()))), []).append(layer)
    for (mtp, nbytes, items), numbers in alike.items():
        yield LayerGroup(number_ranges(numbers), mtp, len(numbers), dict(items), nbytes)


def number_ranges(numbers: Iterable[int]) -> str:
    """`0-2, 6, 10` for the numbers 0 1 2 6 10."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

"""What happens to one weight: the tensors that come out of it, and how they are made.

    scheme       plain       FP8         INT4            NVFP4
    keep         copy        copy        copy            restate
    bf16         copy        decode      decode          decode
    fp8-to-bf16  copy        decode      copy            restate
    int4         to INT4     to INT4     copy, same g    refused
    nvfp4        to NVFP4    to NVFP4    to NVFP4        restate

A copy may get other names, and E8M0 scales become FP32: engines would take their bytes for numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from functools import cached_property

from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.choices import Dialect
from quantkit.errors import PlanError
from quantkit.naming import TensorName
from quantkit.recipe import Mtp, Recipe, Scheme, Treatment
from quantkit.weights.layout import NVFP4_GROUP, int4_specs, nvfp4_specs
from quantkit.weights.quantization_config import Format
from quantkit.weights.weight import FLOAT_DTYPES, Encoding, Strategy, Weight

_MATRIX_LEAVES = ("weight", "weight_packed")


class Action(StrEnum):
    """How the output of a step is made."""

    COPY = auto()
    TRANSPOSE = auto()  # a plain expert out of a fused tensor
    DECODE = auto()  # to BF16
    INT4 = auto()
    NVFP4 = auto()
    RESTATE = auto()  # NVFP4 in another dialect: the same codes and scales, the global scale inverted


@dataclass(frozen=True)
class Step:
    """One weight, what happens to it, and the tensors that come out.

    dialect   of the output
    partners  the weights that share the global scale of NVFP4 with this one, itself among them
    """

    weight: Weight
    treatment: Treatment
    action: Action
    outputs: tuple[TensorSpec, ...]
    dialect: Dialect = Dialect.COMPRESSED_TENSORS
    partners: tuple[Weight, ...] = ()

    @property
    def encoding(self) -> Encoding:
        """How the output is stored."""
        made = {Action.DECODE: Encoding.PLAIN, Action.INT4: Encoding.INT4, Action.NVFP4: Encoding.NVFP4}
        return made.get(self.action, self.weight.encoding)

    @property
    def label(self) -> str:
        """The format that comes out, as reports call it."""
        labels = {Action.DECODE: "bf16", Action.INT4: f"int4 g={self.treatment.group_size}", Action.NVFP4: "nvfp4"}
        return labels.get(self.action, self.weight.label)

    @cached_property
    def format(self) -> Format | None:
        """The format that comes out, as a config describes it; None for a plain tensor."""
        if self.encoding is Encoding.PLAIN:
            return None
        group = {Action.INT4: self.treatment.group_size, Action.NVFP4: NVFP4_GROUP}.get(self.action)
        return Format.groups(self.encoding, group) if group else Format.of(self.weight)

    @property
    def changes(self) -> bool:
        """Whether the output holds other bytes than the source."""
        return self.action is not Action.COPY

    @cached_property
    def reads(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that the output depends on; of a partner those that bound its magnitude."""
        bounds = (partner.scale or partner.data for partner in self.partners if partner is not self.weight)
        return (*self.weight.tensors, *bounds)


def make_steps(weights: Iterable[Weight], recipe: Recipe, num_hidden_layers: int) -> Iterator[Step]:
    """The steps of all `weights` but MTP layers that are dropped.

    Raises PlanError, naming the weight, for what cannot be made of it, and for a rule of `recipe` that fits no weight.
    """
    steps: list[Step] = []
    unused = {id(rule): number for number, rule in enumerate(recipe.rules[:-1], start=1)}
    for weight in weights:
        unused.pop(id(recipe.rule(weight.name, num_hidden_layers)), None)
        if not (recipe.mtp is Mtp.DROP and weight.name.is_mtp(num_hidden_layers)):
            steps.append(_make_step(weight, recipe.treatment(weight.name, num_hidden_layers), recipe.dialect))
    if unused:
        number = next(iter(unused.values()))
        raise PlanError(
            f"recipe {recipe.name}: rule {number} ({recipe.rules[number - 1]}) fits no weight of this model",
            hint="quantkit inspect shows the roles and layers that there are.",
        )
    return _with_partners(steps)


def _with_partners(steps: Iterable[Step]) -> Iterator[Step]:
    """`steps`, those that make NVFP4 with the weights that share their global scale."""
    steps = list(steps)
    fused: dict[str, list[Weight]] = {}
    for step in steps:
        if step.action is Action.NVFP4:
            fused.setdefault(_scale_owner(step.weight.name), []).append(step.weight)
    for step in steps:
        if step.action is Action.NVFP4:
            partners = sorted(fused[_scale_owner(step.weight.name)], key=lambda weight: weight.module)
            yield replace(step, partners=tuple(partners))
        else:
            yield step


def _scale_owner(name: TensorName) -> str:
    return name.fused_projection or name.module


def _make_step(weight: Weight, treatment: Treatment, dialect: Dialect) -> Step:
    action = _action(weight, treatment)
    outputs = _outputs(weight, treatment, action, dialect)
    if weight.encoding is Encoding.NVFP4 and action is Action.RESTATE and dialect is weight.dialect:
        action = Action.COPY
    step = Step(weight, treatment, action, outputs, dialect)
    if dialect is Dialect.MODELOPT and step.encoding in (Encoding.FP8, Encoding.INT4):
        raise PlanError(
            f"{weight.module} would stay {step.label}, which the format {dialect} cannot hold beside NVFP4",
            hint="Give --rest bf16.",
        )
    return step


def _action(weight: Weight, treatment: Treatment) -> Action:
    """By the table above; a bias or another vector of a quantized module is copied."""
    encoding, scheme = weight.encoding, treatment.scheme
    copied = Action.TRANSPOSE if weight.slab else Action.COPY
    if weight.name.leaf not in _MATRIX_LEAVES:
        return copied
    if encoding is Encoding.NVFP4 and scheme in (Scheme.KEEP, Scheme.FP8_TO_BF16, Scheme.NVFP4):
        return Action.RESTATE
    if scheme is Scheme.KEEP or (scheme is Scheme.FP8_TO_BF16 and encoding is not Encoding.FP8):
        return copied
    if scheme in (Scheme.BF16, Scheme.FP8_TO_BF16):
        return copied if encoding is Encoding.PLAIN else Action.DECODE
    if scheme is Scheme.NVFP4:
        return Action.NVFP4
    if encoding is Encoding.INT4 and weight.block == (1, treatment.group_size):
        return Action.COPY
    if encoding in (Encoding.INT4, Encoding.NVFP4):
        raise PlanError(
            f"{weight.name} is {weight.label}; made INT4 with g={treatment.group_size}, it would be rounded twice",
            hint="Convert the FP8 or BF16 release of the model.",
        )
    return Action.INT4


def _outputs(weight: Weight, treatment: Treatment, action: Action, dialect: Dialect) -> tuple[TensorSpec, ...]:
    if action is Action.DECODE:
        return (TensorSpec(weight.name.sibling("weight"), "BF16", weight.shape),)
    if action is Action.INT4:
        return _int4_outputs(weight, treatment)
    return _nvfp4_outputs(weight, dialect) if action in (Action.NVFP4, Action.RESTATE) else _copied(weight)


def _copied(weight: Weight) -> tuple[TensorSpec, ...]:
    """The tensors of `weight` as compressed-tensors spells them."""
    if weight.encoding is not Encoding.FP8 or weight.scale is None:
        return tuple(tensor.spec for tensor in weight.tensors)
    kept = weight.scale.spec.dtype if weight.scale.spec.dtype in FLOAT_DTYPES else "F32"
    shape = (1,) if weight.strategy is Strategy.TENSOR else weight.grid
    outputs = (weight.data.spec, TensorSpec(weight.name.sibling("weight_scale"), kept, shape))
    if weight.input_scale is None:
        return outputs
    return (*outputs, TensorSpec(weight.input_scale.spec.name, "F32", (1,)))


def _int4_outputs(weight: Weight, treatment: Treatment) -> tuple[TensorSpec, ...]:
    assert treatment.group_size is not None
    rows, columns = _matrix(weight, "INT4", treatment.group_size, "Choose a smaller --group-size.")
    return int4_specs(weight.module, (rows, columns), treatment.group_size)


def _nvfp4_outputs(weight: Weight, dialect: Dialect) -> tuple[TensorSpec, ...]:
    rows, columns = _matrix(weight, "NVFP4", NVFP4_GROUP, "Give its role another scheme in the recipe.")
    restated = weight.encoding is Encoding.NVFP4 and weight.input_scale is not None
    return nvfp4_specs(weight.module, (rows, columns), dialect, activations=restated)


def _matrix(weight: Weight, target: str, group_size: int, hint: str) -> tuple[int, int]:
    """The rows and columns of a weight that `target` can be made from."""
    if weight.encoding is Encoding.PLAIN and (weight.data.spec.dtype not in FLOAT_DTYPES or len(weight.shape) != 2):
        raise PlanError(
            f"{weight.name} is {weight.label} {list(weight.shape)}; {target} is made from FP8 and from BF16, FP16 or "
            "FP32 matrices",
            hint="Give its role another scheme in the recipe.",
        )
    rows, columns = weight.shape
    if columns % group_size:
        raise PlanError(f"{weight.name}: the group size {group_size} does not divide the {columns} columns", hint=hint)
    return rows, columns

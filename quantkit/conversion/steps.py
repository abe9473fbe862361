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
from quantkit.choices import Dialect, Mtp, ScaleMethod, Scheme
from quantkit.errors import PlanError
from quantkit.naming import TensorName
from quantkit.recipe import Recipe, Treatment
from quantkit.weights.encodings import FP8, PLAIN, Encoding, Format, Target, target
from quantkit.weights.weight import Weight

_MATRIX_LEAVES = ("weight", "weight_packed")


class Action(StrEnum):
    """How the output of a step is made."""

    COPY = auto()
    TRANSPOSE = auto()  # a plain expert out of a fused tensor
    DECODE = auto()  # to BF16
    QUANTIZE = auto()  # to the target of its scheme
    RESTATE = auto()  # in another dialect: the same codes and scales, the global scale inverted


@dataclass(frozen=True)
class Step:
    """One weight, what happens to it, and the tensors that come out.

    dialect   of the output
    partners  the weights that share a global scale with this one, itself among them
    """

    weight: Weight
    treatment: Treatment
    action: Action
    outputs: tuple[TensorSpec, ...]
    dialect: Dialect = Dialect.COMPRESSED_TENSORS
    partners: tuple[Weight, ...] = ()

    @cached_property
    def target(self) -> Target | None:
        """What the weight is quantized to; None if it is not."""
        return target(self.treatment.scheme) if self.action is Action.QUANTIZE else None

    @property
    def group_size(self) -> int | None:
        """The recipe's."""
        return self.treatment.group_size

    @property
    def scale(self) -> ScaleMethod | None:
        """How the recipe has scales chosen."""
        return self.treatment.scale

    @property
    def encoding(self) -> Encoding:
        """How the output is stored."""
        return PLAIN if self.action is Action.DECODE else self.target or self.weight.encoding

    @property
    def label(self) -> str:
        """The format that comes out, as reports call it."""
        if self.action is Action.DECODE:
            return "bf16"
        return self.target.made_label(self.group_size) if self.target else self.weight.label

    @cached_property
    def format(self) -> Format | None:
        """The format that comes out, as a config describes it; None for a plain tensor."""
        if self.action is Action.DECODE:
            return None
        made = self.target
        return made.made_format(self.group_size) if made else self.weight.encoding.format(self.weight)

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
        rule, treatment = recipe.choose(weight.name, num_hidden_layers)
        unused.pop(id(rule), None)
        if not (recipe.mtp is Mtp.DROP and weight.name.is_mtp(num_hidden_layers)):
            steps.append(_make_step(weight, treatment, recipe.dialect))
    if unused:
        number = next(iter(unused.values()))
        raise PlanError(
            f"recipe {recipe.name}: rule {number} ({recipe.rules[number - 1]}) fits no weight of this model",
            hint="quantkit inspect shows the roles and layers that there are.",
        )
    return _with_partners(steps)


def _with_partners(steps: Iterable[Step]) -> Iterator[Step]:
    """`steps`, those that get a global scale with the weights that share it."""
    steps = list(steps)
    fused: dict[str, list[Weight]] = {}
    for step in steps:
        if step.target and step.target.shares_scales:
            fused.setdefault(_scale_owner(step.weight.name), []).append(step.weight)
    for step in steps:
        if step.target and step.target.shares_scales:
            partners = sorted(fused[_scale_owner(step.weight.name)], key=lambda weight: weight.module)
            yield replace(step, partners=tuple(partners))
        else:
            yield step


def _scale_owner(name: TensorName) -> str:
    return name.fused_projection or name.module


def _make_step(weight: Weight, treatment: Treatment, dialect: Dialect) -> Step:
    action = _action(weight, treatment)
    outputs = _outputs(weight, treatment, action, dialect)
    if action is Action.RESTATE and dialect is weight.dialect:
        action = Action.COPY
    step = Step(weight, treatment, action, outputs, dialect)
    if dialect not in step.encoding.dialects:
        raise PlanError(
            f"{weight.module} would stay {step.label}, which the format {dialect} cannot hold beside NVFP4",
            hint="Give --rest bf16.",
        )
    return step


def _action(weight: Weight, treatment: Treatment) -> Action:
    """By the table above; a bias or another vector of a quantized module is copied."""
    encoding, scheme, made = weight.encoding, treatment.scheme, target(treatment.scheme)
    copied = Action.TRANSPOSE if weight.fused_columns else Action.COPY
    if weight.name.leaf not in _MATRIX_LEAVES:
        return copied
    if encoding.restated and (scheme in (Scheme.KEEP, Scheme.FP8_TO_BF16) or made is encoding):
        return Action.RESTATE
    if scheme is Scheme.KEEP or (scheme is Scheme.FP8_TO_BF16 and encoding is not FP8):
        return copied
    if made is None:
        return copied if encoding is PLAIN else Action.DECODE
    if made is encoding and weight.label == made.made_label(treatment.group_size):
        return Action.COPY
    if encoding.name not in made.origins:
        raise PlanError(
            f"{weight.name} is {weight.label}; made {_said(treatment)}, it would be rounded twice",
            hint="Convert the FP8 or BF16 release of the model.",
        )
    return Action.QUANTIZE


def _said(treatment: Treatment) -> str:
    group = f" with g={treatment.group_size}" if treatment.group_size else ""
    return f"{treatment.scheme.upper()}{group}"


def _outputs(weight: Weight, treatment: Treatment, action: Action, dialect: Dialect) -> tuple[TensorSpec, ...]:
    if action is Action.DECODE:
        return (TensorSpec(weight.name.sibling("weight"), "BF16", weight.shape),)
    made = target(treatment.scheme if action is Action.QUANTIZE else weight.encoding.name)
    if made and action in (Action.QUANTIZE, Action.RESTATE):
        return made.outputs(weight, treatment.group_size, dialect)
    return weight.encoding.copied(weight)

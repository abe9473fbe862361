"""What encodings in groups of a row's columns have in common."""

from quantkit.errors import PlanError
from quantkit.weights.encodings.plain import PLAIN
from quantkit.weights.weight import FLOAT_DTYPES, Weight


def check_divides(module: str, columns: int, group_size: int) -> None:
    """Raise ValueError for columns that a config's groups do not divide."""
    if columns % group_size:
        raise ValueError(f"{module} has {columns} columns, which groups of {group_size} do not divide")


def matrix(weight: Weight, target: str, group_size: int, hint: str) -> tuple[int, int]:
    """The rows and columns of a weight that `target` is made from. Raises PlanError, with `hint`, if it cannot be."""
    if weight.encoding is PLAIN and (weight.data.spec.dtype not in FLOAT_DTYPES or len(weight.shape) != 2):
        raise PlanError(
            f"{weight.name} is {weight.label} {list(weight.shape)}; {target} is made from FP8 and from BF16, FP16 or "
            "FP32 matrices",
            hint="Give its role another scheme in the recipe.",
        )
    rows, columns = weight.shape
    if columns % group_size:
        raise PlanError(f"{weight.name}: the group size {group_size} does not divide the {columns} columns", hint=hint)
    return rows, columns

"""quantkit: quantize and convert checkpoints offline, and prove that the result is still the model.

    quantkit.convert("glm-5.2", "glm-5.2-int4")
    quantkit.verify("glm-5.2-int4", against="glm-5.2")
    quantkit.evaluate("glm-5.2-int4", "glm-5.2-bf16")

Names are loaded on first use, so that importing the package is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.calibration import calibrate
    from quantkit.checkpoint.manifest import Manifest
    from quantkit.conversion import Options, convert, preview
    from quantkit.conversion.respelling import respell
    from quantkit.errors import QuantkitError
    from quantkit.eval.gate.evaluation import evaluate
    from quantkit.folding import fold
    from quantkit.inspection import inspect
    from quantkit.planning.drift import check_drift
    from quantkit.planning.fit import Deployment, plan_serving
    from quantkit.planning.phases import Target, plan_phases
    from quantkit.recipe import Recipe, load_recipe
    from quantkit.verification import verify

__all__ = [
    "Deployment",
    "Manifest",
    "Options",
    "QuantkitError",
    "Recipe",
    "Target",
    "calibrate",
    "check_drift",
    "convert",
    "evaluate",
    "fold",
    "inspect",
    "load_recipe",
    "plan_phases",
    "plan_serving",
    "preview",
    "respell",
    "verify",
]

_HOMES = {
    "Deployment": "planning.fit",
    "Manifest": "checkpoint.manifest",
    "Options": "conversion",
    "QuantkitError": "errors",
    "Recipe": "recipe",
    "Target": "planning.phases",
    "calibrate": "calibration",
    "check_drift": "planning.drift",
    "convert": "conversion",
    "evaluate": "eval.gate.evaluation",
    "fold": "folding",
    "inspect": "inspection",
    "load_recipe": "recipe",
    "plan_phases": "planning.phases",
    "plan_serving": "planning.fit",
    "preview": "conversion",
    "respell": "conversion.respelling",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(f"quantkit.{_HOMES[name]}"), name)

"""The structure that the README draws: imports only go down, each library has one user, files stay short."""

import ast
from pathlib import Path

import pytest

from support.paths import ROOT

LAYERS = {
    "errors": 0,
    "naming": 0,
    "version": 0,
    "records": 0,
    "recipe": 1,
    "report": 1,
    "formats": 1,
    "kernels": 2,
    "ops": 3,
    "remote": 3,
    "checkpoint": 4,
    "plan": 5,
    "capacity": 5,
    "models": 5,
    "runtime": 6,
    "verification": 6,
    "card": 6,
    "calibration": 7,
    "conversion": 7,
    "folding": 7,
    "inspection": 7,
    "compatibility": 7,
    "publish": 7,
    "recipe_check": 8,
    "serving": 8,
    "eval": 8,
    "console": 9,
    "cli": 10,
}
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("quantkit", "kernels", "eval")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
)


def imports(path: Path) -> set[str]:
    """The modules that a file imports, wherever it does so, types included."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [alias.name for alias in node.names] if node.module == "quantkit" else [""]
            found.update(f"{node.module}.{name}".rstrip(".") for name in names)
    return found


def module_of(path: Path) -> str:
    """`conversion` for quantkit/conversion/shards.py, `kernels` for kernels/e4m3.py, `` for quantkit/__init__.py."""
    parts = path.with_suffix("").parts
    return parts[0] if parts[0] != "quantkit" else parts[1].replace("__init__", "")


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_down(path: Path) -> None:
    """A module imports strictly lower layers, or its own package."""
    module = module_of(path)
    if not module:  # the package's front door, which loads lazily
        return
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "quantkit":
            other = rest.split(".")[0]
            assert other == module or LAYERS[other] < LAYERS[module], f"{path} imports quantkit.{rest}"


@pytest.mark.parametrize(
    ("library", "users"),
    [
        ("huggingface_hub", {"remote"}),
        ("rich", {"console"}),
        ("typer", {"cli"}),
        ("transformers", {"eval"}),
        ("numba", {"kernels"}),
        ("tokenizers", {"runtime"}),
        ("jinja2", {"runtime"}),
        ("triton", {"kernels"}),
        ("matplotlib", {"calibration"}),
        ("yaml", {"recipe", "card", "capacity"}),  # recipes, the metadata of model cards, the table of GPUs
    ],
)
def test_one_user(library: str, users: set[str]) -> None:
    """Each library is imported in the one module that owns it; YAML is formats that have nothing in common."""
    found = {module_of(path) for path in SOURCES if any(name.split(".")[0] == library for name in imports(path))}

    assert found == users


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_files_and_functions_are_short(path: Path) -> None:
    """A file has at most 300 lines, and a function's body at most 40, docstring included."""
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= 300

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.body[0].lineno < 40, node.name


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_public_functions_have_docstrings(path: Path) -> None:
    """Every module, public class and public function says what it promises."""
    tree = ast.parse((ROOT / path).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    private = {child for node in nodes if node.name.startswith("_") for child in ast.walk(node)}
    nested = {child for node in nodes if isinstance(node, ast.FunctionDef) for child in ast.walk(node) if child != node}

    assert ast.get_docstring(tree)
    for node in nodes:
        if node not in private and node not in nested:
            assert ast.get_docstring(node), f"{path}: {node.name}"

"""The structure that the README draws: imports go down, a library has one user, files are short, tests in rooms."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT, TESTS

LAYERS = {
    "errors": 0,
    "naming": 0,
    "version": 0,
    "choices": 0,
    "tables": 0,
    "progress": 0,
    "records": 1,
    "formats": 1,
    "kernels": 2,
    "ops": 3,
    "checkpoint": 4,
    "remote": 5,
    "weights": 5,
    "recipe": 6,
    "families": 7,
    "engines": 8,
    "models": 8,
    "runtime": 9,
    "inspection": 9,
    "verification": 9,
    "calibration": 10,
    "conversion": 10,
    "folding": 10,
    "planning": 11,
    "eval": 11,
    "publishing": 12,
    "console": 13,
    "cli": 14,
}
USERS = {  # the one module that imports a library; YAML is formats that have nothing in common
    "huggingface_hub": {"remote"},
    "rich": {"console"},
    "typer": {"cli"},
    "transformers": {"eval"},
    "numba": {"kernels"},
    "msgspec": {"records"},
    "tokenizers": {"runtime"},
    "jinja2": {"runtime"},
    "triton": {"kernels"},
    "matplotlib": {"calibration"},
    "yaml": {"recipe", "publishing", "planning"},  # recipes, the metadata of model cards, the table of GPUs
}
TEXTS = {
    path.relative_to(ROOT): path.read_text()
    for folder in ("quantkit", "kernels", "eval")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(part.is_symlink() for part in path.parents)
}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}


def imports(tree: ast.Module) -> set[str]:
    """The modules that a file imports, wherever it does so, types included; a relative import begins with a dot."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names] if node.module == "quantkit" else [""]
            found.update("." * node.level + f"{node.module}.{name}".rstrip(".") for name in names)
    return found


def module_of(path: Path) -> str:
    """`conversion` for quantkit/conversion/shards.py, `kernels` for kernels/e4m3.py, `` for quantkit/__init__.py."""
    parts = path.with_suffix("").parts
    return parts[0] if parts[0] != "quantkit" else parts[1].replace("__init__", "")


IMPORTS = {path: imports(tree) for path, tree in TREES.items()}


def test_imports_go_down() -> None:
    """A module imports strictly lower layers, or its own package; the front door, which loads lazily, may all."""

    def goes_down(module: str, name: str) -> bool:
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        return bool(package) and (package != "quantkit" or other == module or LAYERS[other] < LAYERS[module])

    rising = {
        str(path): names
        for path, found in IMPORTS.items()
        if (module := module_of(path)) and (names := [name for name in found if not goes_down(module, name)])
    }
    assert rising == {}


def test_readme_draws_the_layers() -> None:
    """The tree of the README names every room, below the rooms that it imports."""
    drawn = (ROOT / "README.md").read_text().partition("quantkit/          the package")[2].partition("\nkernels/")[0]
    lines = [line[2:19].replace("/", " ").split() for line in drawn.splitlines()[1:]]

    assert {room for line in lines for room in line} == LAYERS.keys()
    layers = [[LAYERS[room] for room in line] for line in lines]
    assert all(max(upper) <= min(lower) for upper, lower in itertools.pairwise(layers))


def test_one_user() -> None:
    """Each library is imported in the one module that owns it."""
    found = {
        library: {module_of(path) for path, names in IMPORTS.items() if library in {n.split(".")[0] for n in names}}
        for library in USERS
    }

    assert found == USERS


def test_files_and_functions_are_short() -> None:
    """A file has about 300 lines and a function's body about 40, docstring included; a third more is too much."""
    files = [str(path) for path, text in TEXTS.items() if len(text.splitlines()) > 400]
    functions = [
        f"{path}: {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.body[0].lineno >= 54
    ]

    assert (files, functions) == ([], [])


CLASSES = {node.name: node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """The methods of a class by name."""
    return {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}


def promised(node: ast.ClassDef) -> set[str]:
    """The names of the methods of all classes that a class is derived from."""
    bases = [CLASSES[name] for base in node.bases if (name := ast.unparse(base)) in CLASSES]
    return {name for base in bases for name in (*methods(base), *promised(base))}


def overrides(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The methods of a module's classes that a base class promises, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            inherited = promised(node)
            yield from (method for name, method in methods(node).items() if name in inherited)


def without_docstring(tree: ast.Module) -> Iterator[str]:
    """The public classes and functions of a module that have none, and the module itself.

    An override has its base's.
    """
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    private = {child for node in nodes if node.name.startswith("_") for child in ast.walk(node)}
    nested = {child for node in nodes if isinstance(node, ast.FunctionDef) for child in ast.walk(node) if child != node}
    exempt = private | nested | set(overrides(tree))
    if not ast.get_docstring(tree):
        yield "the module"
    yield from (node.name for node in nodes if node not in exempt and not ast.get_docstring(node))


def test_public_functions_have_docstrings() -> None:
    """Every module, public class and public function says what it promises."""
    assert [f"{path}: {name}" for path, tree in TREES.items() for name in without_docstring(tree)] == []


def test_tests_stand_with_their_subject() -> None:
    """A folder of tests is called like a room, and no test imports another: what two share is in `support`."""
    apart = {"support", "fixtures", "engine_loaders", "record"}
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    misplaced = [str(path) for path in files if len(path.parts) > 1 and path.parts[0] not in LAYERS.keys() | apart]
    shared = [
        f"{path}: {name}"
        for path in TESTS.rglob("*.py")
        for name in imports(ast.parse(path.read_text()))
        if any(part == "conftest" or part.startswith("test_") for part in name.split("."))
    ]

    assert (misplaced, shared) == ([], [])

"""The trained GLM-5.2 in miniature, and what quantkit makes of it."""

from pathlib import Path

import pytest

import quantkit
from support.paths import GLM_TINY


@pytest.fixture(scope="session")
def glm_tiny() -> Path:
    """The trained FP8 checkpoint of this repository."""
    return GLM_TINY


@pytest.fixture(scope="session")
def glm_tiny_converted(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained checkpoint converted by each built-in recipe, by the recipe's name."""
    folder = tmp_path_factory.mktemp("glm-tiny")
    for recipe in ("glm-5.2-int4", "glm-5.2-int4-bf16rest", "glm-5.2-nvfp4", "glm-5.2-nvfp4-modelopt", "bf16"):
        quantkit.convert(glm_tiny, folder / recipe, recipe)
    return {path.name: path for path in folder.iterdir()}

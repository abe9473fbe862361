"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FIXTURES = TESTS / "fixtures"
CONFIGS = FIXTURES / "configs"  # published config.json files
GLM_TINY = FIXTURES / "glm-tiny-fp8"

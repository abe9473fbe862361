"""What tests of `quantkit generate` share: a prompt, the command on the trained model, and its report."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.program import Result, Runner

PROMPT = "As well as WSGI, Django also"


@pytest.fixture
def run_generate(quantkit: Runner, glm_tiny: Path) -> Runner:
    """Runs `quantkit generate` on the trained model: exit code, stdout and stderr."""

    def generate(*arguments: str | Path, checkpoint: Path = glm_tiny) -> Result:
        return quantkit("generate", checkpoint, *arguments, "--memory", "4MB", "--max-new-tokens", "6")

    return generate


def report_of(result: tuple[int, str, str]) -> dict[str, Any]:
    """The one JSON object on stdout."""
    report: dict[str, Any] = json.loads(result[1])
    return report

"""The tiny checkpoints of `families.py` with what running them needs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.families import write_family

# Keys that some of the configs in fixtures/configs leave out, and every published config has.
_KEYS = {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "rope_theta": 1000000}
Checkpoint = Callable[[str], Path]


def write_runnable(folder: Path, name: str) -> Path:
    """The tiny checkpoint `name` of `families.py` with all keys that running it needs."""
    write_family(folder, name)

    def complete(config: dict[str, Any]) -> None:
        text = config.get("text_config", config)
        for key, value in _KEYS.items():
            if key != "rope_theta" or "rope_parameters" not in text:
                text.setdefault(key, value)

    return edit_config(folder, complete)


def edit_config(folder: Path, edit: Any) -> Path:
    """Change the config.json in `folder` by a function that changes the parsed one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of the tiny checkpoint with a name; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        return folder / name if (folder / name).exists() else write_runnable(folder / name, name)

    return make

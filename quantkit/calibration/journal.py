"""The journal of an open calibration: what it is bound to, then one line for each layer that is finished.

A layer's line is written when the disk has the hidden states after it, and holds the sha256 of their files; those
before it are deleted later.
"""

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from quantkit.calibration.report import LayerCalibration
from quantkit.calibration.states import hash_states
from quantkit.checkpoint.journal import CALIBRATE, Opening, append_line, reopen_journal
from quantkit.checkpoint.writer import LOCK_FILE, clear
from quantkit.errors import OutputError
from quantkit.records import read_record


class Journal:
    """The journal in `folder`, whose `layers`, of `total`, were finished before.

    Raises OutputError, naming the first difference, if the run in `folder` is another one, and for files of hidden
    states that are not those that it wrote.
    """

    def __init__(self, folder: Path, opening: Opening, total: int, resume: bool) -> None:
        self.folder, self._path = folder, folder / CALIBRATE.journal
        numbers = count()
        lines = reopen_journal(self._path, opening, lambda line: _parse(line, next(numbers))) if resume else None
        self.layers = tuple(layer for layer, _ in lines or ())
        states = self._states(lines[-1][1]) if lines and len(lines) < total else {}
        for name, sha256 in states.items():
            _check(folder / name, sha256)
        clear(folder, keep=(LOCK_FILE, *states, *([self._path.name] if lines is not None else [])))
        if lines is None:
            append_line(self._path, opening.to_line())

    def add(self, layer: LayerCalibration, states: dict[str, str]) -> None:
        """Record a finished layer, and the sha256 of the files that the next one begins with."""
        append_line(self._path, {**json.loads(layer.to_json()), "states": states})

    def _states(self, recorded: dict[str, str] | None) -> Mapping[str, str | None]:
        """The files to go on with; those of a version that recorded none are known by their names."""
        if recorded is not None:
            return recorded
        choices = (path.name for path in self.folder.glob("choices-*.bin"))
        return dict.fromkeys((f"hidden-{len(self.layers)}.bin", *choices))


def _check(path: Path, sha256: str | None) -> None:
    found = hash_states(path) if path.is_file() else None
    if found is None or found != (sha256 or found):
        what = f"{path} is {'gone' if found is None else f'damaged: sha256 {found}, and {sha256} was written'}"
        raise OutputError(what, hint="Start anew with --overwrite.")


def _parse(line: dict[str, Any], number: int) -> tuple[LayerCalibration, dict[str, str] | None]:
    """The layer `number` and the files after it; ValueError for a line of anything else."""
    states = line.pop("states", None)
    layer = LayerCalibration.from_json(json.dumps(line))
    if layer.layer != number:
        raise ValueError(f"layer {layer.layer}, not {number}")
    return layer, None if states is None else read_record(dict[str, str], states)
